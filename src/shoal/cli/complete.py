"""`shoal complete`: n suggestions for the place of a cursor in a file.

Each suggestion is shown as a diff of the file, as `patch` reads it.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli.console import EXIT_INTERRUPTED, EXIT_REQUEST, Progress, printable, stderr, stdout
from shoal.cli.files import MARK, read_text
from shoal.cli.option_groups import option_groups, sampling_option
from shoal.cli.options import (
    JsonOption,
    ModelSource,
    SamplesOption,
    SamplingOptions,
    SpeculationOptions,
    parse_lookahead,
)
from shoal.cli.printed_samples import describe, follow, report_failures, sample_document
from shoal.constraints.members import SERVERS, jedi_analyser, server_of
from shoal.errors import RequestError
from shoal.types.arguments import line_end, split_options, with_line_ends, with_line_feeds

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.constraints.syntax import Syntax
    from shoal.types.samples import Output, Result, Sample


NO_SYNTAX = "none"
"""The value of `--syntax` that lets any text be."""
RESERVED = 8
"""The tokens of the context kept for the special tokens between the texts, and for alignment."""


@dataclass(frozen=True)
class CursorOptions:
    """The file and the place in it."""

    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file that is edited; it is only read. - is stdin."
        ),
    ]
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="LINE:COL",
            help="The cursor, before that character; both are counted from 1.",
        ),
    ]


@dataclass(frozen=True)
class SuggestionOptions(SamplingOptions):
    """The sampling options of a completion.

    They are those of `shoal generate`, but with more samples and with prompts that end inside a
    token.
    """

    n: SamplesOption = 8
    align: Annotated[
        bool,
        sampling_option(
            "--align/--no-align",
            help="The cursor may stand inside a token, whose bytes are written again.",
        ),
    ] = True
    syntax: Annotated[
        str | None,
        sampling_option(
            "--syntax",
            metavar="LANGUAGE",
            help="python, json, javascript, typescript, tsx, java, go, c, cpp, rust, a .lark "
            "grammar, or none: suggestions after which the file parses; unfinished ones are cut "
            "where it does. The end of the file's name says it unless given.",
        ),
    ] = None
    members: Annotated[
        bool,
        sampling_option(
            "--members",
            help="Behind a dot only names that exist: of Python by jedi, of C and C++ by clangd, "
            "which it needs.",
        ),
    ] = False


@option_groups(without={"guide", "expert"})
def complete(
    cursor: CursorOptions,
    sampling: SuggestionOptions,
    speculation: SpeculationOptions,
    source: ModelSource,
    as_json: JsonOption = False,
) -> int:
    """Suggest a text at a cursor: n of them, best first, each as a diff of the file.

    The model sees the text before and behind the cursor, as much of it as fits, if it was trained
    to fill in the middle. Suggestions that the model ended itself come first, then the best by mean
    log-probability. Ctrl-C stops and prints the finished texts.
    """
    before, behind = split_at(cursor.file, cursor.at)
    options = sampling.given() | {
        "lookahead": parse_lookahead(speculation.lookahead),
        "rule": speculation.rule,
    }
    split_options(options)  # a wrong value is reported before a model is loaded
    if sampling.members:
        _require_analyser(sampling, cursor.file)
    with Progress() as progress:
        _read_syntax(sampling, cursor.file)
        model = source.load()
        progress.expect(rows=sampling.n)
        left, right = map(with_line_feeds, (before.removeprefix(MARK), behind))
        syntax = _read_syntax(sampling, cursor.file)
        syntax = syntax and replace(syntax, left=left, right=right)
        prompt, asked = _prompt(model, left, right, sampling)
        asked["syntax"] = syntax
        stream = model.stream([prompt], sampling.n, **asked, **options)
        result, interrupted = follow(stream, progress.add)
    if interrupted:
        finished = sum(sample.finish_reason != "cancelled" for sample in result[0].samples)
        stderr().print(f"interrupted: {finished} of {sampling.n} suggestions finished")
    _tell_unchecked(model, sampling, syntax, result[0].samples, cursor.file)
    end = line_end(before, behind)
    ranked = [replace(one, text=with_line_ends(one.text, end)) for one in best_first(result[0])]
    if as_json:
        print(json.dumps(_document(result, ranked, cursor), allow_nan=False))
    else:
        show_suggestions(stdout(), str(cursor.file), before, behind, ranked)
    failed = report_failures(result)
    return EXIT_INTERRUPTED if interrupted else EXIT_REQUEST if failed else 0


def _read_syntax(sampling: SuggestionOptions, file: Path) -> Syntax | None:
    """Returns the syntax that suggestions must fit, without the file's texts; see `read_syntax`."""
    from shoal.constraints.syntax import Syntax, read_syntax, syntax_by_name

    if sampling.syntax not in (None, NO_SYNTAX):
        return read_syntax(Syntax(sampling.syntax, members=sampling.members))
    return syntax_by_name(
        None if sampling.syntax or sampling.exact else str(file), members=sampling.members
    )


