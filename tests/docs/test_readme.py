"""What the README, how-tos and the help page show is true: blocks run, commands parse."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from readme import ROOT, blocks, run_blocks, shoal_commands
from shoal.cli import run

README = ROOT / "README.md"
RUN = [
    README,
    ROOT / "docs" / "how-to" / "python.md",
    ROOT / "docs" / "how-to" / "transformers.md",
]  # their Python, in order


@pytest.mark.limit(900)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # whatever an example writes
    run_blocks(page)


def test_the_first_screen_says_what_it_is_and_how_to_start() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130, "README.md is an overview: details go into docs/"
    assert len(blocks("\n".join(text.splitlines()[:30]), "console")) == 1  # the commands to start with


def test_console_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        command for _, block in blocks(README.read_text(encoding="utf-8"), "console") for command in shoal_commands(block)
    ]
    assert commands, "README.md shows no `$ shoal ...` command"
    for command in commands:
        # All options are parsed before --help answers and nothing runs.
        code = run([*command[:1], "--help", *command[1:]])
        assert code == 0, f"shoal {shlex.join(command)}: {capsys.readouterr().err}"


def test_a_command_that_does_not_parse_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--help", "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_commands_are_taken_apart() -> None:
    block = (
        "$ make demo\n$ A=1 shoal demo | head\nshoal: no command\n$ echo 'x; y' | shoal generate \\\n  --n 4 'a | b' > out\n"
    )
    assert shoal_commands(block) == [["demo"], ["generate", "--n", "4", "a | b"]]


def test_help_page_is_what_shoal_says() -> None:
    # In a process of its own: rendering at a fixed width changes settings of the whole process.
    code = "import sys; from shoal.cli.help import render; sys.stdout.buffer.write(render().encode())"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.decode()
    page = (ROOT / "docs" / "help.txt").read_text(encoding="utf-8")
    assert page == said, "docs/help.txt is out of date: run python -m shoal.cli.help"
