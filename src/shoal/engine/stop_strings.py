"""The stop strings of a row, and the parts of its text in which stop strings have no effect."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.types.requests import Closing


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
    unstopped: tuple[tuple[str, Closing], ...] = ()
    shown: frozenset[str] = frozenset()


NO_STOPS = Stops()
LONGEST = 128  # characters of a closing that an expression describes


class Passage:
    """The parts between two marks of a text that grows; each character is looked at once.

    A mark belongs to its part, unless the place holds it as a whole.

    Args:
        opening: a regular expression of the text before a part.
        closing: the text behind it, or an expression of texts of up to `LONGEST` characters; empty
            if the part goes on to the end, None if it ends with its opening. Blanks behind a part
            that begins the text belong to it: they are no part of the answer.
    """

    def __init__(self, opening: str, closing: Closing) -> None:
        text = opening.removeprefix(r"\A").removeprefix(r"\s*")
        literal = re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
        self._mark = literal if re.escape(literal) == text else ""
        self._opening = re.compile(opening)
        self._closing = closing
        self._held = len(closing) if isinstance(closing, str) else LONGEST
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
        if self._closing is None:
            match = self._opening.match(text, 0, start)
            return match is not None and text[match.end() : end].isspace()
        while self._inside or self._begins_before(text, sure, start):
            close, behind = self._next_closing(text)
            if close < 0:
                self._at = max(self._at, sure - self._held + 1)
            if close < 0 or _cuts(start, end, close, behind):
                return True
            self._inside, self._over, self._at = False, self._first_only, close
            self._behind = behind
        answer = self._behind if self._first_only else None
        return answer is not None and answer <= start and text[answer:end].isspace()

    def _next_closing(self, text: str) -> tuple[int, int]:
        """Returns the place of the next closing and its end; -1 without one."""
        if isinstance(self._closing, re.Pattern):
            match = self._closing.search(text, self._at)
            return match.span() if match else (-1, -1)
        close = text.find(self._closing, self._at) if self._closing else -1
        return close, close + len(self._closing or "")

    def begins_at(self, text: str, start: int, end: int) -> bool | None:
        """Returns True if a place lies within the opening of a part.

        None if the text goes on to the end of the text with what may become such an opening.

        Args:
            text: the text, as far as it stays as it is.
            start: the place.
            end: the end of the place.
        """
        size = len(self._mark)
        if self._first_only:
            begin = len(text) - len(text.lstrip())
            begins = range(begin, begin + 1)
        else:
            begins = range(max(0, start - size + 1), start + 1)
        for begin in begins:
            begun = text[begin : begin + size]
            if begun and begin <= start < begin + size and self._mark.startswith(begun):
                return None if len(begun) < size else _cuts(start, end, begin, begin + size)
        return False

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


def _cuts(start: int, end: int, mark: int, behind: int) -> bool:
    """Returns True if a text cut at a place, or before it, would hold a part of a mark."""
    return start < behind and not (start <= mark and behind <= end)


class Passages:
    """The parts of one text in which stop strings have no effect; see `Stops`."""

    def __init__(self, stops: Stops) -> None:
        self._parts = [Passage(*marks) for marks in stops.unstopped]

    def copy(self) -> Passages:
        """Returns a copy of the parts, for a text that goes on by itself."""
        other = copy.copy(self)
        other._parts = [copy.copy(part) for part in self._parts]
        return other

    def cover(self, text: str, sure: int, start: int, end: int) -> bool | None:
        """Returns True if a place is within a part, None if not known yet; see `Passage.covers`."""
        if any(part.covers(text, sure, start, end) for part in self._parts):
            return True
        begun = [part.begins_at(text[:sure], start, end) for part in self._parts]
        return True if True in begun else None if None in begun else False


class RowStops:
    """The stop strings of a row, and the parts of its texts in which stop strings have no effect.

    Args:
        stops: the stop strings.

    Attributes:
        stops: the stop strings.
        passages: those parts, as each stop string is looked for in them.
        waiting: the places of stop strings that may lie within the opening of a part.
    """

    def __init__(self, stops: Stops) -> None:
        self.stops = stops
        self.passages = {stop: Passages(stops) for stop in stops.texts}
        self.waiting: dict[str, int] = {}

    def copy(self) -> RowStops:
        """Returns a copy for a row that goes on by itself."""
        other = copy.copy(self)
        other.passages = {stop: one.copy() for stop, one in self.passages.items()}
        other.waiting = dict(self.waiting)
        return other
