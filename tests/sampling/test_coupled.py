"""The coupled rule: what plain decoding would draw by the same uniforms, whatever drafter, draft lengths or batch.

Tests of: sampling.acceptance.one_sample, sampling.drawing, sampling.uniforms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import shoal
from enumeration import chi_square
from laws import ALPHA, P, Q
from policies import with_known_costs
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Bass, Controller, Fixed, Lookahead
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.drawing import draw, exponential_race
from shoal.sampling.uniforms import BUCKETS, race_uniforms
from shoal.testing import reference
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import table_model
from shoal.types.requests import Limits, Request, Row, Sampling

PROMPTS = ((0, 0), (1, 2, 3), (2,))
NEW = 24


def run(
    drafter: Runner | None, lookahead: Lookahead | Controller, max_batch: int = 16, rule: Rule | None = None, n: int = 5
) -> tuple[Engine, list[Row]]:
    """n samples of three prompts; all rows in order."""
    engine = engine_of(table_model(P), drafter, lookahead, max_batch=max_batch, rule=rule or Coupled())
    rows = [
        row
        for prompt in PROMPTS
        for row in engine.submit(Request(prompt, n, Sampling(temperature=0.9, seed=7), Limits(max_new_tokens=NEW)))
    ]
    while engine.step():
        pass
    return engine, rows


def ids(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens[row.prompt_length :] for row in rows]


PLAIN = ids(run(None, Fixed(0))[1])


@pytest.mark.parametrize("max_batch", [1, 4, 16])
@pytest.mark.parametrize("lookahead", [Fixed(1), Fixed(5), Bass(), with_known_costs()], ids=lambda c: type(c).__name__)
def test_speculation_gives_the_ids_of_plain_decoding_also_when_sampling(lookahead: Lookahead, max_batch: int) -> None:
    engine, rows = run(table_model(Q), lookahead, max_batch)
    assert ids(rows) == PLAIN
    assert engine.stats.drafted > 50
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert engine.stats.row_rounds < len(rows) * NEW


def test_plain_decoding_is_that_of_the_reference() -> None:
    target = table_model(P)
    for i, prompt in enumerate(PROMPTS):
        request = Request(prompt, 5, Sampling(temperature=0.9, seed=7), Limits(max_new_tokens=NEW))
        assert [reference.decode(target.hf, request, index, rule=Coupled()) for index in range(5)] == PLAIN[
            5 * i : 5 * i + 5
        ]


def test_rejection_sampling_does_not_give_those_ids() -> None:
    """The control: its law is the same, its tokens depend on the draft length."""
    plain = ids(run(None, Fixed(0), rule=Rejection())[1])
    assert ids(run(table_model(Q), Fixed(3), rule=Rejection())[1]) != plain


def test_the_law_of_a_race() -> None:
    """Also for weights that need not sum to one, a vocabulary that is no multiple of the buckets, and impossible tokens."""
    weights = torch.rand(150, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    weights[::7] = 0
    tokens = exponential_race(
        weights.expand(40_000, -1), torch.from_numpy(race_uniforms(np.arange(40_000), np.zeros(40_000), 1))[:, 0]
    )
    assert chi_square(torch.bincount(tokens, minlength=150).double(), weights / weights.sum()) > ALPHA
    assert int(torch.bincount(tokens, minlength=150)[::7].sum()) == 0


def test_a_race_sends_the_same_token_through_more_often_than_inverse_transform() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(3000, 512, generator=generator, dtype=torch.float64)
    p, q = (
        logits.softmax(-1),
        (logits + 0.5 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)).softmax(-1),
    )
    uniforms = torch.from_numpy(race_uniforms(np.arange(3000), np.zeros(3000), 1))[:, 0]
    raced = float((exponential_race(p, uniforms) == exponential_race(q, uniforms)).double().mean())
    inverted = float((draw(p, uniforms[:, 0]) == draw(q, uniforms[:, 0])).double().mean())
    distance = (p - q).clamp(min=0).sum(-1)
    bound = float(((1 - distance) / (1 + distance)).mean())
    assert raced > bound - 0.03  # the bound of a race over single tokens, which buckets may miss
    assert inverted < bound / 2


def test_the_race_of_buckets_has_no_bound() -> None:
    """What the rule does not promise: half of the mass is common, and the tokens are never the same, as all share a bucket.

    Tokens of buckets of their own agree as a race over single tokens does: (1 - d) / (1 + d) = 1/3 here."""
    p, q = torch.zeros(2, 3 * BUCKETS, dtype=torch.float64)
    numbers = Coupled().uniforms([1] * 20_000, list(range(20_000)), 1, None)[:, 0]
    for places, expected in (((0, BUCKETS, 2 * BUCKETS), 0.0), ((0, 1, 2), 1 / 3)):
        p.zero_()[list(places[:2])] = 0.5
        q.zero_()[list(places[1:])] = 0.5
        same = [Coupled.draw(weights.expand(20_000, -1), numbers) for weights in (p, q)]
        assert float((same[0] == same[1]).double().mean()) == pytest.approx(expected, abs=0.015)


def test_clocks_are_positive_and_finite() -> None:
    uniforms = race_uniforms(np.arange(500), np.arange(500), 3)
    assert uniforms.shape == (500, 3, 1 + BUCKETS)
    assert (uniforms[..., 1:] > 0).all()
    assert np.isfinite(uniforms).all()
    assert abs(uniforms[..., 1:].mean() - 1) < 0.02


def test_a_seed_asks_for_the_coupled_rule(bundled: shoal.Shoal) -> None:
    """So the same seed gives the same samples, whatever the draft lengths; without one, the rule that accepts most is used."""
    options = {"n": 3, "max_new_tokens": 24, "temperature": 0.9}
    plain, fixed, auto = (
        bundled.generate("def first_even(numbers):\n", lookahead=lookahead, seed=4, **options)
        for lookahead in ("off", 5, "auto")
    )
    texts = [[sample.token_ids for sample in result[0].samples] for result in (plain, fixed, auto)]
    assert texts[0] == texts[1] == texts[2]
    assert fixed.stats.accepted > 0
    rejected = bundled.generate("def first_even(numbers):\n", lookahead=5, seed=4, rule="rejection", **options)
    assert [sample.token_ids for sample in rejected[0].samples] != texts[0]
