"""Slots, admissions, copies and moves: simulated without a tensor, then counted through the engine.

Tests of: engine.admission, engine.running_rows, engine.scheduler, engine.memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.engine.memory import grade
from shoal.engine.running_rows import PlainRows
from shoal.engine.scheduler import CHUNK, Scheduler
from shoal.engine.waiting import Fairness
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row, token_slots
from shoal.types.rounds import Admission, Move, PrefillChunk, PromptOrigin, ScheduledRound


def group(number: int, n: int, deadline: float | None = None, length: int = 1) -> list[Row]:
    request = Request((number + 1,) * length, n)
    return [Row(request, number, i, 0, list(request.prompt_ids), frozenset(), 1 << 20, deadline) for i in range(n)]


def said(round_: ScheduledRound) -> tuple[list[Row], list[Admission], list[Move]]:
    """Who runs, who is admitted, who moves."""
    return list(round_.rows), list(round_.admissions), list(round_.moves)


class Slots:
    """What the slots of a cache hold, moved as the engine moves it.

    A slot holds the name of a prompt (its group) once that is complete, and of the row whose tokens follow it; so does a token
    slot of the prefix store.
    """

    def __init__(self) -> None:
        self.prompt: dict[int, int | None] = {}
        self.owner: dict[int, Row] = {}
        self.token_slots: dict[int, int] = {}
        self.done: dict[Row, int] = {}
        self.computed: list[int] = []

    def carry_out(self, round_: ScheduledRound) -> None:
        """Old copies, then chunks of prompts, then copies of those, then moves: each from a slot that holds what it claims to."""
        copies = [admission for admission in round_.admissions if admission.source is not None]
        for admission in copies:
            if admission.origin is PromptOrigin.COPY:
                self._copy(admission)
        for admission in round_.admissions:
            if admission.source is None:
                self.owner[admission.row.slot] = admission.row
                self.prompt[admission.row.slot] = admission.row.group if admission.origin is PromptOrigin.SHARED else None
        for chunk in round_.chunks:
            self._fill(chunk)
        for admission in copies:
            if admission.origin is PromptOrigin.COPY_AFTER_COMPUTE:
                self._copy(admission)
        for move in round_.moves:
            assert self.owner[move.source] is move.row
            self.prompt[move.target], self.owner[move.target] = self.prompt[move.source], move.row
        assert [row.slot for row in round_.rows] == list(range(len(round_.rows)))
        assert all(row.slot < round_.slots for row in round_.in_slots)
        assert round_.prefilling is None or round_.prefilling.slot >= len(round_.rows)
        for row in round_.rows:
            assert self.owner[row.slot] is row
            assert self.prompt[row.slot] == row.group
            assert all(self.token_slots[token_slot] == row.group for token_slot in token_slots_of(row))
            assert all(token_slot < token_slots(round_.prefixes.values()) for token_slot in token_slots_of(row))

    def _copy(self, admission: Admission) -> None:
        assert admission.source is not None
        assert self.prompt[admission.source] == admission.row.group
        self.prompt[admission.row.slot], self.owner[admission.row.slot] = admission.row.group, admission.row

    def _fill(self, chunk: PrefillChunk) -> None:
        """A prompt is computed from its start to its end, by one row, in one place."""
        row = chunk.row
        assert self.owner[chunk.slot] is row
        assert chunk.start == self.done.get(row, 0)
        self.done[row] = chunk.stop
        self.token_slots.update(dict.fromkeys(token_slots_of(row)[chunk.start : chunk.stop], row.group))
        if chunk.stop == row.prompt_length - 1:
            self.prompt[chunk.slot] = row.group
            self.computed.append(row.group)


def token_slots_of(row: Row) -> range:
    """Where the row's prompt lies in the shared store."""
    return range(0) if row.prefix is None else range(row.prefix.base, row.prefix.base + row.prefix.length)


steps = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6)),
    st.tuples(st.just("round"), st.lists(st.integers(0, 7), max_size=4)),
    st.tuples(st.just("cancel"), st.lists(st.integers(0, 40), max_size=5)),
)


