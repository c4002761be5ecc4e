"""The kernels that draw and verify are their definitions in float64.

Tokens are compared with those of the functions on tensors, by the kernel's own p: rounding then moves a token with a probability of
1e-7 or less. Negative controls compile the sources with one thing wrong, and the same comparisons must notice.

Tests of: sampling.native_draws, sampling.drawing, sampling.uniforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mutants import wrong_ones
from native_kernels import needs_compiler
from shoal.config import Sampling
from shoal.sampling import native_draws
from shoal.sampling.acceptance import accepted_lengths, reject_and_replace
from shoal.sampling.drawing import exponential_race, inverse_transform
from shoal.sampling.native_draws import Drawn, Verified
from shoal.sampling.uniforms import race_uniforms, round_uniforms
from shoal.types.trees import DraftTree, Verdict
from wrong_kernels import compiled_as_wrong_ones_are, wrong_kernels

pytestmark = needs_compiler
quick = settings(max_examples=60, deadline=None)
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=0.8)
SETTINGS = (
    GREEDY, SAMPLED, Sampling(temperature=1.7, top_k=5), Sampling(top_p=0.9), Sampling(top_k=30, top_p=0.7, min_p=0.02),
    Sampling(min_p=1.0), Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=0.3, min_p=0.3, top_p=0.999),
    Sampling(temperature=1.7, top_p=0.9),
)  # fmt: skip
VOCABS = (1, 15, 64, 65, 257, 1000)


def logits_of(
    seed: int, rows: int, columns: int, vocab: int, dtype: torch.dtype = torch.float32, ties: bool = False
) -> Tensor:
    """Some of them -inf; with ties, many scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, columns, vocab, generator=generator)
    logits = (2 * logits).round() / 2 if ties else logits
    banned = torch.rand(logits.shape, generator=generator) < 0.1
    banned[..., seed % vocab] = False
    return logits.masked_fill(banned, -torch.inf).to(dtype)


