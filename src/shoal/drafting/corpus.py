"""Lookups in the index of a corpus: the longest end of a row in its texts, and the tokens after it.

After He et al., "REST: Retrieval-based speculative decoding" (NAACL 2024, arXiv 2311.08252): in a
suffix array all places of one sequence of tokens are neighbours. A lookup takes a few binary
searches for each part of the index and each token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.drafting.index_file import DEPTH, END, Index, Part

LONGEST = DEPTH // 2
"""The most tokens of a row that are matched: the next tokens are in the order of the index, too."""
COUNTED = 128
"""The number of places whose next token is read.

If there are more places, evenly spaced ones are read: places are sorted by the tokens that follow,
so the shares of the tokens are kept.
"""


class Interval(NamedTuple):
    """The places first..last-1 of a part."""

    part: Part
    first: int
    last: int

    def narrowed(self, depth: int, token: int) -> Interval:
        """Returns the places that have the token `depth` tokens further on."""
        return Interval(self.part, self._search(depth, token), self._search(depth, token + 1))

    def _search(self, depth: int, token: int) -> int:
        """Returns the first place with this token, or a greater one, `depth` tokens further on."""
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
        """Returns True if some text has a token there; the end of a text precedes all tokens."""
        return (
            self.last > self.first
            and self.part.tokens[self.part.places[self.last - 1] + depth] != END
        )


class CorpusPlace(NamedTuple):
    """The places of a sequence of tokens in a corpus.

    Attributes:
        intervals: the intervals of the parts that have the sequence.
        length: the number of its tokens.
    """

    intervals: tuple[Interval, ...]
    length: int

    def continued(self) -> CorpusPlace:
        return self

    def counts(self) -> list[tuple[float, int]]:
        """Returns (weight, token) for each next token, of equal weights the lower id first.

        The weight is about the number of times that the token follows.
        """
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
        """Returns the place after one more token, which must follow here in some text."""
        narrowed = [one.narrowed(self.length, token) for one in self.intervals]
        return CorpusPlace(tuple(one for one in narrowed if one.last > one.first), self.length + 1)


NOWHERE = CorpusPlace((), 0)


class Corpus:
    """A collection of texts in which rows are looked up.

    Args:
        index: the index of the texts.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    def place(self, tokens: Sequence[int]) -> CorpusPlace:
        """Returns the place of the longest end of a row after which some text goes on.

        The end has at most `LONGEST` tokens.
        """
        end = list(tokens[-LONGEST:])
        found: dict[int, tuple[Interval, ...]] = {}

        def stands(length: int) -> bool:
            found[length] = self._intervals(end[len(end) - length :])
            return bool(found[length])

        longest = _longest(stands, len(end))
        return CorpusPlace(found[longest], longest) if longest else NOWHERE

    def _intervals(self, tokens: Sequence[int]) -> tuple[Interval, ...]:
        """Returns the intervals of the parts that have these tokens and go on after them."""
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
    """Returns the greatest length that stands somewhere; all shorter ones stand as well.

    Lengths are doubled first, because most matches are short.
    """
    low, high = 0, 1
    while high <= most and stands(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if stands(middle) else (low, middle)
    return low
