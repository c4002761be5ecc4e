"""Shapes of draft trees: places that get a node, and the nodes and prompt tokens of PPD's trees.

Trees of a draft model grow (`shoal.drafting.growth`) in one of these shapes:

| shape | trees | verified by |
|---|---|---|
| rsd-c | `width` different children of the root, each the begin of a chain | recursive rejection |
| rsd-s | the first `width` nodes of a level, by stochastic beam search | recursive rejection |
| dyspec | the places most probably tried, with one budget for all rows | recursive rejection |
| k-seq | `width` sequences, drawn independently | k-SEQ |

PPD's trees are planned (Chen et al. 2024, arXiv 2405.18628, sections 4.1 to 4.3). The state of a
round is the number of prompt tokens that were read before it. In each state a tree has candidates,
and prompt tokens behind each of them and the root, so the next round has guesses wherever the path
ends. A candidate brings a token now; a prompt token behind it brings a better state next time.
Rounds are a Markov chain over the states. The plan maximises the tokens of a round in the long run;
divided by the measured seconds of a pass, they decide the number of columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.config import MOST_NODES
from shoal.drafting.growth import Node, Shape
from shoal.drafting.text import independent


@dataclass(frozen=True)
class RsdC(Shape):
    """RSD-C (Jeon et al. 2024, arXiv 2402.14160) with the branching (width, 1, 1, ...)."""

    width: int
    nodes: int

    def children(self, node: Node) -> int:
        return 1 if node.depth else self.width

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        return _first(self.most, sorted(nodes, key=lambda n: (n.depth, n.number)))


@dataclass(frozen=True)
class RsdS(Shape):
    """RSD-S (Jeon et al. 2024, arXiv 2402.14160): stochastic beam search, drawn lazily.

    The beam search is that of Kool et al. 2019, arXiv 1903.06059. In place of the largest perturbed
    log-probabilities of a level it takes the first arrivals of a Poisson process, which are drawn
    one by one. Rows whose nodes are no sample get the most probable nodes.
    """

    width: int
    nodes: int

    def children(self, node: Node) -> int:
        return self.width

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        best_nodes: list[Node] = []
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        kept: set[Node | None] = set()
        for node in sorted(nodes, key=lambda n: (n.depth, n.time, -n.value, n.number)):
            if sizes[node.row, node.depth] < self.width and (
                node.depth == 1 or node.parent in kept
            ):
                sizes[node.row, node.depth] += 1
                kept.add(node)
                best_nodes.append(node)
        return _first(self.most, best_nodes)


@dataclass(frozen=True)
class KSeq(Shape):
    """The sequences of SpecTr (Sun et al. 2023, arXiv 2310.15141).

    Sequences that agree so far are one path.
    """

    width: int
    nodes: int

    independent: ClassVar[bool] = True

    def length(self, length: int) -> int:
        return min(length, self.most // self.width)

    def root(self, node: Node) -> None:
        node.copies = self.width

    def children(self, node: Node) -> int:
        return node.copies

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        return list(nodes)


@dataclass(frozen=True)
class DySpec(Shape):
    """DySpec (Xiong et al. 2024, arXiv 2410.11744), with `nodes` per row of the batch on average.

    Rows whose drafts are likely to be accepted get more.
    """

    nodes: int

    @property
    def most(self) -> int:
        return MOST_NODES

    def children(self, node: Node) -> int:
        return self.most

    def chosen(self, nodes: Sequence[Node]) -> list[Node]:
        rows: dict[int, int] = {node.row: 0 for node in nodes}
        best_nodes: list[Node] = []
        for node in sorted(nodes, key=lambda n: (-n.value, n.depth, n.number)):
            if len(best_nodes) == self.nodes * len(rows):
                break
            if rows[node.row] < self.most:
                rows[node.row] += 1
                best_nodes.append(node)
        return best_nodes


def _first(most: int, nodes: Sequence[Node]) -> list[Node]:
    """Returns the first nodes, at most `most` of each row."""
    first_nodes: list[Node] = []
    rows: dict[int, int] = defaultdict(int)
    for node in nodes:
        if rows[node.row] < most:
            rows[node.row] += 1
            first_nodes.append(node)
    return first_nodes


def shape_of(name: str, width: int, nodes: int) -> Shape:
    """Returns the shape of this name; raises KeyError if there is none."""
    if name == "dyspec":
        return DySpec(nodes)
    kinds: dict[str, type[RsdC] | type[RsdS] | type[KSeq]] = {
        "rsd-c": RsdC,
        "rsd-s": RsdS,
        "k-seq": KSeq,
    }
    return kinds[name](width, nodes)


Accuracies = tuple[tuple[float, ...], ...]
"""The accuracies of prompt tokens, measured.

