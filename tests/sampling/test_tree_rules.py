"""Rules for trees whose q is known: the distribution of what a round commits, enumerated over trees and uniforms.

`outcomes` runs a program once for each sequence of draws that it may make; all its results are then decided in one call of the real
code. The token that ends a round is not drawn: the weights that it would be drawn from are noted instead.

Tests of: sampling.acceptance.rejection, sampling.acceptance.walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import chain_rule
from laws import PAIRS, table
from shoal.sampling.acceptance import rejection
from shoal.sampling.acceptance.rejection import accept_independent, accept_recursively, gamma
from shoal.sampling.acceptance.walk import Choice
from tree_laws import DIFFERENT, EXACT, HORIZON, Tree, bushy, by_depths_below, committed, nothing, thresholds

EDGE = 1e-7


# ── one column ──────────────────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("choice", [accept_recursively, accept_independent])
def test_rows_with_fewer_draws_are_decided_as_alone(choice: Choice) -> None:
    p, q, counts = table(6, 1), table(6, 2), [1, 3, 2, 3, 1, 2]
    tokens = torch.tensor([[(b + j) % 6 if j < count else -1 for j in range(3)] for b, count in enumerate(counts)])
    for u in torch.linspace(0, 0.95, 9, dtype=torch.float64):
        chosen, rest = choice(p, q, tokens, u.expand(6))
        for b, count in enumerate(counts):
            alone = choice(p[b, None], q[b, None], tokens[b, None, :count], u[None])
            assert (int(chosen[b]), rest[b].tolist()) == (int(alone[0]), pytest.approx(alone[1][0].tolist(), abs=1e-12))


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
    "q is not renormalised": (accept_recursively, rejection, "without", lambda q, x: q.scatter(1, x, 0.0)),
    "siblings as if drawn with replacement": (accept_recursively, rejection, "without", lambda q, x: q),
    "p stays as it is": (accept_recursively, rejection, "residual", lambda p, q: p),
    "the same uniform for each sibling": (accept_recursively, rejection, "_spread", lambda u, a: u),
    "gamma of one candidate": (
        accept_independent,
        rejection,
        "gamma",
        lambda p, q, k: torch.ones(len(p), dtype=torch.float64),
    ),
    "replacement from p": (accept_independent, rejection, "_rest", lambda p, share, k: p),
    "what one draw accepts taken off p": (
        accept_independent,
        rejection,
        "_rest",
        lambda p, share, k: (p - share).clamp(min=0),
    ),
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
    monkeypatch.setattr(rejection, "gamma", lambda p, q, k: k.double())
    monkeypatch.setattr("tree_laws.gamma_of", lambda p, q, k: k)
    law, accepted = law_of_column(accept_independent, p, q, 3)
    torch.testing.assert_close(law, p, rtol=0, atol=EXACT)
    assert accepted < least


# ── trees ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def uneven(tree: Tree) -> None:
    """Three children, and a chain below the second."""
    for column in [tree.draw(0) for _ in range(3)][1:2]:
        tree.draw(tree.draw(column))


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


SHAPES = (bushy, uneven, by_depths_below, by_the_elder, nothing)


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
