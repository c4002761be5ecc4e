"""Greedy decoding in float32 equals Transformers' `generate`, id for id, one prompt alone: any batch, draft length, n and drafter.

That the speculative path really ran is asserted from the counts: what an oracle, an adversary and plain decoding must have done
is known in advance.

Tests of: engine.engine, engine.verify, engine.commit, engine.memory, models.prompt_passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from greedy import NEW, decode, drafter, prompt, stock_ids, target_model
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.engine.memory import grade
from shoal.lookahead.controller import by_name
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import runner
from shoal.types.requests import Request, Row

PROMPTS = 33


def assert_stock(rows: Sequence[Row], n: int, new: int = NEW) -> None:
    """Every row says what Transformers says; all are there."""
    for i, row in enumerate(rows):
        assert tuple(row.tokens[row.prompt_length :]) == stock_ids(i // n)[:new], f"row {i % n} of prompt {i // n}"
        assert row.finish_reason == "length"


def assert_adds_up(engine: Engine, rows: Sequence[Row], n: int) -> None:
    """The counts of the rows are those of the run."""
    stats = engine.stats
    assert stats.committed == sum(row.new_tokens for row in rows)
    assert stats.drafted == sum(row.drafted for row in rows)
    assert stats.accepted == sum(row.accepted for row in rows)
    assert stats.row_rounds == sum(row.rounds for row in rows) == sum(row.target_passes for row in rows)
    assert stats.target_passes == stats.rounds
    assert stats.prefills == len(rows) // n
    assert stats.prefill_tokens == sum(len(prompt(i)) - 1 for i in range(len(rows) // n))
    assert stats.acceptance_length == stats.committed / stats.row_rounds
    for row in rows:
        assert row.new_tokens == row.accepted + row.rounds  # each round adds one token of the target's own


def drafted_in_total(k: int, kind: str, new: int = NEW) -> int:
    """What one row drafts when all or none of it is accepted and it never drafts past its end."""
    drafted, remaining = 0, new
    while remaining:
        length = min(k, remaining - 1)
        drafted += length
        remaining -= length + 1 if kind == "oracle" else 1
    return drafted


LENGTHS = {
    "oracle": (0, 1, 3, 7, 31, 32),
    "same": (3,),
    "random": (3, 32),
    "adversarial": (1, 8, 32),
    "sometimes": (1, 3, 8, 32),
}


@pytest.mark.slow(but=["oracle-3", "random-3", "adversarial-8", "sometimes-8"])
@pytest.mark.parametrize(("kind", "k"), [(kind, k) for kind, lengths in LENGTHS.items() for k in lengths])
def test_every_draft_length_and_drafter(kind: str, k: int) -> None:
    prompts = 5 if k < 8 else 3
    engine, rows = decode(drafter(kind, prompts), k, prompts=prompts, n=1, max_batch=prompts - 1)
    assert_stock(rows, 1)
    assert_adds_up(engine, rows, 1)
    for row in rows:
        if k == 0:
            assert (row.rounds, row.drafted) == (NEW, 0)
        elif kind in ("oracle", "same"):
            assert row.rounds == math.ceil(NEW / (k + 1))
            assert row.accepted == row.drafted == drafted_in_total(k, "oracle") == NEW - row.rounds
        elif kind == "adversarial":
            assert (row.rounds, row.accepted, row.drafted) == (NEW, 0, drafted_in_total(k, kind))
    if k == 0:
        assert engine.stats.draft_passes == 0
        assert runners_of(engine) == [engine.target]
    elif kind == "sometimes":
        assert 0 < engine.stats.accepted < engine.stats.drafted


@pytest.mark.parametrize("k", [1, 3, 7])
def test_an_oracle_commits_one_more_than_it_drafts_in_every_round(k: int) -> None:
    engine = engine_of(runner(target_model()), drafter("oracle", 3), by_name(k), max_batch=3)
    for i in range(3):
        engine.submit(Request(prompt(i), 1, Sampling(temperature=0), Limits(max_new_tokens=3 * (k + 1))))
    for _ in range(3):
        for commit in engine.step():
            assert (len(commit.tokens), commit.accepted) == (k + 1, k)
    assert engine.step() == []
    assert engine.stats.acceptance_length == k + 1
    # Each proposal costs k passes: what the drafter lacks goes in with its first token.
    assert (engine.stats.target_passes, engine.stats.draft_passes) == (3, 3 * k)


@pytest.mark.parametrize(("n", "capacity"), [(1, 64), (2, 1), (3, 5), (8, 5), (8, 64)])
def test_every_n(n: int, capacity: int) -> None:
    """n samples of each prompt, in a batch too small, uneven and larger than needed."""
    engine, rows = decode(drafter("sometimes", 4), 4, prompts=4, n=n, max_batch=capacity, new=12)
    assert_stock(rows, n, 12)
    assert_adds_up(engine, rows, n)
    assert engine.target.cache.slots == grade(min(capacity, 4 * n))


def test_bass_lengths() -> None:
    engine, rows = decode(drafter("sometimes", 9), "bass", prompts=9, n=2, max_batch=6)
    assert_stock(rows, 2)
    assert_adds_up(engine, rows, 2)
    assert 0 < engine.stats.accepted < engine.stats.drafted


def test_long_prompts_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and pass budgets much smaller than the prompts."""
    monkeypatch.setattr("shoal.models.prompt_passes.MAX_PASS_WIDTH", 7)
    monkeypatch.setattr("shoal.models.prompt_passes.MAX_PASS_TOKENS", 20)
    engine, rows = decode(drafter("sometimes", 12), 3, prompts=12, n=2, max_batch=9, new=8)
    assert_stock(rows, 2, 8)
    assert_adds_up(engine, rows, 2)


class Intermittent:
    """Drafts only now and then, so that the drafter lags far behind the target in between."""

    limit = 3

    def __init__(self, pause: int) -> None:
        self.pause, self.round = pause, 0

    def next_length(self) -> int:
        self.round += 1
        return 0 if self.round % (self.pause + 1) else 3

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("pause", [1, 5, 20])
def test_a_drafter_that_lags_far_behind_catches_up(pause: int) -> None:
    engine, rows = decode(drafter("sometimes", 6), Intermittent(pause), prompts=6, n=1, max_batch=4)
    assert_stock(rows, 1)
    assert_adds_up(engine, rows, 1)
    assert engine.stats.accepted > 0


def test_catching_up_beside_a_long_row_that_has_just_joined() -> None:
    """What one row lacks, behind what the other has, is more columns than the cache was made for."""
    engine = engine_of(runner(target_model()), drafter("oracle", PROMPTS), by_name(Intermittent(NEW - 1)), max_batch=2)
    short, long = min(range(PROMPTS), key=lambda i: len(prompt(i))), max(range(PROMPTS), key=lambda i: len(prompt(i)))
    asked = [(short, NEW), (short, NEW - 2), (long, 4)]
    rows = [engine.submit(Request(prompt(i), 1, Sampling(temperature=0), Limits(max_new_tokens=new)))[0] for i, new in asked]
    while engine.step():
        pass
    for (i, new), row in zip(asked, rows, strict=True):
        assert tuple(row.tokens[row.prompt_length :]) == stock_ids(i)[:new]
