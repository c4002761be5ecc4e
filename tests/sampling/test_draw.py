"""The two-level search of `draw`: the token is that of exact sums, whatever the vocabulary, and never one without weight.

Tests of: sampling.drawing.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from enumeration import draw_measure
from shoal.sampling import drawing
from shoal.sampling.drawing import draw

LAST = 1 - 2**-53
"""The largest uniform there is."""
BLOCK = drawing._BLOCK
VOCABS = (1, 3, BLOCK, BLOCK + 1, drawing._ONE_LEVEL + 1, drawing._ONE_LEVEL + BLOCK - 1, drawing._ONE_LEVEL + 2 * BLOCK)
TINY = 5e-324
"""The least float64 above 0."""
real_sums, real_first = drawing._block_sums, drawing._first_above


def exact(weights: Tensor, uniform: float) -> int:
    """The first index whose cumulative weight exceeds u times the total, without rounding."""
    values = list(map(Fraction, weights.double().tolist()))
    threshold, cumulative = Fraction(uniform) * sum(values), Fraction(0)
    for token, value in enumerate(values):
        cumulative += value
        if cumulative > threshold:
            return token
    raise AssertionError("no weight")


def weights_of(vocab: int, seed: int, zeros: float) -> Tensor:
    """Integers whose total is a power of two, so that no sum or product by a short uniform is rounded; [vocab] float32."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 4, (vocab,), generator=generator).float()
    weights *= torch.rand(vocab, generator=generator) >= zeros
    place = int(torch.randint(vocab, (1,), generator=generator))
    weights[place] = 0
    weights[place] = 2 ** (int(weights.sum()).bit_length()) - int(weights.sum())
    return weights


def agrees(weights: Tensor, uniforms: list[float]) -> bool:
    got = draw(weights.expand(len(uniforms), -1), torch.tensor(uniforms, dtype=torch.float64)).tolist()
    return got == [exact(weights, uniform) for uniform in uniforms]


def cases() -> dict[str, tuple[Tensor, list[float]]]:
    """Weights and uniforms by what is special about them; all sums are exact."""
    large = drawing._ONE_LEVEL + 2 * BLOCK
    found = {}
    for name, places in {
        "zero at a block's end": [BLOCK - 2, BLOCK],
        "zero at a block's beginning": [BLOCK - 1, BLOCK + 1],
        "empty blocks before, between and after": [3 * BLOCK + 5, 9 * BLOCK],
        "one token at the end of the first block": [BLOCK - 1],
        "the last token alone": [-1],
        "the first token alone": [0],
        "first and last": [0, -1],
    }.items():
        weights = torch.zeros(large)
        weights[places] = 1.0
        found[name] = weights, [0.0, 0.25, 0.5, 0.75, LAST]
    found["a last block of one token"] = torch.ones(drawing._ONE_LEVEL + 1), [0.0, LAST]
    found["a last block of one heavy token"] = torch.ones(drawing._ONE_LEVEL + 1), [0.0, LAST]
    found["a last block of one heavy token"][0][-1] = drawing._ONE_LEVEL
    found["a token per block"] = torch.zeros(large), [i / 32 for i in range(32)]
    found["a token per block"][0][BLOCK - 1 : 16 * BLOCK : BLOCK] = 1.0
    negative = torch.full((large,), -0.0)
    negative[[7, 4 * BLOCK]] = 1.0
    found["negative zeros"] = negative, [0.0, 0.5, LAST]
    for dtype, least in ((torch.float32, 1e-45), (torch.float64, TINY)):
        for vocab in (5, large):
            weights = torch.zeros(vocab, dtype=dtype)
            weights[1] = weights[-2] = least
            found[f"least {dtype} of {vocab}"] = weights, [0.0, 0.25]
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_the_token_is_that_of_exact_sums(name: str) -> None:
    assert agrees(*CASES[name])


@pytest.mark.parametrize("vocab", [5, drawing._ONE_LEVEL + 5])
def test_products_that_round_up_to_the_total_draw_a_token_that_has_weight(vocab: int) -> None:
    weights = torch.zeros(1, vocab, dtype=torch.float64)
    weights[:, 1] = weights[:, -2] = TINY
    for uniform in (0.5, 0.75, LAST):
        assert int(draw(weights, torch.tensor([uniform], dtype=torch.float64))) in (1, vocab - 2)


@given(st.sampled_from(VOCABS), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.data())
def test_random_weights_of_exact_sums(vocab: int, seed: int, zeros: float, data: st.DataObject) -> None:
    weights = weights_of(vocab, seed, zeros)
    total = int(weights.sum())
    ends = weights.cumsum(0).tolist()
    at = data.draw(st.lists(st.sampled_from(ends), max_size=3))  # a threshold that is just what some tokens have together
    between = data.draw(st.lists(st.integers(0, 4 * total - 1), min_size=1, max_size=3))
    assert agrees(weights, [end / total for end in at if end < total] + [i / (4 * total) for i in between] + [0.0, LAST])