@pytest.mark.parametrize("chunk", [1, 2, CHUNK])
@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@given(st.integers(1, 5), st.lists(steps, max_size=30))
def test_any_schedule(prefix_sharing: str, chunk: int, capacity: int, schedule: Sequence[tuple[str, object]]) -> None:
    """Rows come, end in any order and are cancelled; every copy and move comes from a slot that holds what it claims to, and every
    shared prompt is where its rows look for it, complete."""
    scheduler, slots, rows = Scheduler(capacity, prefix_sharing=prefix_sharing, chunk=chunk), Slots(), []
    entered: list[Row] = []
    gone: set[int] = set()
    groups = 0

    def one_round(ends: Sequence[int]) -> None:
        busy = bool(scheduler.running)
        round_ = scheduler.next_round()
        slots.carry_out(round_)
        entered.extend(admission.row for admission in round_.admissions)
        computed = sum(chunk.stop - chunk.start for chunk in round_.chunks)
        if busy and computed >= chunk:  # running rows wait no longer than that
            assert computed == chunk
        elif not (busy and chunk < CHUNK):  # no row waits while a slot is free
            assert len(round_.rows) == min(capacity, len(rows) - len(gone))
        assert bool(round_.rows) == (len(rows) > len(gone))
        ended = [row for row in round_.rows if row.slot in ends]
        gone.update(map(id, ended))
        scheduler.remove(ended)

    for kind, argument in schedule:
        if kind == "add":
            new = group(groups, int(argument), length=1 + 3 * (groups % 4))  # type: ignore[call-overload]
            groups += 1
            rows += new
            scheduler.add(new)
        elif kind == "round":
            one_round(argument)  # type: ignore[arg-type]
        else:
            chosen = [rows[i] for i in argument if i < len(rows)]  # type: ignore[union-attr]
            gone.update(map(id, chosen))
            scheduler.remove(chosen)
    while not scheduler.idle:
        one_round(range(capacity))
    assert len(gone) == len(rows)
    assert [id(row) for row in entered] == [
        id(row) for row in rows if any(row is e for e in entered)
    ]  # first come, first served
    if chunk == CHUNK:  # else a row may have been cancelled halfway, and its sibling started again
        assert len(slots.computed) == len(set(slots.computed))  # no prompt twice
    assert all((row.prefix is not None) == (prefix_sharing == "shared" and row.prompt_length > 1) for row in entered)
    assert said(scheduler.next_round()) == ([], [], [])


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@given(
    st.integers(1, 5), st.sampled_from([1, 3, CHUNK]), st.integers(4, 40),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4), st.randoms(),
)  # fmt: skip
def test_prompts_with_deadlines_take_turns(
    prefix_sharing: str, capacity: int, chunk: int, most: int, calls: Sequence[Sequence[int]], random: Any
) -> None:
    """Calls of several prompts, too little memory for all of them, rows that end or are cancelled in any order: every prompt of a
    call gets its first row before any gets its second, the calls follow each other, every copy comes from where it is, and what is
    stored never takes more than it may."""
    fits = lambda rows, slots, prefixes: token_slots(prefixes.values()) <= most  # noqa: E731
    scheduler, slots = Scheduler(capacity, prefix_sharing=prefix_sharing, chunk=chunk, fits=fits), Slots()
    entered, rows = [], []
    for number, sizes in enumerate(calls):
        new = [row for i, n in enumerate(sizes) for row in group(10 * number + i, n, deadline=1e9, length=1 + (3 * i) % 5)]
        scheduler.add(new)
        rows += new
    gone: set[Row] = set()
    while not scheduler.idle:
        round_ = scheduler.next_round()
        slots.carry_out(round_)
        entered += [admission.row for admission in round_.admissions]
        assert token_slots(round_.prefixes.values()) <= most
        assert len(scheduler.slots.store.prefixes) <= capacity
        ended = {row for row in round_.rows if random.random() < 0.5} | {row for row in rows if random.random() < 0.02}
        gone |= ended
        scheduler.remove(ended)
    turns = [(row.group // 10, row.index) for row in entered]
    assert turns == sorted(turns)
    assert len(set(entered)) == len(entered)
    assert set(rows) == gone
    assert len(slots.computed) <= len(entered)


@pytest.mark.parametrize(("prefix_sharing", "together"), [("copied", True), ("shared", True), ("shared", False)])
@pytest.mark.parametrize(
    ("groups", "n", "capacity", "computed"),
    [
        *((4, 6, 4, 4), (3, 5, 4, 3), (2, 8, 2, 2), (1, 9, 3, 1)),  # no more prompts than slots: once each
        *(
            (5, 3, 4, 7),
            (8, 4, 4, 20),
            (6, 1, 2, 6),
            (6, 3, 1, 16),
        ),  # else as many are kept from turn to turn as there are slots
    ],
)
def test_how_often_prompts_are_computed_in_turns(
    prefix_sharing: str, together: bool, groups: int, n: int, capacity: int, computed: int
) -> None:
    """Rows end all together, or one at a time in any order: a prompt is computed again only in a turn that finds it nowhere."""
    for seed in range(1 if together else 8):
        choice, admitted = Random(seed).choice, []
        scheduler, slots = Scheduler(capacity, prefix_sharing=prefix_sharing), Slots()
        scheduler.add([row for number in range(groups) for row in group(number, n, deadline=1e9, length=4)])
        while not scheduler.idle:
            round_ = scheduler.next_round()
            slots.carry_out(round_)
            admitted += [admission.row.group for admission in round_.admissions]
            scheduler.remove(round_.rows if together else [choice(round_.rows)])
        assert [set(admitted[i : i + groups]) for i in range(0, groups * n, groups)] == [set(range(groups))] * n
        assert len(slots.computed) == computed == groups + (n - 1) * max(0, groups - capacity)


def test_a_later_call_does_not_go_before_the_turns_of_an_earlier_one() -> None:
    scheduler = Scheduler(1)
    early, late = group(0, 3, deadline=1e9), group(1, 1, deadline=1e9)
    scheduler.add(early)
    scheduler.add(late)
    seen = []
    while not scheduler.idle:
        (row,) = scheduler.next_round().rows
        seen.append(row)
        scheduler.remove([row])
    assert seen == early + late


@given(st.integers(1, 7), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms())
def test_each_prompt_is_computed_once_whatever_the_capacity(capacity: int, sizes: Sequence[int], random: object) -> None:
    scheduler, slots = Scheduler(capacity), Slots()
    for number, n in enumerate(sizes):
        scheduler.add(group(number, n))
    while not scheduler.idle:
        round_ = scheduler.next_round()
        slots.carry_out(round_)
        scheduler.remove([row for row in round_.rows if random.random() < 0.5])  # type: ignore[attr-defined]
    assert slots.computed == list(range(len(sizes)))


def test_one_slot_serves_one_row_at_a_time_in_order() -> None:
    scheduler = Scheduler(1)
    rows = group(0, 2) + group(1, 2)
    scheduler.add(rows)
    computed, copied = (PromptOrigin.COMPUTE, None), (PromptOrigin.COPY, 0)
    for row, (origin, source) in zip(rows, (computed, copied, computed, copied), strict=True):
        round_ = scheduler.next_round()
        assert said(round_) == ([row], [Admission(row, origin, source)], [])
        assert said(scheduler.next_round()) == ([row], [], [])
        scheduler.remove([row])
    assert scheduler.idle


def test_siblings_admitted_together_are_copied_from_the_one_just_computed() -> None:
    scheduler = Scheduler(4)
    first, second = group(0, 2), group(1, 2)
    scheduler.add(first + second)
    expected = [
        Admission(first[0], PromptOrigin.COMPUTE),
        Admission(first[1], PromptOrigin.COPY_AFTER_COMPUTE, 0),
        Admission(second[0], PromptOrigin.COMPUTE),
        Admission(second[1], PromptOrigin.COPY_AFTER_COMPUTE, 2),
    ]
    assert scheduler.next_round().admissions == expected


def test_a_waiting_row_takes_the_slot_of_one_that_ended() -> None:
    scheduler = Scheduler(3)
    rows = group(0, 4)
    scheduler.add(rows)
    scheduler.next_round()
    scheduler.remove([rows[1]])
    assert said(scheduler.next_round()) == ([rows[0], rows[3], rows[2]], [Admission(rows[3], PromptOrigin.COPY, 0)], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"criteria": (len,)}, {"keep_logits": True}, {"top_logprobs": 1}, {"weighted": True}, {"distinct": True},
        {"sampling": Sampling(guidance=0.5)}, {"checks": [("check", 0)]}, {"cutting": object()},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_is_read_of_a_round_decides_whoever_ran_before(fields: dict[str, Any]) -> None:
    """A row that is read more of takes the place of one that is not."""
    (plain,), (row,), asked = group(0, 1), group(1, 1), PlainRows(None)
    ((name, value),) = fields.items()
    if hasattr(row.request, name):
        row.request = replace(row.request, **fields)
    else:
        setattr(row, name, value)
    assert [asked.includes([each]) for each in (plain, row, plain)] == [True, False, True]


def test_holes_are_closed_from_the_end() -> None:
    scheduler = Scheduler(5)
    rows = group(0, 5)
    scheduler.add(rows)
    scheduler.next_round()
    scheduler.remove([rows[0], rows[2]])
    assert said(scheduler.next_round()) == ([rows[4], rows[1], rows[3]], [], [Move(rows[4], 4, 0), Move(rows[3], 3, 2)])
    assert [row.slot for row in (rows[4], rows[1], rows[3])] == [0, 1, 2]


def test_a_prompt_is_completed_where_it_was_begun_and_then_moves() -> None:
    scheduler, slots = Scheduler(3, chunk=2), Slots()
    rows, long = group(0, 2), group(1, 1, length=6)
    scheduler.add(rows)
    slots.carry_out(scheduler.next_round())
    scheduler.add(long)
    seen = []
    for end in (rows[1:], [], []):
        round_ = scheduler.next_round()
        slots.carry_out(round_)
        seen += [(chunk.slot, chunk.start, chunk.stop) for chunk in round_.chunks]
        scheduler.remove(end)
    assert seen == [(2, 0, 2), (2, 2, 4), (2, 4, 5)]
    assert said(round_) == ([rows[0], long[0]], [], [Move(long[0], 2, 1)])


def test_no_slot_holds_a_refused_prompt_that_was_to_move() -> None:
    """A long prompt ends above a free slot and moves there, while the next one begins above it; their pass fails."""
    scheduler = Scheduler(4, chunk=10)
    short, other = group(0, 1)[0], group(1, 1)[0]
    long, later = group(2, 2, length=16), group(3, 1, length=31)
    scheduler.add([short])
    scheduler.add([other])
    scheduler.next_round()
    scheduler.add(long[:1])
    scheduler.next_round()
    scheduler.remove([short])
    scheduler.add(later)
    round_ = scheduler.next_round()
    assert [(chunk.row, chunk.slot) for chunk in round_.chunks] == [(long[0], 2), (later[0], 3)]
    assert [(move.row, move.source, move.target) for move in round_.moves] == [(long[0], 2, 0)]
    assert scheduler.refuse(round_) == [later[0], long[0]]
    assert not {2, 3} & {*scheduler.slots.groups}


def test_no_slot_holds_a_prompt_whose_copy_was_refused() -> None:
    """The pass beside it failed: a later row of the prompt copies from the row that has it, not from the refused row's slot."""
    scheduler, (first, second, third) = Scheduler(2), group(0, 3)
    scheduler.add([first])
    scheduler.next_round()
    scheduler.add([second])
    round_ = scheduler.next_round()
    slot = second.slot
    assert [admission.row for admission in round_.admissions] == [second]
    assert scheduler.refuse(round_) == [second]
    assert scheduler.slots.groups[first.slot] == 0
    assert slot != first.slot
    assert scheduler.slots.groups[slot] != 0
    scheduler.add([third])
    assert [admission.source for admission in scheduler.next_round().admissions] == [first.slot]


def test_cancelling_waiting_and_running_rows() -> None:
    scheduler = Scheduler(2)
    rows = group(0, 4)
    scheduler.add(rows)
    scheduler.next_round()
    scheduler.remove([rows[0], rows[2]])
    assert scheduler.running == [rows[1]]
    assert list(scheduler.waiting) == [rows[3]]
    scheduler.remove(rows)
    assert scheduler.idle


def test_expired_rows_run_or_wait() -> None:
    """Each leaves once, the earliest deadline first; those that ended before are not returned again."""
    scheduler = Scheduler(1)
    early, late, never = group(0, 2, deadline=1.0), group(1, 2, deadline=2.0), group(2, 1)
    scheduler.add(late + early + never)
    scheduler.next_round()
    assert scheduler.expire(0.5) == []
    assert scheduler.expire(1.0) == early
    assert scheduler.running == late[:1]
    scheduler.remove(late[1:])
    assert scheduler.expire(9.0) == late[:1]
    assert scheduler.expire(9.0) == []
    assert list(scheduler.next_round().rows) == never


def test_no_row_pauses_while_a_prompt_is_entering() -> None:
    """The row that waits could not have its slot yet."""
    scheduler, rows = Scheduler(2, chunk=2, fairness=Fairness(1)), [group(0, 1), group(1, 1, length=9), group(2, 1)]
    for own in rows[:2]:
        scheduler.add(own)
        scheduler.next_round()
    scheduler.add(rows[2])
    scheduler.fairness.serve(rows[0][0], 50)
    assert scheduler.slots.filling is rows[1][0]
    assert scheduler.to_pause() is None


def test_a_row_that_begins_again_has_its_deadline() -> None:
    scheduler, (row,) = Scheduler(1), group(0, 1, 5.0)
    scheduler.add([row])
    scheduler.next_round()
    scheduler.remove([row])
    scheduler.put_back(row)
    assert scheduler.expire(6.0) == [row]


def test_a_row_that_ended_is_not_kept_for_its_deadline() -> None:
    """A server's rows end long before their deadlines: what is remembered is bounded by the rows that are there."""
    scheduler = Scheduler(4)
    stay = group(0, 2, deadline=9e9)
    scheduler.add(stay)
    for number in range(1, 200):
        rows = group(number, 5, deadline=1e9 + number)
        scheduler.add(rows)
        scheduler.next_round()
        scheduler.remove(rows)
        assert len(scheduler._deadlines._heap) <= 2 * (len(stay) + len(rows))
    assert scheduler.expire(8e9) == []
    assert scheduler.expire(9e9) == stay


class Watched(Row):
    """A row that counts how often it is looked at, in Python or by a set or dict."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += 1
        return super().__getattribute__(name)

    def __hash__(self) -> int:
        Watched.looks += 1
        return object.__hash__(self)


def work(do: Callable[[], object]) -> int:
    """Bytecodes of shoal that `do` executes, and looks at rows: what it costs, whatever the machine does meanwhile."""
    count, before, folder = 0, Watched.looks, str(Path(sys.modules["shoal"].__file__ or "").parent)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(previous)
    return count + Watched.looks - before


@pytest.mark.slow(but=["4"])
@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@pytest.mark.parametrize("deadline", [None, 1e9])
@pytest.mark.parametrize("n", [1, 4])
def test_a_round_costs_nothing_for_rows_that_wait(n: int, deadline: float | None, prefix_sharing: str) -> None:
    """Twelve rounds in which rows end, are cancelled while they wait, and are admitted: as much work with 600 waiting as with
    6,000, but for the height of a heap."""

    def of(waiting: int) -> int:
        scheduler = Scheduler(4, prefix_sharing=prefix_sharing)
        rows = [
            Watched(row.request, row.group, row.index, 0, row.tokens, frozenset(), 1 << 20, deadline)
            for number in range(waiting // n) for row in group(number, n, length=3)
        ]  # fmt: skip
        scheduler.add(rows)

        def rounds() -> None:
            for i in range(12):
                scheduler.expire(0.0)
                round_ = scheduler.next_round()
                assert round_.rows
                scheduler.remove([*round_.rows[i % 2 : 3], rows[-1 - i]])
                assert not scheduler.idle

        return work(rounds)

    few, many = of(600), of(6000)
    assert few > 1000
    assert many <= few + 200


@pytest.mark.parametrize("capacity", [0, -1])
def test_no_room_at_all(capacity: int) -> None:
    with pytest.raises(RequestError, match=f"max_batch must be >= 1, got {capacity}"):
        Scheduler(capacity)


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────

VOCAB = 12


def tokens_of(requests: Sequence[Request], max_batch: int) -> tuple[Engine, list[list[int]]]:
    """All rows' tokens from models that depend on every token of the history."""
    engine = engine_of(scripted(hashed(VOCAB, 0), VOCAB), scripted(hashed(VOCAB, 1), VOCAB), Fixed(3), max_batch=max_batch)
    rows = [row for request in requests for row in engine.submit(request)]
    while engine.step():
        pass
    return engine, [row.tokens for row in rows]


@functools.cache
def twenty() -> list[Request]:
    """Twenty ragged prompts of four samples, of unequal lengths."""
    return [
        Request(
            tuple(1 + (i + j) % (VOCAB - 1) for j in range(1 + i % 6)), 4, Sampling(seed=i), Limits(max_new_tokens=3 + i % 7)
        )
        for i in range(20)
    ]


@functools.cache
def alone() -> list[list[int]]:
    return [row for request in twenty() for row in tokens_of([request], 4)[1]]


@pytest.mark.parametrize("max_batch", [1, 5, 100])
def test_twenty_prompts_of_four_samples(max_batch: int) -> None:
    """The prompts are computed once each, however few rows fit; every sample is that of its prompt alone."""
    requests = twenty()
    engine, tokens = tokens_of(requests, max_batch)
    assert engine.stats.prefills == 20
    assert engine.stats.prefill_tokens == sum(len(request.prompt_ids) - 1 for request in requests)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert engine.target.cache.slots == grade(min(max_batch, 80))
    assert tokens == alone()


def test_an_engine_step_costs_nothing_for_rows_that_wait() -> None:
    """Rows end in it, and others take their slots."""

    def of(waiting: int) -> int:
        engine = engine_of(scripted(hashed(VOCAB, 0), VOCAB), scripted(hashed(VOCAB, 1), VOCAB), Fixed(2), max_batch=4)
        sampling, limits = Sampling(temperature=0), Limits(max_new_tokens=3, time_budget=1e6)
        engine.submit(Request((1, 2), waiting, sampling, limits))
        engine.step()
        return work(lambda: [engine.step() for _ in range(3)])

    of(40)  # what is computed once in a process
    assert of(2000) <= of(40) + 200
