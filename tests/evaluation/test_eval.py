"""`shoal eval`: one sampling run per method, cut by budgets; resumed, graded, reported; bad input becomes a message or a row."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from sandboxes import strongest
from shoal.api import Shoal
from shoal.cli import run as command_line
from shoal.cli.eval_kinds import show_table
from shoal.engine.commit import finish
from shoal.errors import RequestError
from shoal.evaluation import figure as figures
from shoal.evaluation.journal import FIGURE, GRADES, PAGE, SAMPLES, SUMMARY, Evaluation, Journal
from shoal.evaluation.sampling import BATCHED, METHODS, PLAIN, SINGLE, Sampler, SamplingConfig
from shoal.evaluation.tasks import Completions, Document, Grade, Task, rouge_grader, summary_tasks
from shoal.testing import END, VOCABULARY, save_pair, tiny_tokenizer
from shoal.testing.scripted import mixed, one_hot, scripted

TOKENIZER = tiny_tokenizer()
PROMPT = "def f():\n"
ANSWERS = ("    return 1\n", "    return 2\n", "    return (\n", "    return '<b>é&\n")
"""One of them passes, one is wrong, one does not parse, one is for the browser."""
N, TOKENS = 6, 40


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def writes(*answers: str, weights: Sequence[float] = (3, 2, 2, 3)) -> Any:
    """A script that goes on with one of these answers and ends; how likely each is, as weights."""
    paths = [(*encode(PROMPT), *encode(answer), END) for answer in answers]

    def script(ids: tuple[int, ...]) -> Tensor:
        chances = torch.full((VOCABULARY,), 1e-22, dtype=torch.float64)
        for path, weight in zip(paths, weights, strict=False):
            if path[: len(ids)] == ids != path:
                chances[path[len(ids)]] += weight
        return chances.log() if chances.max() >= 1 else one_hot(END, VOCABULARY)

    return script


@pytest.fixture
def pair() -> Shoal:
    target = writes(*ANSWERS)
    drafter = mixed(target, writes(*reversed(ANSWERS)))
    return Shoal(scripted(target, VOCABULARY), scripted(drafter, VOCABULARY), TOKENIZER, max_batch=N)


def task(name: str, prompt: str = PROMPT, stops: tuple[str, ...] = ()) -> Task:
    return Task(name, prompt, stops, lambda _: prompt, lambda text, _: text)


def config(**changes: Any) -> SamplingConfig:
    options = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": TOKENS, "eos": END, **changes.pop("options", {})}
    return SamplingConfig(**{"n": N, "options": options, "lookahead": 3, "seed": 5, **changes})


def graded(completions: Completions) -> Iterator[Grade]:
    """A grader that knows the answers."""
    words = dict(zip(ANSWERS, ("passed", "failed", "syntax", "failed"), strict=True))
    for _, text in completions:
        outcome = words.get(text, "syntax")
        yield Grade({"passed": float(outcome == "passed")}, outcome, "" if outcome == "passed" else "<i>wrong</i>\x00")


def through(_what: str, results: Iterable[Any], _total: int) -> Iterator[Any]:
    yield from results


def evaluate(directory: Path, pair: Shoal, tasks: Sequence[Task], chosen: SamplingConfig) -> Evaluation:
    evaluation = Evaluation(directory, tasks, chosen, {"set": "x", "temperature": 1, "top_p": 1, "seed": chosen.seed})
    evaluation.sample(Sampler(pair, chosen), through)
    evaluation.grade(graded, through)
    return evaluation


# ── sampling ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_way_writes_the_same_and_says_what_it_took(pair: Shoal) -> None:
    (entry,) = Sampler(pair, config()).run([task("a")])
    attempts = entry["attempts"]
    assert list(attempts) == list(METHODS)
    ids = {method: [sample["token_ids"] for sample in attempt["samples"]] for method, attempt in attempts.items()}
    assert ids[PLAIN] == ids[SINGLE] == ids[BATCHED]
    assert len({tuple(row) for row in ids[PLAIN]}) > 1
    longest, total = max(map(len, ids[PLAIN])), sum(map(len, ids[PLAIN]))
    stats = {method: attempt["stats"] for method, attempt in attempts.items()}
    assert stats[PLAIN]["drafted"] == stats[PLAIN]["draft_passes"] == 0
    assert stats[PLAIN]["target_passes"] == longest
    assert longest / 4 <= stats[BATCHED]["target_passes"] < longest  # up to 4 tokens of each row in a pass
    assert stats[SINGLE]["target_passes"] == stats[SINGLE]["row_rounds"] == stats[BATCHED]["row_rounds"]  # one row in a pass
    assert 0 < stats[SINGLE]["accepted"] == stats[BATCHED]["accepted"] < stats[BATCHED]["drafted"]
    assert all(stats[method]["committed"] == total for method in METHODS)
    assert all(stats[method]["prefills"] == 1 for method in METHODS)
    moments = [sample["finished_at"] for sample in attempts[SINGLE]["samples"]]
    assert moments == sorted(moments)
    assert len(set(moments)) == N  # one after another


@pytest.mark.parametrize(
    ("changes", "stops", "reason"),
    [({}, (), "eos"), ({"max_new_tokens": 1}, (), "length"), ({}, ("return",), "stop")],
)
def test_a_task_knows_what_a_stop_string_ended(
    pair: Shoal, changes: dict[str, Any], stops: tuple[str, ...], reason: str
) -> None:
    """An ending may put back what the stop string took, and must not after other ends."""
    asked = replace(task("a", stops=stops), complete=lambda _, stopped: str(stopped))
    (entry,) = Sampler(pair, config(options=changes)).run([asked])
    samples = [each for attempt in entry["attempts"].values() for each in attempt["samples"]]
    assert reason in {each["finish_reason"] for each in samples}
    assert all(each["completion"] == str(each["finish_reason"] == "stop") for each in samples)


def test_guidance_holds_for_every_way(pair: Shoal) -> None:
    pair.guide = scripted(writes(*ANSWERS, weights=(1, 9, 9, 1)), VOCABULARY)
    options = {"guidance": 3.0, "plausibility": 1e-3}  # the second and third answer are 400 times as improbable
    (plain,), (guided,) = (list(Sampler(pair, config(options=one)).run([task("a")])) for one in ({}, options))
    own = pair.generate(PROMPT, N, lookahead=3, seed=5, max_new_tokens=TOKENS, eos=END, **options)
    texts = [sample.text for sample in own[0].samples]
    for method in METHODS:
        found = guided["attempts"][method]
        assert [one["text"] for one in found["samples"]] == texts
        assert found["stats"]["guide_passes"] == found["stats"]["rounds"] > 0
        assert plain["attempts"][method]["stats"]["guide_passes"] == 0
        assert [one["text"] for one in plain["attempts"][method]["samples"]] != texts


def test_the_pieces_of_a_text_say_who_chose_them(pair: Shoal) -> None:
    (entry,) = Sampler(pair, config(n=N)).run([task("a")])
    for method, attempt in entry["attempts"].items():
        for sample in attempt["samples"]:
            assert "".join(piece for piece, _ in sample["spans"]) == sample["text"]
            drafted = sum(len(piece.encode()) for piece, drafted in sample["spans"] if drafted)
            # An EOS adds no text. "é" is two tokens, and its text is that of the second: the first may be of the other kind.
            assert drafted - 1 <= sample["accepted"] <= drafted + 2
            assert (drafted > 0) == (method != PLAIN)
            assert all(mine[1] != other[1] for mine, other in zip(sample["spans"], sample["spans"][1:], strict=False))


def test_a_problem_has_its_own_samples_whatever_else_is_evaluated(pair: Shoal) -> None:
    """By its prompt, as everywhere: see `test_seeds.py`."""
    first, second = task("a", prompt="x"), task("b")
    one = [entry["attempts"] for entry in Sampler(pair, config(methods=(PLAIN,))).run([first, second])]
    other = [entry["attempts"] for entry in Sampler(pair, config(methods=(PLAIN,))).run([second])]
    texts = lambda attempts: [sample["text"] for sample in attempts[PLAIN]["samples"]]  # noqa: E731
    assert texts(one[1]) == texts(other[0])
    assert texts(one[0]) != texts(one[1])


def test_a_prompt_that_cannot_be_asked_is_an_honest_row(tmp_path: Path) -> None:
    right = scripted(writes(ANSWERS[0]), VOCABULARY)
    pair = Shoal(right, right, TOKENIZER, max_batch=N)
    tasks = [task("long", "x" * 5000), task("fine")]
    summary = evaluate(tmp_path, pair, tasks, config()).report(("passed",), [float("inf")], {}, plot=False)
    assert "5000 tokens" in summary["errors"]["long"]
    line = next(line for line in summary["lines"] if line["method"] == BATCHED)
    assert line["finished"]["mean"] == 0.5
    assert line["passed_all"]["mean"] == 0.5
    assert "long could not be asked" in " ".join(figures_text(summary))
    assert "not asked: the prompt has 5000 tokens" in (tmp_path / PAGE).read_text()


def figures_text(summary: dict[str, Any]) -> list[str]:
    from shoal.evaluation.figure import findings

    return list(findings(summary))


def test_a_model_that_only_ends_has_samples_that_fail(tmp_path: Path) -> None:
    silent = scripted(lambda ids: one_hot(END, VOCABULARY), VOCABULARY)
    pair = Shoal(silent, scripted(writes(*ANSWERS), VOCABULARY), TOKENIZER, max_batch=N)
    evaluation = evaluate(tmp_path, pair, [task("a")], config())
    for attempt in evaluation.samples.entries["a"]["attempts"].values():
        assert [sample["text"] for sample in attempt["samples"]] == [""] * N
        assert all(sample["finished"] and sample["token_ids"] == [END] for sample in attempt["samples"])
    (line, *_) = evaluation.report(("passed",), [9.0], {}, plot=False)["lines"]
    assert line["finished"]["mean"] == 1
    assert line["passed_all"]["mean"] == line["passed_first"]["mean"] == 0
    assert line["syntax_errors"]["mean"] == 1


def test_a_budget_shorter_than_the_prompts_pass_has_no_sample(pair: Shoal, tmp_path: Path) -> None:
    evaluation = evaluate(tmp_path, pair, [task("a")], config(options={"time_budget": 1e-6}))
    for attempt in evaluation.samples.entries["a"]["attempts"].values():
        assert {sample["finish_reason"] for sample in attempt["samples"]} == {"not started"}
        assert attempt["stats"]["committed"] == 0
    summary = evaluation.report(("passed",), [1e-6], {}, plot=True)
    for line in summary["lines"]:
        assert line["finished"]["mean"] == line["passed_all"]["mean"] == line["pass@1"]["mean"] == 0
        assert line["tokens"]["mean"] is None
    assert (tmp_path / FIGURE).read_bytes().startswith(b"\x89PNG")


def test_a_sample_that_ended_too_late_is_not_finished(
    pair: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """It ended by itself, in the round in which its time was over: it gets no grade and counts in no figure."""
    monkeypatch.setattr("shoal.engine.commit.finish", lambda row, now: replace(finish(row, now), in_time=row.index != 0))
    evaluation = evaluate(tmp_path, pair, [task("a")], config(methods=(BATCHED,)))
    first, *others = evaluation.samples.entries["a"]["attempts"][BATCHED]["samples"]
    assert (first["finished"], first["finish_reason"]) == (False, "eos")
    assert all(sample["finished"] for sample in others)
    assert [grade is None for grade in evaluation.grades.entries["a"]["grades"][BATCHED]] == [True] + [False] * (N - 1)
    (line,) = evaluation.report(("passed",), [9.0], {}, plot=False)["lines"]
    assert line["finished"]["mean"] == (N - 1) / N


@pytest.mark.parametrize(
    ("changes", "said"), [({"methods": ("fast",)}, "fast"), ({"methods": ()}, "no method"), ({"options": {"x": 1}}, "'x'")]
)
def test_wrong_configs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        config(**changes)


def test_a_row_that_fails_is_not_finished_and_costs_the_others_nothing(pair: Shoal, tmp_path: Path) -> None:
    speaks, broken = writes(*ANSWERS), (*encode(PROMPT), *encode("    return 2"))
    faulty = scripted(lambda ids: speaks(ids) * (float("nan") if ids == broken else 1), VOCABULARY)
    evaluation = evaluate(tmp_path, Shoal(faulty, pair.draft_model, TOKENIZER, max_batch=N), [task("a")], config())
    whole = evaluate(tmp_path / "whole", pair, [task("a")], config())
    failed = 0
    for method, attempt in evaluation.samples.entries["a"]["attempts"].items():
        for sample, other in zip(attempt["samples"], whole.samples.entries["a"]["attempts"][method]["samples"], strict=True):
            if other["text"] == ANSWERS[1]:
                assert (sample["finish_reason"], sample["finished"], sample["text"]) == ("error", False, "    return 2")
                failed += 1
            else:
                assert sample["token_ids"] == other["token_ids"]
    assert 0 < failed < N * len(METHODS)
    evaluation.report(("passed",), [999.0], {}, plot=False)
    assert "NaN" in (tmp_path / PAGE).read_text()
    finished = [evaluation.results(("passed",)).table(method, "passed").finished(999.0).sum() for method in METHODS]
    assert sum(finished) == N * len(METHODS) - failed


def test_speculative_methods_need_a_drafter(pair: Shoal) -> None:
    alone = Shoal(pair.target, None, TOKENIZER)
    with pytest.raises(RequestError, match="drafter"):
        Sampler(alone, config())
    assert len(list(Sampler(alone, config(methods=(PLAIN,))).run([task("a")]))) == 1


# ── resuming ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stopped_run_goes_on_where_it_was(pair: Shoal, tmp_path: Path) -> None:
    tasks, chosen = [task(name) for name in "abcd"], config(n=2)

    def stopping(_what: str, results: Iterable[Any], _total: int) -> Iterator[Any]:
        for count, result in enumerate(results):
            if count == 2:
                raise KeyboardInterrupt
            yield result

    settings = {"set": "x", "temperature": 1, "top_p": 1}
    first = Evaluation(tmp_path / "a", tasks, chosen, settings)
    with pytest.raises(KeyboardInterrupt):
        first.sample(Sampler(pair, chosen), stopping)
    again = Evaluation(tmp_path / "a", tasks, chosen, settings)
    assert [missing.task_id for missing in again.missing] == ["c", "d"]
    asked: list[str] = []
    sampler = Sampler(pair, chosen)
    attempt = sampler.attempt
    sampler.attempt = lambda method, task, prompt: asked.append(task.task_id) or attempt(method, task, prompt)  # type: ignore[method-assign]
    again.sample(sampler, through)
    assert asked == ["c"] * 6 + ["d"] * 3  # the first one twice, to warm up
    whole = evaluate(tmp_path / "b", pair, tasks, chosen)
    assert _ids(again) == _ids(whole)
    with pytest.raises(KeyboardInterrupt):
        again.grade(graded, stopping)
    assert list(Journal(tmp_path / "a" / GRADES).entries) == ["a", "b"]
    again.grade(graded, through)
    assert again.grades.entries == whole.grades.entries


def _ids(evaluation: Evaluation) -> dict[str, Any]:
    return {
        name: [[sample["token_ids"] for sample in attempt["samples"]] for attempt in entry["attempts"].values()]
        for name, entry in evaluation.samples.entries.items()
    }


# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Reader(HTMLParser):
    """Tags and text of a page; complains of what a browser would have to guess."""

    VOID = ("meta", "br", "path", "use", "rect", "dt", "dd")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_what_was_written_and_obeys_none_of_it(pair: Shoal, tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>\x00\x1b[31m"
    evaluation = evaluate(tmp_path, pair, [task("a<b>"), Task("b", hostile, (), lambda _: PROMPT, lambda t, _: t)], config())
    evaluation.report(("passed",), [1e-9, float("inf")], {}, plot=True)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert not {"script", "b\x00", "i", "link", "img", "iframe"} & set(reader.seen)
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "<script" not in page
    assert "a<b>" in reader.text
    assert "    return '<b>é&\n" in reader.text
    assert "<i>wrong</i>" in reader.text
    assert "</pre><script>alert(1)</script>" in reader.text
    assert 'class="accepted"' in page
    assert 'class="drawn"' in page
    assert "http" not in re.sub(r"http://www\.w3\.org/[\w/]+|http-equiv", "", page)  # nothing is loaded from elsewhere
    assert reader.seen.count("svg") == 1
    assert len(re.findall("rank 1, ", reader.text)) == 2 * len(METHODS)


def test_a_summary_is_whole_and_its_figure_has_every_method(pair: Shoal, tmp_path: Path) -> None:
    evaluation = evaluate(tmp_path, pair, [task(name) for name in "abc"], config())
    summary = evaluation.report(("passed",), [1e-9, float("inf")], {"machine": {}}, plot=False)
    assert json.loads((tmp_path / SUMMARY).read_text()) == summary
    assert not (tmp_path / FIGURE).exists()
    assert [(line["method"], line["budget"]) for line in summary["lines"]] == [(w, b) for b in (1e-9, None) for w in METHODS]
    assert all(pair["same_ids"] == pair["samples"] == 3 * N for pair in summary["against"])
    drawn = figures.draw([summary])
    assert [axes.get_ylabel() for axes in drawn.axes] == ["Pass@First", "Pass@All"]
    assert [len(axes.get_lines()) for axes in drawn.axes] == [len(METHODS)] * 2
    passing = [
        sample["completion"] == ANSWERS[0]
        for entry in evaluation.samples.entries.values()
        for sample in entry["attempts"][PLAIN]["samples"]
    ]
    assert summary["lines"][-1]["pass@1"]["mean"] == pytest.approx(sum(passing) / len(passing))


# ── summaries ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_narrow_terminal_has_a_table_for_each_budget() -> None:
    """A table that is wider than the terminal would be wrapped in the middle of its figures."""
    heads, share = ["budget", "method", *"abcde", "tokens"], "100.0 [100, 100]"
    lines = [
        [budget, method, *[share] * 5, "25.0"] for budget in ("1 s", "none") for method in ("plain", "single", "batched")
    ]
    screen = io.StringIO()
    show_table(Console(file=screen, force_terminal=True, no_color=True, width=80, highlight=False), heads, lines)
    shown = Text.from_ansi(screen.getvalue()).plain.splitlines()
    assert max(map(len, shown)) <= 80
    assert [line.split() for line in shown if line.startswith("budget")] == [
        ["budget:", "1", "s", "plain", "single", "batched"], ["budget:", "none", "plain", "single", "batched"],
    ]  # fmt: skip
    assert sum(line.count(share) for line in shown) == 30
    assert [line.split() for line in shown if line.startswith("tokens")] == [["tokens", "25.0", "25.0", "25.0"]] * 2


def test_summaries_are_compared_with_peoples() -> None:
    pytest.importorskip("rouge_score")
    documents = [Document("0", "A long text.", "The cat sat on the mat")]
    grades = list(rouge_grader(documents)([("0", "the cats sat on the mat"), ("0", "dogs"), ("0", "the cat")]))
    assert [grade.scores["rougeL"] for grade in grades] == pytest.approx([1.0, 0.0, 0.5])  # stemmed; 2 of 2 and 2 of 6 words
    assert grades[2].scores["rouge2"] == pytest.approx(2 * 1 * 0.2 / 1.2)
    (asked,) = summary_tasks(documents)
    assert asked.read(None) == "A long text.\n\nTL;DR:"
    assert asked.complete(" The cat \n", False) == "The cat"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, drafter = save_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft", str(drafter)]


def shoal(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = command_line(["eval", *map(str, arguments), "--sandbox", strongest()])
    return code, *capsys.readouterr()


def documents_file(directory: Path) -> Path:
    file = directory / "xsum.jsonl.gz"
    rows = [{"document": f"Text {i}.", "summary": "Short words."} for i in range(2)]
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file


def test_a_set_of_summaries_from_end_to_end(capsys: pytest.CaptureFixture[str], models: list[str], tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    options = "-n 2 --max-new-tokens 8 --seed 1 --temperature 1".split()
    common = ["summarize", "--data", documents_file(tmp_path), *models, *options]
    code, out, _ = shoal(capsys, *common, "--output", tmp_path / "out", "--time-budget", "1e-6,inf", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["scores"] == ["rouge2", "rougeL", "rouge1"]  # curves and comparisons are of the first, as in BASS
    assert [line["budget"] for line in summary["lines"]] == [1e-6] * 3 + [None] * 3
    assert all(pair["same_ids"] == pair["samples"] == 4 for pair in summary["against"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"settings.json", SAMPLES, GRADES, SUMMARY, FIGURE, PAGE}
    samples = (tmp_path / "out" / SAMPLES).read_bytes()
    code, out, _ = shoal(capsys, *common, "--output", tmp_path / "out")  # complete: reported again, nothing is sampled
    assert code == 0
    for name in ("budget", *(f"ROUGE-{kind}@{which}" for kind in "L12" for which in ("First", "All"))):
        assert name in out  # however narrow the terminal
    assert "…" not in out
    assert "the same token ids in 4 of 4 samples" in out
    assert (tmp_path / "out" / SAMPLES).read_bytes() == samples
    code, _, err = shoal(capsys, *common, "--output", tmp_path / "out", "--top-p", 0.5)
    assert code == 2
    assert "top_p = 0.95, asked for is 0.5" in err


def test_an_interrupted_run_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    pytest.importorskip("rouge_score")
    attempt = Sampler.attempt

    def interrupted(self: Sampler, method: str, task: Task, prompt: Any) -> Any:
        if task.task_id == "1":
            raise KeyboardInterrupt
        return attempt(self, method, task, prompt)

    monkeypatch.setattr(Sampler, "attempt", interrupted)
    common = ["summarize", "--data", documents_file(tmp_path), *models, "-n", 1, "--max-new-tokens", 2]
    code, out, err = shoal(capsys, *common, "--output", tmp_path / "out")
    assert (code, out) == (130, "")
    assert "1 of 2 problems sampled" in err
    assert len((tmp_path / "out" / SAMPLES).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["poetry"], "poetry"),
        (["humaneval"], "--data FILE"),
        (["functions", "--data", "x"], "leave out --data"),
        (["humaneval", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["functions", "--time-budget", "soon"], "--time-budget"),
        (["functions", "--time-budget", "0,1"], "--time-budget"),
        (["functions", "--time-budget", "nan"], "--time-budget"),
        (["functions", "--temperature", "-1"], "temperature"),
        (["functions", "--methods", "plain,quick"], "quick"),
        (["functions", "--lookahead", "off", "--methods", "batched"], "--methods plain"),
        (["functions", "--lookahead", "often"], "often"),
        (["functions", "--limit", "0"], "--limit"),
        (["functions", "--guidance", "0.5"], "give --guide"),
        (["infilling", "--data", "x.jsonl", "--chat"], "--chat"),
    ],
)
def test_wrong_commands_are_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda _: pytest.fail("a model was loaded"))
    code, out, err = shoal(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


PROBLEM = {
    "task_id": "a",
    "prompt": "def f():\n",
    "entry_point": "f",
    "test": "def check(f):\n    assert f() == 1\n",
    "canonical_solution": "    return 1\n",
}


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("humaneval", ["{oops"], "line 1: not JSON"),
        ("humaneval", [json.dumps(PROBLEM), "", "{"], "line 3: not JSON"),
        ("humaneval", [json.dumps({k: v for k, v in PROBLEM.items() if k != "test"})], "'test'"),
        ("humaneval", [json.dumps(PROBLEM)] * 2, "line 2: the task id 'a'"),
        ("mbxp", [json.dumps({**PROBLEM, "language": "cobol"})], "unknown language 'cobol'"),
        ("multipl-e", [json.dumps({**PROBLEM, "name": "a", "language": "jl"})], "'jl' does not run here"),
        ("infilling", [json.dumps(PROBLEM)], "no suffix"),
        ("summarize", ['{"document": "x"}'], "'summary'"),
        ("summarize", ['{"id": 1, "document": "x", "summary": "y"}'] * 2, "line 2: the id '1'"),
    ],
)
def test_wrong_files_are_refused_with_the_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, rows: list[str], said: str
) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join(rows))
    code, _, err = shoal(capsys, name, "--data", file)
    assert code == 2
    assert said in err


def test_a_tokenizer_without_the_tokens_is_refused_once(
    capsys: pytest.CaptureFixture[str], models: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "middle.jsonl"
    file.write_text(json.dumps({**PROBLEM, "suffix": "\n"}))
    for arguments, said in (
        (["infilling", "--data", file], "fill-in-the-middle"),
        (["functions", "--chat"], "chat template"),
    ):
        code, _, err = shoal(capsys, *arguments, *models, "-n", 1)
        assert code == 2
        assert said in err


CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.mark.slow(but=["humaneval"])
@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("humaneval", "[user]Complete the following python code.", "[assistant]```python\ndef f():\n"),
        ("infilling", "<|fim_prefix|>def f():\n<|fim_suffix|>\nx = 1\n", "<|fim_middle|>"),
    ],
)
def test_chats_and_middles_from_end_to_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, begins: str, ends: str
) -> None:
    asked: list[str] = []
    generate = Shoal.generate

    def listening(self: Shoal, prompts: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(self.tokenizer.decode(prompts[0]))
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(Shoal, "generate", listening)
    for place in save_pair(tmp_path, vocab_size=VOCABULARY + 3, max_position_embeddings=256):
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], special_tokens=True)
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(place)
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({**PROBLEM, "suffix": "\nx = 1\n" if name == "infilling" else ""}))
    models = ["--model", tmp_path / "target", "--methods", "plain", *(["--chat"] if name == "humaneval" else [])]
    code, out, err = shoal(capsys, name, "--data", file, *models, "-n", 2, "--max-new-tokens", 4, "--no-plot", "--json")
    assert code == 0, err
    assert json.loads(out)["errors"] == {}
    assert len(asked) == 2  # the first one warms up
    assert asked[0] == asked[1]
    assert asked[0].startswith(begins)
    assert asked[0].endswith(ends)


@pytest.mark.slow
@pytest.mark.limit(900)
def test_generated_problems_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The bundled pair and the real sandbox."""
    options = "--limit 2 -n 2 --max-new-tokens 48 --seed 1 --no-plot --json".split()
    code, out, err = shoal(capsys, "functions", *options, "--output", tmp_path)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["problems"] == 2
    assert summary["isolation"]
    assert all(pair["same_ids"] == pair["samples"] == 4 for pair in summary["against"])
    assert {line["passed_all"]["mean"] for line in summary["lines"]} == {1.0}
    stats = [entry["attempts"][BATCHED]["stats"] for entry in Journal(tmp_path / SAMPLES).entries.values()]
    assert all(one["rounds"] < one["committed"] for one in stats)


@pytest.mark.slow
def test_given_solutions_are_executed_without_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda _: pytest.fail("a model was loaded"))
    code, out, _ = shoal(capsys, "functions", "--limit", 2, "--solutions", "canonical", "--json")
    assert code == 0
    counted = {"passed": 2, "total": 2, "problems": 2, "without_solution": 0}
    assert json.loads(out)["languages"] == {"python": counted}
    problems, wrong = tmp_path / "set.jsonl", tmp_path / "wrong.jsonl"
    problems.write_text("\n".join(map(json.dumps, (PROBLEM, {**PROBLEM, "task_id": "b", "canonical_solution": None}))))
    code, out, _ = shoal(capsys, "humaneval", "--data", problems, "--solutions", "canonical")
    assert code == 0
    assert re.search(r"python +2 +1 +1 +1 +100\.0", out)  # problems, without a solution, passed, of
    wrong.write_text(json.dumps({"task_id": "a", "completion": "    return 2\n"}))
    code, out, _ = shoal(capsys, "humaneval", "--data", problems, "--solutions", wrong)
    assert code == 0  # all were executed
    assert re.search(r"python +2 +1 +0 +1 +0\.0", out)
    assert "a: failed: AssertionError" in out