For each prompt token, they are the shares of positions at which the target draws its most probable
guess, its second one, ...
"""
Array = npt.NDArray[np.float64]
LEAST = 0.005
"""The tokens that a prompt token must bring: one that brings less is left out of the pass."""
SIZES = (2, 4, 6, 8, 12, 16, 24, 32)
"""The numbers of columns beside the root among which measured seconds choose."""
ROUNDS = 12
"""The most improvements of a policy; only the first three or four change it."""
STARTS = ((0.5, 1.0), (0.5, 0.5), (1.0, 0.2))
"""The first values of the states, a * state^b, as pairs (a, b).

With few columns one or the other start leads to the best policy.
"""


@dataclass(frozen=True)
class TreePlan:
    """A plan of trees with a number of columns beside the root.

    Attributes:
        columns: the most nodes and prompt tokens of a row's tree.
        candidates: the most nodes, by the number of prompt tokens that were read.
        gains: the tokens that the first, second, ... prompt token behind the end of a path brings
            later; never rising.
        tokens: the tokens of a round in the long run, by the accuracies.
    """

    columns: int
    candidates: tuple[int, ...]
    gains: tuple[float, ...]
    tokens: float


def reached(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Returns the probability that the path of a round reaches each column, the root first.

    Args:
        parents: the parents of the nodes; -1 is the root.
        chances: for each node, the probability that its token follows its parent.
    """
    reach = [1.0]
    for parent, chance in zip(parents, chances, strict=True):
        reach.append(reach[parent + 1] * chance)
    return reach


def ends(parents: Sequence[int], reach: Sequence[float]) -> list[float]:
    """Returns the probability that the path reaches each column and none of its children."""
    probabilities = list(reach)
    for parent, own in zip(parents, reach[1:], strict=True):
        probabilities[parent + 1] -= own
    return [max(chance, 0.0) for chance in probabilities]


def placed(
    ending: Sequence[float], gains: Sequence[float], most: int, limits: Sequence[int]
) -> list[int]:
    """Returns the number of prompt tokens behind each column.

    They are placed one by one, each at the column at which it brings most.

    Args:
        ending: see `ends`.
        gains: see `TreePlan`.
        most: the most prompt tokens of all columns together.
        limits: the most prompt tokens of each column.
    """
    counts = [0] * len(ending)
    heap = [
        (-chance * gains[0], column)
        for column, chance in enumerate(ending)
        if limits[column] and gains
    ]
    heapify(heap)
    for _ in range(most):
        if not heap or -heap[0][0] < LEAST:
            break
        column = heap[0][1]
        counts[column] += 1
        more = counts[column] < min(limits[column], len(gains))
        heapreplace(heap, (-ending[column] * gains[counts[column]] if more else 0.0, column))
    return counts


