"""A choice over several drafters: what it brings and loses on a clock of its own, row by row, and that the law stays.

Tests of: lookahead.choosing, drafting.text, drafting.sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from clocks import ROWS, TOKENS, Clock, Priced, V, truth
from shoal.config import Limits, Sampling
from shoal.drafting.grafting import SURE, FirstTokens
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.sums import SumDrafter
from shoal.drafting.text import Guess, TextDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.choosing import AutoChoice
from shoal.lookahead.controller import Auto, Controller, Fixed, by_name
from shoal.lookahead.costs import CostCurve, MixedCostCurve, PairCosts
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import RandomTrees
from shoal.testing.scripted import runner
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome
from shoal.types.trees import DraftTree

Skill = Callable[[Row, int], float]
"""A row and how many tokens it has -> probability that the draft there is right."""


def draft(row: Row, length: int, skill: Skill, name: str) -> list[int]:
    """Tokens of which as many are right as the skill says, the same whenever they are asked for."""
    ids, tokens = list(row.tokens), list[int]()
    while len(tokens) < length:
        number = zlib.crc32(f"{name} {row.request.prompt_ids} {len(ids)}".encode()) % 1000
        right = number < 1000 * skill(row, len(ids))
        tokens.append((truth(ids) + (not right)) % V)
        ids.append(tokens[-1])
    return tokens


class Reader(TextDrafter):
    """Free, and always as sure."""

    name = "reader"

    def __init__(self, skill: Skill, sure: float = 0.9) -> None:
        super().__init__()
        self.skill, self.sure = skill, sure

    def read(self, rows: Sequence[Row]) -> int:
        return 0

    def guess(self, row: Row, length: int) -> Guess:
        return Guess(draft(row, length, self.skill, self.name), [self.sure] * length)

    @property
    def table_bytes(self) -> int:
        return 0


class Stepper(Drafter):
    """Takes a price for each step, as a model does."""

    name = "stepper"

    def __init__(self, skill: Skill, clock: Clock, step: float, sure: float = 0.9) -> None:
        self.skill, self.clock, self.step, self.sure = skill, clock, step, sure
        self.late = 0  # drafts of the second half

    def propose(self, inputs: DraftInputs) -> DraftTree:
        lengths, position = list(inputs.lengths), 0
        while position < max(lengths):
            self.clock.seconds += self.step
            ends = inputs.stop(position, [self.sure] * len(lengths)) if inputs.stop else lengths
            lengths, position = [min(pair) for pair in zip(lengths, ends, strict=True)], position + 1
        drafts = [draft(row, length, self.skill, self.name) for row, length in zip(inputs.rows, lengths, strict=True)]
        self.late += sum(
            len(tokens) for row, tokens in zip(inputs.rows, drafts, strict=True) if row.new_tokens > TOKENS // 2
        )
        return DraftTree.of(drafts, device=inputs.uniforms.device, steps=position)


def decoded(
    clock: Clock, drafter: Drafter | None, controller: Controller | Fixed, tokens: int = TOKENS
) -> tuple[float, Engine]:
    """Seconds of rows that are all there from the start, one of them shorter than the others."""
    target = runner(Priced(clock))
    engine = Engine(target, drafter, controller, max_batch=ROWS, rule=Coupled(), clock=clock)
    started, rows = clock.seconds, []
    for first in range(ROWS):
        limits = Limits(max_new_tokens=tokens if first else tokens // 2)
        rows += engine.submit(Request((first, 1), 1, Sampling(temperature=0.0), limits))
    while engine.step():
        pass
    for row in rows:
        ids = list(row.request.prompt_ids)
        while len(ids) < len(row.tokens):
            ids.append(truth(ids))
        assert row.tokens == ids
    return clock.seconds - started, engine


def choosing(reader: Skill, stepper: Skill, step: float, **sure: float) -> tuple[float, Engine, AutoChoice]:
    """The same by a choice over two drafters."""
    clock = Clock()
    drafter = SumDrafter([Reader(reader, **sure)], Stepper(stepper, clock, step))
    controller = by_name("auto", PairCosts(packed=False), drafter)
    assert isinstance(controller, AutoChoice)
    seconds, engine = decoded(clock, drafter, controller)
    return seconds, engine, controller


def alone(stepper: Skill, step: float) -> float:
    """Seconds with the second drafter alone."""
    clock = Clock()
    return decoded(clock, Stepper(stepper, clock, step), Auto(PairCosts(packed=False)))[0]


@pytest.fixture(scope="module")
def plain() -> float:
    return decoded(Clock(), None, Fixed(0))[0]


def always(share: float) -> Skill:
    return lambda row, tokens: share


def second_half(share: float, then: float) -> Skill:
    return lambda row, tokens: share if tokens < TOKENS // 2 else then


def test_two_useless_drafters_cost_next_to_nothing(plain: float) -> None:
    seconds, engine, controller = choosing(always(0.02), always(0.02), step=0.3)
    assert plain / seconds > 0.99
    assert engine.stats.drafted < 0.03 * engine.stats.committed
    assert all(controller.rounds.values())


def test_an_expensive_good_one_is_taken_where_it_pays(plain: float) -> None:
    seconds, engine, controller = choosing(always(0.02), always(0.95), step=0.2)
    assert plain / seconds > 1.5
    assert seconds < 1.05 * alone(always(0.95), 0.2)
    assert max(controller.rounds, key=controller.rounds.__getitem__) != "reader"
    assert engine.stats.by_drafter["stepper"].accepted > 0.4 * engine.stats.committed
    # and left where it does not
    seconds, engine, _ = choosing(always(0.02), always(0.95), step=2.0)
    assert plain / seconds > 0.99
    assert engine.stats.by_drafter["stepper"].drafted < 0.03 * engine.stats.committed


@pytest.mark.parametrize(("learns_alone", "least", "most"), [(False, 1.53, 9.0), (True, 0.0, 1.5)])
def test_short_runs_find_the_one_that_pays(
    learns_alone: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 tokens a row, of which the last drafter takes few trials. The second case is a sabotage: each drafter begins with plain
    rounds of its own, as it did."""
    if learns_alone:
        monkeypatch.setattr("shoal.lookahead.choosing.KNOWN", 0)
    clock = Clock()
    drafter = SumDrafter([Reader(always(0.05))], Stepper(always(0.8), clock, 0.1))
    controller = by_name("auto", PairCosts(packed=False), drafter)
    seconds, _ = decoded(clock, drafter, controller, 48)
    ratio = decoded(Clock(), None, Fixed(0), 48)[0] / seconds
    assert least < ratio < most


