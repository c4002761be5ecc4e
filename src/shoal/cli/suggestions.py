"""The suggestions for a cursor on a console: each is a diff of the file, as `patch` reads it."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shoal.cli.console import printable
from shoal.cli.printed_samples import describe

if TYPE_CHECKING:
    from shoal.types.samples import Output, Sample

ENDED = ("eos", "stop")
PARSES = {
    "complete": "the file parses",
    "cut": "cut where the file parses",
    "incomplete": "the file does not parse yet",
}
SYNTAX = list(PARSES)
NO_NEWLINE = "\\ No newline at end of file"
STYLES = {"-": "red", "+": "green", " ": "dim", "@": "cyan"}


def best_first(output: Output) -> list[Sample]:
    """Ranks suggestions: those that the model ended come before the others.

    The others do not lead to the text behind the cursor. Each kind is ordered as it is ranked.
    Under a syntax, samples cut where the whole file parses come between, and those with which it
    does not parse come last.
    """

    def kind(sample: Sample) -> int:
        if sample.syntax is not None:
            return SYNTAX.index(sample.syntax)
        return 0 if sample.finish_reason in ENDED else len(SYNTAX)

    return sorted(output.ranked, key=kind)


def show_suggestions(
    console: Console, name: str, before: str, behind: str, ranked: Sequence[Sample]
) -> None:
    """Prints the suggestions, best first.

    Equal texts are printed once, and rows that Ctrl-C cut are left out.
    """
    samples = [sample for sample in ranked if sample.finish_reason not in ("cancelled", "error")]
    texts = list(dict.fromkeys(sample.text for sample in samples))
    for number, text in enumerate(texts, 1):
        same = [sample for sample in samples if sample.text == text]
        times = f", {len(same)} times" if len(same) > 1 else ""
        parses = f", {PARSES[same[0].syntax]}" if same[0].syntax is not None else ""
        header = f"# suggestion {number} of {len(texts)}{times}: {describe(same[0])}{parses}"
        console.print(Text(header, style="bold"), soft_wrap=True)
        if not text:
            console.print(Text("# nothing to add", style="dim"))
        for line in diff(name, before, text, behind) if text else ():
            if console.is_terminal:
                console.print(_coloured(line.removesuffix("\r")), soft_wrap=True)
            else:  # as it is: rich would leave out carriage returns
                console.file.write(f"{line}\n")
        console.print()


def diff(name: str, before: str, text: str, behind: str) -> list[str]:
    """Returns the lines of a unified diff that puts a text between two others."""
    old, new = (whole.split("\n") for whole in (before + behind, before + text + behind))
    path = posixpath.normpath(name).lstrip("/")  # git refuses a/./x.py
    path += "\t" if " " in path else ""  # without it, patch ends the name at the blank
    found = unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}")
    return [
        part
        for line in found
        for part in (line.removesuffix("\n"), *(() if line.endswith("\n") else (NO_NEWLINE,)))
    ]


def _lines(parts: Sequence[str]) -> list[str]:
    """Returns lines with their line feeds, which the last one may lack."""
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _coloured(line: str) -> Text:
    style = "bold" if line.startswith(("---", "+++")) else STYLES.get(line[:1], "")
    return Text(printable(line), style=style)
