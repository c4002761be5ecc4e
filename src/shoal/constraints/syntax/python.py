"""Middles of Python programs, as a check of tokens (`shoal.constraints.check`).

After Melcer, Fulton, Gouda and Qian (arXiv 2402.17988): a token is refused only where what it makes cannot be completed, and the
text ends only where the whole parses.
"""

from __future__ import annotations

import codecs
from functools import lru_cache
from typing import Any

from shoal.constraints.check import Check
from shoal.constraints.syntax.layout import Layout
from shoal.constraints.syntax.viable import is_complete, is_viable, require_parser
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Row


class Middle:
    """A middle up to some token; never changed once made. What follows is found once, for all rows and drafts that come here."""

    __slots__ = ("after", "ends", "layout", "rest", "text")

    def __init__(self, layout: Layout, text: str, rest: bytes) -> None:
        self.layout, self.text, self.rest = layout, text, rest
        self.after: dict[int, Middle | None] = {}
        self.ends: bool | None = None


class PythonMiddle(Check[Middle]):
    """What may stand between two texts so that the whole is a Python program.

    Args:
        tokenizer: of the target. left, right: the text before and behind the middle.

    Raises:
        RequestError: no program begins with `left`; or this is Python 3.10.
    """

    def __init__(self, tokenizer: Any, left: str, right: str) -> None:
        require_parser()
        whole, layout = Layout(forgets=False), Layout()
        if not (all(whole.feed(c) and layout.feed(c) for c in left) and is_viable(whole)):
            raise RequestError("syntax='python': the text before the cursor is not the beginning of a Python program")
        self._bytes, self._left, self._right = token_bytes(tokenizer), left, right
        self._start = Middle(layout, "", b"")

    def start(self, row: Row) -> Middle:
        return self._start

    def after(self, state: Middle, token: int) -> Middle | None:
        if token not in state.after:
            state.after[token] = self._read(state, token)
        return state.after[token]

    def may_end(self, state: Middle) -> bool:
        if state.ends is None:
            state.ends = not state.rest and is_complete(self._left + state.text + self._right)
        return state.ends

    def _read(self, state: Middle, token: int) -> Middle | None:
        own = self._bytes[token] if token < len(self._bytes) else None
        if own is None:
            return None
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(state.rest + own)
        except UnicodeDecodeError:
            return None
        rest, layout = decoder.getstate()[0], state.layout.copy()
        for character in text:
            if (layout.due and not is_viable(layout)) or not layout.feed(character):
                return None
        if text and not is_viable(layout):
            return None
        if rest and not (layout.quote or layout.comment or _begins_identifier(rest)):
            return None
        return Middle(layout, state.text + text, rest)


@lru_cache(maxsize=1024)
def _begins_identifier(rest: bytes) -> bool:
    """Whether a character that may stand in a name begins with these bytes of UTF-8."""
    length = 2 if rest[0] < 0xE0 else 3 if rest[0] < 0xF0 else 4
    missing = length - len(rest)
    if missing == 3:
        return rest[0] in (0xF0, 0xF3)  # planes 1 to 3, and the variation selectors
    return any(_in_names(rest + bytes(tail)) for tail in _tails(missing))


def _tails(count: int) -> list[tuple[int, ...]]:
    tails: list[tuple[int, ...]] = [()]
    for _ in range(count):
        tails = [(*tail, byte) for tail in tails for byte in range(0x80, 0xC0)]
    return tails


def _in_names(encoded: bytes) -> bool:
    try:
        return ("a" + encoded.decode()).isidentifier()
    except UnicodeDecodeError:
        return False
