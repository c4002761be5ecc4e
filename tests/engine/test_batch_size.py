"""max_batch="auto": as many rows as raise tokens per second, on a clock that rounds move by what they cost.

Tests of: models.device, engine.batch_size, engine.scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batch_size as virtual
from shoal import Shoal
from shoal.config import Limits, Sampling
from shoal.engine import batch_size as sizes
from shoal.engine import memory as memory_module
from shoal.engine.batch_size import FIRST, MOST, AutoBatchSize, BatchSize, FixedBatchSize
from shoal.engine.engine import Engine
from shoal.engine.scheduler import Scheduler
from shoal.errors import RequestError
from shoal.lookahead.controller import Auto, Controller, Fixed, Lookahead, PairCosts
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import table_model
from shoal.types.requests import Request, Row

Cost = Callable[[int], float]
FLAT: Cost = lambda rows: 1.0  # noqa: E731
TO_16: Cost = lambda rows: max(1.0, rows / 16)  # noqa: E731
VOCAB = 5
P = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(VOCAB), size=VOCAB))


class Decoding:
    """A scheduler whose rounds take what a curve says; `rows` of each round so far."""

    def __init__(self, batch_size: BatchSize, cost: Cost) -> None:
        self.batch_size, self.cost = batch_size, cost
        self.scheduler = Scheduler(batch_size.most, rows_now=batch_size.rows)
        self.left: dict[Row, int] = {}
        self.now, self.groups = 0.0, 0
        self.rows: list[int] = []
        self.ended: dict[Row, float] = {}

    def ask(self, rows: int, tokens: int | Sequence[int], budget: float | None = None) -> list[Row]:
        lengths = [tokens] * rows if isinstance(tokens, int) else list(tokens)
        made = []
        for length in lengths:
            request = Request((1,), limits=Limits(max_new_tokens=length, time_budget=budget), submitted_at=self.now)
            deadline = None if budget is None else self.now + budget
            made.append(Row(request, self.groups, 0, 0, [1], frozenset(), 1 << 20, deadline))
            self.left[made[-1]], self.groups = length, self.groups + 1
        self.scheduler.add(made)
        return made

    def step(self, times: int = 1, slow: float = 1.0) -> None:
        for _ in range(times):
            rows = self.scheduler.next_round().rows
            self.rows.append(len(rows))
            seconds = self.cost(len(rows)) * slow
            self.now += seconds
            self.batch_size.learn(len(rows), len(rows), seconds)
            for row in rows:
                self.left[row] -= 1
            ended = [row for row in rows if not self.left[row]]
            self.scheduler.remove(ended)
            self.ended |= dict.fromkeys(ended, self.now)

    def finish(self) -> float:
        while not self.scheduler.idle:
            self.step()
        return self.now


def lengths(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 129, n).tolist()


# ── what curves lead to ─────────────────────────────────────────────────────────────────────────────────────────────


def test_all_rows_run_where_a_round_costs_the_same_for_any_number() -> None:
    known = AutoBatchSize()
    first = Decoding(known, FLAT)
    first.ask(128, 64)
    assert first.finish() <= 64 + 5
    assert first.rows[:5] == [16, 16, 32, 64, 128]
    second = Decoding(known, FLAT)
    second.ask(128, 64)
    assert second.finish() == 64  # what the first call has learned


def test_about_sixteen_rows_run_where_more_cost_in_proportion() -> None:
    """In the first call up to 32: then 16 are known to bring as much, and the first rows end in half the time."""
    known = AutoBatchSize()
    first = Decoding(known, TO_16)
    first.ask(1000, lengths(1000))
    first.finish()
    assert max(first.rows) <= 32
    assert sorted(first.rows)[len(first.rows) // 2] == 16
    second = Decoding(known, TO_16)
    rows = second.ask(64, 64)
    second.finish()
    assert set(second.rows) == {16}
    assert second.ended[rows[0]] == 64


def test_a_size_that_brings_less_is_left() -> None:
    cost: Cost = lambda rows: (4 + 0.4 * rows) * (1 if rows <= 64 else 1.33)  # noqa: E731
    decoding = Decoding(AutoBatchSize(), cost)
    decoding.ask(600, lengths(600))
    decoding.finish()
    later = decoding.rows[200:-100]
    assert max(decoding.rows) == 128
    assert sorted(later)[len(later) // 2] == 64


def test_equal_batches_where_the_last_would_be_small() -> None:
    """16 rows are enough, but 16 and then 8 take longer than 24 at once."""
    unknown = Decoding(AutoBatchSize(), TO_16)
    unknown.ask(24, 64)
    assert unknown.finish() == 64 * 24 / 16
    known = AutoBatchSize()
    taught = Decoding(known, TO_16)
    taught.ask(400, lengths(400))
    taught.finish()
    for rows, together in ((24, 24), (40, 20), (48, 16)):
        decoding = Decoding(known, TO_16)
        decoding.ask(rows, 64)
        assert decoding.finish() == pytest.approx(64 * rows / 16)
        assert set(decoding.rows) == {together}


@pytest.mark.slow
def test_the_best_fixed_number_is_hardly_better() -> None:
    """`python benchmarks/batch_size.py` prints this for more curves and work; here the measured rounds are disturbed, too."""
    for curve in ("bundled pair, plain", "a third slower beyond 64"):
        found = virtual.regret(curve, "1000 x 8-128", seeds=1)
        assert max(found.calls) < 0.05
    assert virtual.regret("flat", "128 x 64", seeds=1).calls[1:] == pytest.approx([0, 0], abs=1e-9)


def test_sixteen_in_turn_would_be_much_worse_on_the_measured_curve() -> None:
    """The negative control of the tests above: they tell a good number from the old default."""
    cost = virtual.CURVES["bundled pair, plain"]
    turns = virtual.seconds_of_call(FixedBatchSize(16), cost, [64] * 128, np.random.default_rng(0))
    assert turns / virtual.seconds_of_call(AutoBatchSize(), cost, [64] * 128, np.random.default_rng(0)) > 1.5


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10), st.integers(1, 5)), max_size=60), st.integers(0, 300))
def test_whatever_is_measured_the_number_is_within_bounds(rounds: Sequence[tuple[int, float, int]], running: int) -> None:
    size = AutoBatchSize()
    for rows, seconds, each in rounds:
        size.learn(rows, rows * each, seconds)
        for waiting in (1, 40, 10_000):
            for budget in (math.inf, 1e-9, 1.0, 1e9):
                found = size.rows(running, waiting, budget)
                assert min(FIRST, running + waiting) <= found <= MOST


# ── disturbances, late requests, deadlines, memory ──────────────────────────────────────────────────────────────────


def test_one_slow_round_changes_nothing() -> None:
    decoding = Decoding(AutoBatchSize(), FLAT)
    decoding.ask(2000, lengths(2000))
    decoding.step(100)
    full = decoding.rows[-1]
    assert full == MOST
    decoding.step(slow=1000.0)
    decoding.step(200)
    assert set(decoding.rows[-201:]) == {full}


def test_slow_rounds_now_and_then_change_nothing() -> None:
    """One of eight takes ten times as long, which is no reason to leave 64 rows for 128 that bring a fifth less, nor for 32."""
    decoding = Decoding(AutoBatchSize(), lambda rows: (4 + 0.4 * rows) * (1 if rows <= 64 else 1.33))
    decoding.ask(4000, lengths(4000))
    decoding.step(150)
    assert decoding.rows[-1] == 64
    for _ in range(75):
        decoding.step(7)
        decoding.step(slow=10.0)
    assert decoding.rows.count(64) > 0.9 * 600


@pytest.mark.slow
def test_a_long_disturbance_is_forgotten() -> None:
    """300 rounds of three times the cost, all at the largest size: fewer rows may run then, and all later."""
    decoding = Decoding(AutoBatchSize(), lambda rows: 1 + rows / 100)
    decoding.ask(20_000, lengths(20_000))
    decoding.step(100)
    assert decoding.rows[-1] == MOST
    decoding.step(300, slow=3.0)
    decoding.step(2500)
    assert decoding.rows[-1] == MOST


def test_late_requests_join_those_that_run() -> None:
    decoding = Decoding(AutoBatchSize(), FLAT)
    for rows in (8, 20, 70):
        decoding.ask(rows, 64)
        decoding.step(8)
        assert decoding.rows[-1] == len(decoding.scheduler.running) == len(decoding.left)
    decoding.finish()


def test_a_time_budget_bounds_the_rows() -> None:
    """More rows bring more tokens, but none of them would end in time."""
    cost: Cost = lambda rows: 1 + rows / 32  # noqa: E731
    known = AutoBatchSize()
    unhurried = Decoding(known, cost)
    unhurried.ask(1000, lengths(1000))
    unhurried.finish()
    assert max(unhurried.rows) > 128
    budget = 2 * 64 * cost(64)  # half of it is enough for 64 rows
    timed = Decoding(known, cost)
    rows = timed.ask(256, 64, budget=budget)
    timed.finish()
    assert 48 <= max(timed.rows) <= 66
    assert timed.ended[rows[0]] <= 1.02 * budget / 2
    everything = Decoding(FixedBatchSize(256), cost)
    everything.ask(256, 64, budget=budget)
    assert min(everything.ended.values(), default=everything.finish()) > budget
    short = Decoding(known, cost)
    short.ask(64, 64, budget=1.0)  # of which nothing ends in time: as many as ever
    short.finish()
    assert max(short.rows) == FIRST


def test_a_time_budget_bounds_the_rows_of_others_only_while_they_are_there() -> None:
    decoding = Decoding(AutoBatchSize(), lambda rows: 1 + rows / 32)
    hurried = decoding.ask(4, 64, budget=300.0)
    decoding.ask(300, lengths(300))
    decoding.step(60)
    assert max(decoding.rows) < 64
    decoding.scheduler.remove(hurried)
    decoding.step(60)
    assert max(decoding.rows) > 64


class Timed:
    """An engine whose clock is moved by its passes: the target's by their positions, the drafter's by their rows."""

    def __init__(self, cost: Cost, step: Cost | None, lookahead: Controller | Lookahead, **options: Any) -> None:
        self.now, self.cost = 0.0, cost
        drafter = None if step is None else table_model(P)
        self.engine = engine_of(table_model(P), drafter, lookahead, rule=Coupled(), clock=lambda: self.now, **options)
        for runner, priced in zip(runners_of(self.engine), (cost, step or cost), strict=False):
            self._price(runner, priced)
        self.rows: list[int] = []

    def _price(self, runner: Any, cost: Cost) -> None:
        feed = runner.feed

        def priced(slots: Any, tokens: Any, counts: Sequence[int], *, want_logits: bool = True, **tree: Any) -> Any:
            self.now += cost(sum(counts)) if want_logits else 0.0
            return feed(slots, tokens, counts, want_logits=want_logits, **tree)

        runner.feed = priced

    def ask(self, n: int, new: int = 24, **limits: Any) -> list[Row]:
        asked = Limits(max_new_tokens=new, eos=(), **limits)
        return self.engine.submit(Request((1, 2), n, Sampling(seed=3), asked, submitted_at=self.now))

    def finish(self) -> Timed:
        while True:
            before = self.engine.stats.row_rounds
            if not self.engine.step():
                return self
            self.rows.append(self.engine.stats.row_rounds - before)


def test_the_engine_learns_from_its_rounds_alone() -> None:
    """Prompts are no part of them."""
    timed = Timed(FLAT, None, Fixed(0))
    timed.ask(200)
    timed.finish()
    assert timed.rows[:5] == [16, 16, 32, 64, 200]
    assert isinstance(timed.engine.batch_size, AutoBatchSize)
    assert timed.engine.batch_size.costs.at(64) == 1.0


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("k", [0, 2])
def test_ids_do_not_depend_on_who_runs_when(k: int) -> None:
    """Costs without any order, so that rows join and wait at random."""
    expected = Timed(FLAT, FLAT, Fixed(k), max_batch=1)
    rows = expected.ask(70)
    expected.finish()
    random = Random(1)
    timed = Timed(lambda positions: random.random() * positions, FLAT, Fixed(k))
    found = timed.ask(70)
    timed.finish()
    assert [row.tokens for row in found] == [row.tokens for row in rows]
    assert len(set(timed.rows)) > 3


@pytest.mark.slow
def test_rows_and_draft_lengths_do_not_follow_each_other_for_ever() -> None:
    """A target whose passes cost nothing more up to 48 positions, a drafter that is always right: few rows with long drafts and
    many with short ones bring about as much. The number of rows changes a few times while it grows, and then stays."""
    changes = 0
    last = 0

    class Counted(AutoBatchSize):
        def learn(self, rows: int, committed: int, seconds: float) -> None:
            nonlocal changes, last
            super().learn(rows, committed, seconds)
            changes, last = changes + (self._size != last), self._size

    timed = Timed(lambda n: max(1.0, n / 48), lambda n: 0.05, Auto(PairCosts(packed=True)), max_batch=Counted())
    timed.ask(400, new=40)
    timed.finish()
    assert changes <= 8
    assert timed.engine.stats.drafted > 0
    alone = {
        rows: Timed(timed.cost, lambda n: 0.05, Auto(PairCosts(packed=True)), max_batch=rows)
        for rows in (8, 16, 32, 64, 128)
    }
    for each in alone.values():
        each.ask(400, new=40)
        each.finish()
    assert timed.now <= 1.1 * min(each.now for each in alone.values())


def test_rows_beyond_the_first_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free holds some 40 rows; none is refused, and a number that the caller gave is taken as it is."""
    row = Timed(FLAT, None, Fixed(0)).engine.target.memory.cache_bytes(1, 2 + 24 + 1)
    scores = VOCAB * memory_module.BYTES_PER_SCORE
    monkeypatch.setattr(memory_module, "kv_budget", lambda device: 40 * (row + scores))
    timed = Timed(FLAT, None, Fixed(0))
    timed.ask(100)
    assert max(timed.finish().rows) == 40
    monkeypatch.setattr(memory_module, "kv_budget", lambda device: 0)
    tight = Timed(FLAT, None, Fixed(0))
    tight.ask(40)
    assert max(tight.finish().rows) == FIRST
    explicit = Timed(FLAT, None, Fixed(0), max_batch=40)
    explicit.ask(40)
    assert max(explicit.finish().rows) == 40


# ── how it is given ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_learned_stays_with_the_pair_and_the_draft_length() -> None:
    shoal = Shoal(table_model(P), table_model(P))

    def found(name: object) -> BatchSize:
        return shoal.engine(name, Coupled()).batch_size

    assert found("off") is found("off")
    assert found("off") is not found(4)
    assert found(4) is not found("auto")
    assert isinstance(found("off"), AutoBatchSize)


def test_a_number_is_taken_as_it_is() -> None:
    shoal = Shoal(table_model(P), max_batch=3)
    engine: Engine = shoal.engine("off", Coupled())
    assert isinstance(engine.batch_size, FixedBatchSize)
    assert engine.scheduler.capacity == engine.batch_size.most == 3
    assert sizes.most_rows(3) == 3
    assert sizes.most_rows("auto") == MOST


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "all", ""])
def test_the_command_line_takes_auto_and_numbers(text: str) -> None:
    from shoal.cli.options import parse_max_batch

    assert parse_max_batch("auto") == "auto"
    assert parse_max_batch("32") == 32
    with pytest.raises(RequestError, match="max_batch must be 'auto' or an integer >= 1"):
        parse_max_batch(text)
