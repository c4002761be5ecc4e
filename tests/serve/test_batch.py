"""`shoal batch`: what the server would answer, exactly once per id, whatever happened before; also of files of OpenAI's.

Tests of: cli.batch, cli.progress, serve.handler, serve.output_file, serve.batch_lines, serve.app, durable.
"""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import CONTEXT, TIMEOUT_SECONDS, Gate, legible, pair, served
from shoal import cli
from shoal.api import Shoal
from shoal.cli.console import StatusLine
from shoal.config import Grammar
from shoal.durable import mend
from shoal.errors import InternalError, RequestError
from shoal.sampling.acceptance import RULES
from shoal.serve.app import ServeConfig
from shoal.serve.batch_lines import read_lines
from shoal.serve.compiled_grammars import FirstTrials
from shoal.serve.handler import Offline, refusal
from shoal.serve.output_file import SYNC_LINES, OutputFile
from shoal.serve.settings import Settings

LINES: list[Any] = [
    {"id": "seeded", "prompt": "hello", "n": 3, "seed": 7, "max_tokens": 40},
    {"id": 7, "prompt": "hello", "temperature": 0, "max_tokens": 30, "logprobs": 1},
    {"id": "chat", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 8},
    {"id": "best", "prompt": "hello", "n": 1, "best_of": 4, "seed": 3},
    {"prompt": "no name", "seed": 2},
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write(path: Path, lines: list[Any]) -> Path:
    """A file of lines; those that are no texts in JSON."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> dict[Any, Any]:
    """The answers by id, each of which must be there once."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {entry["id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def recipe(shoal: Shoal, **settings: Any) -> ServeConfig:
    return ServeConfig(lambda: shoal, Settings("tiny", **settings), lookahead=4)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command with a scripted pair: its --json, or its exit code and what it says."""
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: pair(legible(0), max_batch=4))

    def run(*arguments: Any) -> Any:
        capsys.readouterr()
        code = cli.run(["batch", *map(str, arguments), "--json", "--k", "4"])
        out = json.loads(capsys.readouterr().out)
        return out if code == 0 else (code, out["error"]["message"] if "error" in out else out)

    return run


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_are_those_of_generate_and_of_the_api(tmp_path: Path) -> None:
    shoal, found = pair(max_batch=4), []
    lines = list(read_lines(write(tmp_path / "in", LINES)))
    recipe(shoal, chat_template=TEMPLATE).offline().answer(lines, found.append)
    answers = {entry["id"]: entry for entry in found}
    assert set(answers) == {"seeded", 7, "chat", "best", "line-5"}
    options: dict[str, Any] = {"lookahead": 4, "rule": "coupled"}
    seeded = shoal.generate("hello", 3, seed=7, max_new_tokens=40, **options)[0].samples
    assert [choice["text"] for choice in answers["seeded"]["choices"]] == [sample.text for sample in seeded]
    for name in ("drafted", "accepted", "rounds"):
        assert [took[name] for took in answers["seeded"]["usage"]["choices"]] == [getattr(s, name) for s in seeded]
    assert sum(sample.accepted for sample in seeded) > 0
    greedy = shoal.generate("hello", temperature=0, max_new_tokens=30, **options)[0].samples[0]
    assert answers[7]["choices"][0]["text"] == greedy.text
    assert answers[7]["choices"][0]["logprobs"]["token_logprobs"] == list(greedy.logprobs)
    best = shoal.generate("hello", 4, seed=3, max_new_tokens=16, **options)[0].ranked[0]
    assert [choice["text"] for choice in answers["best"]["choices"]] == [best.text]
    assert answers["chat"]["object"] == "chat.completion"
    assert openai.types.Completion.model_validate({**answers["seeded"], "id": "x"}).choices[0].text == seeded[0].text


def test_lines_share_rounds_and_all_slots_are_used(tmp_path: Path) -> None:
    shoal, engines = pair(max_batch=4), []

    def engine() -> Any:
        engines.append(shoal.engine(4, RULES["coupled"]()))
        return engines[-1]

    asked = [{"prompt": "hello", "seed": i, "max_tokens": 24} for i in range(16)]
    asked[3]["n"] = 6  # more than there are slots
    lines = list(read_lines(write(tmp_path / "in", asked)))
    found: list[Any] = []
    Offline(shoal, engine, Settings("tiny", queue=0)).answer(lines, found.append)
    stats = engines[0].stats
    assert len(found) == 16
    assert stats.committed == (16 + 5) * 24
    assert stats.row_rounds > 3 * stats.rounds, "nearly always four rows in a round"


def test_what_is_wrong_with_a_line_is_its_answer(tmp_path: Path) -> None:
    lines = [
        "not json", '["a list"]', {"id": "field", "prompt": "x", "nn": 2}, {"id": "stream", "prompt": "x", "stream": True},
        {"id": "model", "prompt": "x", "model": "other"}, {"id": "none"}, {"id": [1], "prompt": "x"},
        {"id": "long", "prompt": "x" * (CONTEXT + 1)}, {"id": "half", "prompt": "\ud800"}, {"id": "good", "prompt": "x"},
        {"id": "range", "prompt": "x", "temperature": -1}, {"id": "many", "prompt": "x", "n": 257},
    ]  # fmt: skip
    found: list[Any] = []
    recipe(pair()).offline().answer(read_lines(write(tmp_path / "in", lines)), found.append)
    said = {entry["id"]: entry.get("error", {}) for entry in found}
    assert len(found) == len(lines) == len(said)
    assert said.pop("good") == {}
    params = {"line-1": None, "line-2": None, "field": "nn", "stream": "stream", "model": "model", "none": "prompt",
              "line-7": "id", "long": "prompt", "half": "prompt", "range": "temperature", "many": "n"}  # fmt: skip
    assert {name: error["param"] for name, error in said.items()} == params
    assert "not valid JSON" in said["line-1"]["message"]
    assert "JSON object" in said["line-2"]["message"]


def test_bytes_that_are_no_text_spoil_their_line_only(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"id": "a", "prompt": "\xff"}\r\n\n{"id": "b", "prompt": "x"}')
    found: list[Any] = []
    recipe(pair()).offline().answer(read_lines(tmp_path / "in"), found.append)
    assert {entry["id"]: "error" in entry for entry in found} == {"a": True, "b": False}


def test_an_engine_that_is_gone_is_no_answer(tmp_path: Path) -> None:
    def broken(ids: tuple[int, ...]) -> Any:
        raise InternalError("broken")

    found: list[Any] = []
    with pytest.raises(InternalError, match="thread has ended"):
        recipe(pair(broken)).offline().answer(read_lines(write(tmp_path / "in", LINES[:2])), found.append)
    assert not found


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_goes_on_where_it_was_killed(tmp_path: Path, batch: Callable[..., Any]) -> None:
    source = write(tmp_path / "in", [{"id": i, "prompt": "hello", "seed": i, "n": 2} for i in range(8)])
    whole = batch(source, tmp_path / "whole")
    assert (whole["lines"], whole["kept"], whole["answered"], whole["failed"]) == (8, 0, 8, 0)
    assert whole["tokens"] == 8 * 2 * 16
    assert 0 < whole["accepted"] <= whole["drafted"]
    assert whole["by_drafter"] == {"model": {"drafted": whole["drafted"], "accepted": whole["accepted"]}}
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    for left in ("", "\0" * 4096, "\0\0\n" + "".join(lines[5:])):  # killed within the fourth; as a crash leaves it besides
        (tmp_path / "out").write_text("".join(lines[:3]) + lines[3][:-9] + left)
        rest = batch(source, tmp_path / "out")
        assert (rest["lines"], rest["kept"], rest["answered"]) == (8, 3, 5)
        once, twice = read(tmp_path / "whole"), read(tmp_path / "out")
        assert {i: once[i]["choices"] for i in once} == {i: twice[i]["choices"] for i in twice}
    before = (tmp_path / "out").read_bytes()
    assert batch(source, tmp_path / "out")["answered"] == 0
    assert (tmp_path / "out").read_bytes() == before


def test_the_rule_is_coupled_where_a_line_has_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    rules, offline = [], ServeConfig.offline
    monkeypatch.setattr(ServeConfig, "offline", lambda self: (rules.append(self.rule), offline(self))[1])
    enveloped = [[asked("a", COMPLETIONS, prompt="x", **seed)] for seed in ({}, {"seed": 0})]
    for lines in (*([{"prompt": "x"}, {"prompt": "y", "seed": seed}] for seed in (None, 0)), *enveloped):
        (tmp_path / "out").unlink(missing_ok=True)
        batch(write(tmp_path / "in", lines), tmp_path / "out")
    assert rules == ["rejection", "coupled"] * 2
    (tmp_path / "out").unlink()
    code, _ = batch(tmp_path / "in", tmp_path / "out", "--rule", "rejection")
    assert (code, len(rules)) == (1, 4)  # which has no seeds


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ("precious\n", "out:1 is no answer"),
        ('{"id": [1], "choices": [], "shoal": {}}\n', "out:1 is no answer"),
        ('{"id": "a", "choices": []}\n', "out:1 is no answer of this version"),
        ('{"id": "a", "prompt": "x"}\n', "out:1 is no answer"),
        ("precious, without a line break", "out:1 is no answer"),
        ("\0binary\n", "out:1 is no answer"),
        ("precious\0", "out:1 is no answer"),
    ],
)
def test_files_that_hold_no_answers_are_left_alone(tmp_path: Path, batch: Any, kept: str, said: str) -> None:
    (tmp_path / "out").write_text(kept)
    code, message = batch(write(tmp_path / "in", [{"id": "a", "prompt": "x"}]), tmp_path / "out")
    assert (code, said in message) == (2, True), message
    assert (tmp_path / "out").read_text() == kept


def test_lines_that_cannot_be_told_apart_or_read_are_refused(tmp_path: Path, batch: Any) -> None:
    own = [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}]
    theirs = [asked("a", COMPLETIONS, prompt="x"), chat("b", "y"), chat("a", "z")]
    for lines in (own, theirs):
        code, message = batch(write(tmp_path / "in", lines), tmp_path / "out")
        assert (code, "lines 1 and 3 have the same id 'a'" in message) == (2, True)
    code, message = batch(tmp_path / "nowhere", tmp_path / "out")
    assert (code, "No such file" in message) == (2, True)
    assert not (tmp_path / "out").exists()


def test_the_output_is_another_file(tmp_path: Path, batch: Any) -> None:
    kept = '{"id": "a", "prompt": "x"}'  # as if torn
    (tmp_path / "in").write_text(kept)
    assert batch(tmp_path / "in", tmp_path / "in") == (2, f"INPUT and OUTPUT are one file, '{tmp_path / 'in'}'")
    assert (tmp_path / "in").read_text() == kept


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    asked = list(read_lines(write(tmp_path / "in", [{"id": 1}, {"id": "1"}])))
    with OutputFile(tmp_path / "out", asked, {}) as ledger, pytest.raises(RequestError, match="another process is writing"):
        OutputFile(tmp_path / "out", asked, {})
    assert ledger.ids == set()
    with OutputFile(tmp_path / "out", asked, {}) as again:
        assert again.write({"id": 1, "choices": []}) is True
        assert again.write({"id": 1, "error": {"code": None}}) is False
        assert again.write({"id": "1", "error": {"code": None}}) is True
        assert (again.ids, again.failed) == ({1, "1"}, {"1"})
    written = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    made = [{"line": line.digest} for line in asked]
    assert written == [{"id": 1, "choices": [], "shoal": made[0]}, {"id": "1", "error": {"code": None}, "shoal": made[1]}]
    with OutputFile(tmp_path / "out", asked, {}) as ledger:
        assert (ledger.ids, ledger.failed, ledger.retried) == ({1}, set(), 1)
        with pytest.raises(RequestError, match="another process is writing"):
            OutputFile(tmp_path / "out", asked, {})  # the file that replaced it is locked, too
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == written[:1]


def test_a_line_that_failed_is_tried_again_also_a_mended_one(tmp_path: Path, batch: Any) -> None:
    """And what no model can answer, names of other models included, is told before one is loaded."""
    good, wrong = {"id": 1, "prompt": "hello", "seed": 1}, {"id": 2, "prompt": "hello", "seed": 1, "model": "other"}
    source, out, link = write(tmp_path / "in", [good, wrong]), tmp_path / "out", tmp_path / "link"
    link.symlink_to(out)
    tally = batch(source, link)
    assert (tally["answered"], tally["failed"]) == (2, 1)
    first, error = sorted(out.read_text().splitlines(), key=lambda line: json.loads(line)["id"])
    assert "there is no model 'other' here" in error
    tally = batch(write(source, [good, {**wrong, "model": "tiny", "n": 2}]), link, "--name", "tiny")
    assert (tally["kept"], tally["answered"], tally["failed"]) == (1, 1, 0)
    kept, second = out.read_text().splitlines()
    assert kept == first
    assert len(json.loads(second)["choices"]) == 2
    assert link.is_symlink()


def test_settings_may_change_where_all_lines_failed(tmp_path: Path, batch: Any) -> None:
    lines = [{"id": name, "prompt": "x", "n": 5, "temperature": 0, "model": name} for name in ("a", "b")]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    assert batch(source, out, "--max-n", 4)[1]["failed"] == 2
    names = ["--name", "a", "--served-model-name", "b"]
    assert (
        batch(source, out, "--max-batch", 8, "--max-tokens", 7, "--timeout", 9, "--rule", "coupled", *names)["answered"] == 2
    )
    assert "was answered with" in batch(write(source, [*lines, {"id": 3, "prompt": "x"}]), out, *names)[1]


def test_nothing_is_loaded_for_lines_that_no_model_can_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: pytest.fail("loaded"))
    closed, close = list[Any](), FirstTrials.close
    monkeypatch.setattr(FirstTrials, "close", lambda trials: closed.append(close(trials)))
    lines = [{"prompt": "x", "model": "other"}, {"prompt": "x", "temperature": "hot"}, {"url": "/v1/embeddings"}]
    lines += [{"prompt": "x", field: 1000} for field in ("n", "best_of")]
    lines += [{"prompt": "x", "stream": True}, chat("a", "hi", stream=True), {"prompt": "x", "guided_regex": "a" * 2**19}]
    lines += [{"prompt": "x", "logprobs": 21}, {"prompt": "x", "guided_regex": "(a"}] if find_spec("llguidance") else []
    lines += [
        {"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]},
        {"messages": [{"role": "user", "content": "x"}], "n": 257},
    ]
    assert cli.run(["batch", str(write(tmp_path / "in", lines)), str(tmp_path / "out")]) == 1
    assert len((tmp_path / "out").read_text().splitlines()) == len(lines)
    assert len(closed) == 1, "its process ends"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NOTHING = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WRONG: list[dict[str, Any]] = [
    {"prompt": "x", "guided_json": {"type": "nothing"}}, {"prompt": "x", "guided_regex": "(a"}, {**HI, "response_format": NOTHING},
    {"prompt": "x", "guided_json": {"const": 2**60 + 1}}, {"prompt": "x", "guided_grammar": "start: nothing"},
    {"prompt": "x", "structured_outputs": {"regex": "[a"}}, {"prompt": "x", "guided_json": "{"},
    {"prompt": "x", "logprobs": 21}, {"prompt": "x", "prompt_logprobs": 30}, {**HI, "logprobs": True, "top_logprobs": 100},
    {**HI, "top_logprobs": 2}, {"prompt": "x", "logit_bias": {"the": 1}}, {"prompt": "x", "max_tokens": 0},
    {**HI, "max_completion_tokens": 3, "max_tokens": 4}, {"prompt": "x", "stop": 3}, {"prompt": [], "n": 2},
    {"prompt": "x", "stream_options": {"include_usage": True}}, {"prompt": "x", "n": 3, "best_of": 2},
    {**HI, "tool_choice": "required"}, {**HI, "tools": [TOOL, TOOL]}, {**HI, "chat_template_kwargs": {"tokenize": True}},
    {**HI, "tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, {"prompt": [1, 2], "suffix": "b"},
    {**HI, "continue_final_message": True, "add_generation_prompt": True}, {"prompt": "x", "truncate_prompt_tokens": 0},
    {"prompt": "x", "members": True}, {"prompt": "x", "echo": True, "suffix": "b"},
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"prompt": "x", "guided_json": {"type": "object"}}, {"prompt": "x", "guided_grammar": "start: <a> /b/"},
    {**HI, "tools": [TOOL], "tool_choice": "required", "response_format": NOTHING}, {"prompt": "x", "max_tokens": 0, "echo": True},
    {**HI, "max_tokens": -1},
    {"prompt": [1, 10**6]}, {"prompt": "x", "logit_bias": {"1000000": 1}}, {"prompt": "x", "max_tokens": 10**6},
    {"prompt": "x", "guided_regex": "(a{1,900}b{1,900}|c{1,900}){900}"},
]  # fmt: skip


def test_faults_are_told_before_a_model_is_loaded_in_the_words_behind_it(tmp_path: Path) -> None:
    """What the model decides is not told: its vocabulary, names of its tokens, the form of its calls, a grammar's time."""
    pytest.importorskip("llguidance")
    asked = list(read_lines(write(tmp_path / "in", [{"id": i, **one} for i, one in enumerate([*WRONG, *RIGHT])])))
    config, trials, behind = recipe(pair(max_batch=4), chat_template=TEMPLATE, seeds=False), FirstTrials(), {}
    try:
        before = [refusal(line, config.settings, trials) for line in asked]
    finally:
        trials.close()
    config.offline().answer(asked[: len(WRONG)], lambda entry: behind.update({entry.pop("id"): entry}))
    for i, one in enumerate(WRONG):
        del behind[i]["shoal"]
        assert before[i] == {**behind[i], "id": i}, one
        assert "error" in behind[i]
    assert before[len(WRONG) :] == [None] * len(RIGHT)


def test_a_grammar_of_many_lines_is_tried_once_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr("shoal.serve.compiled_grammars.MOST_TRIED", 2)
    tried = list[str]()
    trials = FirstTrials()
    monkeypatch.setattr(trials._probe, "outcome", lambda source: tried.append(source) or {"outcome": "refused", "why": "no"})
    for _ in range(3):
        for text in "ab":
            with pytest.raises(RequestError, match="cannot be used: no"):
                trials.require(Grammar("regex", text))
    trials.require(Grammar("regex", "c"))
    assert len(tried) == 2
    slow = FirstTrials()
    monkeypatch.setattr(slow._probe, "outcome", lambda source: {"outcome": "slow", "why": "late", "seconds": 2.0})
    slow.require(Grammar("regex", "a"))  # the model's own alphabet decides


def test_what_is_answered_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", [{"id": i, "prompt": "hello", "seed": i} for i in range(40)])
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: pair(legible(0), max_batch=2))
    written: list[Any] = []
    keep = OutputFile.write

    def interrupted(self: OutputFile, entry: Any) -> bool:
        written.append(entry["id"])
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return keep(self, entry)

    monkeypatch.setattr(OutputFile, "write", interrupted)
    assert cli.run(["batch", str(source), str(tmp_path / "out")]) == 130
    assert list(read(tmp_path / "out")) == written
    assert 3 <= len(written) < 40


