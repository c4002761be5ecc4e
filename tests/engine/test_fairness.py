"""Calls share the slots by tokens: rows pause, and come back with the same tokens, whoever drafts and wherever they are kept.

Tests of: engine.waiting, engine.prefix_cache, engine.scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.suffix import SuffixDrafter
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.engine.scheduler import Scheduler
from shoal.engine.waiting import QUANTUM as QUANTUM_SERVED
from shoal.engine.waiting import Fairness, Waiting
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.serve import app
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, runner, scripted
from shoal.types.requests import Request, Row
from shoal.types.samples import Sample

QUANTUM = 24
RULES = {True: Coupled, False: Rejection}
"""By whether tokens are sampled, at T = 0.8, or greedy."""
LONG = (5, 9, 2, 7, 7, 1, 3, 8, 4, 6, 2, 2)
Made = Callable[[], tuple[Runner, Drafter | None]]


def of_models() -> tuple[Runner, Drafter | None]:
    draft = runner(tiny_model("llama", seed=1, layers=1), 256)
    return runner(tiny_model("llama"), 256), ModelDrafter(draft, 256)


def of_texts() -> tuple[Runner, Drafter | None]:
    return runner(tiny_model("llama"), 256), SuffixDrafter()


def plainly() -> tuple[Runner, Drafter | None]:
    return runner(tiny_model("llama"), 256), None


def request(prompt: Sequence[int], n: int, tokens: int, temperature: float = 0.8) -> Request:
    return Request(tuple(prompt), n, Sampling(temperature=temperature, seed=len(prompt)), Limits(max_new_tokens=tokens))


def new_tokens(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens[row.prompt_length :] for row in rows]


def run(engine: Engine) -> int:
    rounds = 0
    while engine.step():
        rounds += 1
    return rounds


def crowded(made: Made, sampled: bool, *, prefix_bytes: int = 0, **options: Any) -> tuple[Engine, list[list[Row]]]:
    """A request that fills all slots, and three that come later."""
    target, drafter = made()
    prefixes = PrefixMemory(target, getattr(drafter, "runner", None), prefix_bytes) if prefix_bytes else None
    engine = Engine(
        target, drafter, Fixed(3), max_batch=4, rule=RULES[sampled](), quantum=QUANTUM, prefixes=prefixes, **options
    )
    first, *later = requests(sampled)
    rows = [engine.submit(first)]
    for asked in later:
        for _ in range(3):
            engine.step()
        rows.append(engine.submit(asked))
    run(engine)
    return engine, rows


def requests(sampled: bool) -> list[Request]:
    sizes = ((LONG, 6, 60), (LONG[:7], 2, 20), (LONG[:9], 2, 20), (LONG[:3], 2, 20))
    return [request(*size, 0.8 if sampled else 0.0) for size in sizes]


@cache
def expected(sampled: bool) -> list[list[list[int]]]:
    """Of each request alone, decoded plainly."""
    found = []
    for asked in requests(sampled):
        engine = Engine(*plainly(), Fixed(0), max_batch=6, rule=RULES[sampled]())
        found.append(engine.submit(asked))
        run(engine)
    return [new_tokens(rows) for rows in found]


# ── the same tokens ─────────────────────────────────────────────────────────────────────────────────────────────────


WAYS: dict[str, dict[str, object]] = {
    "computed again": {},
    "kept": {"prefix_bytes": 1 << 20},
    "kept in part": {"prefix_bytes": 40_000},
    "shared prompts": {"prefix_sharing": "shared"},
    "in chunks": {"chunk": 5},
}


@pytest.mark.slow(but=["of_texts-True-kept"])
@pytest.mark.parametrize(
    ("made", "sampled", "way"),
    [
        *((of_models, True, way) for way in WAYS),
        (of_models, False, "kept"),
        (of_texts, True, "kept"),
        (plainly, True, "kept"),
    ],
)
def test_rows_that_pause_have_the_tokens_of_rows_that_do_not(made: Made, sampled: bool, way: str) -> None:
    engine, rows = crowded(made, sampled, **WAYS[way])
    assert engine.stats.pauses >= 4
    assert {row.request.n for call in rows for row in call if row.paused_at} >= {6}
    assert [new_tokens(call) for call in rows] == expected(sampled)
    if engine.drafter is not None:
        assert engine.stats.drafted
        assert engine.stats.accepted or not sampled


def test_what_is_kept_of_a_paused_row_is_not_computed_again() -> None:
    computed, _ = crowded(of_models, True)
    kept, rows = crowded(of_models, True, prefix_bytes=1 << 20)
    assert kept.stats.pauses == computed.stats.pauses
    prompts = sum(row.prompt_length - 1 for call in rows for row in call[:1])
    assert kept.stats.prefill_tokens <= prompts
    assert computed.stats.prefill_tokens - prompts >= sum(
        row.paused_at - row.prompt_length for call in rows for row in call if row.paused_at
    )
    assert computed.stats.restored_tokens == 0 < kept.stats.restored_tokens
    # of the prompt before, not of what a row had when it paused
    assert {row.restored for call in rows for row in call if row.paused_at} == {0}
    begun = [[row.started_at or 0.0 for row in call] for call in rows]
    assert max(begun[0][:4]) < min(begun[1])  # a row that comes back began when it first got a slot


def _with_group(row: Row, group: int) -> None:
    row.paused_at = len(row.tokens)


def _one_short(row: Row, group: int) -> None:
    row.paused_at, row.group, row.prefix = len(row.tokens) - 1, group, None


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [_with_group, _one_short])
def test_a_row_that_comes_back_with_other_tokens_is_caught(
    wrong: Callable[[Row, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sibling's prompt for its own text, or without the token before its last."""
    monkeypatch.setattr(Row, "pause", wrong)
    try:
        _, rows = crowded(of_models, True)
    except (AssertionError, RuntimeError, ValueError):
        return
    assert [new_tokens(call) for call in rows] != expected(True)


