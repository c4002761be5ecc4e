"""Rounds as captured functions: what their stages decide, checked at the first, and left to the stages where they cannot be.

Tests of: drafting.captured_inputs, models.compiled.block, models.compiled.draft_functions, drafting.captured,
models.compiled.round_functions, models.compiled.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from by_pairs import by_pairs
from captured_models import K, decode, hf, ids, pair, rows_of, runner
from recorder import Recorder
from shoal.api import Shoal
from shoal.bench.random_pairs import Imposed
from shoal.config import Limits, Sampling
from shoal.drafting.captured import CapturedRounds
from shoal.drafting.captured_inputs import require_verdict
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Controller, Fixed
from shoal.models.compiled import EXECUTORS, draft_functions, round_functions
from shoal.models.compiled.block import Block, View
from shoal.models.compiled.round_functions import Kind, RoundFunctions
from shoal.models.runner import Runner
from shoal.sampling import truncation
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.drawing import inverse_transform
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request
from shoal.types.rounds import Outcome
from shoal.types.trees import Verdict

RULES: tuple[Rule, ...] = (Rejection(), Coupled())


def rounds_run(model: Runner | None) -> int:
    assert model is not None
    assert model.captures is not None
    return model.captures.ran.total()


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, rounds are left to their stages."""
    return lambda: monkeypatch.setattr(CapturedRounds, "decide", lambda *_, **__: None)


class Ragged(Controller):
    """Draft lengths 0 to 4 by row and round; some rounds draft nothing at all."""

    limit = 4

    def __init__(self) -> None:
        self.round = 0

    def lengths(self, rows: Sequence[Any], waiting: int) -> list[int]:
        self.round += 1
        return [min((self.round * (2 + b)) % 5, row.max_draft_length) for b, row in enumerate(rows)]

    def learn(self, outcome: Outcome) -> None:
        return None


def tokens_of(rule: Rule, samplings: Sequence[Sampling], executor: str, lookahead: Any = None) -> tuple[Engine, Any]:
    made = engine_of(
        runner(hf(), executor), runner(hf(seed=1, layers=1), executor), lookahead or Fixed(K), rule=rule, max_batch=8
    )
    return made, rows_of(made, samplings)


SETTINGS: dict[str, list[Sampling]] = {
    "greedy": [Sampling(temperature=0.0)] * 3,
    "sampled": [Sampling(temperature=0.8, seed=i) for i in range(5)],
    "several": [Sampling(temperature=t, seed=2) for t in (0.0, 0.7, 1.2)],
    "top_p": [Sampling(top_p=0.9, top_k=20, seed=i) for i in range(3)],
}


@pytest.mark.slow(but=["Fixed-greedy-Rejection", "Fixed-sampled-Coupled"])
@by_pairs({"lookahead": [Fixed(1), Fixed(K), Ragged], "settings": SETTINGS, "rule": RULES})
def test_tokens_and_counts_are_those_of_the_stages(
    rule: Rule, settings: str, lookahead: Any, monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]
) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    made = lambda: lookahead() if lookahead is Ragged else lookahead  # noqa: E731
    engine, found = tokens_of(rule, SETTINGS[settings], "graphed", made())
    stages()
    plain, expected = tokens_of(rule, SETTINGS[settings], "eager", made())
    assert found == expected
    for count in ("rounds", "drafted", "accepted", "target_passes", "committed"):
        assert getattr(engine.stats, count) == getattr(plain.stats, count), count
    assert engine.stats.draft_passes >= plain.stats.draft_passes  # a longer round serves rows that are about to end
    target, draft = runners_of(engine)
    assert target.captures is not None
    assert target.captures.failures == []
    assert rounds_run(target) == engine.stats.rounds
    assert rounds_run(draft) == engine.stats.draft_passes
    assert rounds_run(runners_of(plain)[0]) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_those_of_the_stages(temperature: float, stages: Callable[[], None]) -> None:
    options = {"temperature": temperature, "rule": "rejection"}
    found = decode(pair("eager", draft_seed=1), **options)
    stages()
    expected = decode(pair("eager", draft_seed=1), **options)
    for one, other in zip(found, expected, strict=True):
        for sample, right in zip(one.samples, other.samples, strict=True):
            assert sample.logprobs == pytest.approx(right.logprobs, abs=1e-5)
            assert sample.processed_logprobs == pytest.approx(right.processed_logprobs, abs=1e-5)


def test_an_imposed_rate_is_kept_by_captured_rounds(stages: Callable[[], None]) -> None:
    rule = Imposed(0.7)
    engine, found = tokens_of(rule, SETTINGS["several"], "eager")
    assert rounds_run(runners_of(engine)[0]) == engine.stats.rounds
    stages()
    assert tokens_of(rule, SETTINGS["several"], "eager")[1] == found


def test_rounds_outlive_an_engine_and_end_with_either_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    made = pair("graphed", draft_seed=1)
    assert made.draft_model is not None
    target, draft = made.target.captures, made.draft_model.captures
    assert target is not None
    assert draft is not None
    decode(made)
    gc.collect()
    built = target.built.copy()
    decode(made)
    assert target.built == built
    generation = next(iter(target._of.values()))
    assert generation.rounds
    draft.forget(next(iter(draft._of)))  # the drafter's cache grows
    assert not generation.rounds


