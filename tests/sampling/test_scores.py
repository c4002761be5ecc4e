"""The kernel in C and tensors decide alike, by the history of each column.

Tests of: sampling.acceptance.rejection, sampling.distributions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import LOSSY_RULES, Sampling
from shoal.errors import RequestError
from shoal.native.build import missing
from shoal.sampling import controls, native_draws
from shoal.sampling.acceptance import RULES, Rule
from shoal.sampling.distributions import Scores, probabilities
from shoal.types.requests import Request, Row
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree, Positions, Verdict

needs_kernels = pytest.mark.skipif(bool(missing()), reason=f"no kernels in C here: {missing()}")


def asked(seed: int, samplings: list[Sampling], k: int = 4, vocab: int = 300) -> tuple[DraftTree, Scores, Tensor]:
    """A chain of up to k tokens for each row, drawn from a q that resembles p, and the uniforms of the rejection rule."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        Row(Request((1, 2), sampling=sampling), 0, b, b, [1, 2, b % 5], frozenset(), 99)
        for b, sampling in enumerate(samplings)
    ]
    logits = 3 * torch.randn(len(rows), k + 1, vocab, generator=generator)
    near = logits[:, :k] + 0.7 * torch.randn(len(rows), k, vocab, generator=generator)
    lengths = torch.randint(0, k + 1, (len(rows),), generator=generator)
    lengths[0] = k
    q = probabilities(near, Positions(rows, [[0] * k] * len(rows)))
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(len(rows), k)
    drafts = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    of = DraftTree.of(drafts)
    tree = DraftTree(tokens, lengths, q.unbind(1), drafts, of.parents)
    return (
        tree, Scores(logits, Positions.of(rows, tree)), torch.rand(len(rows), k + 1, 3, generator=generator, dtype=torch.float64)
    )  # fmt: skip


def decided(seed: int, samplings: list[Sampling], rule: str) -> Verdict:
    tree, found, uniforms = asked(seed, samplings)
    chosen: Rule = RULES[rule]()
    if rule == "coupled":
        uniforms = chosen.uniforms(range(len(samplings)), [3] * len(samplings), tree.m + 1, None)
    return chosen.decide(tree, found, uniforms)


SAMPLED = Sampling(temperature=0.8)
BATCHES = {
    "sampled": [SAMPLED] * 6,
    "greedy": [Sampling(temperature=0)] * 6,
    "mixed": [SAMPLED, Sampling(temperature=0), Sampling(top_p=0.9), Sampling(temperature=0, repetition_penalty=1.5)] * 2,
    "history": [Sampling(frequency_penalty=1.0, seed=b) for b in range(5)],
}


def same(a: Verdict, b: Verdict) -> bool:
    """Also the probabilities of the tokens that are committed."""
    kept = torch.arange(a.probs.shape[1]) <= a.accepted[:, None]
    probs = a.probs[kept].shape == b.probs[kept].shape and torch.allclose(a.probs[kept], b.probs[kept], rtol=1e-4)
    return torch.equal(a.accepted, b.accepted) and torch.equal(a.token, b.token) and probs


class Counting:
    """How many verdicts the kernel gives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, verified = 0, native_draws.verify

        def counted(*arguments: Any, **options: Any) -> native_draws.Verified:
            self.calls += 1
            return verified(*arguments, **options)

        patch.setattr(native_draws, "verify", counted)


def by_tensors(patch: pytest.MonkeyPatch) -> None:
    """Nothing is decided by the kernel in C."""
    patch.setattr(native_draws, "takes", lambda *_: False)


@needs_kernels
@pytest.mark.parametrize("rule", sorted(RULES.keys() - LOSSY_RULES))
@pytest.mark.parametrize("batch", BATCHES)
def test_the_kernel_and_tensors_decide_alike(batch: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Counting(monkeypatch)
    by_kernel = [decided(seed, BATCHES[batch], rule) for seed in range(20)]
    assert kernel.calls == 20
    by_tensors(monkeypatch)
    assert all(same(a, decided(seed, BATCHES[batch], rule)) for seed, a in enumerate(by_kernel))
    assert kernel.calls == 20
    assert any(0 < int(a.accepted.sum()) < 20 for a in by_kernel)


@needs_kernels
def test_a_fault_is_noted_where_its_row_comes_to_it() -> None:
    """Not before, where the row's tokens are right, and not in other rows."""
    tree, found, uniforms = asked(0, BATCHES["sampled"])
    found.logits[0, 2] = torch.nan
    verdict = RULES["rejection"]().decide(tree, found, 0 * uniforms)  # all drafts pass
    assert verdict.accepted[:2].tolist() == [2, int(tree.lengths[1])]
    assert {row.index: [*columns] for row, columns in found.faults.items()} == {0: [2]}


def test_the_probabilities_of_a_verdict_are_those_of_its_tokens() -> None:
    for rule in RULES:
        for seed in range(5):
            tree, found, _ = asked(seed, BATCHES["mixed"])
            verdict = decided(seed, BATCHES["mixed"], rule)
            p = found.p()
            for b, n in enumerate(verdict.accepted.tolist()):
                tokens = [*tree.drafts[b][:n], int(verdict.token[b])]
                expected = [float(p[b, j, token]) for j, token in enumerate(tokens)]
                assert verdict.probs[b, : n + 1].tolist() == pytest.approx(expected, rel=1e-4)


def late(scores: Tensor, positions: Positions, faults: Faults) -> Tensor:
    """Controls by the history of the column before."""
    drafts = [[row.tokens[-1], *own[:-1]] for row, own in zip(positions.rows, positions.drafts, strict=True)]
    return real(scores, replace(positions, drafts=drafts), faults)


real = controls.control_all


@needs_kernels
@pytest.mark.parametrize("wrong", [late, lambda scores, *_: scores], ids=["a column late", "no controls"])
def test_wrong_controls_of_the_kernel_are_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "control_all", wrong)
    found = [decided(seed, BATCHES["history"], "rejection") for seed in range(20)]
    monkeypatch.undo()
    by_tensors(monkeypatch)
    assert not all(same(a, decided(seed, BATCHES["history"], "rejection")) for seed, a in enumerate(found))


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_has_its_own_distributions_and_everyones_faults() -> None:
    _, whole, _ = asked(3, BATCHES["mixed"])
    for b in range(len(whole.positions.rows)):
        assert torch.equal(whole.of_row(b).p()[0], whole.p()[b])
    row = whole.positions.rows[2]
    whole.of_row(2).note({row: {1: RequestError("one")}})
    whole.note({row: {1: RequestError("another"), 2: RequestError("two")}})
    assert {column: str(error) for column, error in whole.faults[row].items()} == {1: "one", 2: "two"}