def test_a_damaged_end_is_cut_wherever_it_begins() -> None:
    whole = b"".join(json.dumps({"id": i, "choices": ["é\n"]}).encode() + b"\n" for i in range(3))
    for size in range(len(whole)):
        for left in (b"", b"\0", b"\0" * 99, b"\0\n\0", b"\0\n" + whole):
            kept: list[int] = []
            file = io.BytesIO(whole[:size] + left)
            if left.endswith(b"}\n") and not whole[:size].count(b"\n") and not whole[:size].startswith(b"{"):
                continue  # it begins like a file of something else
            cut = mend(file, lambda number, line: kept.append(json.loads(line)["id"]))  # noqa: B023
            stays = whole[: whole[:size].rfind(b"\n") + 1]
            assert (file.getvalue(), cut) == (stays, size + len(left) - len(stays))
            assert kept == list(range(stays.count(b"\n")))


def test_what_was_cut_is_told(tmp_path: Path, batch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", [{"id": "a", "prompt": "x", "seed": 1}])
    (tmp_path / "out").write_bytes(b'{"id": "a", "cho' + b"\0" * 84)
    assert cli.run(["batch", str(source), str(tmp_path / "out")]) == 0
    assert "out: its last 100 bytes were no whole answers" in capsys.readouterr().err
    assert cli.run(["batch", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["own", "enveloped"])
def test_answers_to_other_lines_are_never_mixed_in(tmp_path: Path, batch: Any, kind: str) -> None:
    def line(number: int, name: str) -> Any:
        body = {"prompt": f"line {number}", "seed": number}
        if kind == "own":
            return {**body, **({"id": name} if name else {})}
        return {"custom_id": name or f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}

    def names(change: Callable[[list[Any]], list[Any]], name: str = "") -> Any:
        lines = [line(number, name and f"{name}{number}") for number in range(1, 4)]
        (tmp_path / "out").unlink(missing_ok=True)
        assert batch(write(tmp_path / "in", lines), tmp_path / "out")["answered"] == 3
        kept = (tmp_path / "out").read_bytes()
        answer = batch(write(tmp_path / "in", change(lines)), tmp_path / "out")
        assert isinstance(answer, dict) or (tmp_path / "out").read_bytes() == kept
        return answer

    changed = line(9, "b2")
    assert names(lambda lines: [*lines, line(4, "new")])["answered"] == 1, "what is added is answered"
    assert names(lambda lines: [lines[0], line(5, "new"), *lines[1:]], "b")["answered"] == 1, "ids tell them apart"
    assert names(lambda lines: lines[::-1], "b")["answered"] == 0
    code, said = names(lambda lines: [lines[0], changed, lines[2]], "b")
    assert (code, "answers the line 'b2', but line 2 of the input is another one now" in said) == (2, True)
    code, said = names(lambda lines: lines[:2], "b")
    assert (code, "answers the line 'b3', which the input does not have" in said) == (2, True)
    if kind == "own":  # nothing but its place names a line
        code, said = names(lambda lines: [lines[0], line(5, ""), *lines[1:]])
        assert (code, "of the input is another one now" in said) == (2, True)


def test_answers_of_other_settings_are_never_mixed_in(tmp_path: Path, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    for name, weights in (("one", b"w" * 200_000), ("two", b"w" * 199_999 + b"v")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    source, out = write(tmp_path / "in", [{"id": i, "prompt": "x", "temperature": 0} for i in range(2)]), tmp_path / "out"
    (tmp_path / "in.one").write_text((tmp_path / "in").read_text().splitlines(keepends=True)[0])
    first = batch(tmp_path / "in.one", out, "--model", tmp_path / "one", "--name", "m")
    assert first["answered"] == 1
    kept = out.read_bytes()
    for options, name in (
        (["--model", tmp_path / "two"], "model"), (["--rule", "coupled"], "rule"), (["--max-tokens", 7], "max_tokens"),
        (["--timeout", 9], "timeout"), (["--chat-template", tmp_path / "template"], "chat_template"),
    ):  # fmt: skip
        code, said = batch(source, out, "--model", tmp_path / "one", *options)
        assert (code, f"out:1 was answered with {name} = " in said) == (2, True), said
        assert out.read_bytes() == kept
    monkeypatch.setattr(
        "shoal.models.load_report.described",
        lambda runner: {"dtype": "bfloat16", "quantize": "off", "strict": "off", "kv": "off"},
    )
    monkeypatch.setattr(Offline, "answer", lambda *_: pytest.fail("drawn before settings are compared"))
    code, said = batch(source, out, "--model", tmp_path / "one")
    assert (code, "dtype = 'float32', this run has 'bfloat16'" in said) == (2, True), said
    assert out.read_bytes() == kept
    monkeypatch.undo()
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: pair(legible(0), max_batch=4))
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    (tmp_path / "one").symlink_to(tmp_path / "elsewhere")
    for options in (["--max-n", 5], ["--draft", tmp_path / "two"], ["--name", "n"]):
        assert not isinstance(batch(source, out, "--model", tmp_path / "elsewhere", *options), tuple)
    out.unlink()
    guided = [source, out, "--model", "org/m", "--revision"]
    assert batch(*guided, "v1", "--guide", tmp_path / "one")["answered"] == 2
    assert batch(*guided, "v1", "--guide", tmp_path / "elsewhere")["kept"] == 2, "a link to it"
    for revision, guide, name in (("v2", "one", "model"), ("v1", "two", "guide")):
        code, said = batch(*guided, revision, "--guide", tmp_path / guide)
        assert (code, f"out:1 was answered with {name} = " in said) == (2, True), said


def test_a_link_is_written_through(tmp_path: Path, batch: Any) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    source = write(tmp_path / "in", [{"id": i, "prompt": "x", "seed": i} for i in range(3)])
    link.symlink_to(target)
    assert batch(source, link)["answered"] == 3, "a link to nothing yet"
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:2]) + lines[2][:20])
    before = target.stat().st_ino
    assert batch(source, link)["kept"] == 2
    assert link.is_symlink()
    assert link.readlink() == target
    assert (target.stat().st_ino, sorted(read(target))) == (before, [0, 1, 2])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["far", "in", "link"]
    link.unlink()
    link.symlink_to(source)
    asked = source.read_bytes()
    assert batch(source, link)[0] == 2, "a link to the input"
    assert source.read_bytes() == asked


