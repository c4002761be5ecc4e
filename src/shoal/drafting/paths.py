"""The most probable continuations of a row, as a chain or a tree, for drafters that know what may follow and how likely."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from typing import TypeVar

from shoal.drafting.text import NOTHING, Guess

FLOOR = 0.05
"""Least probability of a path: less probable drafts cost a verified position each and bring next to nothing."""
Place = TypeVar("Place")
Following = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""A place in a text -> tokens that may follow, their probabilities, and the places after them; the most probable first."""


def probable(place: Place, following: Following[Place], length: int, nodes: int) -> Guess:
    """Paths of at most `length` tokens: a tree of so many nodes, or a chain where that is 0."""
    return tree(place, following, length, nodes) if nodes else chain(place, following, length)


def chain(place: Place, following: Following[Place], length: int) -> Guess:
    """The most probable token after each."""
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
    """The most probable paths, the most probable first: the greedy rule of DySpec's tree builder (Xiong et al. 2024,
    arXiv 2410.11744). The confidence at a depth is the probability of coming so far, having come to the one before."""
    tokens: list[int] = []
    parents: list[int] = []
    reached = [1.0] + [0.0] * length  # by depth
    heap: list[tuple[float, int, int, int, int, Place]] = []  # -probability, number, depth, parent, token, place after it
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