def test_a_free_poor_one_is_taken_as_far_as_it_pays(plain: float) -> None:
    seconds, engine, controller = choosing(always(0.4), always(0.02), step=0.3, sure=0.4)
    assert plain / seconds > 1.1
    assert max(controller.rounds, key=controller.rounds.__getitem__) == "reader"
    assert engine.stats.by_drafter["reader"].accepted > 10 * engine.stats.by_drafter["stepper"].accepted


def test_rows_of_two_kinds_have_a_drafter_each(plain: float) -> None:
    """Whoever reads is as sure of all rows; what it is right about tells them apart."""

    def reads(row: Row, tokens: int) -> float:
        return 0.95 if row.request.prompt_ids[0] == 1 else 0.05

    seconds, engine, controller = choosing(reads, lambda row, tokens: 0.98 - reads(row, tokens), step=0.1)
    assert plain / seconds > 1.3
    assert controller.rounds["reader+stepper"] > 0.6 * sum(controller.rounds.values())
    for name in ("reader", "stepper"):
        assert engine.stats.by_drafter[name].accepted > 0.6 * engine.stats.by_drafter[name].drafted
        assert engine.stats.by_drafter[name].accepted > 300


def test_a_drafter_that_turns_bad_is_left(plain: float) -> None:
    """Soon enough that it costs little: by then the account holds the gain of at most 32 plain rounds (`MOST`)."""
    skill = second_half(0.95, 0.02)
    seconds, engine, _ = choosing(always(0.3), skill, step=0.15, sure=0.3)
    assert plain / seconds > 1.2
    assert seconds < 1.03 * alone(skill, 0.15)
    assert isinstance(engine.drafter, SumDrafter)
    assert isinstance(stepper := engine.drafter.model, Stepper)
    assert stepper.late < 0.15 * engine.stats.by_drafter["stepper"].drafted
    assert engine.stats.by_drafter["stepper"].drafted > 1000


