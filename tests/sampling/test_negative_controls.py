"""The known mistakes of speculative sampling, made on purpose: each must be caught by the very check that proves the real code.

A check that cannot fail proves nothing. Every test here sabotages one function of the real path and asserts that the p-value falls
below the threshold, that the exact law moves away, or that ids or counts differ.

Tests of: engine.verify, sampling.acceptance.rejection, sampling.distributions, sampling.uniforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal.engine.validation
from enumeration import chain_rule, chi_square, committed_distribution, independence
from greedy import continuations, decode, drafter, prompt, stock_ids, target_model
from laws import ALPHA, EXACT, P, Q, codes, contingency, declared_law, joint, run
from shoal.config import Limits, Sampling
from shoal.lookahead.controller import Fixed
from shoal.models.cache import SlotCache
from shoal.sampling.acceptance import Rejection, rejection
from shoal.sampling.distributions import Scores
from shoal.sampling.uniforms import Purpose, row_seed
from shoal.testing import VOCABULARY
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, runner, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions, Verdict

pytestmark = pytest.mark.slow
real_uniforms = shoal.sampling.uniforms.uniforms
real_positions = Positions.of
real_decide = Rejection.decide


def counted(**sampling: float) -> Tensor:
    """Joint counts of four tokens through the whole engine, as the proof takes them."""
    models = (table_model(table, dtype=torch.float64) for table in (P, Q))  # decided by torch, whose functions are sabotaged
    return joint(run(*models, Fixed(3), **sampling)[1], 4)


# ── the acceptance rule ─────────────────────────────────────────────────────────────────────────────────────────────


def without_clamp(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).abs()
    return rest / rest.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def without_clamp_at_all(p: Tensor, q: Tensor) -> Tensor:
    """Negative weights; they sum to zero, so the guard against 0/0 now answers p."""
    rest = p - q
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def without_order(passes: Tensor, lengths: Tensor) -> Tensor:
    """Counts all passing drafts, not the leading run."""
    return (passes & (torch.arange(passes.shape[1]) < lengths[:, None])).sum(dim=1)


def bonus_left_to_the_residual(
    drafts: Tensor,
    lengths: Tensor,
    q: Any,
    p: Tensor,
    u_accept: Tensor,
    u_next: Tensor,
    sampler: Any = rejection.inverse_transform,
) -> Verdict:
    """After full acceptance the next token is still taken from max(p - q, 0), of the last draft's position."""
    verdict = shoal_reject_and_replace(drafts, lengths, q, p, u_accept, u_next, sampler)
    if q is None:
        return verdict
    rows, last = torch.arange(len(p)), (lengths - 1).clamp(min=0)
    token = rejection.inverse_transform(rejection.residual(p[rows, last], q[rows, last]), u_next[rows, last, :1])
    full = (verdict.accepted == lengths) & (lengths > 0)
    return replace(verdict, token=torch.where(full, token, verdict.token))


shoal_reject_and_replace = rejection.reject_and_replace

RULES: dict[str, tuple[str, Callable[..., Any]]] = {
    "residual without clamp": ("residual", without_clamp),
    "residual with negative weights": ("residual", without_clamp_at_all),
    "replacement from p": ("residual", lambda p, q: p),
    "replacement from q": ("residual", lambda p, q: torch.where(q.sum(-1, keepdim=True) > 0, q, p)),
    "every draft passes": ("acceptance_mask", lambda p, q, u: torch.ones_like(u, dtype=torch.bool)),
    "acceptance without q": ("acceptance_mask", lambda p, q, u: u < p),
    "p and q exchanged": ("acceptance_mask", lambda p, q, u: u * p < q),
    "all passing drafts counted": ("accepted_lengths", without_order),
    "bonus from the residual": ("reject_and_replace", bonus_left_to_the_residual),
}


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_rule_shows_in_the_exact_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = P[0], Q[0]
    assert (committed_distribution(p, q, 4, (3,)) - chain_rule(p, 4)).abs().max() <= EXACT
    monkeypatch.setattr(rejection, *RULES[name])
    assert (committed_distribution(p, q, 4, (3,)) - chain_rule(p, 4)).abs().max() > 1e6 * EXACT


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_rule_shows_in_counted_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, *RULES[name])
    assert chi_square(counted(), chain_rule(P, 4)) < ALPHA


