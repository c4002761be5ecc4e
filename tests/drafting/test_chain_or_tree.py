"""`DIR:tree=auto`: `lookahead="auto"` drafts chains, trees or nothing with one model, whichever brings most by a virtual clock.

Tests of: drafting.tree_model, drafting.draft.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import clocks
from clocks import Clock, Priced, V, truth
from shoal.config import Limits, Sampling
from shoal.drafting.protocol import Drafter
from shoal.drafting.tree_model import ChainOrTreeDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.choosing import AutoChoice
from shoal.lookahead.controller import Auto, Controller, Fixed
from shoal.lookahead.costs import PairCosts
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import ScriptedModel, hashed, runner, scripted
from shoal.types.requests import Request
from shoal.types.rounds import Outcome

ROWS, TOKENS = 2, 300


class Draft(ScriptedModel):
    """A draft model whose passes take a time of their own.

    Args:
        skill: how often its first choice is right; else its second one is, or none if the skill is 0.
    """

    def __init__(self, clock: Clock, step: float, skill: float) -> None:
        def script(ids: Sequence[int]) -> torch.Tensor:
            number = zlib.crc32(str(ids).encode()) % 1000
            right, wrong = truth(ids), (truth(ids) + 1 + number % (V - 1)) % V
            first, second = (right, wrong) if number < 1000 * skill else (wrong, right if skill else (wrong + 1) % V)
            logits = torch.full((V,), -4.0, dtype=torch.float64)
            logits[first], logits[second] = 1.0, 0.8
            return logits

        super().__init__(script, V)
        self.clock, self.step = clock, step

    def _block(self, ids: Any, places: Any, positions: Any, plan: Any) -> Any:
        self.clock.seconds += self.step
        return super()._block(ids, places, positions, plan)


def drafter(clock: Clock, step: float, skill: float) -> ChainOrTreeDrafter:
    return ChainOrTreeDrafter(runner(Draft(clock, step, skill)), V, (2, 4), 24)


def decoded(clock: Clock, made: Drafter | None, controller: Controller | Fixed, tokens: int = TOKENS) -> float:
    """Seconds of greedy rows, whose tokens must be those of the target."""
    engine = Engine(runner(Priced(clock)), made, controller, max_batch=ROWS, rule=Coupled(), clock=clock)
    rows = []
    for first in range(ROWS):
        rows += engine.submit(Request((first, 1), 1, Sampling(temperature=0.0), Limits(max_new_tokens=tokens)))
    clock.seconds = 0.0
    while engine.step():
        pass
    for row in rows:
        assert all(row.tokens[at] == truth(row.tokens[:at]) for at in range(2, len(row.tokens)))
    return clock.seconds


def chosen(step: float, skill: float, kind: type[AutoChoice] = AutoChoice, tokens: int = TOKENS) -> tuple[float, list[int]]:
    """Seconds, and rounds by choice."""
    clock = Clock()
    made = drafter(clock, step, skill)
    controller = kind(PairCosts(packed=False), made)
    return decoded(clock, made, controller, tokens), list(controller.rounds.values())


def alone(step: float, skill: float, choice: int) -> float:
    clock = Clock()
    made = drafter(clock, step, skill)
    made.use(choice)
    return decoded(clock, made, Auto(PairCosts(packed=False)))


def priced(column: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of plain decoding at such a price of a column."""
    monkeypatch.setattr(clocks, "COLUMN", column)
    return decoded(Clock(), None, Fixed(0))


@pytest.mark.slow
def test_trees_are_drafted_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns cost next to nothing, steps of the draft model much."""
    plain = priced(0.002, monkeypatch)
    seconds, rounds = chosen(0.3, 0.55)
    assert seconds < 1.05 * alone(0.3, 0.55, 2)
    assert seconds < 0.8 * alone(0.3, 0.55, 0) < 0.8 * plain
    assert sum(rounds[1:]) > 0.8 * sum(rounds)


class ByDepth(AutoChoice):
    """Bills trees as chains of their depth."""

    def learn(self, outcome: Outcome) -> None:
        super().learn(replace(outcome, nodes=None))


def test_chains_are_drafted_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns cost much, steps next to nothing. The sabotage loses even to plain decoding."""
    plain = priced(0.3, monkeypatch)
    seconds, rounds = chosen(0.02, 0.75)
    assert seconds < 1.05 * alone(0.02, 0.75, 0) < 1.05 * plain
    assert rounds[0] > 0.8 * sum(rounds)
    wrong, rounds = chosen(0.02, 0.75, ByDepth)
    assert wrong > 1.05 * plain
    assert rounds[0] < 0.5 * sum(rounds)


def test_nothing_is_drafted_where_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = priced(0.12, monkeypatch)
    seconds, _ = chosen(0.3, 0.0, tokens=900)
    assert seconds < 3 * plain / 0.985


@pytest.mark.slow(but=["0"])
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_the_protocol_is_kept(choice: int) -> None:
    def made() -> Drafter:
        found = ChainOrTreeDrafter(scripted(hashed(V), V), V, (2, 4), 12)
        found.use(choice)
        return found

    assert check_drafter(made, V) > 0


@pytest.mark.parametrize("rule", [Coupled(), Rejection()], ids=["coupled", "rejection"])
def test_ways_follow_one_another(rule: Coupled | Rejection) -> None:
    """A drafter that is the target stays right when chains and trees take turns: they read and write one cache."""
    target = scripted(hashed(V), V)
    made = ChainOrTreeDrafter(target.fork(), V, (2, 4), 12)
    engine = Engine(target, made, Fixed(3), max_batch=3, rule=rule)
    rows = engine.submit(Request((1, 2), 3, Sampling(temperature=0.0), Limits(max_new_tokens=24)))
    turn = 0
    while engine.step():
        turn += 1
        made.use(turn % 3)
    assert {row.rounds for row in rows} == {6}
    assert {row.accepted for row in rows} == {18}