def test_a_drafter_that_was_left_is_tried_again_while_another_pays() -> None:
    _, engine, controller = choosing(always(0.5), second_half(0.02, 0.97), step=0.05)
    assert isinstance(engine.drafter, SumDrafter)
    assert isinstance(stepper := engine.drafter.model, Stepper)
    assert controller.rounds["reader"] > 100, controller.rounds
    assert stepper.late > 40


def test_a_choice_that_is_not_measured_loses(plain: float) -> None:
    """Negative control: whoever comes last drafts, at a fixed length."""
    clock = Clock()
    seconds, _ = decoded(clock, SumDrafter([Reader(always(0.02))], Stepper(always(0.02), clock, 0.3)), Fixed(2))
    assert plain / seconds < 0.9


class Unbilled(Auto):
    """Takes rounds of a drafter that names no steps for plain ones."""

    def learn(self, outcome: Outcome) -> None:
        super().learn(replace(outcome, steps=0))


@pytest.mark.parametrize(("controller", "least", "most"), [(Auto, 0.95, 1.0), (Unbilled, 0.0, 0.85)])
def test_a_drafter_that_names_no_steps_is_billed(
    controller: type[Auto], least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trees of up to twelve nodes do not pay, and are left. The second case is a sabotage."""
    monkeypatch.setattr("clocks.COLUMN", 0.15)
    plain, _ = decoded(Clock(), None, Fixed(0), 250)
    seconds, engine = decoded(clock := Clock(), RandomTrees(V, guess=truth), controller(PairCosts(packed=False)), 250)
    assert engine.stats.drafted > 0
    assert clock.seconds == seconds
    assert least < plain / seconds < most


def test_proposals_that_cost_unlike_amounts_count_as_they_are() -> None:
    usual, mixed = CostCurve(), MixedCostCurve()
    for _ in range(100):
        for seconds in (0.01, 5.0):
            usual.observe(4, seconds)
            mixed.observe(4, seconds)
    assert mixed.seconds(4) == pytest.approx(2.5, rel=0.2)
    assert usual.seconds(4) < 1.0  # would hide most of what was spent from the account


# ── whose first token ───────────────────────────────────────────────────────────────────────────────────────────────


class Kept:
    """A verdict that kept so many drafts of each row."""

    def __init__(self, *counts: int) -> None:
        self.lists = [range(count) for count in counts], list(counts)


def test_rows_are_told_apart_by_what_came_of_first_tokens() -> None:
    good, bad = (Row(Request((1,), 1), 0, 0, 0, [1], frozenset(), 99) for _ in range(2))
    first = FirstTokens(2)
    assert first.takes(good, 0, SURE)
    assert not first.takes(good, 0, SURE - 0.01)
    for _ in range(30):
        first.proposed([good, bad], [0, 0], [0.9, 0.9], [2, 2])
        first.learn([good, bad], Kept(1, 0))  # type: ignore[arg-type]
    assert first.takes(good, 0, 0.9)
    assert not first.takes(bad, 0, 0.9)
    for _ in range(60):  # the other one was no better
        first.proposed([good, bad], [1, 1], [1.0, 1.0], [2, 0])
        first.learn([good, bad], Kept(0, 0))  # type: ignore[arg-type]
    assert first.takes(good, 0, 0.2)
    assert not first.takes(bad, 0, 0.2)  # nothing was drafted for it
    first.forget([bad])
    assert first.takes(bad, 0, 0.9) == first.takes(Row(Request((1,), 1), 0, 0, 0, [1], frozenset(), 99), 0, 0.9)


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────
