"""The law of the samples: enumerated exactly through the real acceptance code, then counted through the whole engine.

Counted tests are deterministic (fixed seeds, float64 scripts). Each would fail with probability ALPHA if the seeds were drawn
anew; there are about 30 p-values in this file, so the whole file with probability 3e-5. They see a law that is off
by about 10 % in total variation, and `test_joint_law_at_full_power` one that is off by 2 %.

Tests of: engine.verify, sampling.acceptance.rejection, sampling.acceptance.one_sample,
sampling.acceptance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from by_pairs import by_pairs
from enumeration import chain_rule, chi_square, committed_distribution, independence
from laws import ALPHA, EXACT, PAIRS, SAMPLES, P, Q, codes, contingency, declared_law, joint, run, shifted, table
from shoal.config import Limits, Sampling
from shoal.lookahead.controller import Bass, Fixed, Lookahead
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import table_model
from shoal.types.requests import Request

MANY = 20_000


# ── enumerated ──────────────────────────────────────────────────────────────────────────────────────────────────────


@by_pairs({"pair": PAIRS, "vocab": [2, 5], "lengths": [(1,), (4,), (0, 1, 2, 3, 4)]})
def test_committed_tokens_have_the_law_of_the_target(pair: str, vocab: int, lengths: tuple[int, ...]) -> None:
    """All drafts, all acceptance outcomes, all replacements over 4 tokens; rounds of unequal draft lengths in one call."""
    for seed in (10, 20) if vocab < 5 else (10,):
        p, q = PAIRS[pair](vocab, seed)
        clip = vocab > 3 or lengths[0] % 2 == 0
        law = committed_distribution(p, q, 4, lengths, clip=clip)
        torch.testing.assert_close(law, chain_rule(p, 4), rtol=0, atol=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("vocab", "horizon"), [(8, 4), (7, 1)])
def test_larger_vocabularies(pair: str, vocab: int, horizon: int) -> None:
    p, q = PAIRS[pair](vocab, 5)
    torch.testing.assert_close(committed_distribution(p, q, horizon, (3, 1, 4)), chain_rule(p, horizon), rtol=0, atol=EXACT)


@pytest.mark.parametrize("vocab", [2, 3])
def test_a_longer_memory(vocab: int) -> None:
    p, q = table(vocab, 1, order=3), table(vocab, 2, order=3, zeros=0.3)
    torch.testing.assert_close(committed_distribution(p, q, 4, (4, 2), clip=False), chain_rule(p, 4), rtol=0, atol=EXACT)


def test_the_chain_rule_by_hand() -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    assert chain_rule(p, 2).tolist() == [[0.0625, 0.1875], [0.375, 0.375]]


# ── counted through the engine ──────────────────────────────────────────────────────────────────────────────────────


class Cycle:
    """Draft lengths that change from round to round, 0 among them."""

    limit = 4

    def __init__(self, lengths: Sequence[int] = (2, 0, 4, 1, 0, 0, 3)) -> None:
        self._lengths = itertools.cycle(lengths)

    def next_length(self) -> int:
        return next(self._lengths)

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@pytest.mark.slow(but=["8"])
@pytest.mark.parametrize(
    ("lookahead", "max_batch"),
    [
        pytest.param(Fixed(1), 250, id="1", marks=pytest.mark.slow),
        pytest.param(Fixed(3), 250, id="3", marks=pytest.mark.slow),
        pytest.param(Fixed(8), 33, id="8"),
        pytest.param(Bass(), 64, id="bass", marks=pytest.mark.slow),
        pytest.param(Cycle(), 100, id="cycle"),
    ],
)
def test_joint_law_of_four_tokens(lookahead: Lookahead, max_batch: int) -> None:
    engine, rows = run(table_model(P), table_model(Q), lookahead, max_batch=max_batch)
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA
    assert 0 < engine.stats.accepted < engine.stats.drafted  # both ways of a round were taken
    assert engine.stats.row_rounds < engine.stats.committed == 4 * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
def test_joint_law_at_full_power(rule: Rule) -> None:
    """Enough rows that a law off by 3 % in total variation would be noticed, of two tokens at a level of 1e-3."""
    engine, rows = run(table_model(P), table_model(Q), Fixed(1), horizon=2, samples=MANY, max_batch=200, rule=rule)
    law = chain_rule(P, 2)
    assert chi_square(joint(rows, 4), law) > 1e-3
    assert 0 < engine.stats.accepted < engine.stats.drafted == MANY
    for seed in range(20):
        drawn = torch.multinomial(shifted(law, 0.03).flatten(), MANY, True, generator=torch.Generator().manual_seed(seed))
        assert chi_square(torch.bincount(drawn, minlength=16), law.flatten()) < 1e-3


@pytest.mark.parametrize(
    "pair",
    ["zeros in both", *(pytest.param(pair, marks=pytest.mark.slow) for pair in ("greedy drafter", "disjoint", "equal"))],
)
def test_joint_law_with_awkward_pairs(pair: str) -> None:
    p, q = PAIRS[pair](4, 10)
    engine, rows = run(table_model(p), table_model(q), Fixed(2), horizon=3)
    assert chi_square(joint(rows, 4), chain_rule(p, 3)) > ALPHA
    assert (engine.stats.acceptance_rate == 1.0) == (pair == "equal")
    assert (engine.stats.accepted == 0) == (pair == "disjoint")


@pytest.mark.slow
def test_joint_law_in_float64() -> None:
    """Decided by torch, the others by the kernels in C where there are any."""
    _, rows = run(table_model(P, dtype=torch.float64), table_model(Q, dtype=torch.float64), Fixed(3))
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA


def test_joint_law_of_plain_decoding() -> None:
    engine, rows = run(table_model(P), None, Fixed(0))
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA
    assert engine.stats.drafted == engine.stats.draft_passes == 0


def test_joint_law_over_request_seeds() -> None:
    """One row per request, the seeds as close as users choose them."""
    engine = engine_of(table_model(P), table_model(Q), Fixed(3), max_batch=250)
    rows = [engine.submit(Request((0, 0), 1, Sampling(seed=seed), Limits(max_new_tokens=4)))[0] for seed in range(SAMPLES)]
    while engine.step():
        pass
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA
    assert independence(contingency(codes(rows[::2], 4, slice(2)), codes(rows[1::2], 4, slice(2)))) > ALPHA


def test_joint_law_under_temperature_and_top_k() -> None:
    """The declared distribution by hand: the three most probable tokens, to the power 1/T."""

    def step(new: tuple[int, ...]) -> Tensor:
        weights = P[(0, 0, *new)[-2:]] ** (1 / 0.7)
        weights = weights.masked_fill(weights == weights.min(), 0.0)
        return weights / weights.sum()

    _, rows = run(table_model(P), table_model(Q), Fixed(3), temperature=0.7, top_k=3)
    assert chi_square(joint(rows, 4), declared_law(step, 4, 4)) > ALPHA


def test_joint_law_under_penalties() -> None:
    """History-dependent at every drafted position: each earlier occurrence costs a factor e^0.8, the first one e^0.5 more."""

    def step(new: tuple[int, ...]) -> Tensor:
        count = torch.bincount(torch.tensor(new, dtype=torch.long), minlength=4)
        weights = P[(0, 0, *new)[-2:]] * torch.exp(-0.8 * count - 0.5 * (count > 0))
        return weights / weights.sum()

    _, rows = run(table_model(P), table_model(Q), Fixed(3), frequency_penalty=0.8, presence_penalty=0.5)
    assert chi_square(joint(rows, 4), declared_law(step, 4, 4)) > ALPHA


# ── independence ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_neighbours_are_independent() -> None:
    """A row's tokens do not depend on where it stood, on its neighbour's tokens, nor on what the neighbour had accepted."""
    _, rows = run(table_model(P), table_model(Q), Fixed(3), samples=2 * SAMPLES, max_batch=200)
    left, right = rows[::2], rows[1::2]
    own = codes(left, 4, slice(2))
    assert independence(contingency(own, codes(right, 4, slice(2)))) > ALPHA
    assert independence(contingency(own, codes(right, 4, slice(2, 4)))) > ALPHA
    assert independence(contingency(own, torch.tensor([row.accepted for row in right]))) > ALPHA
    assert independence(contingency(own, torch.tensor([row.rounds for row in right]))) > ALPHA
    assert independence(contingency(codes(rows, 4, slice(2)), torch.tensor([row.slot // 40 for row in rows]))) > ALPHA
    # The same statistic does see dependence where there is some: a row's own acceptance goes with its own tokens.
    assert independence(contingency(own, torch.tensor([row.accepted for row in left]))) < ALPHA


# ── the tests of the tests ──────────────────────────────────────────────────────────────────────────────────────────


def test_chi_square_knows_its_own_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    p = table(8, 2)[0]
    values = [
        chi_square(torch.bincount(torch.multinomial(p, 2000, True, generator=generator), minlength=8), p)
        for _ in range(1000)
    ]
    below = sum(value < 0.05 for value in values)
    assert 25 <= below <= 80  # binomial(1000, 0.05), both tails below 1e-4
    assert chi_square(torch.tensor([1, 0]), torch.tensor([0.0, 1.0])) == 0.0


def test_chi_square_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    counts, p = torch.tensor([30, 14, 34, 45, 57, 20]), torch.full((6,), 1 / 6, dtype=torch.float64)
    assert chi_square(counts, p) == pytest.approx(stats.chisquare(counts.tolist()).pvalue, rel=1e-9)
    pairs = torch.tensor([[20, 30, 25], [40, 25, 10]])
    assert independence(pairs) == pytest.approx(stats.chi2_contingency(pairs.numpy(), correction=False).pvalue, rel=1e-9)


def test_a_law_slightly_off_is_noticed() -> None:
    """The power of the counted tests: the drafter's law showing through by a tenth."""
    wrong = chain_rule(torch.lerp(P, Q, 0.1), 4)
    assert (wrong - chain_rule(P, 4)).abs().max() < 0.011
    for seed in range(20):
        drawn = torch.multinomial(wrong.flatten(), SAMPLES, True, generator=torch.Generator().manual_seed(seed))
        assert chi_square(torch.bincount(drawn, minlength=256), chain_rule(P, 4).flatten()) < ALPHA
