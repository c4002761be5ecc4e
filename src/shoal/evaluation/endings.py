"""The end of a completion: stop strings during generation, a cut afterwards.

A model continues behind the function that it was asked for. Stop strings end most rows early; the
cut is made on the text: in Python behind the last top-level block that parses, in languages with
braces behind the function's closing brace. A set that brings stop strings of its own, as MultiPL-E
does, is cut at these and nowhere else.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

FENCE = "\n```"
"""The text that ends the code block of a chat model's answer."""


@dataclass(frozen=True)
class Ending:
    """The ending of a language.

    Attributes:
        stops: strings that end a row; the text is cut before them.
        cut: (prompt, text, stopped) -> the completion; `stopped` tells that a stop string ended the
            row.
    """

    stops: tuple[str, ...]
    cut: Callable[[str, str, bool], str]


def ending(language: str) -> Ending:
    """Returns the ending of a language.

    In an unknown language, completions end only by EOS and limits.
    """
    return _ENDINGS.get(language, Ending((), _whole))


def _whole(_prompt: str, text: str, _stopped: bool) -> str:
    return text


def _python(prompt: str, text: str, _stopped: bool) -> str:
    """Returns the longest text before a line without indent that parses.

    It is the first block if none parses.
    """
    ends = [match.start() + 1 for match in re.finditer(r"\n(?=[^\s)\]}])", text)] + [len(text)]
    whole = (end for end in reversed(ends) if _parses(prompt + text[:end]))
    return text[: next(whole, ends[0])]


def _parses(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parsed code: invalid escapes and the like
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


LITERALS = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"""
C_COMMENTS, HASH_COMMENTS = r"//[^\n]*|/\*.*?\*/", r"(?:^|(?<=\s))\#[^\n]*"


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first of the stop strings; all of it if there is none."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def _braces(prompt: str, text: str, stopped: bool, *, language: str) -> str:
    """Returns the text up to the brace that closes the function that the prompt begins.

    A brace that a stop string removed is put back.
    """
    end, missing = _closing_brace(language, prompt, text)
    if end is not None:
        return text[:end]
    return text + _CLOSINGS.get(language, CLOSING) if stopped and missing == 1 else text


def _closing_brace(language: str, prompt: str, text: str) -> tuple[int | None, int]:
    """Returns the end of the brace that closes what the prompt begins, and the braces missing.

    That is all of it, or the function alone where the tests stand in the class around it.
    """
    symbols = re.compile(f"{COMMENTS[language]}|{LITERALS}|[{{}}]", re.DOTALL | re.MULTILINE)
    depth = sum(_depth_change(match[0]) for match in symbols.finditer(prompt))
    if language in _CLOSINGS:
        depth = min(depth, 1)
    for match in symbols.finditer(text):
        depth += _depth_change(match[0])
        if depth == 0 and match[0] == "}":
            return match.end(), depth
    return None, depth


def function_end(language: str, prompt: str, text: str) -> int | None:
    """Returns the place in a text behind the function that the prompt begins; None without one."""
    if language == "ruby":
        found = re.search(r"^end\b", text, re.MULTILINE)
        return found.end() if found else None
    return _closing_brace(language, prompt, text)[0] if language in COMMENTS else None


def _depth_change(symbol: str) -> int:
    return {"{": 1, "}": -1}.get(symbol, 0)


def _ruby(_prompt: str, text: str, stopped: bool) -> str:
    """Adds the `end` in the first column, which is the stop string, to the function."""
    return text + RUBY_CLOSING if stopped else text


CLOSING, RUBY_CLOSING = "\n}", "\nend"
_CLOSINGS = {"scala": "\n    }", "csharp": "\n        }"}
"""The closing braces of functions in a class that the tests continue, as MBXP indents them."""
COMMENTS = {
    **dict.fromkeys(("javascript", "typescript", "java", "cpp", "go"), C_COMMENTS),
    **dict.fromkeys(("kotlin", "scala", "csharp", "swift"), C_COMMENTS),
    "perl": HASH_COMMENTS,
    "php": f"{C_COMMENTS}|{HASH_COMMENTS}",
}
"""The comments of the languages with braces, as regular expressions."""
_ENDINGS = {
    "python": Ending(
        ("\ndef ", "\nclass ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "), _python
    ),
    **{
        name: Ending((_CLOSINGS.get(name, CLOSING),), partial(_braces, language=name))
        for name in COMMENTS
    },
    "ruby": Ending((RUBY_CLOSING,), _ruby),
}
