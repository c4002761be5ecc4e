"""A constraint or check that raises ends its own row, where plain decoding would come to it; the other rows do not notice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.config import Limits, Sampling
from shoal.constraints.protocol import Allowed, Constraint
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.testing.engines import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row

VOCAB, NEW = 12, 10
TARGET = hashed(VOCAB, 0)
DRAFTER = mixed(TARGET, hashed(VOCAB, 1), every=5)


State = tuple[int, str]


class Even(Constraint[State]):
    """Lets all tokens follow but token 3; what it is told to fail in, it fails in after four tokens."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def begin(self, row: Row) -> State:
        return 0, self.fails

    def advance(self, state: State, token: int) -> State:
        count, fails = state
        if fails == "advance" and count + 1 >= 4:
            raise KeyError("advance at 4")
        return count + 1, fails

    def mask(self, states: Sequence[State], vocab_size: int, device: torch.device) -> Allowed:
        failing = {fails for count, fails in states if count >= 4}
        if "mask" in failing:
            raise KeyError("mask at 4")
        tokens = torch.ones(len(states), vocab_size, dtype=torch.bool)
        tokens[:, 3] = False
        return Allowed(tokens[:, 1:] if "shape" in failing else tokens, torch.ones(len(states), dtype=torch.bool))

    @property
    def batch_key(self) -> object:
        return Even  # one call for the rows of all


class Raises:
    """A check that fails after four tokens, if it is to."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def start(self, row: Row) -> int:
        return 0

    def after(self, state: int, token: int) -> int | None:
        if self.fails and state + 1 > 4:
            raise KeyError("after at 4")
        return state + 1 if token != 3 else None

    def may_end(self, state: int) -> bool:
        return True


def run(second: Any, other: Any, k: int) -> tuple[Engine, list[Row]]:
    drafter = scripted(DRAFTER, VOCAB) if k else None
    engine = engine_of(scripted(TARGET, VOCAB), drafter, Fixed(k), max_batch=8, rule=Coupled())
    rows = [
        row
        for prompt, constraint in (((1, 2), other), ((4, 5), second), ((3, 4, 5), other))
        for row in engine.submit(Request(prompt, 1, Sampling(seed=3), Limits(max_new_tokens=NEW), constraints=(constraint,)))
    ]
    while engine.step():
        pass
    return engine, rows


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    ("fails", "reason"),
    [("advance", "constraint Even failed: KeyError.*advance at 4"), ("mask", "Even failed: KeyError.*mask at 4"),
     ("shape", r"Even must return tokens of shape \(1, 12\)")],
)  # fmt: skip
def test_the_row_of_a_failing_constraint_ends_alone(fails: str, reason: str, k: int) -> None:
    engine, rows = run(Even(fails), Even(), k)
    _, well = run(Even(), Even(), k)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert [row.tokens for row in rows[::2]] == [row.tokens for row in well[::2]]
    assert rows[1].tokens == well[1].tokens[: 2 + 4]
    assert isinstance(rows[1].error, RequestError)
    assert re.search(reason, str(rows[1].error))
    assert engine.scheduler.idle
    assert (engine.stats.accepted > 0) == (k > 0)


@pytest.mark.parametrize("k", [0, 4])
def test_the_row_of_a_failing_check_ends_alone(k: int) -> None:
    _, rows = run(Raises(True), Raises(False), k)
    _, well = run(Raises(False), Raises(False), k)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert [row.tokens for row in rows[::2]] == [row.tokens for row in well[::2]]
    assert rows[1].tokens == well[1].tokens[: 2 + 4]
    assert re.search("a check of the request failed: KeyError.*after at 4", str(rows[1].error))


def test_one_that_fails_before_the_first_token_refuses_its_request() -> None:
    class Begins(Even):
        def begin(self, row: Row) -> State:
            raise KeyError("begin")

    with pytest.raises(RequestError, match="constraint Begins failed: KeyError"):
        run(Begins(), Even(), 0)
