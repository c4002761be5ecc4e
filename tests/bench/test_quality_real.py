"""The runs of a real model's quality: stopped after minutes, gone on with, and shown from the files that there are.

Tests of: evaluation.journal.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quality_engines
import quality_real
import quality_tables
import summaries
from engines.draws import Sampler, plain_rows, row_end
from engines.tasks import Task as Work
from quality_tables import PAGE, between, joined, keep, kept, missing, pages, pair_pages, passes, written
from shoal.api import Shoal
from shoal.cli.eval_options import SetOptions
from shoal.evaluation.tasks import Document, read_documents

FAKE = """#!/bin/sh
trap 'echo "stopped $place" >>{log}; exit 130' INT
for place; do :; done
mkdir -p "$place"
echo "$*" >>{log}
while [ ! -e {go} ]; do sleep 0.05; done
: >"$place/summary.json"
"""
RECORD = {"task_id": "T/0", "prompt": 'def one():\n    """Returns 1."""\n', "entry_point": "one", "test": ""}


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """The options of two sets with two numbers of samples each, by a stand-in that ends once there is a file `go`."""
    fake = tmp_path / "shoal"
    fake.write_text(FAKE.format(log=tmp_path / "log", go=tmp_path / "go"))
    fake.chmod(0o755)
    (tmp_path / "set.jsonl").write_text(json.dumps(RECORD) + "\n")
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as packed:
        packed.write(json.dumps(RECORD) + "\n")
    files = ["--humaneval", str(tmp_path / "set.jsonl"), "--mbpp", str(tmp_path / "packed.jsonl.gz")]
    places = ["--model", "MODEL", *files, "--directory", str(tmp_path / "out"), "--shoal", str(fake)]
    return [*places, "--sets", "humaneval,mbpp-chat", "--rows", "8,1"]


def commands(folder: Path) -> list[str]:
    """The stand-in's calls since the last time."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.write_text("")
    return lines


NAMES = ["humaneval-8", "humaneval-8-single", "humaneval-1", "mbpp-chat-8", "mbpp-chat-8-single", "mbpp-chat-1"]


