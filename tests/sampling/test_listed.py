"""Truncation from a list of candidates, as captured rounds do it: keeps what a sort keeps, or says that it may not.

Tests of: sampling.truncation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretend import DEVICE, OnDevice, Pretend
from shoal.config import Sampling
from shoal.sampling import truncation
from shoal.sampling.truncation import first_candidates, listed_softmax, truncated_softmax

LARGE = 151_936
CUTS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 1e-6}, {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 40, "top_p": 1.0}, {"top_p": 0.9, "min_p": 0.05}, {"typical_p": 0.7},
    {"top_p": 0.9, "typical_p": 0.8}, {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
]  # fmt: skip


def scores_of(seed: int, vocab: int, spread: float, grid: float, forbidden: float) -> Tensor:
    """[3, vocab] float32; grid: what they are multiples of, so that some are equal. forbidden: the share of those that are -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(3, vocab, generator=generator)
    scores = (scores / grid).round() * grid if grid else scores
    gone = torch.rand(3, vocab, generator=generator) < forbidden
    gone.scatter_(1, torch.randint(vocab, (3, 1), generator=generator), False)
    return scores.masked_fill_(gone, -math.inf)


def by_sorting(scores: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens of [vocab] stay, [vocab] bool: every step on the whole vocabulary, sorted, the lower id first."""
    values, ids = scores.sort(descending=True, stable=True)
    kept = values > -math.inf
    if sampling.top_k:
        kept &= values >= values[min(sampling.top_k, len(values)) - 1]
    if sampling.top_p < 1:
        weights = (values - values[0]).exp() * kept
        # As a mass over the vocabulary is known from its softmax, unless top_k came before.
        total = weights.cumsum(0)[-1] if sampling.top_k else scores.softmax(0).amax().reciprocal()
        kept[1:] &= weights.cumsum(0)[:-1] < sampling.top_p * total
    if sampling.min_p:
        probs = (
            values.masked_fill(~kept, -math.inf).softmax(0)
            if sampling.top_k or sampling.top_p < 1
            else scores.softmax(0)[ids]
        )
        kept &= probs >= sampling.min_p * probs.amax()
    if sampling.typical_p < 1:
        probs = values.masked_fill(~kept, -math.inf).softmax(0)
        probs = probs if sampling.top_k or sampling.top_p < 1 else scores.softmax(0)[ids]
        logp = probs.log()
        nearness = -(logp - (logp * probs).nansum()).abs()
        nearest, order = nearness.sort(descending=True, stable=True)
        needed = int((probs[order].cumsum(0) < sampling.typical_p).sum())
        kept &= nearness >= nearest[min(needed, len(nearest) - 1)]
    return torch.zeros(len(scores), dtype=torch.bool).scatter_(0, ids, kept)


def expected(scores: Tensor, sampling: Sampling) -> list[Tensor]:
    return [by_sorting(row, sampling) for row in scores]


def disagreement(scores: Tensor, sampling: Sampling, candidates: int) -> str:
    """What of `listed_softmax` a sort of the vocabulary contradicts."""
    probs, enough = listed_softmax(scores, sampling, candidates)
    for row, found, sure, right in zip(scores, probs, enough.tolist(), expected(scores, sampling), strict=True):
        if sure and not torch.equal(found > 0, right):
            return f"{int((found > 0).sum())} tokens instead of {int(right.sum())}"
        if abs(float(found.sum()) - 1) > 1e-5 or bool(found[row == -math.inf].any()):
            return "no distribution"
        best = row.masked_fill(~right, -math.inf).softmax(0) if sure else found
        if not torch.allclose(found, best, rtol=1e-4, atol=1e-7):
            return "other probabilities"
    return ""


@given(
    st.integers(0, 2**31), st.sampled_from([1, 2, 7, 300, 5000]), st.sampled_from([0.0, 0.5, 2.0, 9.0]),
    st.sampled_from([0.0, 0.0625, 1.0]), st.sampled_from([0.0, 0.5, 0.999]), st.sampled_from([1, 4, 40, 1024]),
    st.sampled_from(CUTS),
)  # fmt: skip
@pytest.mark.limit(900)
def test_what_stays_is_what_a_sort_keeps(
    seed: int, vocab: int, spread: float, grid: float, forbidden: float, candidates: int, cut: dict[str, Any]
) -> None:
    sampling = Sampling(**cut)
    scores = scores_of(seed, vocab, spread, grid, forbidden)
    # Equal but for rounding, tokens are equally typical or not: tests/sampling/test_distributions.py.
    if not sampling.typical_p < 1:
        assert not disagreement(scores, sampling, candidates)
    probs, enough = listed_softmax(scores, sampling, vocab)
    assert bool(enough.all())
    assert bool(((probs.sum(-1) - 1).abs() < 1e-5).all())


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("grid", [0.0, 0.0625])
def test_a_large_vocabulary(cut: dict[str, Any], grid: float) -> None:
    """Logits of 16 bits are multiples of 1/16 between 8 and 16."""
    sampling = Sampling(**cut)
    scores = scores_of(3, LARGE, 3.0, grid, 0.0)
    assert not disagreement(scores, sampling, first_candidates(sampling))


def test_ties_beyond_a_list_count_in_the_mass_that_top_p_is_a_share_of() -> None:
    """Of the first 21 tokens the best holds 73 %, of the 400 that top_k keeps 12 %."""
    scores, sampling = torch.full((1, 400), -4.0), Sampling(top_k=5, top_p=0.5)
    scores[0, 7] = 0.0
    right = by_sorting(scores[0], sampling)
    assert int(right.sum()) > 100
    assert torch.equal(truncated_softmax(scores, sampling)[0] > 0, right)
    assert not disagreement(scores, sampling, 21)


def test_of_a_thousand_equal_tokens_top_p_keeps_the_first() -> None:
    kept = truncated_softmax(torch.zeros(1, 1000), Sampling(top_p=0.5005))[0] > 0
    assert kept.nonzero().flatten().tolist() == list(range(501))


@given(
    st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 2.0, 9.0]), st.sampled_from([0.0, 0.0625, 1.0]), st.sampled_from(CUTS)
)
def test_candidates_suffice_where_they_hold_all_that_stay_and_one_more(
    seed: int, spread: float, grid: float, cut: dict[str, Any]
) -> None:
    """So a round is undone for a reason only."""
    sampling, candidates = Sampling(**cut), 200
    scores = scores_of(seed, 3000, spread, grid, 0.0)
    first = Sampling(**({"top_k": sampling.top_k} if sampling.top_k else {"top_p": sampling.top_p}))
    _, enough = listed_softmax(scores, sampling, candidates)
    if sampling.top_k or sampling.top_p < 1:
        for row, sure, kept in zip(scores, enough.tolist(), expected(scores, first), strict=True):
            reach = int((row >= row[kept].amin()).sum())  # with all that are equal to the last of them
            assert sure == (reach < candidates)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocab", [3, 30_000])
def test_nothing_is_asked_of_the_host_and_no_vocabulary_is_sorted(
    cut: dict[str, Any], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"sort": [0], "topk": [0]}

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **options: Any) -> Any:
            lengths[name].append(self.shape[-1])
            return real(self, *args, **options)

        return call

    for name in lengths:
        monkeypatch.setattr(OnDevice, name, counted(name), raising=False)
    sampling = Sampling(**cut)
    scores = scores_of(0, vocab, 2.0, 0.5, 0.1)
    device = Pretend()
    with device, torch.inference_mode(), device.capture():
        probs, enough = listed_softmax(OnDevice(scores), sampling, first_candidates(sampling))
        assert (probs.device, enough.device) == (DEVICE, DEVICE)
    right = listed_softmax(scores, sampling, first_candidates(sampling))
    assert torch.equal(probs.held, right[0])
    if vocab > 3:
        assert max(lengths["sort"]) <= first_candidates(sampling)
        assert max(lengths["topk"]) <= vocab // 2
    assert device.counts["captured"] <= 60


# ── what would be wrong ─────────────────────────────────────────────────────────────────────────────────────────────


def one_token_more(values: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    kept = keep_top_p(values, mass, top_p)
    return torch.where(torch.nn.functional.pad(kept[:, :-1] > -math.inf, (1, 0), value=True), values, -math.inf)


def beyond(values: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    """A threshold that must be passed, not reached."""
    return keep_top_p(values, mass, math.nextafter(top_p, 2) + 1e-6)


def of_the_list(values: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    return keep_top_p(values, None, top_p)


def unnormalised(values: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    return keep_top_p(values, torch.ones_like(values[:, :1]), top_p)


def higher_id_first(values: Tensor, ids: Tensor) -> Tensor:
    return -in_order(values, -ids)


keep_top_p, in_order, keep_top_k, lowest = (
    truncation._keep_top_p, truncation._in_order, truncation._keep_top_k, truncation._lowest,
)  # fmt: skip
SABOTAGE: dict[str, tuple[str, Any]] = {
    "one token more": ("_keep_top_p", one_token_more),
    "mass to be passed": ("_keep_top_p", beyond),
    "mass of the list": ("_keep_top_p", of_the_list),
    "unnormalised mass": ("_keep_top_p", unnormalised),
    "higher id first": ("_in_order", higher_id_first),
    "one of k more": ("_keep_top_k", lambda values, k: keep_top_k(values, k + 1)),
    "ties dropped": ("_keep_top_k", lambda values, k: values.masked_fill(torch.arange(values.shape[1]) >= k, -math.inf)),
    "always enough": ("_lowest", lambda kept: torch.full_like(kept[:, 0], math.inf)),
    "ties at the end": ("_lowest", lambda kept: torch.nextafter(lowest(kept), torch.tensor(math.inf))),
}


def all_agree() -> bool:
    """For scores whose masses are exact, with and without ties."""
    for cut in ({"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.8}):
        for seed in range(4):
            for vocab, spread, grid in ((64, 0.0, 0.0), (600, 2.0, 0.0), (600, 2.0, 1.0), (600, 0.5, 0.5)):
                for candidates in (4, 16, 60):
                    if disagreement(scores_of(seed, vocab, spread, grid, 0.0), Sampling(**cut), candidates):
                        return False
    return True


def test_all_agree() -> None:
    assert all_agree()


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, *SABOTAGE[name])
    assert not all_agree()