def test_answers_are_on_the_disk_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list(read_lines(write(tmp_path / "in", [{"id": i} for i in range(3 * SYNC_LINES)])))
    (tmp_path / "far").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "far" / "out")
    seen: list[Any] = []
    real, now = os.fsync, [0.0]

    def fsync(descriptor: int) -> None:
        real(descriptor)
        stat = os.fstat(descriptor)
        seen.append("folder" if stat.st_ino == (tmp_path / "far").stat().st_ino else stat.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "out"
    with OutputFile(out, asked, {}, clock=lambda: now[0]) as ledger:
        assert seen == [0, "folder"], "a new file has a name on the disk"
        seen.clear()
        for line in asked[: SYNC_LINES - 1]:
            ledger.write({"id": line.id, "choices": []})
            assert list(read(out))[-1] == line.id, "others read it at once"
        assert seen == []
        ledger.write({"id": asked[SYNC_LINES - 1].id, "choices": []})
        assert seen == [out.stat().st_size], "after so many lines"
        now[0] += 0.5
        ledger.write({"id": asked[SYNC_LINES].id, "choices": []})
        assert len(seen) == 1
        now[0] += 0.6
        ledger.write({"id": asked[SYNC_LINES + 1].id, "choices": []})
        assert seen[1:] == [out.stat().st_size], "after a second"
        ledger.write({"id": asked[SYNC_LINES + 2].id, "choices": []})
        assert len(seen) == 2
    assert seen[2:] == [out.stat().st_size], "and at the end"


def test_the_exit_code_is_1_if_every_line_failed(tmp_path: Path, batch: Any) -> None:
    wrong = [{"id": 1, "prompt": "x", "nn": 1}, {"custom_id": "2", "method": "POST", "url": "/v1/embeddings", "body": {}},
             {"custom_id": "3", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 0}}]  # fmt: skip
    code, tally = batch(write(tmp_path / "in", wrong), tmp_path / "out")
    assert (code, tally["answered"], tally["failed"]) == (1, 3, 3)
    code, tally = batch(tmp_path / "in", tmp_path / "out")
    assert (code, tally["kept"], tally["answered"], tally["failed"]) == (1, 0, 3, 3), "also where they failed before"
    assert batch(write(tmp_path / "in", [*wrong, {"id": 4, "prompt": "x"}]), tmp_path / "out")["failed"] == 3
    assert batch(write(tmp_path / "none", []), tmp_path / "none.out")["lines"] == 0