def test_a_drafter_that_is_not_told_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the slot of a row that is away."""
    monkeypatch.setattr(ModelDrafter, "pause", lambda self, rows: None)
    with pytest.raises(Exception, match="slot"):
        crowded(of_models, True)


def test_a_row_that_waits_may_be_cancelled_or_cut() -> None:
    engine = Engine(*of_models(), Fixed(3), max_batch=2, rule=Coupled(), quantum=8)
    long = engine.submit(request(LONG, 2, 200))
    engine.step()
    other = engine.submit(request(LONG[:5], 1, 100))
    while not any(row.paused_at for row in long):
        engine.step()
    (paused,) = (row for row in long if row.paused_at)
    (ended,) = engine.cancel([paused])
    assert ended.sample is not None
    assert (ended.sample.finish_reason, len(ended.sample.token_ids)) == ("cancelled", paused.new_tokens)
    assert paused.new_tokens > 0
    run(engine)
    assert {row.finish_reason for row in (*long, *other)} == {"cancelled", "length"}
    assert engine.scheduler.idle


# ── whose turn it is ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_short_request_waits_a_bounded_number_of_rounds() -> None:
    """Behind 16 rows of 150 tokens: a quantum and what a round commits, not the 150 tokens."""
    waited = {}
    for quantum in (None, 64):
        engine = engine_of(scripted(hashed(17), 17), None, Fixed(0), max_batch=16, quantum=quantum)
        engine.submit(request(LONG, 16, 150))
        for _ in range(5):
            engine.step()
        (row,) = engine.submit(request((1, 2), 1, 5))
        waited[quantum] = 0
        while not row.rounds:
            engine.step()
            waited[quantum] += 1
    assert waited[64] <= 8  # 16 tokens a round: ahead by 80 after the fifth
    assert waited[None] > 10 * waited[64]


def test_calls_get_the_same_number_of_tokens_whatever_their_rows() -> None:
    engine = engine_of(scripted(hashed(17), 17), None, Fixed(0), max_batch=4, quantum=QUANTUM)
    calls = [engine.submit(request(LONG[:length], n, 400)) for length, n in ((2, 12), (3, 2), (4, 1))]
    served = []
    for _ in range(300):
        engine.step()
        served.append([sum(row.new_tokens for row in rows) for rows in calls])
    assert all(len(rows) * 400 > count for rows, count in zip(calls, served[-1], strict=True))
    # A row can get no more than a token a round: the call with one row lags behind, and never has to wait.
    assert served[-1][2] >= 290
    assert abs(served[-1][0] - served[-1][1]) <= QUANTUM + 12
    assert engine.stats.pauses


def test_calls_get_tokens_by_their_weights() -> None:
    """Three times as many, within the quantum, whoever came first and however many rows each has."""
    for weights, sizes in (((3.0, 1.0), (12, 12)), ((1.0, 3.0), (6, 12)), ((0.25, 0.75), (12, 6))):
        engine = engine_of(scripted(hashed(17), 17), None, Fixed(0), max_batch=4, quantum=QUANTUM)
        calls = [
            engine.submit(replace(request(LONG[: 2 + i], n, 400), weight=weight))
            for i, (n, weight) in enumerate(zip(sizes, weights, strict=True))
        ]
        for _ in range(300):
            engine.step()
        served = [sum(row.new_tokens for row in rows) for rows in calls]
        assert sum(served) == 300 * 4
        assert engine.stats.pauses
        counters = [count / weight for count, weight in zip(served, weights, strict=True)]
        assert abs(counters[0] - counters[1]) <= QUANTUM + 4 / min(weights)
        assert max(served) > 2 * min(served)


def test_weights_that_are_not_looked_at_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(self: Fairness, row: Row, tokens: int) -> None:
        self._tokens[row.call] += tokens

    monkeypatch.setattr(Fairness, "serve", serve)
    with pytest.raises(AssertionError):
        test_calls_get_tokens_by_their_weights()


def test_a_call_of_little_weight_gives_way_sooner() -> None:
    waited = {}
    for weight in (1.0, 0.25, 0.05):
        engine = engine_of(scripted(hashed(17), 17), None, Fixed(0), max_batch=16, quantum=256)
        engine.submit(replace(request(LONG, 16, 150), weight=weight))
        engine.step()
        (row,) = engine.submit(request((1, 2), 1, 5))
        waited[weight] = 0
        while not row.rounds:
            engine.step()
            waited[weight] += 1
    assert 12 <= waited[1.0] <= 20  # so many rounds until 16 tokens each, by weight, are more than 256
    assert waited[0.05] < waited[0.25] < waited[1.0] / 2


def test_weights_do_not_change_tokens() -> None:
    engine = Engine(*of_models(), Fixed(3), max_batch=4, rule=RULES[True](), quantum=QUANTUM)
    first, *later = [replace(asked, weight=weight) for asked, weight in zip(requests(True), (0.5, 4, 1, 2), strict=True)]
    rows = [engine.submit(first)]
    engine.step()
    rows += [engine.submit(asked) for asked in later]
    run(engine)
    assert engine.stats.pauses >= 2
    assert engine.stats.accepted
    assert [new_tokens(call) for call in rows] == expected(True)


def test_who_asked_for_nothing_before_gains_nothing_by_it() -> None:
    fairness = Fairness(quantum=10)
    first, second = ([Row(request(LONG, 1, 9), i, 0, 0, [], frozenset(), 99, call=i)] for i in range(2))
    fairness.enter(first)
    fairness.serve(first[0], 1000)
    fairness.enter(second)
    assert fairness.to_pause(first, [1]) is None
    fairness.serve(first[0], 11)
    assert fairness.to_pause(first, [1]) is first[0]


def test_a_counter_that_begins_at_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(self: Fairness, rows: Sequence[Row]) -> None:
        self._tokens[rows[0].call], self._rows[rows[0].call] = 0, len(rows)

    monkeypatch.setattr(Fairness, "enter", enter)
    with pytest.raises(AssertionError):
        test_who_asked_for_nothing_before_gains_nothing_by_it()


def test_without_a_quantum_no_row_pauses() -> None:
    engine = engine_of(scripted(hashed(17), 17), None, Fixed(0), max_batch=2)
    rows = [engine.submit(request(LONG[:length], 2, 50)) for length in (2, 3, 4)]
    samples: dict[Row, Sample] = {}
    while commits := engine.step():
        samples |= {done.row: done.sample for done in commits if done.sample is not None}
    assert engine.stats.pauses == 0
    ended = [samples[row].finished_at for call in rows for row in call]
    assert ended == sorted(ended)


def test_a_server_shares_its_slots_and_batches_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    class Pair:
        target = runner(tiny_model("llama"), 256)

        def engine(self, *_: Any, quantum: int | None, **__: Any) -> Engine:
            asked.append(quantum)
            return Engine(self.target, None, Fixed(0))

    made = lambda pair, make, settings: make()  # noqa: E731
    monkeypatch.setattr(app, "make_app", made)
    monkeypatch.setattr(app, "Offline", made)
    config = app.ServeConfig(cast(Any, Pair), cast(Any, None), kv_bytes=1 << 20)
    config.app()
    config.offline()
    assert asked == [QUANTUM_SERVED, None]


@pytest.mark.parametrize("kind", ["resampled", "distinct"])
def test_rows_that_depend_on_others_do_not_pause(kind: str) -> None:
    fairness = Fairness(quantum=1)
    rows = [Row(replace(Request(LONG, 2), **{kind: True}), 0, i, 0, list(LONG), frozenset(), 99) for i in range(2)]
    fairness.enter(rows)
    fairness.serve(rows[0], 50)
    fairness._tokens[1] = 0
    assert fairness.to_pause(rows, [1]) is None
    fairness.enter([])


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=6), st.randoms())
def test_any_course_ends_and_serves_everybody(capacity: int, calls: Sequence[tuple[int, int]], random: object) -> None:
    """Rows of any lengths that come at any time: all end with their tokens, a slot is free only where nobody waits."""
    scheduler = Scheduler(capacity, fairness=Fairness(4))
    todo, rows, left = list(calls), [], {}
    while todo or not scheduler.idle:
        if todo and random.random() < 0.3:  # type: ignore[attr-defined]
            n, tokens = todo.pop()
            new = [Row(request(LONG, n, tokens), len(left) + 1, i, 0, list(LONG), frozenset(), 999) for i in range(n)]
            scheduler.add(new)
            rows += new
            left |= dict.fromkeys(new, tokens)
        round_ = scheduler.next_round()
        assert len(round_.rows) == min(capacity, sum(count > 0 for count in left.values()))
        assert [row.slot for row in round_.rows] == list(range(len(round_.rows)))
        for admission in round_.admissions:
            assert admission.row.entry_length == len(admission.row.tokens)
        for row in round_.rows:
            row.tokens.append(1)
            left[row] -= 1
            scheduler.fairness.serve(row, 1)
        scheduler.remove([row for row in round_.rows if not left[row]])
        paused = scheduler.to_pause()
        if paused is not None:
            assert len(scheduler.slots.rows_in_slots) == capacity
            assert scheduler.waiting
            scheduler.pause(paused)
    assert all(count == 0 for count in left.values())
    assert not scheduler.fairness._tokens
    assert not scheduler._groups.sizes


def test_a_paused_row_is_the_next_of_its_call() -> None:
    waiting = Waiting()
    rows = [Row(request(LONG, 3, 9), 0, i, 0, list(LONG), frozenset(), 99, call=4) for i in range(3)]
    later = [Row(request(LONG, 1, 9), 1, 0, 0, list(LONG), frozenset(), 99, call=5)]
    waiting.add(rows)
    waiting.add(later)
    for row in rows:
        waiting.remove(row)
    assert list(waiting.calls) == [5]
    waiting.put_back(rows[2])
    waiting.put_back(rows[1])
    assert (list(waiting.calls), list(waiting), len(waiting)) == ([4, 5], [rows[1], rows[2], *later], 3)
    assert waiting.first(4, [0]) is rows[1]
