"""Keyed uniforms: pure, uniform, and independent over every axis of the key.

The statistical tests are deterministic; on an ideal generator each would fail with probability 1e-6.

Tests of: sampling.uniforms.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enumeration import chi_square
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.uniforms import AHEAD, Purpose, UniformsAhead, group_seed, row_seed, uniforms
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row

ALPHA = 1e-6
COUNT = 200_000
BINS = 16


def flat(counts: np.ndarray) -> float:
    return chi_square(torch.from_numpy(counts), torch.full(counts.shape, 1 / counts.size))


def squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How often (x, y) falls into each square of the unit square."""
    return np.bincount((x * BINS).astype(int).ravel() * BINS + (y * BINS).astype(int).ravel(), minlength=BINS * BINS)


DRAWN = [Purpose.TOKEN, Purpose.ACCEPT, Purpose.REPLACE]


def test_known_values() -> None:
    """Seeds that people wrote down must keep their meaning."""
    drawn = uniforms([[0], [1]], [5, 6], Purpose.TOKEN)
    expected = [[0.8132181901360952, 0.19041952841964171], [0.46526177321578777, 0.9911237274725585]]
    assert drawn.tolist() == expected
    rows = [row_seed(0, 0), row_seed(0, 1), row_seed(1, 0)]
    assert rows == [8147104208329303767, 3980143261097177850, 6915206964022700985]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.sampled_from(DRAWN))
def test_a_uniform_is_a_function_of_its_key_alone(seed: int, position: int, purpose: Purpose) -> None:
    alone = float(uniforms(seed, position, purpose))
    assert 0 <= alone < 1
    assert float(alone * 2**53).is_integer()
    block = uniforms(np.array([seed, 7])[:, None, None], np.array([3, position])[:, None], np.array(DRAWN))
    assert block.shape == (2, 2, 3)
    assert block[0, 1, DRAWN.index(purpose)] == alone


@given(st.integers(), st.lists(st.integers(0, 2**63 - 1), max_size=9), st.integers(0, 2**40), st.integers(0, 10_000))
def test_any_request_gives_row_seeds_that_fit(seed: int, prompt: list[int], occurrence: int, row: int) -> None:
    assert 0 <= row_seed(group_seed(seed, prompt, occurrence), row) < 2**63


def test_row_seeds_are_distinct() -> None:
    assert len({row_seed(seed, row) for seed in range(100) for row in range(100)}) == 10_000


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_over_positions_and_over_seeds(purpose: Purpose) -> None:
    for drawn in (uniforms(row_seed(0, 0), np.arange(COUNT), purpose), uniforms(np.arange(COUNT), 17, purpose)):
        assert flat(np.bincount((drawn * 256).astype(int), minlength=256)) > ALPHA
        assert flat(np.bincount((drawn * 2**53).astype(np.int64) % 256, minlength=256)) > ALPHA  # the low bits as well


def neighbours() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of uniforms whose keys are as close as keys can be."""
    positions, seeds = np.arange(COUNT), np.arange(COUNT)
    rows = np.array([row_seed(3, row) for row in range(2000)])[:, None]
    requests = np.array([row_seed(seed, 0) for seed in range(2000)])[:, None]
    few = np.arange(100)
    token, accept, replace = Purpose.TOKEN, Purpose.ACCEPT, Purpose.REPLACE
    return {
        "next position": (uniforms(5, positions, token), uniforms(5, positions + 1, token)),
        "next seed": (uniforms(seeds, 5, token), uniforms(seeds + 1, 5, token)),
        "token and accept": (uniforms(5, positions, token), uniforms(5, positions, accept)),
        "accept and replace": (uniforms(5, positions, accept), uniforms(5, positions, replace)),
        "token and replace": (uniforms(5, positions, token), uniforms(5, positions, replace)),
        "accept and next token": (uniforms(5, positions, accept), uniforms(5, positions + 1, token)),
        "next row": (uniforms(rows[:-1], few, token), uniforms(rows[1:], few, token)),
        "next request": (uniforms(requests[:-1], few, token), uniforms(requests[1:], few, token)),
        "seed against position": (uniforms(rows[:-1], few + 1, token), uniforms(rows[1:], few, token)),
    }


@pytest.mark.parametrize("pair", neighbours())
def test_neighbouring_keys_are_independent(pair: str) -> None:
    x, y = neighbours()[pair]
    assert flat(squares(x, y)) > ALPHA


def test_the_test_of_independence_can_fail() -> None:
    x = uniforms(5, np.arange(COUNT), Purpose.TOKEN)
    assert flat(squares(x, x)) < ALPHA
    assert flat(squares(x, 0.98 * x + 0.02 * uniforms(6, np.arange(COUNT), Purpose.TOKEN))) < ALPHA


def test_requests_without_a_seed_have_seeds_of_their_own() -> None:
    """Of 63 random bits: two of 5,000 such numbers are equal by chance once in 10^12 runs."""
    engine = engine_of(scripted(hashed(5), 5), None, Fixed(0))
    seeds = [row.seed for _ in range(5_000) for row in engine.submit(Request((1, 2)))]
    assert len(set(seeds)) == len(seeds)
    assert flat(np.bincount(np.array(seeds) >> 55, minlength=256)) > ALPHA  # none of the high bits is missing
    assert flat(np.bincount(np.array(seeds) % 256, minlength=256)) > ALPHA


# ── ahead of the rounds ─────────────────────────────────────────────────────────────────────────────────────────────


class Counted:
    """A rule that counts how often it is asked for uniforms."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.calls = rule, 0
        self.numbers_rounds = rule.numbers_rounds
        self.draw, self.decide = rule.draw, rule.decide

    def uniforms(self, *asked: Any) -> torch.Tensor:
        self.calls += 1
        return self.rule.uniforms(*asked)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("rule", [Rejection, Coupled])
