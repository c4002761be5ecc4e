"""`shoal generate` while samples grow, and prompts with parameters of their own.

Tests of: cli.generate, cli.views, cli.prompt_lines.
"""

from __future__ import annotations

import io
import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import press_ctrl_c
from shoal import load
from shoal.api import Shoal
from shoal.cli import generate, printed_samples, run
from shoal.cli.console import printable
from shoal.testing.scripted import hashed, scripted
from shoal.types.samples import Increment

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def pair(saved_pair: tuple[Path, Path]) -> tuple[str, Shoal]:
    """A target's directory, and the target as its own drafter: nearly everything is accepted."""
    return str(saved_pair[0]), load(saved_pair[0], saved_pair[0])


@pytest.fixture
def shoal(
    pair: tuple[str, Shoal], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs `shoal generate` on the pair: its exit code, stdout and stderr."""
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda self: pair[1])

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        asked = ["generate", "--model", pair[0], "--draft", pair[0], "--k", "3", *map(str, arguments)]
        return (run(asked), *capsys.readouterr())

    return call


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """What stdout is instead."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=90, height=40, highlight=False)
    monkeypatch.setattr(generate, "stdout", lambda: console)
    return console


def shown(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


ASK = ("-p", "def f", "--seed", 5, "--max-new-tokens", 16)


def samples_of(answer: tuple[int, str, str]) -> list[dict[str, Any]]:
    return [sample for prompt in json.loads(answer[1])["prompts"] for sample in prompt["samples"]]


def events_of(answer: tuple[int, str, str]) -> Lines:
    return [json.loads(line) for line in answer[1].splitlines()]


def untimed(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in ("finished_at_s", "event", "prompt", "sample")}


def test_a_pipe_gets_bare_text(shoal: Callable[..., Any]) -> None:
    (sample,) = samples_of(shoal(*ASK, "--json"))
    assert sample["accepted"] > 0
    code, out, err = shoal(*ASK, "--stream")
    assert code == 0
    assert out.rstrip("\n") == sample["text"].rstrip("\n")
    assert f"length, 16 tokens, {16 / sample['rounds']:.2f}/round" in err
    assert shoal(*ASK)[1] == shoal(*ASK, "--no-stream")[1] != out, "unasked, a pipe gets what it always got"


def test_a_terminal_sees_accepted_drafts_in_green(shoal: Callable[..., Any], terminal: Console) -> None:
    assert shoal(*ASK)[:2] == (0, "")
    streamed = shown(terminal)
    assert "\x1b[32m" in streamed
    shoal(*ASK, "--json")
    (sample,) = json.loads(shown(terminal).removeprefix(streamed))["prompts"][0]["samples"]
    assert plain(streamed).rstrip("\n") == printable(sample["text"]).expandtabs().rstrip("\n")


def plain(text: str) -> str:
    """Without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_several_samples_grow_in_place_and_are_then_printed(shoal: Callable[..., Any], terminal: Console) -> None:
    code, _, err = shoal(*ASK, "-n", 3)
    assert code == 0
    text = plain(shown(terminal))
    assert "row 3: " in text
    assert "accepted draft token" in text
    assert [f"# sample {number}, rank" in text for number in (1, 2, 3)] == [True] * 3
    assert text.index("row 3: ") < text.index("# sample 1")
    assert not err
    terminal.file = io.StringIO()
    assert shoal(*ASK, "-n", 37)[0] == 0  # more rows than the terminal has lines
    assert "row 1: " not in shown(terminal)
    assert "# sample 37, rank" in shown(terminal)


def test_events_are_increments_samples_and_an_end(shoal: Callable[..., Any]) -> None:
    ask = (*ASK, "-p", "xy", "-n", 2, "--json", "--top-logprobs", 1)
    whole = shoal(*ask)
    events = events_of(shoal(*ask, "--stream"))
    assert [untimed(event) for event in sorted(ended(events), key=place)] == [untimed(each) for each in samples_of(whole)]
    for event in ended(events):
        own = [each for each in events if each["event"] == "increment" and place(each) == place(event)]
        assert "".join(each["text"] for each in own) == event["text"]
        assert [token for each in own for token in each["token_ids"]] == event["token_ids"]
        assert sum(each["accepted"] for each in own) == event["accepted"] > 0
        assert len(own) == event["rounds"]
    assert set(events[0]) == {"event", "prompt", "sample", "text", "token_ids", "accepted"}
    assert [set(event) for event in events if event["event"] == "end"] == [{"event", "interrupted", "stats"}]
    assert events[-1]["event"] == "end"
    assert events[-1]["stats"]["accepted"] == sum(event["accepted"] for event in ended(events))


def ended(events: Lines) -> Lines:
    return [event for event in events if event["event"] == "sample"]


def place(event: dict[str, Any]) -> tuple[int, int]:
    return event["prompt"], event["sample"]


def test_what_has_come_stays_after_ctrl_c(shoal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    long = ("-p", "def f", "--seed", 5, "--max-new-tokens", 60)
    whole = samples_of(shoal(*long, "--json"))[0]
    press_ctrl_c(monkeypatch, generate, 3)
    code, out, err = shoal(*long, "--stream")
    assert code == 130
    assert whole["text"].startswith(out[:-1])
    assert len(out) > 1
    assert "cancelled, " in err
    press_ctrl_c(monkeypatch, generate, 3)
    events = events_of(shoal(*long, "--stream", "--json"))
    assert [(event["event"], event.get("finish_reason")) for event in events[-2:]] == [
        ("sample", "cancelled"),
        ("end", None),
    ]
    assert events[-1]["interrupted"]
    assert 0 < len(events[-2]["token_ids"]) < 60


def test_ctrl_c_cancels_once_however_many_rows_wait() -> None:
    """Each cancelled row is an increment: with 100,000 of them the command did not end."""
    model = Shoal(scripted(hashed(9), 9), max_batch=2)
    stream, cancels = model.stream([[1, 2]], 200, max_new_tokens=8, temperature=0), Counter[str]()
    cancel = stream.cancel
    stream.cancel = lambda: cancels.update(["all"]) or cancel()  # type: ignore[method-assign]
    seen: list[Increment] = []

    def show(increment: Increment) -> None:
        if not seen:
            signal.raise_signal(signal.SIGINT)
        seen.append(increment)

    result, interrupted = printed_samples.follow(stream, show)
    assert interrupted
    assert cancels["all"] == 1
    assert [sample.finish_reason for sample in result[0].samples] == ["cancelled"] * 200
    assert len(seen) > 200


def test_a_terminal_keeps_cut_samples_after_ctrl_c(
    shoal: Callable[..., Any], terminal: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_ctrl_c(monkeypatch, generate, 4)
    assert shoal("-p", "x", "-n", 2, "--seed", 1, "--max-new-tokens", 60)[0] == 130
    assert plain(shown(terminal)).count(", cancelled, ") >= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stream", "-n", 2], "--stream writes the text of one sample, and 2 are asked for"),
        (["--stream", "--ranked", "--json"], "leave out --output and --ranked"),
        (["--stream", "-o", "x"], "leave out --output and --ranked"),
    ],
)
def test_what_cannot_be_streamed_is_refused(shoal: Callable[..., Any], arguments: list[Any], words: str) -> None:
    code, _, err = shoal(*ASK, *arguments)
    assert code == 2
    assert words in err


# ── prompts with parameters of their own ────────────────────────────────────────────────────────────────────────────


def test_lines_have_parameters_of_their_own(shoal: Callable[..., Any], pair: tuple[str, Shoal], tmp_path: Path) -> None:
    """Each gets what the library gives it alone; what a line does not say is the command line's."""
    file = tmp_path / "asked.jsonl"
    lines = [
        {"prompt": "def f", "n": 2, "seed": 3, "temperature": 0.5, "id": 7},
        "xy",
        {"prompt": "def f", "seed": 4, "max_new_tokens": 5, "stop": ["q"], "logit_bias": {"5": -2}, "bad_words": ["e"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    answer = shoal("--prompts", file, "--seed", 9, "--max-new-tokens", 8, "--temperature", 0.9, "--json", "-p", "z")
    assert answer[0] == 0
    found = json.loads(answer[1])
    assert [(prompt["prompt"], prompt.get("id")) for prompt in found["prompts"]] == [
        ("z", None), ("def f", 7), ("xy", None), ("def f", None),
    ]  # fmt: skip
    common = {"max_new_tokens": 8, "lookahead": 3}
    own = [
        ("z", 1, {"seed": 9, "temperature": 0.9}),
        ("def f", 2, {"seed": 3, "temperature": 0.5}),
        ("xy", 1, {"seed": 9, "temperature": 0.9}),
        ("def f", 1, {"seed": 4, "temperature": 0.9, "max_new_tokens": 5, "stop": ["q"], "logit_bias": {5: -2},
                      "bad_words": ["e"]}),
    ]  # fmt: skip
    for prompt, (text, n, options) in zip(found["prompts"], own, strict=True):
        alone = pair[1].generate(text, n, **common | options)
        assert [sample["token_ids"] for sample in prompt["samples"]] == [list(s.token_ids) for s in alone[0].samples]
    assert found["stats"]["accepted"] > 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "temprature": 1}', "lines.jsonl:2: unknown field 'temprature'; did you mean 'temperature'?"),
        ('{"prompt": "a", "top_p": 3}', "lines.jsonl:2: top_p must be"),
        ('{"prompt": "a", "n": 0}', "lines.jsonl:2: n must be an integer in [1, 1000000], got 0"),
        ('{"prompt": ""}', "the prompt of "),
        ('{"text": "a"}', 'lines.jsonl:2 must be a text or an object with a text "prompt"'),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "lines.jsonl:2: the keys of logit_bias must be token ids"),
        ("{", "lines.jsonl:2 is not JSON"),
    ],
)
def test_a_wrong_line_is_named(shoal: Callable[..., Any], tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(f'"good"\n{line}\n')
    code, _, err = shoal("--prompts", file, "--seed", 1)
    assert code == 2
    assert words in err


def test_other_files_hold_prompts_alone(shoal: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_text("one\n\ntwo\n")
    answer = json.loads(shoal("--prompts", file, "--max-new-tokens", 2, "--json")[1])
    assert [prompt["prompt"] for prompt in answer["prompts"]] == ["one", "two"]
    (tmp_path / "none.jsonl").write_text("\n")
    assert "holds no prompt" in shoal("--prompts", tmp_path / "none.jsonl")[2]
