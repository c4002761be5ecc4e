"""Distributions of large vocabularies are computed block by block, and every decision is the one that all at once would be.

Tests of: sampling.acceptance.rejection, sampling.distributions, sampling.scores.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import frozen
from by_pairs import by_pairs
from shoal.config import LOSSY_RULES, Sampling
from shoal.sampling import distributions, scores
from shoal.sampling.acceptance import RULES, Rule, by_rejection, by_samples, rejection
from shoal.sampling.distributions import probabilities
from shoal.sampling.scores import Block, Scores
from shoal.types.requests import Request, Row
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree, Positions

KEPT = frozen.kept()
NAMES = [name for name in KEPT if name.startswith(("llama", "controls", "engine: three", "engine: chunks"))]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of some columns, for the vocabularies of tests."""
    monkeypatch.setattr(scores, "_TOGETHER", 40)
    monkeypatch.setattr(scores, "_CACHED", 2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", NAMES)
def test_the_kept_runs_in_blocks(name: str) -> None:
    assert frozen.runs()[name]() == KEPT[name]


# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(seed: int, samplings: list[Sampling], k: int = 4, vocab: int = 300) -> tuple[DraftTree, Scores, Tensor]:
    """A chain of up to k tokens for each row, drawn from a q that resembles p, and the uniforms of the rejection rule."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        Row(Request((1, 2), sampling=sampling), 0, b, b, [1, 2, b % 5], frozenset(), 99)
        for b, sampling in enumerate(samplings)
    ]
    logits = 3 * torch.randn(len(rows), k + 1, vocab, generator=generator, dtype=torch.float64)
    near = logits[:, :k] + 0.7 * torch.randn(len(rows), k, vocab, generator=generator, dtype=torch.float64)
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
    probs = a.probs[kept].shape == b.probs[kept].shape and torch.allclose(a.probs[kept], b.probs[kept], rtol=1e-12)
    return torch.equal(a.accepted, b.accepted) and torch.equal(a.token, b.token) and probs


@by_pairs({"rule": RULES, "batch": BATCHES, "together, cached": [(1, 1), (1, 10**9), (700, 900), (10**9, 10**9)]})
def test_the_verdict_does_not_depend_on_blocks(
    together: int, cached: int, batch: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    whole = [decided(seed, BATCHES[batch], rule) for seed in range(20)]
    monkeypatch.setattr(scores, "_TOGETHER", together)
    monkeypatch.setattr(scores, "_CACHED", cached)
    assert all(same(a, decided(seed, BATCHES[batch], rule)) for seed, a in enumerate(whole))
    assert any(0 < int(a.accepted.sum()) < 20 for a in whole)


def test_the_probabilities_of_a_verdict_are_those_of_its_tokens() -> None:
    for rule in RULES:
        for seed in range(5):
            tree, found, _ = asked(seed, BATCHES["mixed"])
            verdict = decided(seed, BATCHES["mixed"], rule)
            p = found.p(found.everything())
            for b, n in enumerate(verdict.accepted.tolist()):
                tokens = [*tree.drafts[b][:n], int(verdict.token[b])]
                expected = [float(p[b, j, token]) for j, token in enumerate(tokens)]
                assert verdict.probs[b, : n + 1].tolist() == pytest.approx(expected, rel=1e-12)


SABOTAGE: dict[str, tuple[Any, str, Any]] = {
    "a column late": (Block, "of", lambda self, values: self.of_rows(values[:, 1:][:, self.columns.start : self.columns.stop])),
    "rows of another part": (Block, "of_rows", lambda self, values: values if self.index is None else values[self.index - 1]),
    "lengths from the first column": (rejection, "lengths_from", lambda tree, block: block.of_rows(tree.lengths) - 1),
    "histories of the first columns": (
        Scores, "positions_of", lambda self, block: self.positions if block.rows is None else self.positions.of_rows(block.rows),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SABOTAGE)
def test_wrong_blocks_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [decided(seed, BATCHES["history"], "rejection") for seed in range(20)]
    monkeypatch.setattr(*SABOTAGE[name])
    monkeypatch.setattr(scores, "_TOGETHER", 1)
    monkeypatch.setattr(scores, "_CACHED", 900)
    try:
        found = [decided(seed, BATCHES["history"], "rejection") for seed in range(20)]
    except (RuntimeError, IndexError):  # shapes that do not fit are noticed as well
        return
    assert not all(map(same, whole, found))


# ── what is computed ────────────────────────────────────────────────────────────────────────────────────────────────────


class Counting:
    """How many distributions each call of `probabilities` is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed = self.dense = 0
        distribution, best = distributions._distribution, distributions._best

        def counted(scores: Tensor, *arguments: Any) -> Tensor:
            self.dense += scores.shape[0] * scores.shape[1]
            return distribution(scores, *arguments)

        def found(scores: Tensor, *arguments: Any) -> Tensor:
            self.computed += scores.shape[0] * scores.shape[1]
            return best(scores, *arguments)

        monkeypatch.setattr(distributions, "_distribution", counted)
        monkeypatch.setattr(distributions, "_best", found)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - LOSSY_RULES))
@pytest.mark.parametrize("batch", ["sampled", "greedy"])
def test_nothing_is_computed_behind_the_first_rejection(batch: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_TOGETHER", 1)
    for seed in range(10):
        tree, _, _ = asked(seed, BATCHES[batch])
        counting = Counting(monkeypatch)
        verdict = decided(seed, BATCHES[batch], rule)
        needed = int((verdict.accepted + 1).sum())
        dense = 0 if batch == "greedy" else needed
        at_asking = 0 if batch == "greedy" else len(tree.drafts) * tree.m  # q is made by the same function
        assert (counting.dense - at_asking, counting.computed) == (
            dense,
            needed - dense + (len(tree.drafts) * tree.m if batch == "greedy" else 0),
        )
        monkeypatch.undo()
        monkeypatch.setattr(scores, "_TOGETHER", 1)


def test_small_vocabularies_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation costs more than the columns that it would save."""
    tree, found, uniforms = asked(0, BATCHES["sampled"])
    blocks = []
    real = Scores.p
    monkeypatch.setattr(Scores, "p", lambda self, block: blocks.append(block) or real(self, block))
    by_rejection(tree, found, uniforms)
    assert blocks == [found.everything()]
    by_samples(tree, found, RULES["rejection"]().draw, uniforms)
    assert blocks == [found.everything()]