def _require_analyser(sampling: SuggestionOptions, file: Path) -> None:
    """Raises RequestError, before a model is loaded: the analyser of members is not installed."""
    from shoal.constraints.syntax import language_of

    language = sampling.syntax or language_of(str(file))
    if language in SERVERS:
        server_of(language)
    else:
        jedi_analyser()


def _tell_unchecked(
    model: Shoal,
    sampling: SuggestionOptions,
    syntax: Syntax | None,
    samples: Sequence[Sample],
    file: Path,
) -> None:
    """Prints why suggestions were not checked although the file's name says a language."""
    from shoal.constraints.syntax import language_of, reason_unchecked

    reason: str | None
    if syntax is None and not sampling.syntax and language_of(str(file)):
        reason = "there is no check of syntax beside --exact"
    elif syntax and syntax.optional and all(one.syntax is None for one in samples):
        reason = reason_unchecked(syntax, model.tokenizer)
    else:
        return
    stderr().print(f"suggestions may not parse: {reason}", markup=False, soft_wrap=True)


def _prompt(
    model: Shoal, before: str, behind: str, sampling: SuggestionOptions
) -> tuple[str, dict[str, Any]]:
    """Returns the text that is continued, as much as fits, and its options for `Shoal.stream`.

    A model that cannot fill in continues the text if only blanks stand behind the cursor.

    Raises:
        RequestError: the model cannot fill in and there is text behind the cursor, or there is no
            text at all.
    """
    from shoal.constraints.fim import middle_tokens, nearest

    fills = middle_tokens(model.tokenizer) is not None
    if not fills and behind.strip():
        raise RequestError(
            "this model has no fill-in-the-middle tokens and there is text behind the cursor: "
            "take a model that was trained to fill in, or a cursor at the end of the file"
        )
    if not fills and not before:
        raise RequestError("there is no text before the cursor, and this model cannot fill in")
    space = model.target.context - sampling.max_new_tokens - RESERVED
    if space < 1:
        raise RequestError(
            f"--max-new-tokens {sampling.max_new_tokens} leaves no space for the file: the "
            f"context is {model.target.context} tokens"
        )
    asked: dict[str, Any] = {"align": sampling.align, "exact": sampling.exact or False}
    before, behind = nearest(model.tokenizer, before, behind if fills else "", space)
    return before, asked | ({"suffix": behind} if fills else {})


def _document(result: Result, ranked: Sequence[Sample], cursor: CursorOptions) -> dict[str, Any]:
    """Returns the JSON object of the suggestions, best first."""
    return {
        "file": str(cursor.file),
        "at": cursor.at,
        "suggestions": [sample_document(sample) for sample in ranked],
        "stats": result.stats.to_dict(),
    }


STDIN = "-"


def split_at(file: Path, at: str) -> tuple[str, str]:
    """Returns the texts of a file before and behind a cursor.

    The cursor stands before the character at its place. A column is a count of characters; the
    column after a line's last character is the line's end. Line breaks are those of the file, and a
    byte order mark stands before its first character.

    Raises:
        RequestError: the file cannot be read, or has no such place.
    """
    place = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", at)
    if place is None:
        raise RequestError(f"--at must be LINE:COL, two numbers from 1 on such as 12:5, got {at!r}")
    if str(file) == STDIN and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(newline="")
    text = sys.stdin.read() if str(file) == STDIN else read_text(file, "file", newline="")
    begin = len(text) - len(text.removeprefix(MARK))
    whole, (line, column) = text[begin:].split("\n"), map(int, place.groups())
    lines = [one.removesuffix("\r") for one in whole]
    if line > len(lines):
        raise RequestError(f"--at {at}: {str(file)!r} has {len(lines)} lines")
    if column > len(lines[line - 1]) + 1:
        raise RequestError(
            f"--at {at}: line {line} has {len(lines[line - 1])} characters, so its last column "
            f"is {len(lines[line - 1]) + 1}"
        )
    cut = begin + sum(len(one) + 1 for one in whole[: line - 1]) + column - 1
    return text[:cut], text[cut:]


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
    """Prints the suggestions, best first, each text once, without rows that Ctrl-C cut."""
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
    names = [f"{side}/{path}" for side in "ab"]
    if re.search(r"[\t\n\r]| $", path):
        names = [json.dumps(each, ensure_ascii=False) for each in names]  # quoted as git does it
    elif " " in path:
        names = [f"{each}\t" for each in names]  # without it, patch ends the name at the blank
    changes = unified_diff(_lines(old), _lines(new), names[0], names[1])
    return [
        part
        for line in changes
        for part in (line.removesuffix("\n"), *(() if line.endswith("\n") else (NO_NEWLINE,)))
    ]


def _lines(parts: Sequence[str]) -> list[str]:
    """Returns lines with their line feeds, which the last one may lack."""
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _coloured(line: str) -> Text:
    style = "bold" if line.startswith(("---", "+++")) else STYLES.get(line[:1], "")
    return Text(printable(line), style=style)
