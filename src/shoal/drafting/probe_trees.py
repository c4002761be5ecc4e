"""The number of nodes and of prompt tokens of PPD's trees.

Chen et al. 2024 (arXiv 2405.18628), sections 4.1 to 4.3. The state of a round is the number of
prompt tokens that were read before it. In each state a tree has candidates, and prompt tokens
behind each of them and the root, so the next round has guesses wherever the path ends. A candidate
brings a token now; a prompt token behind it brings a better state next time. Rounds are a Markov
chain over the states. The plan maximises the tokens of a round in the long run; divided by the
measured seconds of a pass, they decide the number of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from shoal.drafting.text import independent

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
    found = [1.0]
    for parent, chance in zip(parents, chances, strict=True):
        found.append(found[parent + 1] * chance)
    return found


def ends(parents: Sequence[int], reach: Sequence[float]) -> list[float]:
    """Returns the probability that the path ends at each column.

    The path reaches the column, and none of its children.
    """
    found = list(reach)
    for parent, own in zip(parents, reach[1:], strict=True):
        found[parent + 1] -= own
    return [max(chance, 0.0) for chance in found]


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
    found = [
        _improved(shapes, columns, first * np.arange(states, dtype=np.float64) ** power)
        for first, power in STARTS
    ]
    return max(found, key=lambda plan: plan.tokens)


def _improved(
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
    found = [0]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found[1:]


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
