"""Rule 4 of capture (docs/explanation/captured-rounds.md): what depends on settings is part of the key: no function serves others.

Tests of: models.compiled, drafting.captured_kinds, models.compiled.captured_round,
models.compiled.round_functions, models.compiled.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from captured_models import hf, runner
from recorder import Recorder
from shoal.bench.random_pairs import Imposed
from shoal.config import Limits, Sampling
from shoal.drafting import captured_kinds
from shoal.drafting.captured_kinds import RoundKinds
from shoal.engine.engine import Engine
from shoal.errors import InternalError
from shoal.lookahead.controller import Fixed
from shoal.models.cache import SlotCache
from shoal.models.compiled import EXECUTORS
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.captures import Captures
from shoal.models.compiled.round_functions import Kind
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request

K = 3
Settings = tuple[Any, Rule, Sequence[Sampling], int]
"""Controller, rule, settings of the rows, new tokens."""
SAMPLED = [Sampling(temperature=0.9, seed=i) for i in range(3)]


CHANGES: dict[str, tuple[tuple[str, ...], Settings, Settings]] = {
    "rows": (("rows",), (Fixed(K), Rejection(), SAMPLED[:1], 12), (Fixed(K), Rejection(), SAMPLED, 12)),
    "k": (("k", "piece"), (Fixed(2), Rejection(), SAMPLED, 12), (Fixed(K), Rejection(), SAMPLED, 12)),
    "greedy": (
        ("style",),
        (Fixed(K), Rejection(), [Sampling(temperature=0.0)] * 3, 12),
        (Fixed(K), Rejection(), SAMPLED, 12),
    ),
    "rate": (("rule",), (Fixed(K), Imposed(0.0), SAMPLED, 12), (Fixed(K), Imposed(1.0), SAMPLED, 12)),
    "keys": (
        ("target_keys", "draft_keys"),
        (Fixed(K), Rejection(), SAMPLED[:1], 12),
        (Fixed(K), Rejection(), SAMPLED[:1], 72),
    ),
    "plain": (("style", "rule", "numbers"), (Fixed(0), Rejection(), SAMPLED, 12), (Fixed(0), Coupled(), SAMPLED, 12)),
}
"""What a second run has other than the first, and the fields of the key that say so."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs the function that was captured, with its settings."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    monkeypatch.setattr(captured_kinds, "STEADY", 1)  # no longer round serves a shorter one


def models() -> tuple[Runner, Runner]:
    return runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed")


def run(pair: tuple[Runner, Runner], settings: Settings) -> tuple[Engine, list[list[int]]]:
    lookahead, rule, samplings, new = settings
    made = engine_of(pair[0], pair[1], lookahead, rule=rule, max_batch=8)
    made.prepare(8, 100)  # all runs have the caches of the first
    rows = [
        row
        for i, sampling in enumerate(samplings)
        for row in made.submit(Request((1, 2, 3 + i), 1, sampling, Limits(max_new_tokens=new)))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rounds that go wrong, in the negative control
        while made.step():
            pass
    return made, [row.tokens for row in rows]


@cache
def of_a_fresh_pair(change: str) -> list[list[int]]:
    """The tokens of the second run alone."""
    return run(models(), CHANGES[change][2])[1]


def one_after_the_other(change: str) -> tuple[Captures, list[list[int]]]:
    """The second run over what the first has captured: passes of the target, and tokens."""
    _, first, second = CHANGES[change]
    pair = models()
    run(pair, first)
    gc.collect()
    made, found = run(pair, second)
    static = runners_of(made)[0].captures
    assert static is not None
    return static, found


@pytest.mark.slow(but=["k"])
@pytest.mark.parametrize("change", CHANGES)
def test_rounds_of_other_settings_are_other_functions(change: str) -> None:
    static, found = one_after_the_other(change)
    assert static.failures == []
    assert found == of_a_fresh_pair(change)
    values = {getattr(kind, CHANGES[change][0][0]) for kind in static.built if isinstance(kind, Kind)}
    assert len(values) > 1


@pytest.mark.slow(but=["k"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_key_without_a_setting_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the round of the first run serves the second, too."""
    fields, right, seen = CHANGES[change][0], RoundKinds._round, dict[Any, Kind]()
    expected = of_a_fresh_pair(change)

    def blind(kinds: RoundKinds, kind: Kind) -> CapturedRound:
        return right(kinds, seen.setdefault(kind._replace(**dict.fromkeys(fields)), kind))

    monkeypatch.setattr(RoundKinds, "_round", blind)
    static, found = one_after_the_other(change)
    assert static.failures or found != expected


def test_a_cache_without_layers_has_no_generation() -> None:
    static = models()[0].captures
    assert static is not None
    for _ in range(2):
        with pytest.raises(InternalError, match="layers"):
            static.generation(SlotCache())
