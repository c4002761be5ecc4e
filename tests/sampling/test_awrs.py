"""Weights of samples under checks and masks: with them, samples have the law of p given that the whole text is allowed.

Tests of: sampling.drawing, constraints.protocol, constraints.dressing, engine.checks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import particles
from particles import Texts
from shoal.config import Limits, Sampling
from shoal.constraints.dressing import add_weights
from shoal.engine import checks
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling import drawing as awrs_module
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.drawing import awrs
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request

V, EOS, NEW, SAMPLES = 4, 3, 3, 1500
SCRIPT = hashed(V, 2)
PROMPT = (0, 1)

# ── the estimate ────────────────────────────────────────────────────────────────────────────────────────────────────

Estimator = Callable[..., tuple[int | None, float]]


class Course:
    """The draws of one run, each with its probability. Beyond those that are given it takes the first possible ones, and notes the
    others for further runs, but for courses of next to no probability."""

    def __init__(self, given: list[int], others: list[list[int]]) -> None:
        self.given, self.others, self.taken, self.probability = given, others, list[int](), 1.0

    def choose(self, options: list[tuple[int, float]]) -> int:
        if len(self.taken) == len(self.given):
            for value, probability in options[1:]:
                if self.probability * probability > 1e-6:
                    self.others.append([*self.taken, value])
            self.given = [*self.given, options[0][0]]
        value = self.given[len(self.taken)]
        self.probability *= dict(options)[value]
        self.taken.append(value)
        return value

    def following(self, left: Tensor) -> int:
        return self.choose([(token, float(left[token] / left.sum())) for token in left.nonzero()[:, 0].tolist()])

    def phantoms(self, mass: float) -> int:
        most = math.ceil(math.log(1e-6) / math.log(mass)) if mass > 1e-6 else 1
        return self.choose([(number, (1 - mass) * mass**number) for number in range(most)])


def expected(estimate: Estimator, p: Tensor, passing: set[int]) -> dict[int | None, float]:
    """E[weight 1(token)] by all courses of draws."""
    found: dict[int | None, float] = defaultdict(float)
    others: list[list[int]] = [[]]
    while others:
        course = Course(others.pop(), others)
        first = course.following(p)
        token, weight = estimate(p, first, passing.__contains__, course.following, course.phantoms)
        found[token] += course.probability * weight
    return found


CASES = [
    (p, set(passing))
    for p in ([0.5, 0.3, 0.15, 0.05], [0.75, 0.15, 0.1])
    for size in range(len(p) + 1)
    for passing in itertools.combinations(range(len(p)), size)
    if not 0 < sum(p[token] for token in passing) < 0.2  # many phantoms, and courses
]


@pytest.mark.parametrize(("p", "passing"), CASES)
def test_the_estimate_is_unbiased_for_every_token(p: list[float], passing: set[int]) -> None:
    found = expected(awrs, torch.tensor(p, dtype=torch.float64), passing)
    for token in range(len(p)):
        assert found[token] == pytest.approx(p[token] if token in passing else 0.0, abs=1e-12 if len(p) == 4 else 2e-3)
    assert found[None] == 0.0


def test_the_estimator_does_not_change_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed's tokens are those without weights, by both: their further draws come after the token is known. So with drafts."""

    def texts(weighted: bool, peak: float, k: int = 0) -> list[list[int]]:
        monkeypatch.setattr(awrs_module, "PEAK", peak)
        draft = scripted(mixed(SCRIPT, hashed(V, 9), every=2), V) if k else None
        engine = engine_of(scripted(SCRIPT, V), draft, Fixed(k), max_batch=50, rule=Coupled(), eos=[EOS])
        request = Request(PROMPT, 60, Sampling(seed=4), Limits(max_new_tokens=NEW), constraints=(Asked(),))
        rows = engine.submit(add_weights(request) if weighted else request)
        while engine.step():
            pass
        return [row.tokens for row in rows]

    assert texts(True, 0.0) == texts(True, 1.0) == texts(False, 0.5) == texts(False, 0.5, k=2)


@pytest.mark.parametrize("k", [0, 2])
def test_what_takes_the_place_of_a_refused_token_has_its_own_log_probability(k: int) -> None:
    """Of logits in float32, of which the kernel in C computes log-probabilities along with its verdict."""
    draft = scripted(mixed(SCRIPT, hashed(V, 9), every=2), V, dtype=torch.float32) if k else None
    engine = engine_of(scripted(SCRIPT, V, dtype=torch.float32), draft, Fixed(k), max_batch=50, eos=[EOS])
    rows = engine.submit(Request(PROMPT, 50, Sampling(seed=4), Limits(max_new_tokens=NEW), constraints=(Asked(),)))
    while engine.step():
        pass
    for row in rows:
        places = range(len(PROMPT), len(row.tokens))
        expected = [float(SCRIPT(tuple(row.tokens[:at])).log_softmax(-1)[row.tokens[at]]) for at in places]
        assert row.logprobs == pytest.approx(expected, abs=1e-5)


