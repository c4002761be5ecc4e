"""The arguments that examples and tests are made of: small pools, a few favourites first.

A skewed choice from a fixed pool keeps the entropy of an example low, so that a model
of a few million parameters can be sure of most of the text it writes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Pool:
    """The argument names, and values of which the earlier ones are drawn more often."""

    names: tuple[str, ...]
    values: Sequence[Any]

    @cached_property
    def _weights(self) -> list[float]:
        return list(itertools.accumulate(1 / (4 + rank) for rank in range(len(self.values))))

    def draw(self, rng: random.Random) -> Any:
        """Draws one value; value number r has a probability proportional to 1 / (4 + r)."""
        return rng.choices(self.values, cum_weights=self._weights)[0]


_WORDS = (
    "apple banana cherry hello world python code data list tree river stone bird cloud green "
    "blue red yellow house garden table chair lamp door window paper pencil letter number "
    "small large happy quiet bright dark early late north south east west spring summer "
    "autumn winter bread butter cheese water milk sugar salt pepper lemon orange grape cat "
    "dog horse mouse tiger lion snow rain wind storm"
)
WORDS = _WORDS.split()

_SENTENCES = (
    "hello world|the quick brown fox|apple pie|Hello World|good morning|data science|"
    "a b c|open the door|Python 3|red green blue|one two three|blue sky and green grass|"
    "banana bread|level|radar|noon|abc123|room 42|the end|see you later|winter is here|"
    "small steps|bread and butter|an apple a day|Call me at 5|Green Tea|north and south|"
    "bookkeeper|mississippi|to be or not to be|rain or shine|hello|world|python|banana"
)
SENTENCES = _SENTENCES.split("|")


def _number_lists() -> list[list[int]]:
    """Returns sixty fixed lists of small integers, the plain ones first."""
    rng = random.Random(7)
    plain = [[1, 2, 3, 4, 5], [3, 1, 2], [10, 20, 30], [5, 8, 12, 3], [-2, 0, 7, 4], [2, 4, 6, 8]]
    drawn = [[rng.randint(-9, 30) for _ in range(rng.randint(3, 6))] for _ in range(50)]
    return [*plain, [], [7], [1, 1, 2, 3, 3], [9, -3, 15, 6, 21], *drawn]


def _word_lists() -> list[list[str]]:
    rng = random.Random(8)
    return [WORDS[i : i + 3] for i in range(0, 60, 3)] + [rng.sample(WORDS, rng.randint(2, 4)) for _ in range(30)]


def _dicts() -> list[dict[str, int]]:
    rng = random.Random(9)
    plain = [{"a": 1, "b": 2}, {"x": 5, "y": 12, "z": 3}, {"a": 10, "b": -4, "c": 7}]
    names = ("a", "b", "c", "d", "x", "y", "z")
    drawn = [{name: rng.randint(-5, 30) for name in sorted(rng.sample(names, rng.randint(2, 3)))} for _ in range(40)]
    return plain + drawn


def _matrices() -> list[list[list[int]]]:
    rng = random.Random(10)
    square = [[[rng.randint(0, 9) for _ in range(2)] for _ in range(2)] for _ in range(20)]
    return [[[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6]], [[5]], [[0, 1], [1, 0]], *square]


POOLS = {
    "ints": Pool(("numbers", "values", "items"), _number_lists()),
    "some": Pool(("numbers", "values", "items"), [x for x in _number_lists() if x]),
    "text": Pool(("text", "string"), SENTENCES),
    "words": Pool(("words", "names"), _word_lists()),
    "word": Pool(("word", "text"), WORDS),
    "dict": Pool(("mapping", "scores"), _dicts()),
    "matrix": Pool(("matrix", "rows"), _matrices()),
    "n": Pool(("n", "number"), (5, 10, 3, 7, 1, 12, 20, 6, 15, 8, 4, 9, 2, 25, 30, 18, 24)),
    "big": Pool(("n", "number"), (12, 123, 45, 100, 7, 2024, 981, 36, 505, 64, 1000, 17, 90)),
    "int": Pool(("a", "x"), (3, 10, 5, -2, 0, 7, 12, 8, -6, 15, 4, 20)),
    "int2": Pool(("b", "y"), (4, 6, 2, 9, 3, 15, 12, 5, 8, 1, 10)),
    "limit": Pool(("limit",), (3, 5, 2, 4, 10, 6, 8)),
    "divisor": Pool(("divisor",), (2, 3, 5, 4, 7)),
    "letter": Pool(("letter",), ("a", "e", "o", "b", "l", "s", "h", "r")),
    "count": Pool(("k", "count"), (2, 3, 1, 4)),
}
