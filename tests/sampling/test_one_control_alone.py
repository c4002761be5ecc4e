"""Rows of one batch that differ in a single control: each is computed by its own.

Tests of: sampling.controls, sampling.distributions, sampling.penalties, sampling.truncation, config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Grammar, Limits, Sampling
from shoal.drafting.shapes import RsdS
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.sampling.controls import groups
from shoal.sampling.distributions import probabilities
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, runner, scripted
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions

BASE = Sampling(temperature=0.9, seed=5)
HISTORY = [5, 3, 7, 3, 7, 5, 3]
EOS = 4


def odd(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor of the caller's: no even tokens."""
    return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 0, -torch.inf)


OTHER: dict[str, Any] = {
    "temperature": 1.6, "top_k": 3, "top_p": 0.5, "min_p": 0.3, "typical_p": 0.4, "repetition_penalty": 1.8,
    "presence_penalty": 1.5, "frequency_penalty": 1.5, "logit_bias": {9: 3.0}, "bad_words": [[3, 7]],
    "min_new_tokens": 20, "no_repeat_ngram": 2, "processors": [odd],
    "grammar": Grammar("regex", "[a-z ]{30,60}"), "seed": 6,
}  # fmt: skip
"""Each field of `Sampling` with another value, which matters behind the history."""
CHANGED = [name for name in OTHER if name not in ("grammar", "seed")]
"""Those that the distribution follows by itself: a grammar is a constraint of the row, and a seed is of its uniforms."""


def row(sampling: Sampling) -> Row:
    return Row(Request(tuple(HISTORY[:3]), 1, sampling), 0, 0, 0, list(HISTORY), frozenset({EOS}), 99)


