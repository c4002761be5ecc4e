"""What is told while a pair is loaded: the stages, in order, to a callback, a log or a terminal.

Tests of: models.load_report, cli.console.
"""

from __future__ import annotations

import io
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shoal
from serving import pair
from shoal.cli import console, progress, run
from shoal.cli.options import ModelSource
from shoal.cli.progress import with_progress
from shoal.errors import ModelError
from shoal.models import loading
from shoal.models.load_report import LoadStage, LoadStages

OF_A_PAIR = [
    ("tokenizer", "target"), *((name, model) for model in ("target", "draft") for name in ("weights", "packing", "checking")),
    ("passes", "target"), ("passes", "draft"),
]  # fmt: skip


def test_each_stage_begins_and_ends_before_the_next(saved_pair: tuple[Path, Path]) -> None:
    told: list[LoadStage] = []
    made = shoal.load(*saved_pair, compile="off", progress=told.append)
    ready = told.pop()
    began, ended = told[::2], told[1::2]
    assert [(stage.name, stage.model) for stage in began] == OF_A_PAIR
    assert [(stage.name, stage.model) for stage in ended] == OF_A_PAIR
    assert all(stage.seconds is None for stage in began)
    assert all(stage.seconds is not None and stage.seconds >= 0 for stage in ended)
    assert (ready.name, ready.model, ready.stages) == ("ready", "pair", tuple(ended))
    again: list[LoadStage] = []
    assert made.draft_model is not None
    shoal.load(made.target.hf, made.draft_model.hf, tokenizer=made.tokenizer, compile="off", progress=again.append)
    assert [(stage.name, stage.model) for stage in again[::2]] == [
        ("checking", "target"), ("checking", "draft"), ("passes", "target"), ("passes", "draft"), ("ready", "pair"),
    ]  # fmt: skip


def test_a_stage_that_fails_does_not_end(saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise ModelError("it computes garbage")

    monkeypatch.setattr(loading, "self_check", fail)
    told: list[str] = []
    with pytest.raises(ModelError, match="garbage"):
        shoal.load(saved_pair[0], progress=lambda stage: told.append(f"{stage.name} {stage.seconds is not None}"))
    assert told == [f"{name} {ended}" for name in ("tokenizer", "weights", "packing") for ended in (False, True)] + [
        "checking False"
    ]


def test_what_a_callback_raises_ends_the_call(saved_pair: tuple[Path, Path]) -> None:
    def stop(stage: LoadStage) -> None:
        if stage.name == "weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shoal.load(saved_pair[0], progress=stop)


def three_stages() -> LoadStages:
    stages = LoadStages()
    with stages.stage("weights", "target"):
        pass
    with stages.of("draft")("packing"):
        pass
    stages.ready()
    return stages


SENTENCES = ["reading the weights of the target ...", "packing the weights of the draft model ...", "the pair is loaded: "]


def test_without_a_callback_the_log_has_a_line_for_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"):
        three_stages()
    assert [record.getMessage()[: len(said)] for record, said in zip(caplog.records, SENTENCES, strict=True)] == SENTENCES
    assert "(target weights 0.0 s, draft packing 0.0 s)" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_them_in_the_place_of_an_open_line(
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=terminal, width=100, highlight=False)
    monkeypatch.setattr(console, "stderr", lambda: shown)
    with console.Progress() as outer:
        with console.loading_shown():
            assert not outer.live.is_started
            LOG = logging.getLogger("shoal")
            LOG.info("between")
            three_stages()
        assert outer.live.is_started == terminal
    assert caplog.records == []  # a package that gave the root a handler, as rouge-score's does, prints nothing twice
    LOG.warning("afterwards")
    assert [record.getMessage() for record in caplog.records] == ["afterwards"]
    assert logging.getLogger("shoal").handlers == []
    assert all((said in screen.getvalue()) == terminal for said in ("loading ...", SENTENCES[-1]))
    assert capsys.readouterr() == ("", "")


def test_the_bar_of_a_batch_makes_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the bar and the stage stand in one line, and the bar stays when the batch has ended."""
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr(console, "stderr", lambda: shown)
    monkeypatch.setattr(progress, "stderr", lambda: shown)
    with progress.displayed(progress.BatchProgress(2, 0)):
        (bar,) = console.StatusLine.shown
        assert bar.is_started
        with console.loading_shown():
            assert not bar.is_started
            three_stages()
        assert bar.is_started
    assert console.StatusLine.shown == []
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split("[\r\n]", screen.getvalue())]
    assert any("answering" in line for line in lines)
    assert not any("answering" in line and ("loading" in line or SENTENCES[0] in line) for line in lines)


def test_a_pipe_gets_a_line_of_the_innermost_display_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "stderr", lambda: Console(file=screen, width=100, highlight=False))
    monkeypatch.setattr(console, "PACE", 0.001)

    def lines_until(text: str) -> list[str]:
        start = len(screen.getvalue())
        while text not in screen.getvalue()[start:]:
            time.sleep(0.001)
        return screen.getvalue()[start:].splitlines()

    with console.Progress() as outer:
        assert re.fullmatch(r"\d+ s: loading \.\.\.", lines_until("loading ...\n")[0])
        with console.loading_shown(), LoadStages().stage("weights", "target"):
            outer.say("not to be seen")
            lines_until(SENTENCES[0])
            assert not any("not to" in line for line in lines_until(SENTENCES[0]))
        outer.expect(rows=2)
        lines_until("reading the prompts")
        assert list(with_progress("executing", iter([lines_until]), 1)) == [lines_until]
    with console.StatusLine() as line:
        line.say("the next check")
        line.clear()  # before a result on stdout
        assert line.text == "the next check"
    with progress.progress_bar() as bar:
        bar.expect(3, "sampling")
        lines_until("0 of 3, sampling")
        bar.step("plain")
        lines_until("1 of 3, plain")
    assert console.StatusLine.printed == []
    silent = screen.getvalue()
    monkeypatch.setenv("RANK", "1")
    with console.Progress() as other, console.loading_shown():
        assert other not in console.StatusLine.printed
    assert screen.getvalue() == silent


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_server_logs_them(form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(_self: ModelSource) -> Any:
        three_stages()
        return pair()

    def no_server(*_arguments: Any, **_options: Any) -> Any:
        raise ModelError("loaded, and that is enough")

    monkeypatch.setattr(ModelSource, "load", load)
    monkeypatch.setattr("shoal.serve.run.run", no_server)
    assert run(["serve", "--port", "0", "--log-format", form]) == 2
    out, err = capsys.readouterr()
    *lines, last = err.splitlines()
    assert (out, last) == ("", "error: loaded, and that is enough")
    said = [json.loads(line)["message"] if form == "json" else line.split("INFO", 1)[1].strip() for line in lines]
    assert [line[: len(text)] for line, text in zip(said, SENTENCES, strict=False)] == SENTENCES
    assert not any("server process" in line for line in said)  # of what answers /health until then
    assert logging.getLogger("shoal").handlers == []
