"""Blocks and commands of the README and of pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the line number of its first line."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def run_blocks(page: Path) -> dict[str, Any]:
    """Runs the Python of a page, in order, and returns the names that it has defined."""
    python = blocks(page.read_text(encoding="utf-8"), "python")
    assert python, f"{page.name} shows no Python"
    names: dict[str, Any] = {"__name__": "readme"}
    for line, source in python:
        padded = "\n" * (line - 1) + source  # so that a traceback names the page's own lines
        exec(compile(padded, str(page), "exec", dont_inherit=True), names)
    return names


def shoal_commands(console: str) -> list[list[str]]:
    """The arguments of every `shoal` call after a `$` prompt, pipes and redirections taken apart."""
    commands = []
    lines = console.replace("\\\n", " ").splitlines()
    for line in (line.removeprefix("$ ") for line in lines if line.startswith("$ ") and "shoal" in line):
        words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        words.whitespace_split = True
        part: list[str] = []
        for word in [*words, ";"]:
            if not word or not set(word) <= set("|&;<>"):
                part.append(word)
                continue
            while part and re.fullmatch(r"\w+=.*", part[0]):
                del part[0]
            if part and part[0] == "shoal":
                commands.append(part[1:])
            part = []
    return commands
