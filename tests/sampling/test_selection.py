"""The last token that a mass needs is found without sorting, and is the one that sorting finds.

Tests of: sampling.drawing, sampling.truncation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.config import Sampling
from shoal.sampling import drawing, truncation
from shoal.sampling.drawing import last_needed
from shoal.sampling.truncation import truncated_softmax

real_largest, real_sums = drawing.largest, drawing.row_sums


def weighted(seed: int, vocab: int, grid: float) -> tuple[Tensor, Tensor]:
    """Keys, some of them equal, and weights of sum 1 that are equal where the keys are; [3, vocab] float64."""
    generator = torch.Generator().manual_seed(seed)
    keys = 3 * torch.randn(3, vocab, generator=generator, dtype=torch.float64)
    keys = (keys / grid).round() * grid if grid else keys
    return keys, (keys / 4).softmax(-1)


def by_sorting(keys: Tensor, weights: Tensor, mass: float) -> tuple[float, int]:
    values, order = keys.sort(descending=True)
    last = min(int((weights[order].cumsum(0) < mass).sum()), len(keys) - 1)
    return float(values[last]), last + 1 - int((values > values[last]).sum())


def agrees(seed: int, vocab: int, grid: float, mass: float) -> bool:
    keys, weights = weighted(seed, vocab, grid)
    limit, taken = last_needed(keys, weights, mass, keys.amin(-1, keepdim=True) - 1)
    expected = [by_sorting(*row, mass) for row in zip(keys, weights, strict=True)]
    return list(zip(limit.flatten().tolist(), taken.flatten().tolist(), strict=True)) == expected


@given(
    st.integers(0, 2**31), st.sampled_from([1, 7, 300, 5000]), st.sampled_from([0.0, 0.5, 3.0, 100.0]), st.floats(1e-3, 0.999)
)  # fmt: skip
def test_what_is_needed_is_what_sorting_finds(seed: int, vocab: int, grid: float, mass: float) -> None:
    keys, weights = weighted(seed, vocab, grid)
    held = weights.gather(1, keys.argsort(descending=True)).cumsum(1)
    if not bool(((held - mass).abs() < 1e-9).any()):  # there rounding decides
        assert agrees(seed, vocab, grid, mass)


def test_a_mass_that_is_just_held_needs_no_more() -> None:
    keys, weights = torch.tensor([[4.0, 3.0, 3.0, 3.0]]), torch.full((1, 4), 0.25)
    limit, taken = last_needed(keys, weights, 0.5, torch.zeros(1, 1))
    assert (limit.item(), taken.item()) == (3.0, 1)


@pytest.mark.parametrize("mass", [1e-9, 1 - 1e-9])
def test_masses_near_the_ends(mass: float) -> None:
    assert agrees(1, 5000, 0.0, mass)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.9), Sampling(typical_p=0.8), Sampling(top_p=0.95, min_p=0.01), Sampling(min_p=0.001)],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_a_row_is_truncated_as_if_it_were_alone(sampling: Sampling, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, with rows that are cut elsewhere beside it, and however many rows are computed together."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 9001, generator=generator) * torch.tensor([[spread], [0.01], [3.0], [0.5], [20.0]])
    together = truncated_softmax(scores, sampling)
    assert all(
        torch.equal(truncated_softmax(row[None], sampling)[0], found) for row, found in zip(scores, together, strict=True)
    )
    monkeypatch.setattr(truncation, "_TOGETHER", 2 * 9001)
    assert torch.equal(truncated_softmax(scores, sampling), together)


def test_typical_p_may_need_the_most_probable_tokens_last() -> None:
    """Where more tokens than are looked at first are nearer to the entropy, and hold too little."""
    probs = torch.full((1, 4096), 0.8 / 4092, dtype=torch.float64)
    probs[0, :4] = torch.tensor([0.06, 0.055, 0.045, 0.04])
    expected = probs / 0.94
    expected[0, 0] = 0  # the others hold 0.94, and without the second 0.885
    torch.testing.assert_close(truncated_softmax(probs.log(), Sampling(typical_p=0.9)), expected)


def test_no_vocabulary_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_lengths = []
    real = Tensor.sort

    def counted(self: Tensor, *args: Any, **options: Any) -> Any:
        sorted_lengths.append(self.shape[-1])
        return real(self, *args, **options)

    monkeypatch.setattr(Tensor, "sort", counted)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.5, 3.0, 9.0):
        scores = spread * torch.randn(2, 30_000, generator=generator)
        for sampling in (
            Sampling(top_p=0.95),
            Sampling(typical_p=0.95),
            Sampling(top_k=50, top_p=0.95),
            Sampling(min_p=0.05),
        ):
            if spread or not sampling.top_k:  # top_k keeps all ties with the k-th
                assert bool((truncated_softmax(scores, sampling).sum(-1) - 1).abs().max() < 1e-5)
    assert max(sorted_lengths, default=0) <= drawing._BETWEEN + truncation._TIES


SABOTAGE = {
    "sums of one block less": ("row_sums", lambda weights: real_sums(weights[:, 256:])),
    "counts that are not exact": ("row_sums", lambda weights: real_sums(weights) * 0.99),
    "candidates in ascending order": ("largest", lambda scores, width: real_largest(-scores, width)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_selection_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, *SABOTAGE[name])
    assert not all(agrees(seed, 5000, grid, mass) for seed in range(3) for grid in (0.0, 0.5) for mass in (0.3, 0.9))
