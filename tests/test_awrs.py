"""Weights of samples under checks and masks: with them, samples have the law of p given that the whole text is allowed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.constraints.protocol import Allowed, Constraint
from shoal.constraints.weights import weighed
from shoal.engine import checks
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.awrs import awrs
from shoal.testing.engines import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row

V, EOS, NEW, SAMPLES = 4, 3, 3, 1500
SCRIPT = hashed(V, 2)
PROMPT = (0, 1)

# ── the estimate ────────────────────────────────────────────────────────────────────────────────────────────────────

Estimator = Callable[..., tuple[int | None, float]]


def expected(estimate: Estimator, p: Tensor, passing: set[int]) -> dict[int | None, float]:
    """E[weight 1(token)] by all orders in which tokens can be drawn without replacement."""
    found: dict[int | None, float] = defaultdict(float)
    for order in itertools.permutations(range(len(p))):
        left, probability = 1.0, 1.0
        for token in order:
            probability *= float(p[token]) / left
            left = max(left - float(p[token]), 1e-300)
        drawn = iter(order)
        token, weight = estimate(p, next(drawn), passing.__contains__, lambda _, drawn=drawn: next(drawn))
        found[token] += probability * weight
    return found


CASES = [
    (p, set(passing))
    for p in ([0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01])
    for size in range(5)
    for passing in itertools.combinations(range(4), size)
]


@pytest.mark.parametrize(("p", "passing"), CASES)
def test_the_estimate_is_unbiased_for_every_token(p: list[float], passing: set[int]) -> None:
    found = expected(awrs, torch.tensor(p, dtype=torch.float64), passing)
    for token in range(4):
        assert found[token] == pytest.approx(p[token] if token in passing else 0.0, abs=1e-12)
    assert found[None] == 0.0


def no_second(p: Tensor, first: int, passes: Any, following: Any, *, weighs: bool = True) -> tuple[int | None, float]:
    """What was refused is counted, and nothing is asked of what follows."""
    return awrs(p, first, passes, following)[0], _unasked(p, first, passes, following)


def _unasked(p: Tensor, first: int, passes: Any, _: Any) -> float:
    return 1.0 if passes(first) else 1.0 - float(p[first])


def always_shared(p: Tensor, first: int, passes: Any, following: Any, *, weighs: bool = True) -> tuple[int | None, float]:
    """The share of the token that passed, whatever the one after it says."""
    token, weight = awrs(p, first, passes, following)
    return token, weight * (float(p[first]) if token == first and weight == 1.0 else 1.0)


@pytest.mark.parametrize("wrong", [no_second, always_shared])
def test_a_biased_estimate_is_caught(wrong: Estimator) -> None:
    p, passing = [0.5, 0.3, 0.15, 0.05], {0, 2}
    found = expected(wrong, torch.tensor(p, dtype=torch.float64), passing)
    assert max(abs(found[token] - (p[token] if token in passing else 0.0)) for token in range(4)) > 0.01


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


def allowed(tokens: tuple[int, ...]) -> bool:
    """No 2 after a 0, and an end only after an even number of tokens."""
    return (0, 2) not in itertools.pairwise(tokens) and (tokens[-1] != EOS or len(tokens) % 2 == 1)


class Asked:
    """Checks single tokens."""

    def start(self, row: Row) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        return (*state, token) if allowed((*state, token)) else None

    def may_end(self, state: tuple[int, ...]) -> bool:
        return allowed((*state, EOS))


class Masked(Constraint[tuple[int, ...]]):
    """Masks the vocabulary."""

    def begin(self, row: Row) -> tuple[int, ...]:
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def mask(self, states: Any, vocab_size: int, device: torch.device) -> Allowed:
        tokens = torch.tensor([[token != EOS and allowed((*state, token)) for token in range(V)] for state in states])
        ends = torch.tensor([allowed((*state, EOS)) for state in states])
        return Allowed(tokens, ends)


@cache
def truth() -> dict[tuple[int, ...], float]:
    """p of every text that is allowed."""
    found: dict[tuple[int, ...], float] = {}

    def go_on(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == NEW or tokens[-1:] == (EOS,):
            found[tokens] = probability
            return
        p = SCRIPT((*PROMPT, *tokens)).double().softmax(-1)
        for token in range(V):
            if allowed((*tokens, token)):
                go_on((*tokens, token), probability * float(p[token]))

    go_on((), 1.0)
    return found


def deviation(constraint: Any, k: int, rule: Rule) -> tuple[float, int, int]:
    """Greatest deviation of the weighted counts from p, in standard errors; drafts accepted and drafted."""
    target = scripted(SCRIPT, V)
    draft = scripted(mixed(SCRIPT, hashed(V, 9), every=2), V) if k else None
    engine = engine_of(target, draft, Fixed(k), max_batch=250, rule=rule, eos=[EOS])
    request = Request(PROMPT, SAMPLES, Sampling(seed=4), Limits(max_new_tokens=NEW), constraints=(constraint,))
    rows = engine.submit(weighed(request))
    while engine.step():
        pass
    sums: dict[tuple[int, ...], float] = defaultdict(float)
    for row in rows:
        assert row.error is None
        sums[tuple(row.tokens[2:])] += math.exp(row.log_weight)
    assert set(sums) <= set(truth())
    # No weight is above 1, so that the variance of a text's weight is at most p.
    most = max(abs(sums[text] / SAMPLES - p) / math.sqrt(p / SAMPLES) for text, p in truth().items() if p > 1e-3)
    return most, engine.stats.accepted, engine.stats.drafted


@pytest.mark.parametrize("constraint", [Asked(), Masked()], ids=["checks", "masks"])
@pytest.mark.parametrize(
    ("k", "rule"), [(0, Rejection()), (2, Rejection()), (2, Coupled())], ids=["plain", "drafts", "coupled"]
)
def test_weighted_samples_have_the_law_of_p_given_that_the_text_is_allowed(constraint: Any, k: int, rule: Rule) -> None:
    most, accepted, drafted = deviation(constraint, k, rule)
    assert most < 4
    assert 0 < accepted < drafted or not k


def one(p: Tensor, first: int, passes: Any, following: Any, *, weighs: bool = True) -> tuple[int | None, float]:
    return awrs(p, first, passes, following, weighs=False)


@pytest.mark.parametrize("wrong", [one, no_second])
def test_wrong_weights_show_in_counted_samples(wrong: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "awrs", wrong)
    assert deviation(Asked(), 2, Rejection())[0] > 5


def test_few_tokens_are_asked_about() -> None:
    """Against a mask, which asks about each token of the vocabulary at each place."""
    asked = 0

    class Counted(Asked):
        def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
            nonlocal asked
            asked += 1
            return super().after(state, token)

    engine = engine_of(scripted(hashed(200, 0), 200), None, Fixed(0), max_batch=50)
    rows = engine.submit(weighed(Request(PROMPT, 20, Sampling(seed=1), Limits(max_new_tokens=10), constraints=(Counted(),))))
    while engine.step():
        pass
    committed = sum(row.new_tokens for row in rows)
    assert committed < asked < 8 * committed


@pytest.mark.parametrize(
    ("sampling", "constraints", "message"),
    [
        (Sampling(), (), "weighs samples by what limits them"),
        (Sampling(temperature=0.0), (Asked(),), "temperature=0"),
        (Sampling(top_p=0.9), (Masked(),), "leave out top_k"),
    ],
)
def test_what_cannot_be_weighed_is_refused(sampling: Sampling, constraints: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        weighed(Request(PROMPT, 1, sampling, constraints=constraints))
