"""Middles of Python programs, as a check of tokens (`shoal.constraints.protocol`).

The method is that of Melcer, Fulton, Gouda and Qian (arXiv 2402.17988): the check refuses a token
only if the text up to it cannot be completed, and the text ends only if the whole parses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shoal.constraints.protocol import Cutting
from shoal.constraints.syntax.endings import end_places, ends_program
from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.viable import is_complete, is_viable, require_parser
from shoal.constraints.token_bytes import decoded, token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Row

NEXT_LINES = 3
"""The number of lines behind the cursor that are read before the whole is."""


class Middle:
    """A middle up to some token; its text never changes.

    The states behind it are computed once, for all rows and drafts that come here.

    Attributes:
        layout: the layout of the program up to here.
        text: the text of the middle.
        rest: the bytes of a character that is not complete.
        healing: the number of bytes of the text before the cursor that are still to be written
            again (`shoal.constraints.alignment`).
        after: the state behind each token, filled on demand; None = the token may not follow.
        refused: beginnings of texts that may not follow.
        ends: `may_end`, once known.
    """

    __slots__ = ("after", "ends", "healing", "layout", "refused", "rest", "text")

    def __init__(self, layout: SourceLayout, text: str, rest: bytes, healing: int = 0) -> None:
        self.layout, self.text, self.rest, self.healing = layout, text, rest, healing
        self.after: dict[int, Middle | None] = {}
        self.ends: bool | None = None
        self.refused: set[str] = set()


class PythonMiddle(Cutting):
    """A check that the whole of two texts and the middle between them is a Python program.

    Args:
        tokenizer: the target's.
        left: the text before the middle.
        right: the text behind the middle.
        healing: the number of bytes of `left`'s end that the new tokens write again.

    Raises:
        RequestError: no program begins with `left`, or none ends with `right` (`ends_program`); or
            this is Python 3.10.
    """

    def __init__(self, tokenizer: Any, left: str, right: str, healing: int = 0) -> None:
        require_parser()
        whole, layout = SourceLayout(forgets=False), SourceLayout()
        if not (all(whole.feed(c) and layout.feed(c) for c in left) and is_viable(whole)):
            raise RequestError(
                "syntax='python': the text before the cursor is not the beginning of a Python "
                "program"
            )
        if not ends_program(right):
            raise RequestError(
                "syntax='python': the text behind the cursor is not the end of a Python program"
            )
        self._bytes, self._left, self._right = token_bytes(tokenizer), left, right
        self._next_lines = "".join(right.splitlines(keepends=True)[:NEXT_LINES])
        self._start = Middle(layout, "", b"", healing)

    def start(self, row: Row) -> Middle:
        return self._start

    def after(self, state: Middle, token: int) -> Middle | None:
        if token not in state.after:
            state.after[token] = self._read(state, token)
        return state.after[token]

    def may_end(self, state: Middle) -> bool:
        if state.ends is None:
            state.ends = not (state.rest or state.healing) and is_complete(
                self._left + state.text + self._right
            )
        return state.ends

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """Returns the best end; see `Cutting`.

        The places of highest score are tried first, each by a parse of the whole.
        """
        own = [
            (self._bytes[token] if token < len(self._bytes) else None) or b"" for token in tokens
        ]
        places, text = end_places(own, self._start.healing, scores, most)
        ends = (place for place in places if self._may_cut(text[: place[1]]))
        return next(((size, count) for _, size, count in ends), None)

    def _may_cut(self, text: str) -> bool:
        """Returns True if the whole is complete when the middle is cut to this text.

        The first lines of the text behind are read first with the kept layout of the text before:
        this is less to parse and refuses most places.
        """
        layout = self._start.layout.copy()
        for character in text + self._next_lines:
            if not layout.feed(character):
                return False
        return is_viable(layout) and is_complete(self._left + text + self._right)

    def _read(self, state: Middle, token: int) -> Middle | None:
        own = self._bytes[token] if token < len(self._bytes) else None
        if own is None:
            return None
        healing = max(0, state.healing - len(own))
        found = decoded(state.rest + own[state.healing :])
        if found is None:
            return None
        text, rest = found
        layout = self._written(state, text)
        if layout is None or (
            rest and not (layout.quote or layout.comment or _begins_identifier(rest))
        ):
            return None
        return Middle(layout, state.text + text, rest, healing)

    def _written(self, state: Middle, text: str) -> SourceLayout | None:
        """Returns the layout after more text; None if the text may not follow.

        A refused text is remembered by its shortest refused beginning: no text with this beginning
        is parsed again, so refusals at one place cost a few parses per beginning and not per token.
        """
        if state.refused and any(text[:end] in state.refused for end in range(1, len(text) + 1)):
            return None
        layout = _fed(state.layout, text)
        if layout is None:
            end = (
                bisect_left(
                    range(1, len(text)),
                    True,
                    key=lambda size: _fed(state.layout, text[:size]) is None,
                )
                + 1
            )
            state.refused.add(text[:end])
        return layout


def _fed(layout: SourceLayout, text: str) -> SourceLayout | None:
    """Returns the layout after more text; None if no program begins with it."""
    layout = layout.copy()
    for character in text:
        if (layout.due and not is_viable(layout)) or not layout.feed(character):
            return None
    return None if text and not is_viable(layout) else layout


@lru_cache(maxsize=1024)
def _begins_identifier(rest: bytes) -> bool:
    """Returns True if these bytes begin the UTF-8 of some character that may stand in a name."""
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
