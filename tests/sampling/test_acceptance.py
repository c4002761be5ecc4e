"""The acceptance rules one by one: edges, raggedness, and the measure of every decision.

Tests of: sampling.acceptance.one_sample, sampling.acceptance.rejection, sampling.drawing.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from enumeration import acceptance_measure, draw_measure
from shoal.sampling.acceptance import acceptance_mask, accepted_lengths, reject_and_replace, residual
from shoal.sampling.drawing import draw

LAST = 1 - 2**-53
"""The largest uniform there is."""

seeds = st.integers(0, 2**31)


def distributions(generator: torch.Generator, *shape: int, zeros: float = 0.0) -> Tensor:
    """Random distributions over the last axis, float64; about a share of `zeros` of their entries is 0, never all."""
    weights = torch.rand(shape, generator=generator, dtype=torch.float64) ** 3
    weights = weights.masked_fill(torch.rand(shape, generator=generator) < zeros, 0.0)
    weights[..., 0] += (weights.sum(dim=-1) == 0).double()
    return weights / weights.sum(dim=-1, keepdim=True)


# ── acceptance ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds)
def test_a_draft_passes_with_probability_p_over_q(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = distributions(generator, 4, 6, zeros=0.3), distributions(generator, 4, 6, zeros=0.3)
    expected = torch.where(q > 0, p / q, 0.0).clamp(max=1)
    measured = acceptance_measure(p, q)
    torch.testing.assert_close(measured[q > 0], expected[q > 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("p", "q", "u", "passes"),
    [
        (0.0, 0.5, 0.0, False),
        (0.0, 0.0, 0.0, False),
        (0.5, 0.5, LAST, True),
        (0.5, 0.0, LAST, True),
        (1e-300, 1e-300, LAST, True),
        (0.25, 0.5, 0.5, False),
        (0.25, 0.5, 0.49999999, True),
        (1e-45, 1.0, 0.0, True),
    ],
)
def test_edges_of_acceptance(p: float, q: float, u: float, passes: bool) -> None:
    p_draft, q_draft, uniform = (torch.tensor([[x]], dtype=torch.float64) for x in (p, q, u))
    assert acceptance_mask(p_draft, q_draft, uniform).item() is passes


def test_float32_probabilities_are_compared_in_float64() -> None:
    q = torch.tensor([[0.3]])
    just_below = q.double() * (1 - 2**-40)
    assert acceptance_mask(just_below, q, torch.full((1, 1), 1 - 2**-39, dtype=torch.float64)).item()
    assert not acceptance_mask(just_below, q, torch.full((1, 1), 1 - 2**-41, dtype=torch.float64)).item()


@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 5)), min_size=1, max_size=6))
def test_only_the_leading_run_within_the_own_length_counts(rows: list[tuple[list[bool], int]]) -> None:
    passes, lengths = torch.tensor([p for p, _ in rows]), torch.tensor([n for _, n in rows])
    expected = [next((i for i in range(n) if not p[i]), n) for p, n in rows]
    assert accepted_lengths(passes, lengths).tolist() == expected


# ── replacement ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_residual_is_what_the_drafter_left() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.4, 0.1, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.8, 0.0, 0.2, 0.0]], dtype=torch.float64))


def test_residual_of_equals_is_p_itself() -> None:
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    assert torch.equal(residual(p, p.clone()), p)


def test_residual_of_disjoint_supports_is_p() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    assert torch.equal(residual(p, q), p)


def test_residual_does_not_write_to_its_arguments() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.1, 0.9]])
    before = p.clone(), q.clone()
    residual(p, q)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 40))
def test_a_token_is_drawn_with_its_weight(seed: int, vocab: int) -> None:
    weights = distributions(torch.Generator().manual_seed(seed), 5, vocab, zeros=0.4)
    torch.testing.assert_close(draw_measure(weights), weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(draw_measure(7.5 * weights), weights, rtol=0, atol=1e-12)  # need not sum to one


@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_a_token_without_weight_is_never_drawn(seed: int, dtype: torch.dtype) -> None:
    weights = distributions(torch.Generator().manual_seed(seed), 6, 9, zeros=0.6).to(dtype)
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1]
    for column in range(9):  # exactly at every step, and at both ends
        for u in (cumulative[:, column] / total, torch.zeros_like(total), torch.full_like(total, LAST)):
            token = draw(weights, u.clamp(max=LAST))
            assert bool((weights.gather(1, token[:, None]) > 0).all())


def test_small_weights_at_the_end_of_a_large_vocabulary_are_reached() -> None:
    """In float32 the cumulative sum would be 1 long before the end."""
    weights = torch.full((1, 200_000), 1e-9)
    weights[0, 0] = 1.0
    assert draw(weights, torch.tensor([LAST], dtype=torch.float64)).item() == 199_999


# ── a whole round ───────────────────────────────────────────────────────────────────────────────────────────────────


def ragged_round(seed: int, rows: int = 5, k: int = 4, vocab: int = 6) -> tuple[Tensor, ...]:
    """Random arguments of `reject_and_replace`: drafts, lengths, q, p, u_accept, u_next."""
    generator = torch.Generator().manual_seed(seed)
    p, q = distributions(generator, rows, k + 1, vocab, zeros=0.3), distributions(generator, rows, k, vocab, zeros=0.3)
    u = torch.rand((rows, k), generator=generator, dtype=torch.float64)
    drafts = torch.stack([draw(q[:, j], u[:, j]) for j in range(k)], dim=1)
    lengths = torch.randint(0, k + 1, (rows,), generator=generator)
    u_accept = torch.rand((rows, k), generator=generator, dtype=torch.float64)
    u_next = torch.rand((rows, k + 1, 2), generator=generator, dtype=torch.float64)
    return drafts, lengths, q, p, u_accept, u_next


@given(seeds)
def test_a_round_by_hand(seed: int) -> None:
    drafts, lengths, q, p, u_accept, u_next = arguments = ragged_round(seed)
    verdict = reject_and_replace(*arguments)
    for b, length in enumerate(lengths.tolist()):
        kept = 0
        while kept < length and u_accept[b, kept] * q[b, kept, drafts[b, kept]] < p[b, kept, drafts[b, kept]]:
            kept += 1
        rejected = kept < length
        weights = (p[b, kept] - q[b, kept]).clamp(min=0) if rejected else p[b, kept]
        token = int((weights.cumsum(0) > u_next[b, kept, 0 if rejected else 1] * weights.sum()).nonzero()[0])
        assert (int(verdict.accepted[b]), int(verdict.token[b])) == (kept, token)
        if rejected:
            assert q[b, kept, token] < p[b, kept, token]


@given(seeds)
def test_padding_does_not_matter(seed: int) -> None:
    drafts, lengths, q, p, u_accept, u_next = arguments = ragged_round(seed)
    expected = reject_and_replace(*arguments)
    other = ragged_round(seed + 1)
    beyond = torch.arange(drafts.shape[1]) >= lengths[:, None]
    beyond_next = torch.arange(drafts.shape[1] + 1) > lengths[:, None]
    verdict = reject_and_replace(
        torch.where(beyond, other[0], drafts), lengths, torch.where(beyond[..., None], other[2], q),
        torch.where(beyond_next[..., None], other[3], p), torch.where(beyond, 0.0, u_accept),
        torch.where(beyond_next[..., None], other[5], u_next),
    )  # fmt: skip
    assert torch.equal(verdict.accepted, expected.accepted)
    assert torch.equal(verdict.token, expected.token)


@given(seeds)
def test_a_row_in_a_batch_is_the_row_alone(seed: int) -> None:
    arguments = ragged_round(seed)
    together = reject_and_replace(*arguments)
    for b in range(len(arguments[0])):
        own = int(arguments[1][b])
        drafts, lengths, q, p, u_accept, u_next = (x[b : b + 1] for x in arguments)
        alone = reject_and_replace(
            drafts[:, :own], lengths, q[:, :own], p[:, : own + 1], u_accept[:, :own], u_next[:, : own + 1]
        )
        assert (int(alone.accepted), int(alone.token)) == (int(together.accepted[b]), int(together.token[b]))


def test_without_drafts_a_round_is_plain_decoding() -> None:
    _, _, _, p, _, u_next = ragged_round(3)
    none, zero = torch.empty(5, 0, dtype=torch.long), torch.zeros(5, dtype=torch.long)
    verdict = reject_and_replace(none, zero, None, p[:, :1], none.double(), u_next)
    assert verdict.accepted.tolist() == [0] * 5
    assert torch.equal(verdict.token, draw(p[:, 0], u_next[:, 0, 1]))


def test_a_greedy_target_takes_its_own_token_and_nothing_else() -> None:
    """One-hot p: the argmax is accepted whatever q and the uniforms are, anything else is replaced by it."""
    p = torch.zeros(2, 3, 4, dtype=torch.float64)
    p[:, 0, 2] = p[:, 1, 1] = p[:, 2, 3] = 1.0
    q = torch.full((2, 2, 4), 0.25, dtype=torch.float64)
    for u in (0.0, 0.5, LAST):
        u_accept, u_next = torch.full((2, 2), u, dtype=torch.float64), torch.full((2, 3, 2), u, dtype=torch.float64)
        verdict = reject_and_replace(torch.tensor([[2, 1], [2, 0]]), torch.tensor([2, 2]), q, p, u_accept, u_next)
        assert verdict.accepted.tolist() == [2, 1]
        assert verdict.token.tolist() == [3, 1]