def test_few_rounds_are_captured_for_a_batch_that_ends_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture takes as long as many rounds: rows that end, and ask for fewer drafts at their ends, find one that serves them."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    models_ = runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed")
    made = engine_of(*models_, Fixed(K), rule=Rejection(), max_batch=8)
    for i in range(8):
        made.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=6 + 3 * i)))
    while made.step():
        pass
    target = runners_of(made)[0].captures
    assert target is not None
    kinds = [key for key in target.built if isinstance(key, Kind)]
    assert {(kind.rows, kind.k) for kind in kinds} <= {(8, K), (8, 0), (1, K), (1, 0)}
    assert sum(target.ran[kind] for kind in kinds) == made.stats.rounds > 4 * len(kinds)


@pytest.mark.slow(but=["1"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_draft_length_that_stays_is_captured_even_where_a_longer_one_is(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    target, draft = runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed")
    rows_of(engine_of(target, draft, Fixed(K), max_batch=8), SETTINGS["sampled"])
    gc.collect()
    engine = engine_of(target, draft, Fixed(k), max_batch=8)
    for _ in range(3):
        for sampling in SETTINGS["sampled"]:
            engine.submit(Request((1, 2, 3), 1, sampling, Limits(max_new_tokens=16)))
    while engine.step():
        pass
    assert target.captures is not None
    assert k in {key.k for key in target.captures.built if isinstance(key, Kind)}


# ── what is left to the stages ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["{'repetition_penalty': 1.3}"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 2.0}},
        {"temperature": 1e-4},
        {"min_new_tokens": 3},
    ],
    ids=str,
)
def test_settings_that_captured_rounds_do_not_take(options: dict[str, Any], stages: Callable[[], None]) -> None:
    made = pair("eager", draft_seed=1)
    found = decode(made, **options)
    assert rounds_run(made.target) == 0
    stages()
    assert ids(found) == ids(decode(pair("eager", draft_seed=1), **options))


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_logits_that_are_not_finite_are_left_to_the_stages(role: str, stages: Callable[[], None]) -> None:
    """One token's embedding is NaN: rounds in which it is fed, and those after, must be what they are by stages."""

    def result() -> Any:
        models_ = [tiny_model("llama", seed=0, layers=2), tiny_model("llama", seed=1, layers=1)]
        models_[role == "drafter"].model.embed_tokens.weight.data[7] = torch.nan
        made = Shoal(*(runner(model) for model in models_), max_batch=6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs = made.generate([[1, 2, 3], [4, 5]], 3, lookahead=K, max_new_tokens=24, seed=5, logit_bias={})
        reasons = [sample.finish_reason for output in outputs for sample in output.samples]
        return rounds_run(made.target), ids(outputs), reasons, outputs.stats.accepted

    run, *found = result()
    assert run
    stages()
    _, *expected = result()
    assert found == expected


def flat(k: int, rule: Rule, samplings: Sequence[Sampling]) -> tuple[Engine, list[list[int]]]:
    """Over 512 tokens that are about as probable as each other."""
    target, draft = (runner(tiny_model("llama", seed=seed, vocab_size=512), "graphed") for seed in (0, 1))
    made = engine_of(target, draft if k else None, Fixed(k), rule=rule, max_batch=8)
    return made, rows_of(made, samplings)


@pytest.mark.slow(but=["{'top_p': 0.9}-0-Rejection()", "{'top_k': 150}-4-Coupled()"])
@pytest.mark.parametrize(("k", "rule"), [(0, Rejection()), (K, Rejection()), (K, Coupled())], ids=str)
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 150}, {"typical_p": 0.9}], ids=str)
def test_rounds_look_at_more_candidates_where_there_are_too_few(
    k: int, rule: Rule, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]
) -> None:
    """A round in which 4 candidates are too few is left to the stages, and the next looks at 16, and so on. What the drafter's
    candidates leave out costs acceptance and no exactness: drafts of another q are rejected more often."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    monkeypatch.setattr(draft_functions, "first_candidates", lambda _: 4)
    samplings = [Sampling(seed=i, **cut) for i in range(3)] + [Sampling(temperature=0.0, **cut)]
    made, found = flat(k, rule, samplings)
    target = runners_of(made)[0].captures
    assert target is not None
    assert target.failures == []
    assert list(target.candidates.values()) == [256]  # half of the vocabulary or more is sorted
    assert rounds_run(runners_of(made)[0]) == made.stats.rounds
    stages()
    if isinstance(rule, Coupled) or not k:
        assert found == flat(k, rule, samplings)[1]


def test_what_too_few_candidates_say_is_noticed(monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]) -> None:
    """Negative control: rounds that go on with what the candidates hold."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    monkeypatch.setattr(draft_functions, "first_candidates", lambda _: 4)
    monkeypatch.setattr(truncation, "_lowest", lambda kept: torch.full_like(kept[:, 0], torch.inf))
    samplings = [Sampling(seed=i, top_p=0.9) for i in range(3)]
    made, found = flat(0, Coupled(), samplings)
    stages()
    assert rounds_run(runners_of(made)[0]) == made.stats.rounds
    assert found != flat(0, Coupled(), samplings)[1]