def kept(scores: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens of scores [vocab] float64 after temperature are kept; [vocab] bool. By sorting."""
    order = scores.sort(descending=True, stable=True).indices
    chosen = scores > -torch.inf
    if sampling.top_k:
        chosen &= scores >= scores[order[min(sampling.top_k, len(order)) - 1]]
    if sampling.top_p < 1:
        p = scores.masked_fill(~chosen, -torch.inf).softmax(-1)[order]
        before = p.cumsum(-1) - p
        chosen[order] &= before < sampling.top_p - 1e-12
    p = scores.masked_fill(~chosen, -torch.inf).softmax(-1)
    return chosen & (p >= sampling.min_p * p.max() * (1 - 1e-6))


def definition(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """The declared distributions, [rows, q, vocab] float64."""
    p = torch.zeros(logits.shape, dtype=torch.float64)
    for row, sampling in zip(range(len(logits)), samplings * len(logits), strict=False):
        for column in range(logits.shape[1]):
            scores = logits[row, column].double()
            if sampling.greedy:
                p[row, column, scores.argmax()] = 1
            else:
                scores = scores / sampling.temperature
                p[row, column] = scores.masked_fill(~kept(scores, sampling), -torch.inf).softmax(-1)
    return p


def uniforms_of(race: bool, rows: int, columns: int) -> Tensor:
    seeds = list(range(7, 7 + rows))
    return torch.from_numpy(
        race_uniforms(seeds, [3] * rows, columns) if race else round_uniforms(seeds, [3] * rows, columns)
    )


def draws_excess(seed: int, samplings: list[Sampling], vocab: int, dtype: torch.dtype, ties: bool, race: bool) -> float:
    """How far draws are from their definition: at most 1 if they are right."""
    rows, columns = max(2, len(samplings)), 3
    logits, uniforms = logits_of(seed, rows, columns, vocab, dtype, ties), uniforms_of(race, rows, columns)
    found = native_draws.draw(logits, samplings, uniforms, race=race, want_p=True, want_highest=True)
    assert found.p is not None
    assert found.highest is not None
    expected = definition(logits, samplings)
    draw = exponential_race if race else inverse_transform
    tokens = draw(found.p.double().flatten(0, 1), uniforms.flatten(0, 1)).view(rows, columns)
    greedy = torch.tensor([sampling.greedy for sampling in samplings]).expand(rows)[:, None]
    tokens = torch.where(greedy, expected.argmax(-1), tokens)
    top = torch.where(greedy, logits.double().softmax(-1).amax(-1), expected.amax(-1))
    wrong = [
        2.0 * found.impossible,
        2.0 * int((found.tokens != tokens).sum()),
        2.0 * int(((found.p > 0) != (expected > 1e-37)).sum()),
        ((found.p - expected).abs() / (2e-6 * expected + 1e-9)).max().item(),
        ((found.probs - expected.gather(-1, tokens[..., None])[..., 0]).abs() / 1e-5).max().item(),
        ((found.highest - top).abs() / 1e-5).max().item(),
    ]
    return max(wrong) if all(map(math.isfinite, wrong)) else math.inf


@quick
@given(
    st.integers(0, 10**6), st.lists(st.sampled_from(SETTINGS), min_size=1, max_size=1) | st.just(list(SETTINGS)),
    st.sampled_from(VOCABS), st.booleans(), st.booleans(),
)  # fmt: skip
def test_draws_are_their_definition(seed: int, samplings: list[Sampling], vocab: int, ties: bool, race: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert draws_excess(seed, samplings, vocab, dtype, ties, race) <= 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.95), Sampling(top_k=50), Sampling(top_p=0.9, top_k=40)])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 4.0])
def test_large_vocabularies(sampling: Sampling, spread: float) -> None:
    """Also flat ones, of which top_p keeps nearly all, and those of equal scores."""
    logits = spread * torch.randn(2, 1, 60_000, generator=torch.Generator().manual_seed(3))
    found = native_draws.draw(logits, [sampling], uniforms_of(True, 2, 1), race=True, want_p=True)
    assert found.p is not None
    expected = definition(logits, [sampling] * 2)
    # Where 60,000 weights are summed, rounding moves the last token that top_p keeps.
    assert int(((found.p > 0) != (expected > 0)).sum()) <= 2
    torch.testing.assert_close(found.p.double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(found.tokens[:, 0], exponential_race(found.p[:, 0].double(), uniforms_of(True, 2, 1)[:, 0]))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30, 1.0])
def test_extreme_temperatures_and_scores(temperature: float) -> None:
    logits = torch.tensor([[[3e38, -3e38, 3e38, 0.0]], [[-3e38, -3e38, -torch.inf, -3.1e38]], [[0.0, -0.0, 1e-30, -1e-30]]])
    sampling = Sampling(temperature=temperature)
    found = native_draws.draw(logits, [sampling], uniforms_of(False, 3, 1), want_p=True)
    assert found.p is not None
    assert found.impossible == 0
    exact = ((logits.double() - logits.double().amax(-1, keepdim=True)) / max(temperature, 1.2e-38)).softmax(-1)
    torch.testing.assert_close(found.p.double(), exact, rtol=1e-5, atol=1e-7)
    assert torch.allclose(found.p.sum(-1), torch.ones(3, 1))


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), None], ids=["NaN", "inf", "all -inf"])
def test_positions_without_a_distribution(sampling: Sampling, poison: float | None) -> None:
    logits = logits_of(0, 3, 2, 100)
    if poison is None:
        logits[1, 0] = -torch.inf
    else:
        logits[1, 0, 41] = poison
    clean = native_draws.draw(
        logits_of(0, 3, 2, 100), [sampling], uniforms_of(True, 3, 2), race=True, want_p=True, want_highest=True
    )
    found = native_draws.draw(logits, [sampling], uniforms_of(True, 3, 2), race=True, want_p=True, want_highest=True)
    assert (found.impossible, int(found.tokens[1, 0])) == (1, -1)
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    for mine, theirs in zip(found[:4], clean[:4], strict=True):
        assert mine is not None
        assert theirs is not None
        assert bool(mine.isfinite().all())
        assert torch.equal(mine[others], theirs[others])


# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(seed: int, samplings: list[Sampling], vocab: int, k: int = 4) -> tuple[Tensor, DraftTree]:
    """Logits [rows, k + 1, vocab], and chains drawn from a q that resembles p; rows of unequal lengths."""
    rows, generator = len(samplings), torch.Generator().manual_seed(seed + 1)
    logits = logits_of(seed, rows, k + 1, vocab)
    near = logits[:, :k] + 2.0 * torch.randn(rows, k, vocab, generator=generator)
    q = native_draws.draw(near, samplings, None, want_p=True).p
    assert q is not None
    lengths = torch.randint(0, k + 1, (rows,), generator=generator)
    lengths[0] = k
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, k)
    drafts = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return logits, DraftTree(tokens, lengths, q.unbind(1), drafts, DraftTree.of(drafts).parents)


def expected_verdict(
    p: Tensor, samplings: list[Sampling], tree: DraftTree, uniforms: Tensor, race: bool, rejection: bool
) -> Verdict:
    """By the functions on tensors, from p [rows, m + 1, vocab] float64."""
    draw = exponential_race if race else inverse_transform
    rows, columns, _ = p.shape
    greedy = torch.tensor([sampling.greedy for sampling in samplings])[:, None]
    said = draw(p.flatten(0, 1), uniforms.flatten(0, 1)).view(rows, columns)
    said = torch.where(greedy, p.argmax(-1), said)
    accepted = accepted_lengths(said[:, :-1] == tree.tokens, tree.lengths)
    exact = Verdict(accepted, said.gather(1, accepted[:, None]).squeeze(1), p.gather(-1, said[..., None]).squeeze(-1))
    if not rejection:
        return exact
    assert tree.q is not None
    q = torch.stack(list(tree.q), 1).double()
    found = reject_and_replace(tree.tokens, tree.lengths, q, p, uniforms[:, :-1, 1], uniforms[..., [2, 0]])
    one = greedy[:, 0]
    return Verdict(
        torch.where(one, exact.accepted, found.accepted), torch.where(one, exact.token, found.token),
        torch.where(greedy, exact.probs, found.probs),
    )  # fmt: skip


def verdict_excess(seed: int, samplings: list[Sampling], vocab: int, race: bool, rejection: bool) -> float:
    """How far a verdict is from its definition: at most 1 if it is right."""
    logits, tree = asked(seed, samplings, vocab)
    uniforms = uniforms_of(race, len(samplings), tree.m + 1)
    p = native_draws.draw(logits, samplings, None, want_p=True).p
    assert p is not None
    found = native_draws.verify(logits, samplings, tree, uniforms, race=race, rejection=rejection)
    right = expected_verdict(p.double(), samplings, tree, uniforms, race, rejection)
    wrong = [
        2.0 * int((found.accepted != right.accepted).sum()),
        2.0 * int((found.token != right.token).sum()),
        2.0 * found.impossible,
    ]
    for row, count in enumerate(found.accepted.tolist()):
        tokens = torch.tensor([*tree.drafts[row][:count], int(found.token[row])])[: count + 1]
        columns = torch.arange(len(tokens))
        own, raw = p[row, columns, tokens], logits[row].double().log_softmax(-1)[columns, tokens]
        wrong += ((found.probs[row, : len(tokens)] - own).abs() / 1e-5).tolist()
        wrong += ((found.logprobs[row, : len(tokens)] - raw).abs() / (1e-5 + 1e-5 * raw.abs())).tolist()
    return max(wrong) if all(map(math.isfinite, wrong)) else math.inf


RULES = [(True, False), (False, False), (False, True)]


@quick
@given(
    st.integers(0, 10**6), st.sampled_from(SETTINGS[:5]).map(lambda one: [one] * 5) | st.just(list(SETTINGS)),
    st.sampled_from(VOCABS), st.sampled_from(RULES),
)  # fmt: skip
def test_verdicts_are_their_definition(seed: int, samplings: list[Sampling], vocab: int, rule: tuple[bool, bool]) -> None:
    assert verdict_excess(seed, samplings, vocab, *rule) <= 1


def verdict(
    seed: int, change: Callable[[Tensor, Verified], None] = lambda logits, found: None, rows: int = 6
) -> tuple[Verified, Verified]:
    """Before and after a change of the logits."""
    logits, tree = asked(seed, [SAMPLED] * rows, 300)
    uniforms = uniforms_of(False, rows, tree.m + 1)
    before = native_draws.verify(logits, [SAMPLED], tree, uniforms, race=False, rejection=True)
    change(logits, before)
    return before, native_draws.verify(logits, [SAMPLED], tree, uniforms, race=False, rejection=True)


def test_nothing_behind_the_first_rejection_is_read() -> None:
    def poison(logits: Tensor, found: Verified) -> None:
        for row, count in enumerate(found.accepted.tolist()):
            logits[row, count + 1 :] = torch.nan

    for seed in range(10):
        before, after = verdict(seed, poison)
        assert all(map(torch.equal, before[:4], after[:4]))
        assert after.impossible == 0


def test_a_row_ends_where_it_has_no_distribution() -> None:
    def poison(logits: Tensor, found: Verified) -> None:
        logits[0, int(found.accepted[0]), 7] = torch.nan

    for seed in range(10):
        before, after = verdict(seed, poison)
        assert after.impossible == 1
        assert int(after.token[0]) == -1
        assert torch.equal(before.accepted, after.accepted)
        assert torch.equal(before.token[1:], after.token[1:])


def test_a_draft_outside_the_vocabulary_is_not_looked_up() -> None:
    """A drafter of somebody else's may propose what p and q do not have: it is rejected, and the token is drawn from p."""
    logits, tree = asked(0, [SAMPLED] * 6, 300)
    tree.tokens[0, 0] = 2**40
    uniforms = uniforms_of(False, 6, tree.m + 1)
    found = native_draws.verify(logits, [SAMPLED], tree, uniforms, race=False, rejection=True)
    assert int(found.accepted[0]) == 0
    assert int(found.token[0]) == int(native_draws.draw(logits, [SAMPLED], uniforms).tokens[0, 0])


# ── bits ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab", [300, 40_000])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_bits_do_not_depend_on_the_batch(vocab: int, sampling: Sampling) -> None:
    """Alone, beside others, as a part of a larger block, by one thread or two, drawn or verified."""
    logits, uniforms = logits_of(1, 5, 3, vocab), uniforms_of(True, 5, 3)

    def of(rows: slice, columns: slice, samplings: list[Sampling]) -> Drawn:
        return native_draws.draw(
            logits[rows, columns], samplings, uniforms[rows, columns], race=True, want_p=True, want_highest=True
        )

    whole = of(slice(None), slice(None), [sampling])
    beside = of(slice(None), slice(None), [SAMPLED, SAMPLED, sampling, GREEDY, GREEDY])
    alone = of(slice(2, 3), slice(1, 2), [sampling])
    with patch.object(native_draws.torch, "get_num_threads", return_value=1):
        single = of(slice(None), slice(None), [sampling])
    for a, b, c, d in zip(whole[:4], beside[:4], alone[:4], single[:4], strict=True):
        assert a is not None
        assert b is not None
        assert c is not None
        assert d is not None
        assert torch.equal(a[2], b[2])
        assert torch.equal(a[2:3, 1:2], c)
        assert torch.equal(a, d)
    tree = DraftTree(
        whole.tokens[:, :2], torch.full((5,), 2), None, whole.tokens[:, :2].tolist(), DraftTree.of([[0, 0]] * 5).parents
    )
    found = native_draws.verify(logits, [sampling], tree, uniforms, race=True, rejection=False)
    assert torch.equal(found.accepted, torch.full((5,), 2))
    assert torch.equal(found.token, whole.tokens[:, 2])
    assert torch.equal(found.probs, whole.probs)


# ── sabotage ────────────────────────────────────────────────────────────────────────────────────────────────────────────

MUTANTS = wrong_ones("draws")


def worst() -> float:
    """Of comparisons that meet every branch."""
    found = [
        draws_excess(seed, samplings, vocab, torch.float32, ties, race)
        for seed, vocab in enumerate((65, 257, 1000))
        for samplings in ([SAMPLED], list(SETTINGS))
        for ties in (False, True)
        for race in (False, True)
    ]
    found += [verdict_excess(seed, list(SETTINGS), 257, *rule) for rule in RULES for seed in range(10)]
    logits = logits_of(0, 1, 1, 100)
    logits[0, 0, 41] = torch.nan
    found.append(2.0 * (1 - native_draws.draw(logits, [SAMPLED]).impossible))
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_caught(name: str) -> None:
    library = wrong_kernels(MUTANTS[name])
    with patch.object(native_draws, "library", lambda: library):
        try:
            assert worst() > 1
        except RuntimeError:  # tensors that do not fit are noticed as well
            return


def test_the_same_comparisons_pass_the_right_kernels() -> None:
    library = compiled_as_wrong_ones_are()
    with patch.object(native_draws, "library", lambda: library):
        assert worst() <= 1
