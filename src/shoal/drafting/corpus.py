"""Lookups in the index of a corpus: the longest end of a row that stands in its texts, and what
followed it there.

After He et al., "REST: Retrieval-based speculative decoding" (NAACL 2024, arXiv 2311.08252): in a
suffix array all places where some tokens stand are neighbours. Work is bounded: a few binary
searches for each part of the index and token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.drafting.index_file import DEPTH, END, Index, Part

LONGEST = DEPTH // 2
"""Most tokens of a row that are matched: what follows lies within the order of the index, too."""
COUNTED = 128
"""Places whose next token is looked at. Of more, every so many: places are in the order of what
follows, so that shares hold."""


class Interval(NamedTuple):
    """The places first..last-1 of a part."""

    part: Part
    first: int
    last: int

    def narrowed(self, depth: int, token: int) -> Interval:
        """Those that have the token so many tokens further on."""
        return Interval(self.part, self._search(depth, token), self._search(depth, token + 1))

    def _search(self, depth: int, token: int) -> int:
        """The first place with this token there, or a later one."""
        (tokens, places), low, high = (self.part.tokens, self.part.places), self.first, self.last
        size = len(tokens)
        while low < high:
            middle = (low + high) // 2
            at = places[middle] + depth
            if (tokens[at] if at < size else END) < token:
                low = middle + 1
            else:
                high = middle
        return low

    def goes_on(self, depth: int) -> bool:
        """Whether some text has a token there. The end of a text comes before all tokens."""
        return (
            self.last > self.first
            and self.part.tokens[self.part.places[self.last - 1] + depth] != END
        )


class CorpusPlace(NamedTuple):
    """Where `length` tokens stand in a corpus. intervals: of the parts that have them."""

    intervals: tuple[Interval, ...]
    length: int

    def continued(self) -> CorpusPlace:
        return self

    def counts(self) -> list[tuple[float, int]]:
        """How often each token follows, about; of equal ones the lower id first."""
        if self.length >= DEPTH:
            return []
        weights: dict[int, float] = {}
        for part, first, last in self.intervals:
            looked = range(first, last, max((last - first) // COUNTED, 1))
            found = Counter(part.tokens[part.places[place] + self.length] for place in looked)
            for token, seen in found.items():
                weights[token] = weights.get(token, 0.0) + seen * (last - first) / len(looked)
        weights.pop(END, None)
        return sorted((weight, token) for token, weight in weights.items())

    def after(self, token: int) -> CorpusPlace:
        """Once a token follows that some text has there."""
        narrowed = [one.narrowed(self.length, token) for one in self.intervals]
        return CorpusPlace(tuple(one for one in narrowed if one.last > one.first), self.length + 1)


NOWHERE = CorpusPlace((), 0)


class Corpus:
    """Texts that rows are looked up in.

    Args:
        index: of the texts.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    def place(self, tokens: Sequence[int]) -> CorpusPlace:
        """The longest end of a row, of at most `LONGEST` tokens, after which some text goes on."""
        end = list(tokens[-LONGEST:])
        found: dict[int, tuple[Interval, ...]] = {}

        def stands(length: int) -> bool:
            found[length] = self._intervals(end[len(end) - length :])
            return bool(found[length])

        longest = _longest(stands, len(end))
        return CorpusPlace(found[longest], longest) if longest else NOWHERE

    def _intervals(self, tokens: Sequence[int]) -> tuple[Interval, ...]:
        """Of the parts that have these tokens and go on after them."""
        kept = []
        for part in self._index.parts:
            interval = Interval(part, 0, len(part.places))
            for depth, token in enumerate(tokens):
                interval = interval.narrowed(depth, token)
                if interval.last == interval.first:
                    break
            if interval.goes_on(len(tokens)):
                kept.append(interval)
        return tuple(kept)


def _longest(stands: Callable[[int], bool], most: int) -> int:
    """The longest length that stands somewhere: all shorter ones do. Most matches are short, so
    that lengths are doubled first."""
    low, high = 0, 1
    while high <= most and stands(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if stands(middle) else (low, middle)
    return low