def test_without_a_terminal_lines_tell_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They come while no line of the batch ends, too."""
    gate, texts = Gate(legible(0), 5), []  # the prompt has 5 tokens: nothing ends until the gate is opened

    def print_when_it_computes(line: StatusLine) -> None:
        gate.reached.wait(TIMEOUT_SECONDS)
        texts.append(line.text)
        gate.opened.set()

    monkeypatch.setattr(StatusLine, "_print", print_when_it_computes)
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: pair(gate, max_batch=4))
    source = write(tmp_path / "in", [{"id": 1, "prompt": "hello", "seed": 1}])
    assert cli.run(["batch", str(source), str(tmp_path / "out")]) == 0
    assert [text.split(":")[0] for text in texts] == ["0 of 1 lines answered"]
    assert "1 of 1 lines answered" in capsys.readouterr().out


# ── files of OpenAI's batch API ─────────────────────────────────────────────────────────────────────────────────────

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def asked(name: Any, url: Any, **body: Any) -> dict[str, Any]:
    """A line as OpenAI's documentation shows it."""
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def chat(name: str, text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]
    return asked(name, CHAT, model="tiny", messages=messages, **options)


def results(tmp_path: Path, lines: list[Any]) -> dict[str, dict[str, Any]]:
    """What comes back, by custom id."""
    found: list[Any] = []
    offline = recipe(pair(max_batch=4), chat_template=TEMPLATE, max_tokens=64).offline()
    offline.answer(read_lines(write(tmp_path / "in", lines)), found.append)
    assert len(found) == len(lines)
    return {entry["custom_id"]: entry for entry in found}


