"""A constraint or check that raises ends its own row, where plain decoding would come to it; the other rows do not notice.

Tests of: constraints.masks, engine.engine.
"""

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
from shoal.testing.drafters import engine_of
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


def run_all(second: dict[str, Any], other: dict[str, Any], k: int, temperature: float = 1.0) -> tuple[Engine, list[Row]]:
    """Three requests, of which the second has something else; what they have is named."""
    engine = engine_of(
        scripted(TARGET, VOCAB), scripted(DRAFTER, VOCAB) if k else None, Fixed(k), max_batch=8, rule=Coupled()
    )
    rows = []
    for prompt, given in (((1, 2), other), ((4, 5), second), ((3, 4, 5), other)):
        sampling = Sampling(seed=3, temperature=temperature, processors=given.get("processors", ()))
        own = {name: value for name, value in given.items() if name != "processors"}
        rows += engine.submit(Request(prompt, 1, sampling, Limits(max_new_tokens=NEW), **own))
    while engine.step():
        pass
    return engine, rows


def run(second: Any, other: Any, k: int) -> tuple[Engine, list[Row]]:
    return run_all({"constraints": (second,)}, {"constraints": (other,)}, k)


def require_alone(failed: tuple[Engine, list[Row]], well: tuple[Engine, list[Row]], reason: str) -> None:
    """The second row ends after its fourth token, with the reason; the others say what they say where nothing fails."""
    (engine, rows), (_, expected) = failed, well
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert [row.tokens for row in rows[::2]] == [row.tokens for row in expected[::2]]
    assert rows[1].tokens == expected[1].tokens[: 2 + 4]
    assert re.search(reason, str(rows[1].error))
    assert engine.scheduler.idle


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    ("fails", "reason"),
    [("advance", "constraint Even failed: KeyError.*advance at 4"), ("mask", "Even failed: KeyError.*mask at 4"),
     ("shape", r"Even must return tokens of shape \(1, 12\)")],
)  # fmt: skip
def test_the_row_of_a_failing_constraint_ends_alone(fails: str, reason: str, k: int) -> None:
    engine, rows = failed = run(Even(fails), Even(), k)
    require_alone(failed, run(Even(), Even(), k), reason)
    assert isinstance(rows[1].error, RequestError)
    assert (engine.stats.accepted > 0) == (k > 0)


@pytest.mark.parametrize("k", [0, 4])
def test_the_row_of_a_failing_check_ends_alone(k: int) -> None:
    well = run(Raises(False), Raises(False), k)
    require_alone(run(Raises(True), Raises(False), k), well, "a check of the request failed: KeyError.*after at 4")


def test_one_that_fails_before_the_first_token_refuses_its_request() -> None:
    class Begins(Even):
        def begin(self, row: Row) -> State:
            raise KeyError("begin")

    with pytest.raises(RequestError, match="constraint Begins failed: KeyError"):
        run(Begins(), Even(), 0)


# ── processors, criteria, checks that change their mind ─────────────────────────────────────────────────────────────


class Processor:
    """Takes 1 from an id's score; fails, if it is to, after 4 new tokens behind a prompt of 2."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.fails == "raise" and ids.shape[1] >= 2 + 4:
            raise KeyError("at 4")
        if self.fails == "shape" and ids.shape[1] >= 2 + 4:
            return scores[:, 1:]
        scores[:, 3] -= 1
        return scores


class Criterion:
    """Never ends a row; fails, if it is to, at 4 new tokens behind a prompt of 2."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __call__(self, ids: torch.Tensor, scores: Any) -> bool:
        if self.fails and ids.shape[1] == 2 + 4:
            raise KeyError("at 4")
        return False


class Forgets:
    """A check that is no function of its state: it lets every token pass while it is drawn, and none when it is committed."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.asked = fails, 0

    def start(self, row: Row) -> int:
        return 0

    def after(self, state: int, token: int) -> int | None:
        self.asked += state + 1 == 4
        return None if self.fails and state + 1 == 4 and self.asked > 2 else state + 1

    def may_end(self, state: int) -> bool:
        return True


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("raise", r"processor Processor failed: KeyError\('at 4'\)"),
        ("shape", r"Processor must return scores of shape \(1, 12\)"),
    ],
)
def test_the_row_of_a_failing_processor_ends_alone(fails: str, reason: str, k: int, temperature: float) -> None:
    healthy = {"processors": [Processor()]}
    engine, rows = failed = run_all({"processors": [Processor(fails)]}, healthy, k, temperature)
    require_alone(failed, run_all(healthy, healthy, k, temperature), reason)
    assert isinstance(rows[1].error, RequestError)
    assert (engine.stats.accepted > 0) == (k > 0)


def test_a_processor_that_fails_for_rejected_drafts_alone_is_not_noticed() -> None:
    """Where plain decoding never comes."""
    _, plain = run_all({}, {}, 0, 0.0)
    path = plain[1].tokens

    class Picky(Processor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert ids.shape[1] <= 3 or ids[0].tolist() == path[: ids.shape[1]]  # what it is tried on is shorter
            return scores

    engine, rows = run_all({"processors": [Picky()]}, {}, 4, 0.0)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert {row.finish_reason for row in rows} == {"length"}
    assert engine.stats.accepted < engine.stats.drafted


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (Criterion, "criteria", r"stopping criterion Criterion failed: KeyError\('at 4'\)"),
        (Forgets, "constraints", r"check Forgets let token \d+ pass, and refused it"),
    ],
)
def test_the_row_of_what_fails_at_a_committed_token_ends_with_it(kind: Any, name: str, reason: str, k: int) -> None:
    require_alone(run_all({name: [kind(True)]}, {name: [kind()]}, k), run_all({name: [kind()]}, {name: [kind()]}, k), reason)
