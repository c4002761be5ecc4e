"""The most probable continuations of a row, as a chain or a tree.

They serve drafters that know the tokens that may follow, and their probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from typing import TypeVar

from torch import Tensor

from shoal.drafting.text import NOTHING, Guess

FLOOR = 0.05
"""The least probability of a path.

Less probable drafts cost a verified position each and bring next to no tokens.
"""
CHOICES = 10
"""The most tokens of a position in a tree: Medusa's trees have no others."""
Place = TypeVar("Place")
Following = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""A place in a text -> tokens that may follow, their probabilities, and the places after them.

The most probable token comes first.
"""


def probable(place: Place, following: Following[Place], length: int, nodes: int) -> Guess:
    """Returns a tree of at most `nodes` nodes, or a chain if `nodes` is 0.

    Its paths have at most `length` tokens.
    """
    return tree(place, following, length, nodes) if nodes else chain(place, following, length)


Choices = Sequence[tuple[int, float]]
"""The tokens of a position and their probabilities, the most probable first."""


def most_probable(logits: Tensor, choices: int) -> list[list[list[tuple[int, float]]]]:
    """Returns the `choices` most probable tokens of each row and position.

    Args:
        logits: the logits, [rows, positions, vocab].
        choices: the number of tokens.
    """
    top = logits.float().softmax(-1).topk(min(choices, logits.shape[-1]), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        [list(zip(*position, strict=True)) for position in zip(*row, strict=True)] for row in pairs
    ]


def independent(positions: Sequence[Choices], length: int, nodes: int) -> Guess:
    """Guesses as `probable` does, if the tokens of a position do not depend on earlier ones.

    Returns NOTHING if a probability is not finite.
    """
    if any(not math.isfinite(choices[0][1]) for choices in positions):
        return NOTHING
    return probable(0, partial(_after, positions), length, nodes)


def _after(positions: Sequence[Choices], depth: int) -> Iterator[tuple[int, float, int]]:
    for token, chance in positions[depth] if depth < len(positions) else ():
        yield token, min(chance, 0.999), depth + 1


def chain(place: Place, following: Following[Place], length: int) -> Guess:
    """Returns a chain with the most probable token after each."""
    tokens: list[int] = []
    confidence: list[float] = []
    path = 1.0
    while len(tokens) < length:
        found = next(iter(following(place)), None)
        if found is None:
            break
        token, sure, place = found
        path *= sure
        if path < FLOOR:
            break
        tokens.append(token)
        confidence.append(sure)
    return Guess(tokens, confidence) if tokens else NOTHING


def tree(place: Place, following: Following[Place], length: int, nodes: int) -> Guess:
    """Returns a tree of the most probable paths, the most probable first.

    This is the greedy rule of DySpec's tree builder (Xiong et al. 2024, arXiv 2410.11744). The
    confidence at a depth is the probability of reaching it from the depth before.
    """
    tokens: list[int] = []
    parents: list[int] = []
    reached = [1.0] + [0.0] * length  # by depth
    heap: list[
        tuple[float, int, int, int, int, Place]
    ] = []  # -probability, number, depth, parent, token, place after it
    numbers = count()

    def push(place: Place, path: float, depth: int, parent: int) -> None:
        for token, sure, after in islice(following(place), nodes if depth <= length else 0):
            if path * sure < FLOOR:
                return
            heappush(heap, (-path * sure, next(numbers), depth, parent, token, after))

    push(place, 1.0, 1, -1)
    while heap and len(tokens) < nodes:
        path, _, depth, parent, token, after = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        reached[depth] -= path  # which is negative
        push(after, -path, depth + 1, len(tokens) - 1)
    confidence = [min(after / before, 1.0) for before, after in pairwise(reached) if after]
    return Guess(tokens, confidence, parents) if tokens else NOTHING