def test_results_hold_what_the_server_answers(tmp_path: Path) -> None:
    lines = [
        chat("request-1", "Hello world!", seed=1, max_tokens=12),
        chat("request-2", "Name a prime.", seed=2, max_completion_tokens=9, n=2, logprobs=True, user="somebody"),
        asked("request-3", COMPLETIONS, prompt="hello", seed=3, n=3, best_of=4),
        asked("request-4", COMPLETIONS, model="tiny", prompt=["a", "b"], temperature=0, max_tokens=9999),
        chat("request-5", "Hi", seed=5, nn=1),
        asked("request-6", COMPLETIONS, prompt="x", model="other"),
        asked("request-7", COMPLETIONS, prompt="x", n=0),
    ]
    got = results(tmp_path, lines)
    with served(pair(max_batch=4), chat_template=TEMPLATE, max_tokens=64) as server:
        for line in lines:
            answer = server.post(line["url"], **({"prompt": None} if "messages" in line["body"] else {}) | line["body"])
            result = got[line["custom_id"]]
            assert result.keys() == {"id", "custom_id", "response", "error", "shoal"}
            assert result["id"].startswith("batch_req_")
            assert result["error"] is None
            assert result["response"].keys() == {"status_code", "request_id", "body"}
            assert result["response"]["request_id"]
            assert result["response"]["status_code"] == answer.status_code
            assert essence(result["response"]["body"]) == essence(answer.json())
            notes = {name: value for name, value in answer.headers.items() if name in ("x-shoal-ignored", "x-shoal-clamped")}
            assert result["shoal"].get("notes", {}) == notes
    assert [got[f"request-{n}"]["response"]["status_code"] for n in range(1, 8)] == [200, 200, 200, 200, 400, 404, 400]
    completion = openai.types.chat.ChatCompletion.model_validate(got["request-2"]["response"]["body"])
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2 * 9
    assert len({result["id"] for result in got.values()}) == len({r["response"]["request_id"] for r in got.values()}) == 7


