"""Rules for trees whose q is known: the distribution of what a round commits, enumerated over trees and uniforms.

`outcomes` runs a program once for each sequence of draws that it may make; all its results are then decided in one call of the real
code. The token that ends a round is not drawn: the weights that it would be drawn from are noted instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.sampling.acceptance import Rejection, k_seq, recursive, tree_walk
from shoal.sampling.acceptance.k_seq import accept_independent, gamma
from shoal.sampling.acceptance.recursive import accept_recursively
from shoal.sampling.acceptance.tree_walk import Choice
from shoal.sampling.scores import Scores
from shoal.testing.distributions import chain_rule
from shoal.types.requests import Request, Row
from shoal.types.siblings import Siblings
from shoal.types.trees import DraftTree, Positions
from test_exact_distribution import PAIRS, table

EXACT = 1e-12
HORIZON = 3
EDGE = 1e-7
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


# ── one column ──────────────────────────────────────────────────────────────────────────────────────────────────────


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


def points(steps: Sequence[float]) -> list[tuple[float, float]]:
    """Uniforms within each step, at its edges too, and what share of [0, 1) each stands for."""
    return [
        (start + at * (end - start), share * (end - start))
        for start, end in itertools.pairwise(steps)
        if end > start
        for at, share in ((EDGE / 2, EDGE), (0.5, 1 - 2 * EDGE), (1 - EDGE / 2, EDGE))
    ]


def law_of_column(choice: Choice, p: Tensor, q: Tensor, draws: int) -> tuple[Tensor, float]:
    """The distribution of the token accepted, or drawn in its place; and how often one is accepted."""
    vocab, replaced = len(p), choice is accept_independent
    cases: list[tuple[list[int], float, float]] = []
    count = draws if replaced else min(draws, int((q > 0).sum()))
    for tokens in itertools.product(range(vocab), repeat=count):
        weight, left = 1.0, q.tolist()
        for x in tokens:
            weight *= left[x] / sum(left) if sum(left) else 0.0
            left[x] = left[x] if replaced else 0.0
        if weight:
            cases += [
                (list(tokens), u, weight * share) for u, share in points(thresholds(choice, p.tolist(), q.tolist(), tokens))
            ]
    tokens_, weights = (
        torch.tensor([case[0] for case in cases]),
        torch.tensor([case[2] for case in cases], dtype=torch.float64),
    )
    u = torch.tensor([case[1] for case in cases], dtype=torch.float64)
    chosen, rest = choice(p.expand(len(cases), -1), q.expand(len(cases), -1), tokens_, u)
    law = torch.zeros(vocab, dtype=torch.float64)
    hit = chosen >= 0
    law.index_add_(0, tokens_[hit].gather(1, chosen[hit][:, None]).squeeze(1), weights[hit])
    law += ((rest / rest.sum(-1, keepdim=True)) * weights[:, None])[~hit].sum(0)
    return law, float(weights[hit].sum())


@pytest.mark.parametrize("choice", [accept_recursively, accept_independent])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_column_has_the_law_of_the_target(pair: str, choice: Choice) -> None:
    for vocab, draws in ((6, 3), (5, 2), (4, 1), (2, 3)):
        p, q = (values[0] for values in PAIRS[pair](vocab, 7))
        law, accepted = law_of_column(choice, p, q, draws)
        torch.testing.assert_close(law, p, rtol=0, atol=EXACT)
        if draws == 1:
            assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)


def test_more_draws_are_accepted_more_often_and_without_replacement_most_often() -> None:
    p, q = (values[0] for values in PAIRS["random"](6, 7))
    by_draws = [
        [law_of_column(choice, p, q, k)[1] for k in (1, 2, 3)] for choice in (accept_independent, accept_recursively)
    ]
    for independent, without in zip(*by_draws, strict=True):
        assert independent <= without + 1e-12
    assert all(a < b for rates in by_draws for a, b in itertools.pairwise(rates))


def test_gamma_is_the_least_that_is_valid() -> None:
    p, q = table(6, 1), table(6, 2)
    for k in (1, 2, 3, 8):
        scale = gamma(p, q, torch.full((6,), k))
        for at, valid in ((scale * (1 + 1e-9), True), (scale * (1 - 1e-6), False)):
            b = torch.minimum(q, p / at[:, None]).sum(-1)
            enough = 1 - (1 - b) ** k <= at * b + 1e-12
            assert bool((enough == valid).all()) or (k == 1 and valid is False)
        assert bool((scale >= 1).all() and (scale <= k).all())


ONE_COLUMN: dict[str, tuple[Choice, Any, str, Callable[..., Any]]] = {
    "q is not renormalised": (accept_recursively, recursive, "without", lambda q, x: q.scatter(1, x, 0.0)),
    "siblings as if drawn with replacement": (accept_recursively, recursive, "without", lambda q, x: q),
    "p stays as it is": (accept_recursively, recursive, "residual", lambda p, q: p),
    "the same uniform for each sibling": (accept_recursively, recursive, "_spread", lambda u, a: u),
    "gamma of one candidate": (accept_independent, k_seq, "gamma", lambda p, q, k: torch.ones(len(p), dtype=torch.float64)),
    "replacement from p": (accept_independent, k_seq, "_rest", lambda p, share, k: p),
    "what one draw accepts taken off p": (accept_independent, k_seq, "_rest", lambda p, share, k: (p - share).clamp(min=0)),
}


@pytest.mark.parametrize("name", ONE_COLUMN)
def test_wrong_rules_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, module, function, wrong = ONE_COLUMN[name]
    p, q = (values[0] for values in PAIRS["random"](5, 7))
    monkeypatch.setattr(module, function, wrong)
    assert (law_of_column(choice, p, q, 2)[0] - p).abs().max() > 1e3 * EXACT  # much more for most


def test_any_larger_gamma_is_exact_and_accepts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = (values[0] for values in PAIRS["random"](5, 7))
    least = law_of_column(accept_independent, p, q, 3)[1]
    monkeypatch.setattr(k_seq, "gamma", lambda p, q, k: k.double())
    monkeypatch.setattr("test_tree_rules.gamma_of", lambda p, q, k: k)
    law, accepted = law_of_column(accept_independent, p, q, 3)
    torch.testing.assert_close(law, p, rtol=0, atol=EXACT)
    assert accepted < least


# ── trees ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def uneven(tree: Tree) -> None:
    """Three children, and a chain below the second."""
    for column in [tree.draw(0) for _ in range(3)][1:2]:
        tree.draw(tree.draw(column))


def by_depths_below(tree: Tree) -> None:
    """The root has a second child only if the first child's child is token 0: known before the second is drawn."""
    below = tree.draw(tree.draw(0))
    if tree.last[below] == 0:
        tree.draw(0)


