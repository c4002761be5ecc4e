"""Distributions over 50,000 tokens and more, whose tails hold per cents: top-p above temperature 1, and residuals.

Tests of: sampling.native_draws, sampling.distributions, sampling.truncation, sampling.acceptance.rejection, native (drawing.h).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_kernels import needs_compiler
from shoal.config import Sampling
from shoal.sampling.acceptance import reject_and_replace
from shoal.sampling.distributions import probabilities, pure_probabilities
from shoal.sampling.native_draws import verify
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions

VOCABULARY = 60_000
HOT = [
    Sampling(temperature=temperature, top_p=top_p, **more)
    for temperature in (1.3, 2.0)
    for top_p, more in ((0.95, {}), (0.5, {"min_p": 1e-6}), (0.9, {"top_k": 40_000}))
]


def definition(logits: Tensor, sampling: Sampling) -> Tensor:
    """The declared distribution of scores [vocab], by sorting, in float64."""
    scores = logits.double() / sampling.temperature
    order = scores.sort(descending=True, stable=True).indices
    if sampling.top_k:
        scores[scores < scores[order[sampling.top_k - 1]]] = -torch.inf  # ties are kept
    p = scores.softmax(-1)[order]
    scores[order[p.cumsum(-1) - p >= sampling.top_p]] = -torch.inf
    p = scores.softmax(-1)
    return scores.masked_fill(p < sampling.min_p * p.max(), -torch.inf).softmax(-1)


def positions(sampling: Sampling) -> Positions:
    return Positions([Row(Request((1,), 1, sampling), 0, 0, 0, [1], frozenset(), 99)], [()])


def assert_right(found: Tensor, expected: Tensor) -> None:
    """Where 60,000 weights are summed, rounding moves the last token that top_p keeps."""
    assert int(((found > 0) != (expected > 0)).sum()) <= 2
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-8)


@pytest.mark.parametrize("sampling", HOT, ids=lambda one: f"{one.temperature} {one.top_p}")
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_top_p_above_temperature_1(sampling: Sampling, spread: float) -> None:
    """By the kernels in C (float32, bfloat16), by operations of torch (float64), and by those that a GPU captures."""
    generator = torch.Generator().manual_seed(11)
    logits = spread * torch.randn(VOCABULARY, generator=generator)
    expected = definition(logits, sampling)
    assert 500 < int((expected > 0).sum()) < VOCABULARY - 1000
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scores = logits.to(dtype)
        right = expected if dtype != torch.bfloat16 else definition(scores, sampling)
        found = probabilities(scores[None, None], positions(sampling))[0, 0]
        if dtype != torch.bfloat16:  # has ties at the edge, which tokens of other ids win
            assert_right(found, right)
        else:
            assert abs(int((found > 0).sum()) - int((right > 0).sum())) <= 2
    temperature = torch.tensor([sampling.temperature], dtype=torch.float64)
    captured, enough = pure_probabilities(logits.double()[None], temperature, sampling, False, VOCABULARY)
    assert enough is None or bool(enough.all())
    assert_right(captured[0], expected)


def flat(rows: int, seed: int) -> Tensor:
    """Nearly flat logits: tokens below 1e-4 hold all of the mass."""
    return 0.005 * torch.randn(rows, 1, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def in_the_residual(replacements: Tensor, p: Tensor, q: Tensor) -> bool:
    """Whether each is likelier under p than under q; all [rows, ...]."""
    place = replacements[:, None]
    return bool((p.gather(1, place) > q.gather(1, place)).all())


@needs_compiler
def test_replacements_come_from_the_tail_by_the_kernels() -> None:
    rows, sampling = 24, Sampling()
    p, q = flat(rows, 1), flat(rows, 2).softmax(-1)
    tokens = torch.arange(rows)[:, None] * 2000
    drafts = tokens.tolist()
    tree = DraftTree(tokens, torch.ones(rows, dtype=torch.long), [q[:, 0]], drafts, DraftTree.of(drafts).parents)
    uniforms = torch.rand(rows, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    uniforms[:, 0, 1] = 1 - 1e-7  # rejected wherever q is above p
    found = verify(torch.cat([p, p], 1), [sampling] * rows, tree, uniforms, race=False, rejection=True)
    rejected = found.accepted == 0
    assert int(rejected.sum()) >= rows // 4
    assert in_the_residual(found.token[rejected], p[rejected, 0].softmax(-1), q[rejected, 0])
    assert found.token[rejected].unique().numel() > rejected.sum() // 2


def test_replacements_come_from_the_tail_by_torch() -> None:
    rows = 24
    p, q = (flat(rows, seed).double().softmax(-1) for seed in (1, 2))
    tokens, lengths = torch.arange(rows)[:, None] * 2000, torch.ones(rows, dtype=torch.long)
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(rows, 2, 2, generator=generator, dtype=torch.float64)
    accept = torch.full((rows, 1), 1 - 1e-7, dtype=torch.float64)
    found = reject_and_replace(tokens, lengths, q, torch.cat([p, p], 1), accept, draws)
    rejected = found.accepted == 0
    assert int(rejected.sum()) >= rows // 4
    assert in_the_residual(found.token[rejected], p[rejected, 0], q[rejected, 0])