def test_lines_of_responses_are_answered(tmp_path: Path) -> None:
    body = {"model": "tiny", "input": "Hello world!", "seed": 1, "max_output_tokens": 999}
    got = results(
        tmp_path, [asked("a", "/v1/responses", **body), chat("b", "x", seed=1), asked("c", "/v1/responses", input=[])]
    )
    answer = openai.types.responses.Response.model_validate(got["a"]["response"]["body"])
    assert answer.usage is not None
    assert (answer.output_text != "", answer.usage.output_tokens) == (True, 64)
    assert got["a"]["shoal"]["notes"] == {"x-shoal-clamped": "max_output_tokens=64"}
    assert (got["c"]["response"]["status_code"], got["c"]["response"]["body"]["error"]["param"]) == (400, "input")


def essence(body: dict[str, Any]) -> Any:
    """An answer without what differs from one asking to the next."""
    usage = body.get("usage", {})
    took = [{**choice, "rounds": 0, "mean_logprob": 0} for choice in usage.get("choices", ())]
    texts = [choice.get("text", choice.get("message")) for choice in body.get("choices", ())]
    return [body.get(name) for name in ("error", "object", "model")], texts, took, usage.get("completion_tokens")


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"url": "/v1/embeddings"}, "invalid_url", "/v1/embeddings"),
        ({"url": None}, "invalid_url", "None"),
        ({"url": ["/v1/completions"]}, "invalid_url", "url must be"),
        ({"method": "GET"}, "invalid_method", "GET"),
        ({"method": None}, "invalid_method", "POST"),
        ({"body": "text"}, "invalid_body", "body"),
        ({"body": None}, "invalid_body", "body"),
        ({"prompt": "x"}, "unknown_field", "'prompt'"),
        ({"id": "x"}, "unknown_field", "'id'"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
    ],
)
def test_a_wrong_line_has_no_response_and_leaves_the_others_alone(tmp_path: Path, change: Any, code: str, said: str) -> None:
    wrong = {**asked("wrong", COMPLETIONS, prompt="x"), **change}
    got = results(tmp_path, [wrong, asked("right", COMPLETIONS, prompt="x", seed=1)])
    result = got[wrong["custom_id"]]
    assert (result["response"], result["error"]["code"]) == (None, code)
    assert result["error"].keys() == {"code", "message"}
    assert said in result["error"]["message"]
    assert got["right"]["response"]["status_code"] == 200