def by_the_elder(tree: Tree) -> None:
    """A second child, with two of its own, after token 1 only; the first has a child otherwise."""
    first = tree.draw(0)
    if tree.last[first] == 1:
        second = tree.draw(0)
        tree.draw(second)
        tree.draw(second)
    else:
        tree.draw(first)


def sequences(tree: Tree) -> None:
    """Two sequences of two tokens, those that agree as one."""
    for column in [tree.draw(0), tree.draw(0)]:
        tree.draw(column)


def nothing(tree: Tree) -> None:
    """No node."""


SHAPES = (bushy, uneven, by_depths_below, by_the_elder, nothing)


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
    real, tree_walk.draw = tree_walk.draw, noted
    try:
        paths, _ = Rejection().decide(tree, scores, u).lists
    finally:
        tree_walk.draw = real
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


TREE_PAIRS = ("random", "zeros in both", "greedy target", "equal", "disjoint")


@pytest.mark.parametrize("pair", TREE_PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_without_replacement(shape: Callable[[Tree], None], pair: str) -> None:
    p, q = PAIRS[pair](3, 5)
    law, accepted = committed(p, q, shape)
    torch.testing.assert_close(law, chain_rule(p, HORIZON), rtol=0, atol=EXACT)
    assert (accepted > 0) == (shape is not nothing) or pair != "random"


@pytest.mark.parametrize("pair", TREE_PAIRS)
def test_independent_sequences(pair: str) -> None:
    p, q = PAIRS[pair](3, 5)
    law, accepted = committed(p, q, sequences, independent=True)
    torch.testing.assert_close(law, chain_rule(p, HORIZON), rtol=0, atol=EXACT)
    assert accepted > 0.5 or pair != "random"


DIFFERENT = tuple(
    torch.stack([torch.tensor(weights, dtype=torch.float64).roll(by) for by in range(4)])
    for weights in ((0.4, 0.4, 0.1, 0.1), (0.1, 0.2, 0.3, 0.4))
)
"""What is left of p after a rejection is more than one token."""


def wrong_order(tree: Tree) -> None:
    """Siblings are verified in another order than that in which they were drawn."""
    bushy(tree)
    tree.draws = [draws[::-1] for draws in tree.draws]


def by_its_own_token(tree: Tree) -> None:
    """A second child is dropped for what it is."""
    tree.draw(0)
    second = tree.draw(0)
    if tree.last[second] == 0 and second != 0:
        tree.draws[0].pop()


def grouped(tree: Tree) -> None:
    """Three candidates, those of the same token one after the other."""
    for _ in range(3):
        tree.draw(0)
    tree.draws[0] = sorted(tree.draws[0], key=tree.draws[0].index)


@pytest.mark.parametrize(("shape", "independent"), [(wrong_order, False), (by_its_own_token, False), (grouped, True)])
def test_wrong_trees_show(shape: Callable[[Tree], None], independent: bool) -> None:
    p, q = DIFFERENT
    assert (committed(p, q, shape, independent)[0] - chain_rule(p, HORIZON)).abs().max() > 1e-4


def test_independent_draws_by_the_rule_of_others_show() -> None:
    """Each rule is exact for its own drafters only."""
    p, q = DIFFERENT

    def replaced(tree: Tree) -> None:
        tree.independent = True
        tree.draw(0)
        tree.draw(0)
        tree.independent = False

    assert (committed(p, q, replaced)[0] - chain_rule(p, HORIZON)).abs().max() > 1e-3
