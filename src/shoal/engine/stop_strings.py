"""The stop strings of a row, and the parts of its text in which stop strings have no effect."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stops:
    """The stop strings of a row.

    Attributes:
        texts: the strings.
        least: the number of first tokens within which no stop string has an effect.
        unstopped: see `shoal.types.requests.Request`.
        shown: the strings that stay in the text.
    """

    texts: Sequence[str] = ()
    least: int = 0
    unstopped: tuple[tuple[str, str], ...] = ()
    shown: frozenset[str] = frozenset()


NO_STOPS = Stops()


class Passage:
    """The parts between two marks of a text that grows; each character is looked at once.

    Args:
        opening: a regular expression of the text before a part.
        closing: the text behind it; empty if the part goes on to the end. Blanks behind the closing
            of a part that begins the text belong to it: they are no part of the answer.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = re.compile(opening), closing
        self._first_only, self._longest = opening.startswith(r"\A"), len(opening)
        self._inside, self._over, self._at = False, False, 0
        self._behind: int | None = None

    def covers(self, text: str, sure: int, start: int, end: int) -> bool:
        """Returns True if a place of the text is within a part.

        Args:
            text: the text, which goes on with the text read before.
            sure: the number of its characters that stay as they are.
            start: the place, never before an earlier one.
        """
        while self._inside or self._begins_before(text, sure, start):
            close = text.find(self._closing, self._at) if self._closing else -1
            if close < 0:
                self._at = max(self._at, sure - len(self._closing) + 1)
            if close < 0 or close >= end:
                return True
            self._inside, self._over, self._at = False, self._first_only, close
            self._behind = close + len(self._closing)
        answer = self._behind if self._first_only else None
        return answer is not None and answer <= start and text[answer:end].isspace()

    def _begins_before(self, text: str, sure: int, start: int) -> bool:
        """Returns True if a part begins before a place."""
        if self._over:
            return False
        if self._first_only:
            match = self._opening.match(text, 0, start)
        else:
            match = self._opening.search(text, self._at, start)
        if match is None:
            self._at = max(self._at, min(start, sure) - self._longest)
            return False
        self._inside, self._at = True, match.end()
        return True


class Passages:
    """The parts of one text in which stop strings have no effect; see `Stops`."""

    def __init__(self, stops: Stops) -> None:
        self._parts = [Passage(*marks) for marks in stops.unstopped]

    def copy(self) -> Passages:
        """Returns a copy of the parts, for a text that goes on by itself."""
        other = copy.copy(self)
        other._parts = [copy.copy(part) for part in self._parts]
        return other

    def cover(self, text: str, sure: int, start: int, end: int) -> bool:
        """Returns True if a place is within one of the parts; see `Passage.covers`."""
        return any(part.covers(text, sure, start, end) for part in self._parts)


class RowStops:
    """The stop strings of a row, and the parts of its texts in which stop strings have no effect.

    Args:
        stops: the stop strings.

    Attributes:
        stops: the stop strings.
        passages: those parts of the text, and of the text that spells special tokens out (True).
    """

    def __init__(self, stops: Stops) -> None:
        self.stops = stops
        self.passages = {marked: Passages(stops) for marked in (False, True)}

    def copy(self) -> RowStops:
        """Returns a copy for a row that goes on by itself."""
        other = copy.copy(self)
        other.passages = {marked: one.copy() for marked, one in self.passages.items()}
        return other