def test_a_line_without_custom_id_goes_by_its_number(tmp_path: Path) -> None:
    nameless = asked("x", COMPLETIONS, prompt="x")
    del nameless["custom_id"]
    got = results(tmp_path, [asked("right", COMPLETIONS, prompt="x"), nameless])
    assert got["line-2"]["error"]["code"] == "invalid_custom_id"


def test_a_stream_is_refused_as_the_api_would_refuse_a_field(tmp_path: Path) -> None:
    result = results(tmp_path, [chat("a", "hi", stream=True)])["a"]
    assert result["error"] is None
    assert (result["response"]["status_code"], result["response"]["body"]["error"]["param"]) == (400, "stream")


def test_both_kinds_of_lines_in_one_file(tmp_path: Path, batch: Any) -> None:
    lines = [asked("one", COMPLETIONS, prompt="hello", seed=1), {"id": "two", "prompt": "hello", "seed": 1}, {"prompt": "x"}]
    tally = batch(write(tmp_path / "in", lines), tmp_path / "out")
    assert (tally["answered"], tally["failed"], tally["tokens"]) == (3, 0, 3 * 16)
    assert 0 < tally["accepted"] <= tally["drafted"]
    found = {one.get("custom_id", one["id"]): one for one in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert [name for name, one in sorted(found.items()) if "custom_id" in one] == ["one"]
    assert sorted(found) == ["line-3", "one", "two"]
    assert found["one"]["response"]["body"]["choices"][0]["text"] == found["two"]["choices"][0]["text"]
    kept = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(kept[:-30])
    assert batch(tmp_path / "in", tmp_path / "out")["answered"] == 1


def test_failures_are_counted(tmp_path: Path, batch: Any) -> None:
    lines = [asked("a", "/v1/embeddings", input="x"), asked("b", COMPLETIONS, prompt="x", n=0)]
    source = write(tmp_path / "in", lines)
    code, tally = batch(source, tmp_path / "out")
    assert (code, tally["answered"], tally["failed"]) == (1, 2, 2)
    settings = json.loads((tmp_path / "out").read_text().splitlines()[0])["shoal"]
    del settings["line"]
    with OutputFile(tmp_path / "out", list(read_lines(source)), settings) as ledger:
        assert (ledger.ids, ledger.retried) == (set(), 2)