@given(st.sampled_from([1000, 5000, 32_011]), st.integers(0, 2**31), st.sampled_from([0.3, 3.0, 30.0]))
def test_any_weights_give_the_token_of_one_cumulative_sum(vocab: int, seed: int, spread: float) -> None:
    """But for uniforms within rounding of a step, which no such case has met."""
    generator = torch.Generator().manual_seed(seed)
    weights = (spread * torch.randn(8, vocab, generator=generator)).softmax(-1)
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    assert torch.equal(
        draw(weights, uniforms), torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:]).squeeze(1)
    )


@given(st.integers(0, 2**31), st.sampled_from([3, 4, 8, 9, 31, 40]))
def test_the_distribution_of_a_search_in_two_levels(seed: int, vocab: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_BLOCK", 4)
        patch.setattr(drawing, "_ONE_LEVEL", 4)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(3, vocab, generator=generator, dtype=torch.float64) ** 4
        weights *= torch.rand(3, vocab, generator=generator) < 0.6
        weights[:, vocab // 2] += 0.1
        weights /= weights.sum(-1, keepdim=True)
        torch.testing.assert_close(draw_measure(weights), weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab", [6, drawing._ONE_LEVEL + 3])
def test_sums_that_are_not_monotone_never_lead_to_a_token_without_weight(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a parallel sum of another device may round. Sums of nothing are 0 on any."""
    real, generator = Tensor.cumsum, torch.Generator().manual_seed(0)

    def disturbed(self: Tensor, *args: Any, **options: Any) -> Tensor:
        sums = real(self, *args, **options)
        return sums * (1 + 1e-3 * torch.randn(sums.shape, generator=generator, dtype=sums.dtype))

    monkeypatch.setattr(Tensor, "cumsum", disturbed)
    for seed in range(200):
        weights = weights_of(vocab, seed, 0.9)
        uniforms = torch.cat([torch.rand(6, generator=generator, dtype=torch.float64), torch.tensor([0.0, LAST])])
        assert bool((weights[draw(weights.expand(8, -1), uniforms)] > 0).all())


@pytest.mark.parametrize("vocab", [5, drawing._ONE_LEVEL + 5])
def test_rows_that_mean_nothing_stay_inside_the_vocabulary(vocab: int) -> None:
    """Padding of captured rounds: what is drawn is ignored, but other operations take it for an index."""
    rows = torch.stack([torch.zeros(vocab), torch.full((vocab,), torch.nan)])
    for uniform in (0.0, 0.5, LAST):
        tokens = draw(rows, torch.full((2,), uniform, dtype=torch.float64))
        raced = drawing.exponential_race(rows, torch.full((2, 65), uniform, dtype=torch.float64))
        assert bool(((tokens >= 0) & (tokens < vocab) & (raced >= 0) & (raced < vocab)).all())


# ── controls: mistakes that the cases above must notice ─────────────────────────────────────────────────────────────────


def first_not_below(weights: Tensor, cumulative: Tensor, threshold: Tensor) -> Tensor:
    return torch.searchsorted(cumulative, threshold).clamp_(max=weights.shape[-1] - 1)


def unguarded(weights: Tensor, cumulative: Tensor, threshold: Tensor) -> Tensor:
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=weights.shape[-1] - 1)


SABOTAGE: dict[str, tuple[str, Any]] = {
    "one too far": ("_first_above", lambda w, c, t: (real_first(w, c, t) + 1).clamp(max=w.shape[-1] - 1)),
    "one too early": ("_first_above", lambda w, c, t: (real_first(w, c, t) - 1).clamp(min=0)),
    "a sum that reaches the threshold is enough": ("_first_above", first_not_below),
    "sums moved by a block": ("_block_sums", lambda w: real_sums(w).roll(1, -1)),
    "no sum of the last, partial block": ("_block_sums", lambda w: real_sums(w[:, : w.shape[-1] // BLOCK * BLOCK])),
    "sums in float32 of absolute values": ("_block_sums", lambda w: real_sums((w + 0.01).abs())),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_search_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, *SABOTAGE[name])
    assert not all(agrees(*case) for case in CASES.values())


def test_the_guard_against_rounding_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_first_above", unguarded)
    check: Callable[..., None] = test_sums_that_are_not_monotone_never_lead_to_a_token_without_weight
    with pytest.raises(AssertionError):
        check(6, monkeypatch)
