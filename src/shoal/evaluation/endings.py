"""Where a completion ends: stop strings while it is written, a cut afterwards.

A model goes on after the function it was asked for. Stop strings end most rows early; the cut is made on the text: Python by the
last top-level block that parses, languages with braces where the function's brace closes.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

FENCE = "\n```"
"""Ends the code block of a chat model's answer."""


@dataclass(frozen=True)
class Ending:
    """Of one language.

    Attributes:
        stops: strings that end a row; the text is cut before them.
        cut: (prompt, text, stopped) -> the completion to judge. stopped: a stop string ended the row.
    """

    stops: tuple[str, ...]
    cut: Callable[[str, str, bool], str]


def ending(language: str) -> Ending:
    """How completions in a language end; in an unknown one, only by EOS and limits."""
    return _ENDINGS.get(language, Ending((), _whole))


def _whole(_prompt: str, text: str, _stopped: bool) -> str:
    return text


def _python(prompt: str, text: str, _stopped: bool) -> str:
    """Up to the last line without indent before which everything parses; the first block if nothing does."""
    ends = [match.start() + 1 for match in re.finditer(r"\n(?=[^\s)\]}])", text)] + [len(text)]
    whole = (end for end in reversed(ends) if _parses(prompt + text[:end]))
    return text[: next(whole, ends[0])]


def _parses(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the code that is judged: invalid escapes and the like
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


LITERALS = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"""
C_COMMENTS, HASH_COMMENTS = r"//[^\n]*|/\*.*?\*/", r"(?:^|(?<=\s))\#[^\n]*"


def _braces(prompt: str, text: str, stopped: bool, *, comments: str) -> str:
    """Up to the brace that closes what the prompt opened; the one that a stop string took away is put back."""
    tokens = re.compile(f"{comments}|{LITERALS}|[{{}}]", re.DOTALL | re.MULTILINE)
    depth = sum(_step(match[0]) for match in tokens.finditer(prompt))
    for match in tokens.finditer(text):
        depth += _step(match[0])
        if depth == 0 and match[0] == "}":
            return text[: match.end()]
    return text + CLOSING if stopped and depth == 1 else text


def _step(token: str) -> int:
    return {"{": 1, "}": -1}.get(token, 0)


def _ruby(_prompt: str, text: str, stopped: bool) -> str:
    """The `end` in the first column, which is the stop string, is part of the function."""
    return text + RUBY_CLOSING if stopped else text


CLOSING, RUBY_CLOSING = "\n}", "\nend"
_C_FAMILY = Ending((CLOSING,), partial(_braces, comments=C_COMMENTS))
_ENDINGS = {
    "python": Ending(("\ndef ", "\nclass ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "), _python),
    **dict.fromkeys(("javascript", "typescript", "java", "cpp", "go"), _C_FAMILY),
    "perl": Ending((CLOSING,), partial(_braces, comments=HASH_COMMENTS)),
    "php": Ending((CLOSING,), partial(_braces, comments=f"{C_COMMENTS}|{HASH_COMMENTS}")),
    "ruby": Ending((RUBY_CLOSING,), _ruby),
}
