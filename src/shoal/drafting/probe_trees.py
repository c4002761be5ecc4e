"""How many nodes and how many prompt tokens a tree of PPD has: Chen et al. 2024 (arXiv 2405.18628),
sections 4.1 to 4.3.

A round begins with what so many prompt tokens have said: its state. In each state a tree has
candidates, and prompt tokens behind each of them and the root, so that whichever node a path ends
at, the next round knows something. A candidate brings a token now, a prompt token behind it a
better state next time. Rounds are a Markov chain over the states; the tokens of a round in the long
run are what is made large, and over the measured seconds of a pass, what says how many columns pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from shoal.drafting.paths import independent

Accuracies = tuple[tuple[float, ...], ...]
"""Of each prompt token, how often the target says its most probable guess, its second one, ...;
measured."""
Array = npt.NDArray[np.float64]
LEAST = 0.005
"""Tokens that a prompt token must bring: below, it is left out of the pass."""
SIZES = (2, 4, 6, 8, 12, 16, 24, 32)
"""Columns beside the root among which measured seconds choose."""
ROUNDS = 12
"""Most improvements of a policy; three or four change anything."""
STARTS = ((0.5, 1.0), (0.5, 0.5), (1.0, 0.2))
"""What states are worth at first, a * state^b: with few columns the one or the other start comes to
the best policy."""


@dataclass(frozen=True)
class TreePlan:
    """What trees of so many columns beside the root are made of.

    Attributes:
        columns: most nodes and prompt tokens of a row's tree.
        candidates: by how many prompt tokens were read, the most nodes.
        gains: tokens that the first, second, ... prompt token behind the end of a path brings
            later; never rising.
        tokens: of a round in the long run, by the accuracies.
    """

    columns: int
    candidates: tuple[int, ...]
    gains: tuple[float, ...]
    tokens: float


def reached(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """How probably the path of a round comes to each column, the root first.

    Args:
        parents: of the nodes, -1 is the root.
        chances: of each node, that its token follows its parent.
    """
    found = [1.0]
    for parent, chance in zip(parents, chances, strict=True):
        found.append(found[parent + 1] * chance)
    return found


def ends(parents: Sequence[int], reach: Sequence[float]) -> list[float]:
    """How probably the path ends at each column: it comes there, and to none of its children."""
    found = list(reach)
    for parent, own in zip(parents, reach[1:], strict=True):
        found[parent + 1] -= own
    return [max(chance, 0.0) for chance in found]


def placed(
    ending: Sequence[float], gains: Sequence[float], most: int, limits: Sequence[int]
) -> list[int]:
    """How many prompt tokens each column gets: one by one where it brings most.

    Args:
        ending: see `ends`.
        gains: see `TreePlan`.
        most: of all columns.
        limits: the most of each column.
    """
    found = [0] * len(ending)
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
        found[column] += 1
        more = found[column] < min(limits[column], len(gains))
        heapreplace(heap, (-ending[column] * gains[found[column]] if more else 0.0, column))
    return found


@lru_cache(maxsize=64)
def planned(accuracies: Accuracies, columns: int) -> TreePlan:
    """The trees of so many columns beside the root that bring most tokens per round in the long
    run: the policy is improved as long as that changes anything (Howard 1960)."""
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
    found = [
        _improved(shapes, columns, first * np.arange(states, dtype=np.float64) ** power)
        for first, power in STARTS
    ]
    return max(found, key=lambda plan: plan.tokens)


def _improved(
    shapes: Sequence[tuple[list[int], list[float]]], columns: int, values: Array
) -> TreePlan:
    """The best plan on the way from these values of the states.

    Args:
        shapes: of each state, the parents of all candidates, and how probably the path comes to the
            root and to each.
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
    """Of the `SIZES`, the plan that brings most tokens per second; None where plain decoding does.

    Args:
        seconds: of a pass with so many columns beside the root.
    """
    plans = [planned(accuracies, columns) for columns in SIZES]
    best = max(plans, key=lambda plan: plan.tokens / seconds(plan.columns))
    return best if best.tokens / seconds(best.columns) > 1.0 / seconds(0) else None


def _depths(parents: Sequence[int]) -> list[int]:
    found = [0]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found[1:]


def _gains(values: Array) -> tuple[float, ...]:
    """What each further prompt token brings, made never rising."""
    return tuple(float(gain) for gain in np.minimum.accumulate(np.maximum(np.diff(values), 0.0)))


def _best(
    parents: Sequence[int],
    reach: Sequence[float],
    gains: Sequence[float],
    values: Array,
    columns: int,
) -> tuple[int, float, Array]:
    """Of a state: how many candidates are best, the tokens that they bring, and how probably each
    state follows. The most probable candidates of a tree are those of the smaller trees, too."""
    options = []
    for count in range(min(len(parents), columns) + 1):
        above, own = parents[:count], reach[: count + 1]
        ending = ends(above, own)
        counts = placed(ending, gains, columns - count, [len(gains)] * len(ending))
        to = np.bincount(counts, weights=ending, minlength=len(values)).astype(np.float64)
        options.append((count, float(sum(own)), to))
    return max(options, key=lambda option: option[1] + float(option[2] @ values))


def _long_run(brought: Array, to: Array) -> tuple[float, Array]:
    """Tokens of a round in the long run, g, and what each state is worth beside state 0: h =
    brought - g + to h, h[0] = 0."""
    states = len(brought)
    system = np.zeros((states + 1, states + 1))
    system[:states, :states] = np.eye(states) - to
    system[:states, states] = 1.0
    system[states, 0] = 1.0
    solved = np.linalg.lstsq(system, np.append(brought, 0.0), rcond=None)[0]
    return float(solved[states]), solved[:states]