@lru_cache(maxsize=64)
def planned(accuracies: Accuracies, columns: int) -> TreePlan:
    """Returns the plan with `columns` columns that brings most tokens per round in the long run.

    The policy is improved until it no longer changes (Howard 1960).
    """
    states = len(accuracies) + 1
    guesses = [tuple((rank, chance) for rank, chance in enumerate(row)) for row in accuracies]
    trees = [independent(guesses, state, columns) if state else None for state in range(states)]
    shapes: list[tuple[list[int], list[float]]] = [([], [1.0])]
    for guess in trees[1:]:
        assert guess is not None
        parents = list(guess.parents or ())
        depths = _depths(parents)
        chances = [
            accuracies[depth - 1][rank] for rank, depth in zip(guess.tokens, depths, strict=True)
        ]
        shapes.append((parents, reached(parents, chances)))
    plans = [
        _improve(shapes, columns, first * np.arange(states, dtype=np.float64) ** power)
        for first, power in STARTS
    ]
    return max(plans, key=lambda plan: plan.tokens)


def _improve(
    shapes: Sequence[tuple[list[int], list[float]]], columns: int, values: Array
) -> TreePlan:
    """Returns the best plan on the way from these values of the states.

    Args:
        shapes: for each state, the parents of all candidates, and the probability that the path
            reaches the root and each candidate.
        columns: the number of columns beside the root.
        values: the first values of the states.
    """
    plans: list[TreePlan] = []
    for _ in range(ROUNDS):
        gains = _gains(values)
        made = [_best(*shape, gains, values, columns) for shape in shapes]
        tokens, values = _long_run(
            np.array([brought for _, brought, _ in made]), np.stack([to for _, _, to in made])
        )
        plans.append(TreePlan(columns, tuple(count for count, _, _ in made), gains, tokens))
        if plans[-1] in plans[:-1]:
            break
    return max(plans, key=lambda plan: plan.tokens)


def chosen(accuracies: Accuracies, seconds: Callable[[int], float]) -> TreePlan | None:
    """Returns the plan of the `SIZES` that brings most tokens per second.

    Returns None if plain decoding brings more.

    Args:
        accuracies: the accuracies of the prompt tokens.
        seconds: the seconds of a pass, by the number of columns beside the root.
    """
    plans = [planned(accuracies, columns) for columns in SIZES]
    best = max(plans, key=lambda plan: plan.tokens / seconds(plan.columns))
    return best if best.tokens / seconds(best.columns) > 1.0 / seconds(0) else None


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths[1:]


def _gains(values: Array) -> tuple[float, ...]:
    """Returns the gain of each further prompt token, made never rising."""
    return tuple(float(gain) for gain in np.minimum.accumulate(np.maximum(np.diff(values), 0.0)))


def _best(
    parents: Sequence[int],
    reach: Sequence[float],
    gains: Sequence[float],
    values: Array,
    columns: int,
) -> tuple[int, float, Array]:
    """Returns the best number of candidates of a state, their tokens, and the next states.

    The next states are given by their probabilities. The most probable candidates of a tree are
    also the candidates of the smaller trees.
    """
    options = []
    for count in range(min(len(parents), columns) + 1):
        above, own = parents[:count], reach[: count + 1]
        ending = ends(above, own)
        counts = placed(ending, gains, columns - count, [len(gains)] * len(ending))
        to = np.bincount(counts, weights=ending, minlength=len(values)).astype(np.float64)
        options.append((count, float(sum(own)), to))
    return max(options, key=lambda option: option[1] + float(option[2] @ values))


def _long_run(brought: Array, to: Array) -> tuple[float, Array]:
    """Returns the tokens of a round in the long run, g, and the values h of the states.

    The values are relative to state 0: h = brought - g + to h, h[0] = 0.
    """
    states = len(brought)
    system = np.zeros((states + 1, states + 1))
    system[:states, :states] = np.eye(states) - to
    system[:states, states] = 1.0
    system[states, 0] = 1.0
    solved = np.linalg.lstsq(system, np.append(brought, 0.0), rcond=None)[0]
    return float(solved[states]), solved[:states]