def test_time_that_is_over_ends_a_run_and_the_next_goes_on(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality_real.main([*asked, "--minutes", "0"]) == 3
    assert not commands(tmp_path)
    assert quality_real.main([*asked, "--minutes", "0.02"]) == 3
    assert "time is over in humaneval-8: the same command goes on" in capsys.readouterr().err
    assert commands(tmp_path)[-1] == f"stopped {tmp_path / 'out' / 'humaneval-8'}"
    (tmp_path / "go").touch()
    assert quality_real.main([*asked, "--minutes", "5"]) == 0
    calls = commands(tmp_path)
    assert [one.rsplit("/", 1)[1] for one in calls] == NAMES
    assert "--model MODEL --draft self:int4 --methods plain,batched -n 8" in calls[0]
    assert "--methods plain-single,single -n 8" in calls[1]
    assert "--limit 200 --chat --model MODEL" in calls[3]
    assert "--methods plain,batched -n 1" in calls[5]
    assert quality_real.main(asked) == 0
    assert not commands(tmp_path)  # all are there


def test_the_plan_names_runs_and_times_and_does_nothing(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = {"attempts": {"plain": {"seconds": 1.5}, "batched": {"seconds": 0.5}}}
    for name, text in (("humaneval-8", json.dumps(attempt) + "\n" + '{"cut'), ("mbpp-chat-1", "")):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "samples.jsonl").write_text(text)
    (tmp_path / "out" / "mbpp-chat-1" / "summary.json").touch()
    assert quality_real.main([*asked, "--plan", "--python", "PYTHON"]) == 0
    assert not commands(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 of 10 runs are there; the others, in this order:"
    assert lines[1] == "  humaneval-8: plain, batched, 1 of 164 problems are there: 5 min, 5 min so far"
    samples = 164 * 8 * quality_real.LENGTH["humaneval"]
    single = 2 * samples / quality_real.RATES[1] / 60
    assert lines[2] == f"  humaneval-8-single: plain-single, single: {single:.0f} min, {single + 326 / 60:.0f} min so far"
    assert [line.split(":")[0].strip() for line in lines[3:6]] == [
        "humaneval-8-llamacpp",
        "humaneval-8-openvino",
        "humaneval-1",
    ]


def test_summaries_are_a_set_where_their_file_is_named(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "go").touch()
    every = [*asked[:-4], "--rows", "8"]
    assert quality_real.main([*every, "--summaries", "FILE"]) == 0
    calls = [one for one in commands(tmp_path) if not one.endswith("single")]
    assert [one.rsplit("/", 1)[1] for one in calls] == [f"{name}-8" for name in quality_real.SETS]
    assert "eval summarize --data FILE --chat --model MODEL" in calls[-1]
    assert ["--max-new-tokens 96 " in one for one in calls] == [False, False, False, False, True]
    assert quality_real.main(every) == 0
    assert not commands(tmp_path)


def test_an_error_ends_all_runs_with_its_code(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "shoal").write_text(f"#!/bin/sh\necho x >>{tmp_path / 'log'}\nexit 2\n")
    for options in ([], ["--minutes", "5"]):
        assert quality_real.main([*asked, *options]) == 2
    assert commands(tmp_path) == ["x", "x"]


# ── other engines ───────────────────────────────────────────────────────────────────────────────────────────────────


class Written:
    """An engine that writes the solution in the first row, and what is wrong in the others."""

    def __init__(self, tokenizer: Any, eos: int, times: bool) -> None:
        self.tokenizer, self.eos, self.times = tokenizer, eos, times
        self.asked: list[Work] = []

    def __call__(self, task: Work) -> dict[str, Any]:
        self.asked.append(task)
        right = [*self.tokenizer.encode("\n    return 1\n", add_special_tokens=False), self.eos, 5, 5]
        wrong = self.tokenizer.encode("\n    return 2\n\ndef other():", add_special_tokens=False)
        # OpenVINO GenAI leaves out a last token that has the end of a stop string and more
        early = self.tokenizer.encode("\n    return 2\n\ndef", add_special_tokens=False)
        ids = [right, wrong, early][: task.n]
        times = [0.25 * (1 + row) for row in range(task.n)] if self.times else None
        return {"ids": ids, "seconds": 2.0, "finished_at": times, "mean_logprobs": [-1.0, -0.5, -2.0][: task.n]}


@pytest.mark.slow(but=["True"])
@pytest.mark.parametrize("times", [True, False])
def test_samples_of_another_engine_are_judged_as_those_of_shoal(tmp_path: Path, bundled: Shoal, times: bool) -> None:
    tests = "def check(candidate):\n    assert candidate() == 1\n"
    records = [RECORD | {"task_id": f"T/{i}", "test": tests} for i in range(2)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    options = ["humaneval", "--data", str(tmp_path / "set.jsonl"), "--model", "/some/where/small", "--engine", "llamacpp"]
    options += ["-n", "3", "--time-budget", "0.3,inf", "--seed", "7", "--output", str(tmp_path / "out-3-llamacpp")]
    asked = quality_engines.parsed(options)
    chosen = SetOptions("humaneval", data=asked.data).read()
    tokenizer = bundled.tokenizer
    engine = Written(tokenizer, tokenizer.eos_token_id, times)
    sampler = quality_engines.EngineSampler(engine, asked, tokenizer, [tokenizer.eos_token_id])

    def interrupted(tasks: Any) -> Any:
        yield next(iter(sampler.run(tasks, {"version": "1"})))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quality_engines.evaluated(asked, chosen, interrupted)
    assert len(engine.asked) == 2  # the first warms up
    found = quality_engines.evaluated(asked, chosen, lambda tasks: sampler.run(tasks, {"version": "1"}))
    assert len(engine.asked) == 4  # the second problem alone
    task, *others = engine.asked
    assert others == [task] * 3
    assert [*task.prompts[0]] == [*bundled.generate(chosen.tasks[0].prompt, max_new_tokens=1)[0].prompt_ids]
    assert (task.n, task.temperature, task.top_p, task.seed) == (3, 0.2, 0.95, 7)
    assert (task.eos, task.stops) == ((tokenizer.eos_token_id,), chosen.tasks[0].stops)
    first, whole = found["lines"]
    assert (first["finished"]["mean"], whole["finished"]["mean"]) == (pytest.approx(1 / 3 if times else 0), 1.0)
    assert (first["passed_first"]["mean"], whole["passed_first"]["mean"]) == (1.0 if times else 0.0, 0.0)
    assert (whole["passed_all"]["mean"], whole["pass@1"]["mean"]) == (1.0, pytest.approx(1 / 3))
    assert json.loads((asked.output / "summary.json").read_text()) == json.loads(json.dumps(found))
    lines = (asked.output / "samples.jsonl").read_text().splitlines()
    (one,) = {json.dumps(entry["attempts"]) for entry in map(json.loads, lines)}
    right, wrong, early = json.loads(one)["llamacpp"]["samples"]
    assert (right["text"], right["finish_reason"]) == ("\n    return 1\n", "eos")
    assert (early["finish_reason"], early["completion"].strip()) == ("stop", "return 2")
    assert (wrong["text"], wrong["finish_reason"]) == ("\n    return 2\n", "stop")
    assert right["token_ids"][-1] == tokenizer.eos_token_id


def test_rows_drop_out_where_they_end() -> None:
    """Row r draws the tokens r, r, ... until its third; row 1 ends by its second token, row 2 by a string."""
    seen = []

    def decode(rows: Any, tokens: Any) -> Any:
        seen.append((rows.tolist(), tokens.tolist()))
        return np.log(np.eye(3, dtype=np.float32)[rows] * 0.5 + 1e-9)

    ends = row_end([], ["bb"], lambda ids: "".join("abc"[i] for i in ids))
    logits = np.log(np.eye(3, dtype=np.float32) * 0.5 + 1e-9)
    sampler = Sampler(1.0, 1.0, np.random.default_rng(0))
    answer = plain_rows(logits, decode, Work([[1]], 3, 3, 1.0, 1.0, 0), sampler, ends, time.perf_counter())
    assert answer.ids == [[0, 0, 0], [1, 1], [2, 2, 2]]
    assert seen == [([0, 1, 2], [0, 1, 2]), ([0, 2], [0, 2])]
    assert answer.finished_at[1] < min(answer.finished_at[0], answer.finished_at[2])
    assert np.allclose(answer.mean_logprobs, 0, atol=1e-5)
    assert [row_end([4])(ids) for ids in ([4], [4, 5])] == [True, False]


# ── summaries ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_papers_become_documents_with_the_sentence_of_an_aspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"challenge": "It was hard.", "approach": "They tried.", "outcome": "It is easy."}
    sentences = {"abstract": ["We try ( twice ) .", "It works , mostly ."], "introduction": ["Long ago ."]}
    papers, file = tmp_path / "test.jsonl", tmp_path / "build" / "summaries.jsonl"
    papers.write_text("".join(json.dumps({"id": str(i), "summary": said, "sentences": sentences}) + "\n" for i in range(2)))
    for options, summary in (([], "They tried."), (["--aspect", "outcome"], "It is easy.")):
        monkeypatch.setattr("sys.argv", ["summaries.py", str(papers), str(file), *options])
        summaries.main()
        assert read_documents(file) == [Document(str(i), "We try (twice). It works, mostly.", summary) for i in range(2)]
    assert capsys.readouterr().out == f"2 documents in {file}\n" * 2


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(n: int, shift: float = 0.0) -> dict[str, Any]:
    def line(method: str, budget: float | None, share: float) -> dict[str, Any]:
        names = ("passed_first", "passed_all", "pass@1", "finished", "seconds")
        means = (share, share + 0.05, share / 2, share + 0.3, 1.234 + shift)
        return {
            "method": method,
            "budget": budget,
            **{name: {"mean": mean} for name, mean in zip(names, means, strict=True)},
        }

    shares = {0.5: 0.1, 1: 0.2, 2: 0.3, 3: 0.9, 4: 0.4, None: 0.5}
    methods = ["plain", "batched"]
    return {
        "settings": {"model": "/some/where/small", "methods": methods},
        "machine": {"commit": "0123456789ab", "date": "2026-01-02"},
        "problems": 7,
        "scores": ["passed"],
        "lines": [line(method, budget, share + shift) for method in methods for budget, share in shares.items()],
        "against": [{"method": "batched", "other": "plain", "samples": 7 * n, "same_ids": 7 * n - 1}],
    }


def test_tables_are_of_the_runs_that_have_ended(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    for name, n in (("mbpp-chat", 16), ("mbpp-chat", 8), ("humaneval", 1)):
        (runs / f"{name}-{n}").mkdir(parents=True)
        (runs / f"{name}-{n}" / "summary.json").write_text(json.dumps(summary(n)))
    (runs / "mbpp-1").mkdir()  # has not ended
    keep(runs, results)
    assert [file.name for file in sorted(results.iterdir())] == [
        f"quality-smollm2-{name}.json" for name in ("humaneval-1", "mbpp-chat-16", "mbpp-chat-8")
    ]
    found = kept(results)
    assert {name: list(one) for name, one in found.items()} == {"humaneval": [1], "mbpp-chat": [8, 16]}
    assert found["humaneval"][1]["settings"]["model"] == "small"
    page = written(f"before\n{quality_tables.BEGIN}old\n{quality_tables.END}after\n", found)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert written(page, found) == page
    row = "10.0 / 15.0 | 20.0 / 25.0 | 30.0 / 35.0 | 40.0 / 45.0 | 50.0 / 55.0 | 25.0 | 50.0 | 1.23 |"
    assert f"| 8 | plain | {row}  |\n| 8 | batched | {row} 55 of 56 |\n| 16 | plain | {row}  |" in page
    assert "[n = 16](../../benchmarks/results/quality-smollm2-mbpp-chat-16.json), commit `0123456789ab`, 2026-01-02" in page
    assert "quality-smollm2-mbpp-chat.png" in page
    with pytest.raises(SystemExit, match="no marks"):
        written("a page", found)


def test_runs_of_other_methods_join_the_table_of_their_set(tmp_path: Path) -> None:
    def part(name: str, method: str, passed: list[bool], **settings: Any) -> Path:
        place = tmp_path / name
        place.mkdir()
        shared = dict.fromkeys(quality_tables.SHARED, 1) | {"n": 2, "methods": [method], "model": "/some/where/small"}
        lines = [{"method": method, "budget": budget} for budget in (0.5, None)]
        about = {"commit": "0123456789ab", "date": "2026-01-02"}
        written = {
            "settings": shared | settings,
            "scores": ["passed"],
            "lines": lines,
            "machine": about,
            "loaded": [{"of": method}],
        }
        (place / "summary.json").write_text(json.dumps(written))
        for file, field in (("samples", "attempts"), ("grades", "grades")):
            entries = []
            for i, one in enumerate(passed):
                sample = {"token_ids": [1], "mean_logprob": -1.0, "finished_at": 0.25}
                graded = [{"scores": {"passed": float(one)}, "outcome": "passed"}] * 2
                value = {"seconds": 1.0, "samples": [sample] * 2} if field == "attempts" else graded
                entries.append({"task_id": f"T/{i}", "error": None, field: {method: value}})
            (place / f"{file}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in entries))
        return place

    places = [part("humaneval-2-openvino", "openvino", [False, False]), part("humaneval-2", "plain", [True, False])]
    found = joined(places)
    assert found["settings"]["methods"] == ["plain", "openvino"]
    shares = {(one["method"], one["budget"]): one["passed_first"]["mean"] for one in found["lines"]}
    assert shares == {("plain", 0.5): 0.5, ("openvino", 0.5): 0.0, ("plain", None): 0.5, ("openvino", None): 0.0}
    assert [one["methods"] for one in found["parts"]] == [["openvino"], ["plain"]]
    assert [(one["method"], one["other"]) for one in found["against"]] == [("openvino", "plain")]
    (tmp_path / "results").mkdir()
    keep(tmp_path, tmp_path / "results")
    (file,) = (tmp_path / "results").iterdir()
    assert (file.name, json.loads(file.read_text())["settings"]["model"]) == ("quality-smollm2-humaneval-2.json", "small")
    with pytest.raises(SystemExit, match="has seed 2"):
        joined([*places, part("humaneval-2-single", "single", [True], seed=2)])


def test_the_page_says_what_is_missing() -> None:
    found = {"humaneval": {8: summary(8), 1: summary(1)}}
    said = [*missing(found)]
    assert said[:3] == [
        "HumanEval, n = 4, 16, 32",
        "HumanEval, n = 8: plain-single, single, llamacpp, openvino",
        "HumanEval by the chat template",
    ]
    assert [*pages(found)][-1] == f"Not measured yet: {'; '.join(said)}.\n"


def test_a_set_of_which_nothing_passes_has_no_plot() -> None:
    flat = summary(1)
    for line in flat["lines"]:
        line["passed_all"]["mean"] = 0.0
    assert passes({1: flat, 2: summary(2)})
    assert not passes({1: flat})
    text, _ = pages({"mbpp": {1: flat}})
    assert "png" not in text


def test_tables_of_summaries_have_rouge_2_in_place_of_passing() -> None:
    compared = summary(8) | {"scores": ["rouge2", "rougeL"]}
    for line in compared["lines"]:
        del line["pass@1"]
        for which in ("first", "all"):
            line[f"rouge2_{which}"] = line.pop(f"passed_{which}")
            line[f"rougeL_{which}"] = {"mean": 0.99}
    text, _ = pages({"summaries": {8: compared}})
    assert "![ROUGE-2@First and ROUGE-2@All over the time budget]" in text
    assert "| no budget | finished by 1 s, % | all there after, s | ids of plain |" in text
    assert "| 8 | plain | 10.0 / 15.0 | 20.0 / 25.0 | 30.0 / 35.0 | 40.0 / 45.0 | 50.0 / 55.0 | 50.0 | 1.23 |  |" in text


def test_the_page_has_the_tables_of_the_files() -> None:
    found = kept()
    text = PAGE.read_text("utf-8")
    assert written(text, found) == text
    assert all(
        (quality_tables.RESULTS / f"quality-smollm2-{name}.png").exists() for name, runs in found.items() if passes(runs)
    )
    pair = quality_tables.kept_pair()
    assert between(text, quality_tables.PAIR_BEGIN, quality_tables.PAIR_END, pair_pages(pair)) == text


def test_tables_of_the_pair_name_their_files_and_tell_methods_apart(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    means = {"mean": 0.01, "low": -0.02, "high": 0.03, "p": 0.5}
    metric = {
        "better": 3,
        "worse": 1,
        "gain": {"difference": 0.25, "budget": 0.125},
        "loss": {"difference": 0.0, "budget": 1},
    }
    for name in (*quality_tables.SEEDED, *quality_tables.FRESH):
        compared = summary(8)
        compared["machine"]["commit"] += "-dirty" * (name == "fresh-0.8")
        compared["against"][0] |= {"first": metric, "all": metric, "pass@1": means}
        (runs / name).mkdir(parents=True)
        (runs / name / "summary.json").write_text(json.dumps(compared))
    quality_tables.keep_pair(runs, results)
    text = "\n".join(pair_pages(quality_tables.kept_pair(results)))
    assert text.count("(commit `0123456789ab`, 2026-01-02)") == 3
    assert text.count("(commit `0123456789ab` with changes, 2026-01-02)") == 1
    heads = "| method | 0.5 s | 1 s | 2 s | 3 s | 4 s | no budget | all there after, s |"
    assert text.count(heads) == 2
    assert "| batched: finished, % | 40.0 | 50.0 | 60.0 | 120.0 | 70.0 | 80.0 |  |" in text
    assert "| 0.2 | batched, plain | Pass@All | 3 | 1 | +25.0 (0.12 s) | 0 | 55 of 56 |" in text
    assert "| 0.8 | pass@1 | 25.00 | 25.00 | +1.00 [-2.00, +3.00] | 0.50 |" in text


def test_a_table_has_the_budgets_at_which_methods_differ_most(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = summary(8)
    for line in compared["lines"]:
        line["finished"]["mean"] = {0.5: 0.1, 2: 0.3, 4: 0.2}.get(line["budget"], 0.0) * (line["method"] == "batched")
    monkeypatch.setattr(quality_tables, "COLUMNS", 2)
    assert quality_tables.telling_budgets(compared) == [2, 4]
