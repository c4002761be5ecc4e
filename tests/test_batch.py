"""`shoal batch`: what the server would answer, exactly once per id, whatever happened before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import CONTEXT, legible, pair
from shoal import cli
from shoal.accept import RULES
from shoal.api import Shoal
from shoal.errors import InternalError, RequestError
from shoal.serve.lines import Ledger, read_lines
from shoal.serve.offline import Offline
from shoal.serve.recipe import Recipe
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
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> dict[Any, Any]:
    """The answers by id, each of which must be there once."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    found = {entry["id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def recipe(shoal: Shoal, **settings: Any) -> Recipe:
    return Recipe(lambda: shoal, Settings("tiny", **settings), lookahead=4)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command with a scripted pair: its --json, or its exit code and what it says."""
    monkeypatch.setattr("shoal.cli.options.Source.load", lambda source: pair(legible(0), max_batch=4))

    def run(*arguments: Any) -> Any:
        capsys.readouterr()
        code = cli.run(["batch", *map(str, arguments), "--json", "--k", "4"])
        out = json.loads(capsys.readouterr().out)
        return out if code == 0 else (code, out["error"]["message"])

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

    lines = list(read_lines(write(tmp_path / "in", [{"prompt": "hello", "seed": i, "max_tokens": 24} for i in range(16)])))
    found: list[Any] = []
    Offline(shoal, engine, Settings("tiny", queue=0)).answer(lines, found.append)
    stats = engines[0].stats
    assert len(found) == 16
    assert stats.committed == 16 * 24
    assert stats.row_rounds > 3 * stats.rounds, "nearly always four rows in a round"


def test_what_is_wrong_with_a_line_is_its_answer(tmp_path: Path) -> None:
    lines = [
        "not json", '["a list"]', {"id": "field", "prompt": "x", "nn": 2}, {"id": "stream", "prompt": "x", "stream": True},
        {"id": "model", "prompt": "x", "model": "other"}, {"id": "none"}, {"id": [1], "prompt": "x"},
        {"id": "long", "prompt": "x" * (CONTEXT + 1)}, {"id": "half", "prompt": "\ud800"}, {"id": "good", "prompt": "x"},
        {"id": "range", "prompt": "x", "temperature": -1}, {"id": "many", "prompt": "x", "n": 65},
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
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "out").write_text("".join(lines[:3]) + lines[3][:-9])  # killed within the fourth
    rest = batch(source, tmp_path / "out")
    assert (rest["lines"], rest["kept"], rest["answered"]) == (8, 3, 5)
    once, twice = read(tmp_path / "whole"), read(tmp_path / "out")
    assert {i: once[i]["choices"] for i in once} == {i: twice[i]["choices"] for i in twice}
    before = (tmp_path / "out").read_bytes()
    assert batch(source, tmp_path / "out")["answered"] == 0
    assert (tmp_path / "out").read_bytes() == before


def test_the_rule_is_coupled_where_a_line_has_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    rules, offline = [], Recipe.offline
    monkeypatch.setattr(Recipe, "offline", lambda self: (rules.append(self.rule), offline(self))[1])
    batch(write(tmp_path / "a", [{"prompt": "x"}, {"prompt": "y", "seed": None}]), tmp_path / "a.out")
    batch(write(tmp_path / "b", [{"prompt": "x"}, {"prompt": "y", "seed": 0}]), tmp_path / "b.out")
    assert rules == ["rejection", "coupled"]


@pytest.mark.parametrize(
    ("lines", "kept", "said"),
    [
        (
            [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}],
            "",
            "lines 1 and 3 have the same id 'a'",
        ),
        ([{"id": "a", "prompt": "x"}], "precious\n", "out:1 is no answer"),
        ([{"id": "a", "prompt": "x"}], '{"id": "b", "choices": []}\n{"id": [1], "choices": []}\n', "out:2 is no answer"),
        ([{"id": "a", "prompt": "x"}], '{"id": "a", "prompt": "x"}\n', "out:1 is no answer"),
        ([{"id": "a", "prompt": "x"}], "precious, without a line break", "out:1 is no answer"),
        (None, "", "No such file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, batch: Any, lines: Any, kept: str, said: str) -> None:
    source = tmp_path / "in" if lines is None else write(tmp_path / "in", lines)
    (tmp_path / "out").write_text(kept)
    code, message = batch(source, tmp_path / "out")
    assert code == 2
    assert said in message
    assert (tmp_path / "out").read_text() == kept


def test_the_output_is_another_file(tmp_path: Path, batch: Any) -> None:
    kept = '{"id": "a", "prompt": "x"}'  # as if torn
    (tmp_path / "in").write_text(kept)
    assert batch(tmp_path / "in", tmp_path / "in") == (2, f"INPUT and OUTPUT are one file, '{tmp_path / 'in'}'")
    assert (tmp_path / "in").read_text() == kept


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with Ledger(tmp_path / "out") as ledger, pytest.raises(RequestError, match="another process is writing"):
        Ledger(tmp_path / "out")
    assert ledger.ids == set()
    with Ledger(tmp_path / "out") as again:
        assert again.write({"id": 1, "choices": []}) is True
        assert again.write({"id": 1, "error": {}}) is False
        assert again.write({"id": "1", "error": {}}) is True
    with Ledger(tmp_path / "out") as ledger:
        assert ledger.ids == {1, "1"}
    written = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert written == [{"id": 1, "choices": []}, {"id": "1", "error": {}}]


def test_what_is_answered_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", [{"id": i, "prompt": "hello", "seed": i} for i in range(40)])
    monkeypatch.setattr("shoal.cli.options.Source.load", lambda source: pair(legible(0), max_batch=2))
    written: list[Any] = []
    keep = Ledger.write

    def interrupted(self: Ledger, entry: Any) -> bool:
        written.append(entry["id"])
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return keep(self, entry)

    monkeypatch.setattr(Ledger, "write", interrupted)
    assert cli.run(["batch", str(source), str(tmp_path / "out")]) == 130
    assert list(read(tmp_path / "out")) == written
    assert 3 <= len(written) < 40
