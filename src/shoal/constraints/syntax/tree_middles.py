"""Middles of languages that tree-sitter reads, as a check of tokens (`shoal.constraints.check`).

No token is refused for the text that it makes: tree-sitter does not tell an incomplete text from a
wrong one. A text ends by itself only where the whole file has no error and no missing node that is
not the file's own (`error_nodes`), and is cut at the best such place that is not inside a word,
unless the text behind begins with the rest of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from shoal.constraints.check import Cutting
from shoal.constraints.syntax.endings import end_places
from shoal.constraints.syntax.error_nodes import CursorTrees
from shoal.constraints.token_bytes import decoded, token_bytes
from shoal.types.requests import Row

_JOINED = r"[ \t][ \t]|\r\n"
_IN_WORD = r"[\w$][\w$]"
"""Two characters between which no text is cut; those of a word only if no word goes on behind."""


class WrittenText:
    """A middle up to some token; its text never changes.

    Attributes:
        text: the text of the middle.
        rest: the bytes of a character that is not complete.
        healing: the number of bytes of the text before the cursor that are still to be written
            again (`shoal.constraints.alignment`).
        after: the state behind each token, filled on demand; None = the token may not follow.
    """

    __slots__ = ("after", "healing", "rest", "text")

    def __init__(self, text: str, rest: bytes, healing: int) -> None:
        self.text, self.rest, self.healing = text, rest, healing
        self.after: dict[int, WrittenText | None] = {}


class TreeMiddle(Cutting):
    """A check that a middle adds no error and no missing node to a file.

    Args:
        tokenizer: the target's.
        left: the text before the middle.
        right: the text behind the middle.
        healing: the number of bytes of `left`'s end that the new tokens write again.
        language: one of `error_nodes.GRAMMARS`.

    Raises:
        RequestError: tree-sitter or the grammar is not installed.
    """

    def __init__(
        self, tokenizer: Any, left: str, right: str, healing: int = 0, *, language: str
    ) -> None:
        self._bytes = token_bytes(tokenizer)
        self._trees = CursorTrees(language, left, right)
        self._start = WrittenText("", b"", healing)
        goes_on = re.match(r"[\w$]", right) is not None
        self._joined = re.compile(_JOINED if goes_on else f"{_JOINED}|{_IN_WORD}")

    def start(self, row: Row) -> WrittenText:
        return self._start

    def after(self, state: WrittenText, token: int) -> WrittenText | None:
        """Returns the state after a token; None for one that writes nothing, or no UTF-8."""
        if token not in state.after:
            own = self._bytes[token] if token < len(self._bytes) else None
            found = None if own is None else decoded(state.rest + own[state.healing :])
            state.after[token] = (
                None
                if own is None or found is None
                else WrittenText(state.text + found[0], found[1], max(0, state.healing - len(own)))
            )
        return state.after[token]

    def may_end(self, state: WrittenText) -> bool:
        if state.rest or state.healing:
            return False
        return self._trees.count(state.text) is not None

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """Returns the best end; see `Cutting`.

        Where the file has faults of its own, ends with the fewest faults come first.
        """
        own = [
            (self._bytes[token] if token < len(self._bytes) else None) or b"" for token in tokens
        ]
        places, text = end_places(own, self._start.healing, scores, most)
        best, fewest = None, math.inf
        for _, size, count in places:
            if not fewest or self._joined.match(text[max(0, size - 1) : size + 1]):
                continue
            faults = self._trees.count(text[:size], guess=True)
            if faults is not None and faults < fewest:
                faults = self._trees.count(text[:size])
            if faults is not None and faults < fewest:
                best, fewest = (size, count), faults
        return best
