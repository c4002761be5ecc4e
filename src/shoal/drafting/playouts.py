"""Draft trees by playouts: paths that are tried in turns, the promising ones and those that were tried seldom.

After Liu et al., "ADED: adaptive draft-verification" (2024, arXiv 2407.12021), whose search is that of AlphaZero: the worth of a
child is the mean of the playouts through it and a bonus for its probability, which shrinks as it is tried. Nothing is random.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from math import log, sqrt

from shoal.drafting.paths import FLOOR, Following, Place
from shoal.drafting.text import NOTHING, Guess

BONUS = 1.25
"""c1 of the search: how much the bonus counts, before it grows with the logarithm of playouts."""
GROWTH = 19652
"""c2 of the search."""


@dataclass
class _Node:
    """One more token. path: its probability from the root on. worth: mean of the playouts through it."""

    token: int
    chance: float
    path: float
    depth: int
    visits: int = 0
    worth: float = 0.0
    children: list[_Node] | None = None


def explored(place: Place, following: Following[Place], length: int, nodes: int, playouts: int) -> Guess:
    """A tree of at most so many nodes and so deep: those that most playouts went through.

    Args:
        place, following: as of `shoal.drafting.paths.probable`. playouts: paths that are tried.
    """
    root = _Node(-1, 1.0, 1.0, 0)
    places: dict[int, Place] = {id(root): place}
    for _ in range(playouts):
        path = [root]
        while path[-1].depth < length:
            node = path[-1]
            if node.children is None:
                node.children = []
                for token, sure, after in islice(following(places[id(node)]), nodes):
                    if node.path * sure >= FLOOR:
                        node.children.append(child := _Node(token, sure, node.path * sure, node.depth + 1))
                        places[id(child)] = after
            if not node.children:
                break
            tried = sum(child.visits for child in node.children)
            scale = sqrt(tried + 1) * (BONUS + log((tried + GROWTH + 1) / GROWTH))
            path.append(max(node.children, key=lambda child: child.worth + child.chance * scale / (1 + child.visits)))
        # A path is worth the tokens that it is expected to bring.
        value = sum(node.path for node in path[1:])
        for node in path:
            node.visits += 1
            node.worth += (value - node.worth) / node.visits
    return _most_visited(root, length, nodes)


def _most_visited(root: _Node, length: int, nodes: int) -> Guess:
    tokens: list[int] = []
    parents: list[int] = []
    reached = [1.0] + [0.0] * length
    numbers = count()
    heap: list[tuple[int, float, int, int, _Node]] = []

    def push(children: list[_Node] | None, parent: int) -> None:
        for child in children or ():
            if child.visits:
                heappush(heap, (-child.visits, -child.path, next(numbers), parent, child))

    push(root.children, -1)
    while heap and len(tokens) < nodes:
        *_, parent, node = heappop(heap)
        tokens.append(node.token)
        parents.append(parent)
        reached[node.depth] += node.path
        push(node.children, len(tokens) - 1)
    confidence = [min(after / before, 1.0) for before, after in pairwise(reached) if after]
    return Guess(tokens, confidence, parents) if tokens else NOTHING