def test_every_field_has_another_value() -> None:
    guided = {"guidance", "plausibility", "posterior", "negative_prompt", "positive_prompt"}  # in the logits already
    assert sorted({*OTHER, *guided}) == sorted(field.name for field in fields(Sampling))


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("processors", [odd], [len]), ("logit_bias", {9: 3.0}, {8: 3.0}), ("bad_words", [[3, 7]], [[3, 8]])],
)
def test_rows_of_unlike_containers_are_computed_apart(name: str, one: Any, other: Any) -> None:
    rows = [row(replace(BASE, **{name: value})) for value in (one, other, one)]
    rows[2].request = rows[0].request
    assert [places for _, places in groups(rows)] == [[0, 2], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", CHANGED)
def test_two_rows_that_differ_in_it(name: str, dtype: torch.dtype) -> None:
    """Whichever comes first, and beside a third one of other numbers."""
    logits = 2 * torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[..., EOS] = logits.max()
    other = replace(BASE, **{name: OTHER[name]})

    def of(*samplings: Sampling) -> Tensor:
        rows = [row(sampling) for sampling in samplings]
        blocks = logits.to(dtype).expand(len(rows), 1, -1)
        return probabilities(blocks, Positions(rows, [() for _ in rows]))[:, 0]

    alone = torch.cat([of(BASE), of(other)])
    assert not torch.allclose(alone[0], alone[1], atol=1e-3), "it does not matter here"
    for order in ((0, 1), (1, 0), (0, 1, 0)):
        assert torch.equal(of(*((BASE, other)[i] for i in order)), alone[list(order)])


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


@cache
def models() -> tuple[Any, Any]:
    return tiny_model("llama", seed=3), tiny_model("llama", seed=4, layers=1)


def ran(requests: Sequence[Request], engine: Engine) -> list[tuple[Any, ...]]:
    rows = [row for request in requests for row in engine.submit(request)]
    while engine.step():
        pass
    assert all(row.error is None for row in rows)
    return [(tuple(row.tokens), row.finish_reason, tuple(row.top_logprobs)) for row in rows]


def test_requests_of_one_batch_that_differ_in_one_field() -> None:
    """Each gets the tokens that it gets alone."""
    pytest.importorskip("llguidance")
    samplings = [BASE, *(replace(BASE, **{name: value}) for name, value in OTHER.items())]
    limits = Limits(max_new_tokens=10, eos=(EOS, 40, 41, 42))
    requests = [Request((5, 3, 7), 1, sampling, limits) for sampling in samplings]

    def engine() -> Engine:
        target, drafter = models()
        return engine_of(
            runner(target, 128), runner(drafter, 128), Fixed(3), max_batch=16, rule=Coupled(), tokenizer=tiny_tokenizer()
        )

    together = ran(requests, engine())
    assert together == [ran([request], engine())[0] for request in requests]
    assert len({found[0] for found in together}) > 8


def test_grammars_penalties_trees_and_top_logprobs_in_one_batch() -> None:
    """Rows of every mixture get what they get alone, in chains and in trees, down to the alternatives at each position."""
    pytest.importorskip("llguidance")
    words = Grammar("regex", "[a-e]{4,30}!")
    samplings = [
        Sampling(seed=1), Sampling(seed=2, grammar=words), Sampling(seed=3, repetition_penalty=1.5, presence_penalty=0.5),
        Sampling(seed=4, grammar=words, frequency_penalty=1.0, no_repeat_ngram=3), Sampling(seed=5, temperature=0),
        Sampling(seed=6, top_k=5, bad_words=[[65], [66, 67]]), Sampling(seed=7, grammar=words, temperature=0),
    ]  # fmt: skip
    limits = Limits(max_new_tokens=16, eos=(256,))
    requests = [Request((65, 66), 2, sampling, limits, top_logprobs=i % 3 * 2) for i, sampling in enumerate(samplings)]
    said = hashed(VOCABULARY, 0)
    drafts = mixed(said, hashed(VOCABULARY, 1), every=3)

    def trees() -> Engine:
        drafter = TreeDrafter(scripted(drafts, VOCABULARY).fork(), VOCABULARY, RsdS(2, 3))
        target = scripted(said, VOCABULARY)
        return Engine(target, drafter, Fixed(3), max_batch=16, rule=Coupled(), tokenizer=tiny_tokenizer())

    def chains() -> Engine:
        return engine_of(
            scripted(said, VOCABULARY), scripted(drafts, VOCABULARY), Fixed(3), max_batch=16, rule=Coupled(),
            tokenizer=tiny_tokenizer(),
        )  # fmt: skip

    def off() -> Engine:
        target = scripted(said, VOCABULARY)
        return engine_of(target, None, Fixed(0), max_batch=16, rule=Coupled(), tokenizer=tiny_tokenizer())

    plain = [found for request in requests for found in ran([request], off())]
    for make in (chains, trees):
        engine = make()
        found = ran(requests, engine)
        assert [one[:2] for one in found] == [one[:2] for one in plain]
        assert 0 < engine.stats.accepted < engine.stats.drafted
        for place, (_, _, tops) in enumerate(found):
            wanted = place // 2 % 3 * 2
            assert len(tops) == (len(found[place][0]) - 2 if wanted else 0)
            assert all(len(top.raw) == wanted for top in tops)
            assert [[t for t, _ in top.raw] for top in tops] == [[t for t, _ in top.raw] for top in plain[place][2]]


def test_256_rows_get_what_seven_at_a_time_get() -> None:
    target, drafter = models()
    request = Request((5, 3, 7), 256, Sampling(seed=1, top_p=0.95), Limits(max_new_tokens=6))

    def all_of(most: int, sharing: str) -> tuple[Engine, list[tuple[Any, ...]]]:
        engine = engine_of(
            runner(target, 128), runner(drafter, 128), Fixed(3), max_batch=most, rule=Coupled(), prefix_sharing=sharing
        )
        return engine, ran([request], engine)

    engine, together = all_of(256, "auto")
    assert together == all_of(7, "copied")[1]
    assert engine.stats.rounds < 20
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert len({tokens for tokens, *_ in together}) > 240
