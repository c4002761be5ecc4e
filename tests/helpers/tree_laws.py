"""Trees of drafts, and the law of what a round over them commits, by enumeration."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.sampling.acceptance import Rejection, walk
from shoal.sampling.acceptance.rejection import accept_independent, accept_recursively, gamma
from shoal.sampling.acceptance.walk import Choice
from shoal.sampling.distributions import Scores
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions, Siblings

EXACT = 1e-12
HORIZON = 3
Found = TypeVar("Found")
Pick = Callable[[Sequence[float]], int]
"""Weights of some alternatives -> which of them."""


def outcomes(program: Callable[[Pick], Found]) -> Iterator[tuple[float, Found]]:
    """What a program returns for every sequence of picks that it may make, and the probability of each."""
    prefixes: list[list[int]] = [[]]
    while prefixes:
        prefix = prefixes.pop()
        made: list[int] = []
        weight = 1.0

        def pick(weights: Sequence[float], prefix: list[int] = prefix, made: list[int] = made) -> int:
            nonlocal weight
            possible = [i for i, w in enumerate(weights) if w > 0]
            if len(made) >= len(prefix):
                prefixes.extend([*made, other] for other in possible[1:])
                prefix.append(possible[0])
            chosen = prefix[len(made)]
            weight *= weights[chosen] / sum(weights)
            made.append(chosen)
            return chosen

        found = program(pick)
        yield weight, found


@functools.cache
def gamma_of(p: tuple[float, ...], q: tuple[float, ...], k: int) -> float:
    both = torch.tensor([[p], [q]], dtype=torch.float64)
    return float(gamma(both[0], both[1], torch.tensor([k]))[0])


def thresholds(
    choice: Choice, p: Sequence[float], q: Sequence[float], tokens: Sequence[int], sampled: int = 99
) -> list[float]:  # fmt: skip
    """Where the decision on these draws steps, in [0, 1): by the rules' formulas, one probability after the other. Draws behind the
    first `sampled` are point masses."""
    if choice is accept_independent:
        scale = gamma_of(tuple(p), tuple(q), len(tokens))
        each = [1.0 if p[x] >= 1 else min(1.0, p[x] / (scale * q[x])) for x in tokens]
    else:
        each, left, drawn = [], list(p), list(q)
        for place, x in enumerate(tokens):
            if place >= sampled:
                drawn = [float(x == token) for token in range(len(p))]
            each.append(min(1.0, left[x] / drawn[x]) if drawn[x] else float(left[x] > 0))
            rest = [max(a - b, 0.0) for a, b in zip(left, drawn, strict=True)]
            left = [value / sum(rest) for value in rest] if sum(rest) > 0 else left
            drawn[x] = 0.0
            drawn = [value / sum(drawn) for value in drawn] if sum(drawn) > 0 else drawn
    steps, passed = [0.0], 0.0
    for a in each:
        passed += (1 - passed) * a
        steps.append(passed)
    return [*steps, 1.0]


class Tree:
    """A tree that grows by draws; `draws` and `contexts` by column, as in `Siblings`."""

    def __init__(self, q: Tensor, pick: Pick, independent: bool) -> None:
        self.q, self.pick, self.independent = q, pick, independent
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.draws: list[list[int]] = [[]]
        self.sampled: list[list[int]] | None = None  # of the only row, as in `Siblings`
        self.last = [0]  # tokens by column

    def draw(self, column: int) -> int:
        """Draws a child of a column, from what its siblings left unless draws are independent; returns the child's column."""
        weights = self.q[self.last[column]].tolist()
        for node in () if self.independent else self.draws[column]:
            weights[self.tokens[node]] = 0.0
        if not sum(weights):
            return column
        token = self.pick(weights)
        for node in self.draws[column]:
            if self.tokens[node] == token:
                self.draws[column].append(node)
                return node + 1
        self.tokens.append(token)
        self.parents.append(column - 1)
        self.draws[column].append(len(self.tokens) - 1)
        self.draws.append([])
        self.last.append(token)
        return len(self.tokens)


def bushy(tree: Tree) -> None:
    """Two children of the root, two of its first child, one of the second."""
    first, second = tree.draw(0), tree.draw(0)
    for column in (first, first, second):
        tree.draw(column)


def by_depths_below(tree: Tree) -> None:
    """The root has a second child only if the first child's child is token 0: known before the second is drawn."""
    below = tree.draw(tree.draw(0))
    if tree.last[below] == 0:
        tree.draw(0)


def nothing(tree: Tree) -> None:
    """No node."""


