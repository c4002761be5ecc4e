"""A request may bound the drafts of its own rows: the others draft on, and nobody's tokens change.

Tests of: engine.scheduler.
"""

from __future__ import annotations

from typing import Any

import pytest

from drafts import passes_of
from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed, by_name
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request
from shoal.types.samples import Sample

V, NEW = 23, 24


def run(bounds: list[int | None], lookahead: Any, **sampling: Any) -> list[Sample]:
    """One row per bound, all in one batch, with a drafter that is always right."""
    target = scripted(hashed(V), V)
    engine = engine_of(target, scripted(hashed(V), V), lookahead, rule=Coupled(), clock=passes_of(target))
    limits = Limits(max_new_tokens=NEW)
    rows = [
        engine.submit(Request((1, i + 2), 1, Sampling(seed=i, **sampling), limits, max_draft=bound))[0]
        for i, bound in enumerate(bounds)
    ]
    samples: dict[int, Sample] = {}
    while commits := engine.step():
        samples |= {id(c.row): c.sample for c in commits if c.sample is not None}
    return [samples[id(row)] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_drafts_as_far_as_it_may(temperature: float) -> None:
    bounds = [None, 0, 1, 2, 9]
    samples = run(bounds, Fixed(3), temperature=temperature)
    assert [s.token_ids for s in samples] == [s.token_ids for s in run([0] * 5, Fixed(3), temperature=temperature)]
    for sample, length in zip(samples, [3, 0, 1, 2, 3], strict=True):
        rounds = NEW // (length + 1)  # all is accepted: a round commits its drafts and a bonus
        assert (sample.rounds, sample.drafted, sample.accepted) == (rounds, rounds * length, rounds * length)


def test_auto_keeps_to_it() -> None:
    free, plain = run([None, 0], by_name("auto"))
    assert free.drafted > 0
    assert (plain.rounds, plain.drafted, plain.accepted) == (NEW, 0, 0)


@pytest.mark.parametrize("most", [-1, 2.5, "3"])
def test_what_is_no_draft_length(most: Any) -> None:
    engine = engine_of(scripted(hashed(9, 0), 9), scripted(hashed(9, 0), 9), Fixed(3))
    with pytest.raises(RequestError, match="max_draft must be an integer >= 0 or None, got"):
        engine.submit(Request((1,), max_draft=most))
    assert engine.scheduler.idle