# ── what is wrong is found at the first round ───────────────────────────────────────────────────────────────────────


def wrong_decision(self: RoundFunctions, *arguments: Any) -> Any:
    results, logits = verified(self, *arguments)
    results[:, 0] += 1
    return results, logits


def wrong_position(self: Block, plan: Any, capacity: int) -> Any:
    numbers = placed(self, plan, capacity)
    numbers[: self.bucket.rows * self.bucket.q] += 1
    return numbers


def wrong_step(found: Any, then: Block, **options: Any) -> None:
    fed(found, then, **options)
    then.tokens.add_(1)


def wrong_cell(self: Block, plan: Any, capacity: int) -> Any:
    numbers = placed(self, plan, capacity)
    block = self.bucket.rows * self.bucket.q
    numbers[2 * block] -= 1
    return numbers


def wrong_padding(self: Block, plan: Any, capacity: int) -> Any:
    """Unused columns and rows write into the first cell of row 0."""
    self.scratch = 0
    return placed(self, plan, capacity)


def wrong_layer(self: View, store: Tensor, states: Tensor) -> Tensor:
    return written(self, store, states.roll(1, dims=-1) if self._layer == 1 else states)


def wrong_draw(*arguments: Any, **options: Any) -> Any:
    """Drafts what the drafter thinks least of."""
    found = stepped(*arguments, **options)
    return found._replace(tokens=found.logits.argmin(-1))


verified, placed, fed = RoundFunctions.verified, Block.placed, round_functions.feed
written, stepped = View._stored, round_functions.stepped
SABOTAGES: dict[str, tuple[Any, str, Any, str]] = {
    "decision": (RoundFunctions, "verified", wrong_decision, "decides"),
    "position": (Block, "placed", wrong_position, "logits diverge"),
    "cell": (Block, "placed", wrong_cell, "logits diverge"),
    "layer": (View, "_stored", wrong_layer, "logits diverge"),
    "step": (round_functions, "feed", wrong_step, "logits diverge"),
    "draw": (round_functions, "stepped", wrong_draw, "does not draw from the distribution"),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_wrong_round_is_found_at_the_first(
    sabotage: str, monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]
) -> None:
    owner, name, wrong, words = SABOTAGES[sabotage]
    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as seen:
        patched.setattr(owner, name, wrong)
        warnings.simplefilter("always")
        engine, found = tokens_of(Rejection(), [Sampling(0.8, seed=i, top_k=5) for i in range(3)], "eager")
    target = runners_of(engine)[0].captures
    assert target is not None
    assert words in target.failures[0]
    assert "no more captured rounds" in str(seen[0].message)
    stages()
    assert found == tokens_of(Rejection(), [Sampling(0.8, seed=i, top_k=5) for i in range(3)], "eager")[1]


@pytest.mark.parametrize(("drawn", "explained"), [(0, True), (1, True), (2, False)])
def test_a_verdict_that_rounding_explains_is_the_rules(drawn: int, explained: bool) -> None:
    """A uniform that lies at the end of a token draws it or the next one, by the last bit of sums; the one behind it is a fault."""
    weights, uniforms = torch.tensor([[0.25, 0.25, 0.5]] * 2), torch.tensor([[0.25], [0.9]], dtype=torch.float64)

    def decided(logits: torch.Tensor, scale: float = 1.0) -> Verdict:
        return Verdict(torch.zeros(2, dtype=torch.long), inverse_transform(weights, scale * uniforms), weights)

    functions: Any = SimpleNamespace(decided=decided)
    found: Any = SimpleNamespace(accepted=np.array([0, 0]), tokens=np.array([drawn, 2]))
    with nullcontext() if explained else pytest.raises(ArithmeticError, match="does not decide what its rule decides"):
        require_verdict(functions, weights, found)


def test_padding_that_is_not_set_aside_shows(monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]) -> None:
    """Negative control: a comparison need not find it, as ordinary passes read the same cell afterwards."""
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patched.setattr(Block, "placed", wrong_padding)
        found = tokens_of(Rejection(), SETTINGS["sampled"], "eager")[1]
    stages()
    assert found != tokens_of(Rejection(), SETTINGS["sampled"], "eager")[1]


def test_a_limit_of_drafts_and_rows_that_end(stages: Callable[[], None]) -> None:
    def result() -> list[list[int]]:
        made = engine_of(runner(hf()), runner(hf(seed=1, layers=1)), Fixed(K), rule=Rejection(), max_batch=4)
        rows = [
            row
            for i in range(6)
            for row in made.submit(
                Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=3 + 4 * i), max_draft=[None, 0, 2][i % 3])
            )
        ]
        while made.step():
            pass
        return [row.tokens for row in rows]

    found = result()
    stages()
    assert found == result()