def round_of(grown: Sequence[Tree], q: Tensor, p: Tensor) -> tuple[DraftTree, Scores]:
    """Trees, one per row, as a drafter proposes them, and what a target of the Markov table p says of them."""
    tree = DraftTree.of([one.tokens for one in grown], [one.parents for one in grown])
    contexts = [[last if draws else -1 for last, draws in zip(one.last, one.draws, strict=True)] for one in grown]
    sampled = None if grown[0].sampled is None else [one.sampled[0] for one in grown if one.sampled]
    siblings = Siblings(q, contexts, [one.draws for one in grown], grown[0].independent, sampled)
    tree = DraftTree(tree.tokens, tree.lengths, None, tree.drafts, tree.parents, 0, siblings)
    request = Request((0,), 1, Sampling())
    rows = [Row(request, 0, 0, 0, [0], frozenset(), 99) for _ in grown]
    last = torch.tensor([one.last + [0] * (tree.m + 1 - len(one.last)) for one in grown])
    return tree, Scores(p.log()[last], Positions.of(rows, tree))


def committed(p: Tensor, q: Tensor, shape: Callable[[Tree], None], independent: bool = False) -> tuple[Tensor, float]:
    """The law of HORIZON tokens, of which one round commits the first and plain decoding the others; and how many are accepted."""
    choice = accept_independent if independent else accept_recursively

    def program(pick: Pick) -> tuple[Tree, list[float]]:
        tree = Tree(q, pick, independent)
        shape(tree)
        at: list[float] = []
        column = 0
        while tree.draws[column]:  # along the path that these uniforms accept
            tokens = [tree.tokens[node] for node in tree.draws[column]]
            before = tree.last[column]
            sampled = 99 if tree.sampled is None else tree.sampled[0][column]
            steps = thresholds(choice, p[before].tolist(), q[before].tolist(), tokens, sampled)
            widths = [end - start for start, end in itertools.pairwise(steps)]
            step = pick(widths)
            at.append((steps[step] + steps[step + 1]) / 2)
            if step == len(tokens):
                break
            column = tree.draws[column][step] + 1
        return tree, at

    cases = list(outcomes(program))
    u = torch.zeros(len(cases), HORIZON + 1, 3, dtype=torch.float64)
    for row, (_, (_, at)) in enumerate(cases):
        u[row, :, 0], u[row, :, 2] = row, row + 0.5
        u[row, : len(at), 1] = torch.tensor(at, dtype=torch.float64)
    tree, scores = round_of([grown for _, (grown, _) in cases], q, p)
    ends: dict[int, Tensor] = {}

    def noted(weights: Tensor, uniforms: Tensor) -> Tensor:
        for row, own in zip(uniforms.tolist(), weights, strict=True):
            assert int(row) not in ends
            ends[int(row)] = own / own.sum()
            drafted[int(row)] = row != int(row)
        return weights.argmax(-1)

    drafted: dict[int, bool] = {}
    real, walk.draw = walk.draw, noted
    try:
        verdict = Rejection().decide(tree, scores, u)
    finally:
        walk.draw = real
    paths, ended = verdict.lists
    for own, path, token, probs in zip(tree.drafts, paths, ended, verdict.probs.tolist(), strict=True):
        tokens = [0, *(own[node] for node in path), token]
        expected = [float(p[a, b]) for a, b in itertools.pairwise(tokens)]
        assert max(abs(a - b) for a, b in zip(probs, expected, strict=False)) < 1e-9, "probabilities are the target's"
    law, accepted = torch.zeros([p.shape[-1]] * HORIZON, dtype=torch.float64), 0.0
    for row, ((weight, (grown, _)), path) in enumerate(zip(cases, paths, strict=True)):
        tokens = [grown.tokens[node] for node in path]
        accepted += weight * len(path)
        assert drafted[row] == bool(grown.draws[path[-1] + 1 if path else 0]), (
            "replacement and bonus have uniforms of their own"
        )
        for end in range(p.shape[-1]):
            so_far = [*tokens, end][:HORIZON]
            mass = weight * float(ends[row][end])
            for rest in itertools.product(range(p.shape[-1]), repeat=HORIZON - len(so_far)) if mass else ():
                chance, last = mass, so_far[-1]
                for token in rest:
                    chance, last = chance * float(p[last, token]), token
                law[(*so_far, *rest)] += chance
    return law, accepted


DIFFERENT = tuple(
    torch.stack([torch.tensor(weights, dtype=torch.float64).roll(by) for by in range(4)])
    for weights in ((0.4, 0.4, 0.1, 0.1), (0.1, 0.2, 0.3, 0.4))
)
"""What is left of p after a rejection is more than one token."""