# ── uniforms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


REUSED: dict[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {
    "for drafting and again for accepting": lambda seeds, at, use: (seeds, at, np.full_like(use, Purpose.TOKEN)),
    "for accepting and replacing": lambda seeds, at, use: (seeds, at, np.where(use == Purpose.REPLACE, Purpose.ACCEPT, use)),
    "at every position": lambda seeds, at, use: (seeds, np.zeros_like(at), use),
}


@pytest.mark.parametrize("where", REUSED)
def test_a_uniform_that_is_used_twice(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.sampling.uniforms, "uniforms", lambda *key: real_uniforms(*REUSED[where](*key)))
    assert chi_square(counted(), chain_rule(P, 4)) < ALPHA


def test_neighbours_that_share_their_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row alone has the right law; only the test of independence sees it."""
    shared = lambda seed, first, end: [row_seed(seed, row // 2) for row in range(first, end)]  # noqa: E731
    monkeypatch.setattr(shoal.engine.validation, "row_seeds", shared)
    rows = run(table_model(P), table_model(Q), Fixed(3))[1]
    assert chi_square(joint(rows[::2], 4), chain_rule(P, 4)) > ALPHA
    assert independence(contingency(codes(rows[::2], 4, slice(2)), codes(rows[1::2], 4, slice(2)))) < ALPHA


# ── the drafter's word ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_greedy_draft_with_a_soft_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rejection, "draw", lambda _, q, uniforms: q.argmax(dim=-1))
    assert chi_square(counted(), chain_rule(P, 4)) < ALPHA


def test_a_q_before_the_sampling_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn at one temperature, reported at another."""
    real = Rejection.draw
    monkeypatch.setattr(Rejection, "draw", lambda _, q, uniforms: real(q**2, uniforms))
    assert chi_square(counted(), chain_rule(P, 4)) < ALPHA


# ── bonus ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dropped_bonus_shows_in_the_oracles_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law and ids stay right, so only the count of k + 1 tokens per round can see it."""

    def dropped(self: Rejection, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        verdict = real_decide(self, tree, scores, uniforms)
        if tree.m == 0:
            return verdict
        full = (verdict.accepted == tree.lengths) & (tree.lengths > 0)
        last = tree.tokens.gather(1, (tree.lengths - 1).clamp(min=0)[:, None]).squeeze(1)
        accepted = torch.where(full, verdict.accepted - 1, verdict.accepted)
        return replace(verdict, accepted=accepted, token=torch.where(full, last, verdict.token))

    k, new = 3, 20
    expected = math.ceil(new / (k + 1))
    assert all(row.rounds == expected for row in decode(drafter("oracle", 3), k, prompts=3, n=1, max_batch=3, new=new)[1])
    monkeypatch.setattr(Rejection, "decide", dropped)
    rows = decode(drafter("oracle", 3), k, prompts=3, n=1, max_batch=3, new=new)[1]
    assert all(row.rounds > expected for row in rows)
    assert [tuple(row.tokens[row.prompt_length :]) for row in rows] == [stock_ids(i)[:new] for i in range(3)]


# ── history ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_token_late(rows: Sequence[Row], tree: DraftTree) -> Positions:
    """Draft position j is given the history of position j - 1."""
    positions = real_positions(rows, tree)
    pairs = zip(positions.rows, positions.drafts, strict=True)
    late = [[row.tokens[-1], *draft[:-1]] if draft else [] for row, draft in pairs]
    return replace(positions, drafts=late)


def test_penalties_one_token_late_show_in_counted_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(new: tuple[int, ...]) -> Tensor:
        weights = P[(0, 0, *new)[-2:]] * torch.exp(-1.5 * torch.bincount(torch.tensor(new, dtype=torch.long), minlength=4))
        return weights / weights.sum()

    law = declared_law(step, 4, 4)
    assert chi_square(counted(frequency_penalty=1.5), law) > ALPHA
    monkeypatch.setattr(Positions, "of", staticmethod(one_token_late))
    assert chi_square(counted(frequency_penalty=1.5), law) < ALPHA


@pytest.mark.parametrize(
    "control", [{"repetition_penalty": 5.0}, {"no_repeat_ngram": 1}, {"frequency_penalty": 3.0}], ids=str
)
def test_penalties_one_token_late_show_in_greedy_ids(control: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that likes to repeat itself."""
    noise, again = hashed(12, 0, spread=0.5), torch.eye(12, dtype=torch.float64)
    target = scripted(lambda ids: noise(ids) + 2.5 * again[ids[-1]], 12)

    def ids(k: int) -> list[int]:
        engine = engine_of(target, target, Fixed(k))
        row = engine.submit(Request((1,), 1, Sampling(temperature=0, **control), Limits(max_new_tokens=10)))[0]
        while engine.step():
            pass
        return row.tokens

    plain = ids(0)
    assert ids(4) == plain
    monkeypatch.setattr(Positions, "of", staticmethod(one_token_late))
    assert ids(0) == plain  # without drafts nothing can be late
    assert ids(4) != plain


# ── cache ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def greedy_ids(monkeypatch: pytest.MonkeyPatch | None, more: int = 0) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Ids of three prompts with a drafter that is right now and then, and what they should be."""
    engine = engine_of(runner(target_model()), drafter("sometimes", 3), Fixed(4), max_batch=3)
    if monkeypatch is not None:

        def keep(slot: int, length: int, columns: Sequence[int]) -> None:
            SlotCache.rollback(cache, slot, max(0, min(cache.lengths[slot], length + len(columns) + more)))

        cache = engine.target.cache
        monkeypatch.setattr(cache, "keep", keep)
    rows = [engine.submit(Request(prompt(i), 1, Sampling(temperature=0), Limits(max_new_tokens=20)))[0] for i in range(3)]
    while engine.step():
        pass
    return [row.tokens[row.prompt_length :] for row in rows], [stock_ids(i)[:20] for i in range(3)]


@pytest.mark.parametrize("more", [1, 2, -1])
def test_a_cache_rolled_back_to_the_wrong_length(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said, expected = greedy_ids(None)
    assert list(map(tuple, said)) == expected
    said, expected = greedy_ids(monkeypatch, more)
    assert all(tuple(ids) != right for ids, right in zip(said, expected, strict=True))


def test_a_prompt_copied_one_token_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings of a group differ from the row whose prompt was computed."""
    real = SlotCache.copy

    def short(self: SlotCache, source: int, target: int, length: int) -> None:
        real(self, source, target, length - 1)
        self.lengths[target] = length

    monkeypatch.setattr(SlotCache, "copy", short)
    monkeypatch.setattr("shoal.engine.engine.policy_for", lambda *_: "copied")
    rows = decode(None, 0, prompts=3, n=2, max_batch=6, new=10)[1]
    assert [tuple(row.tokens[row.prompt_length :]) for row in rows[::2]] == [stock_ids(i)[:10] for i in range(3)]
    assert any(first.tokens != second.tokens for first, second in zip(rows[2::2], rows[3::2], strict=True))


@torch.inference_mode()
def spoil(cache: SlotCache) -> None:
    """Fills every cell beyond its row's length."""
    for layer in cache._layers:
        for tensor in layer.tensors():
            for slot, length in enumerate(cache.lengths):
                tensor[slot, length:] = 1e4


def test_stale_cells_behind_a_row_are_never_read() -> None:
    """The opposite control: garbage where the real code says nobody looks changes nothing."""
    plain, expected = greedy_ids(None)
    engine = engine_of(
        runner(target_model()), scripted(continuations(3), VOCABULARY, dtype=torch.float32), Fixed(4), max_batch=3
    )
    rows = [engine.submit(Request(prompt(i), 1, Sampling(temperature=0), Limits(max_new_tokens=20)))[0] for i in range(3)]
    while engine.step():
        spoil(engine.target.cache)
    assert [tuple(row.tokens[row.prompt_length :]) for row in rows] == expected == list(map(tuple, plain))