def no_second(p: Tensor, first: int, passes: Any, *draws: Any, weighs: bool = True) -> tuple[int | None, float]:
    """What was refused is counted, and nothing is asked of what follows."""
    return awrs(p, first, passes, *draws)[0], 1.0 if passes(first) else 1.0 - float(p[first])


def always_shared(p: Tensor, first: int, passes: Any, *draws: Any, weighs: bool = True) -> tuple[int | None, float]:
    """The share of the token that passed, whatever the one after it says."""
    token, weight = awrs(p, first, passes, *draws)
    return token, weight * (float(p[first]) if token == first and weight == 1.0 else 1.0)


def no_phantoms(
    p: Tensor, first: int, passes: Any, following: Any, _: Any, *, weighs: bool = True
) -> tuple[int | None, float]:
    """Draws with replacement, as if what was refused were never drawn again."""
    return awrs(p, first, passes, following, lambda mass: 0)


def by_what_passed(p: Tensor, first: int, passes: Any, *draws: Any, weighs: bool = True) -> tuple[int | None, float]:
    """The second token that passes is counted as one without bias would be: 2 / draws, not 1 / (draws - 1)."""
    token, weight = awrs(p, first, passes, *draws)
    return token, 2 / (1 / weight + 1) if weight else 0.0


@pytest.mark.parametrize("wrong", [no_second, always_shared, no_phantoms, by_what_passed])
def test_a_biased_estimate_is_caught(wrong: Estimator) -> None:
    p, passing = ([0.75, 0.15, 0.1], {0, 2}) if wrong in (no_phantoms, by_what_passed) else ([0.5, 0.3, 0.15, 0.05], {0, 2})
    found = expected(wrong, torch.tensor(p, dtype=torch.float64), passing)
    assert max(abs(found[token] - (p[token] if token in passing else 0.0)) for token in range(len(p))) > 0.005


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


def allowed(tokens: tuple[int, ...]) -> bool:
    """No 2 after a 0, and an end only after an even number of tokens."""
    return (0, 2) not in itertools.pairwise(tokens) and (tokens[-1] != EOS or len(tokens) % 2 == 1)


TEXTS = Texts(V, EOS, NEW, SCRIPT, PROMPT, allowed)


def truth() -> dict[tuple[int, ...], float]:
    return TEXTS.law


class Asked(particles.Asked):
    texts = TEXTS


class Masked(particles.Masked):
    texts = TEXTS


def deviation(constraint: Any, k: int, rule: Rule) -> tuple[float, int, int]:
    """Greatest deviation of the weighted counts from p, in standard errors; drafts accepted and drafted."""
    target = scripted(SCRIPT, V)
    draft = scripted(mixed(SCRIPT, hashed(V, 9), every=2), V) if k else None
    engine = engine_of(target, draft, Fixed(k), max_batch=250, rule=rule, eos=[EOS])
    request = Request(PROMPT, SAMPLES, Sampling(seed=4), Limits(max_new_tokens=NEW), constraints=(constraint,))
    rows = engine.submit(add_weights(request))
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


@pytest.mark.slow(but=["geometric"])
@pytest.mark.parametrize("peak", [0.0, 1.0], ids=["geometric", "recursive"])
def test_each_estimator_gives_that_law(peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awrs_module, "PEAK", peak)
    assert deviation(Asked(), 2, Rejection())[0] < 4


@pytest.mark.slow(but=["plain-checks", "coupled-masks"])
@pytest.mark.parametrize("constraint", [Asked(), Masked()], ids=["checks", "masks"])
@pytest.mark.parametrize(
    ("k", "rule"), [(0, Rejection()), (2, Rejection()), (2, Coupled())], ids=["plain", "drafts", "coupled"]
)
def test_weighted_samples_have_the_law_of_p_given_that_the_text_is_allowed(constraint: Any, k: int, rule: Rule) -> None:
    most, accepted, drafted = deviation(constraint, k, rule)
    assert most < 4
    assert 0 < accepted < drafted or not k


def one(p: Tensor, first: int, passes: Any, *draws: Any, weighs: bool = True) -> tuple[int | None, float]:
    return awrs(p, first, passes, *draws, weighs=False)


@pytest.mark.slow(but=["one"])
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
    rows = engine.submit(
        add_weights(Request(PROMPT, 20, Sampling(seed=1), Limits(max_new_tokens=10), constraints=(Counted(),)))
    )
    while engine.step():
        pass
    committed = sum(row.new_tokens for row in rows)
    assert committed < asked < 8 * committed


def test_what_is_drawn_after_many_refusals_has_the_law_of_what_passes() -> None:
    """Each further draw has a number of its own: by one number, what passes near the first token is drawn more often."""

    class Two(particles.Asked):
        def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
            return state if token in (0, 10) else None

    engine = engine_of(scripted(lambda _: torch.zeros(50), 50), None, Fixed(0), max_batch=250)
    rows = engine.submit(Request(PROMPT, 200, Sampling(seed=1), Limits(max_new_tokens=1), constraints=(Two(),)))
    while engine.step():
        pass
    assert 70 < sum(row.tokens[-1] == 0 for row in rows) < 130


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
        add_weights(Request(PROMPT, 1, sampling, constraints=constraints))