def test_uniforms_computed_ahead_are_those_of_the_rule(rule: Callable[[], Rule], numbered: bool) -> None:
    """Rows join, leave, change their order, and go on by different lengths; each number is what the rule gives for that round."""
    random, counted = Random(0), Counted(rule())
    ahead = UniformsAhead(counted)
    request = Request((1, 2), 1)
    rows: list[Row] = []
    for round_ in range(400):
        rows = [row for row in rows if random.random() > 0.02]
        while len(rows) < 4 or (len(rows) < 9 and random.random() < 0.1):
            rows.append(Row(request, 0, 0, random.getrandbits(62), [1] * random.randrange(2, 90), frozenset(), 1 << 20))
        random.shuffle(rows)
        width = AHEAD + 3 if round_ % 100 == 99 else random.choice([1, 5, 17, 17, 47] if round_ > 200 else [1, 5, 17])
        rounds = [row.rounds for row in rows] if numbered else None
        expected = rule().uniforms([row.seed for row in rows], [len(row.tokens) for row in rows], width, rounds)
        assert torch.equal(ahead.of_round(rows, width, numbered), expected)
        for row in rows:
            row.tokens += [1] * random.randrange(1, 7)
            row.rounds += 1
    assert counted.calls > 260 if numbered and rule is Rejection else counted.calls < 200
    assert len(ahead._table) <= 9 * AHEAD


def test_numbers_of_plain_rounds_are_computed_ahead() -> None:
    """Plain rounds, one or several in a go, and a few rounds with drafts among them."""
    random, counted = Random(2), Counted(Rejection())
    ahead = UniformsAhead(counted)
    rows = [Row(Request((1,), 1), 0, i, random.getrandbits(62), [1] * (i + 2), frozenset(), 1 << 20) for i in range(5)]

    def right(later: int) -> torch.Tensor:
        seeds, firsts = [row.seed for row in rows], [len(row.tokens) + later for row in rows]
        return Rejection().uniforms(seeds, firsts, 1, [row.rounds + later for row in rows])[:, 0]

    for round_ in range(200):
        drafts, several = round_ % 50 == 49, 1 + round_ % 8
        if drafts:
            ahead.of_round(rows, 4, numbered=True)
        else:
            assert torch.equal(
                ahead.of_rounds(rows, several, numbered=True), torch.stack([right(i) for i in range(several)], 1)
            )
            assert torch.equal(ahead.of_round(rows, 1, numbered=True)[:, 0], right(0))
            assert torch.equal(
                ahead.of_round(rows, 1, True, later=1)[:, 0],
                Rejection().uniforms(
                    [row.seed for row in rows], [len(row.tokens) for row in rows], 1, [row.rounds + 1 for row in rows]
                )[:, 0],
            )
        for row in rows:
            row.tokens += [1] * (random.randrange(1, 5) if drafts else several)
            row.rounds += 1 if drafts else several
    assert counted.calls - 200 <= 40  # of those that the test asks for: with drafts, and later by one


def test_rows_of_one_call_need_new_uniforms_together() -> None:
    """Eight rows that go on by 1 to 5 tokens a round: the rule is asked once in ten rounds or more rarely."""
    random, counted = Random(1), Counted(Coupled())
    ahead = UniformsAhead(counted)
    rows = [Row(Request((1,), 1), 0, i, i, [1], frozenset(), 1 << 20) for i in range(8)]
    for _ in range(200):
        ahead.of_round(rows, 5, numbered=True)
        for row in rows:
            row.tokens += [1] * random.randrange(1, 6)
    assert counted.calls <= 20
