"""What a round does outside the passes, in operations of torch: counted, so that it does not grow back.

Tests of: engine.accounting, engine.engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bookkeeping import Operations
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import table_model
from shoal.types.requests import Request

VOCAB = 6
P, Q = (torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(i)).double() for i in (0, 1))
ROUNDS = 6


def operations(rows: int, k: int, rule: Rule, **sampling: Any) -> float:
    """Of a round outside `Runner.feed`, on average, once prompts and the first uniforms are computed."""
    engine: Engine = engine_of(table_model(P), table_model(Q) if k else None, Fixed(k), max_batch=rows, rule=rule)
    engine.submit(Request((1, 2), rows, Sampling(seed=1, **sampling), Limits(max_new_tokens=100, eos=())))
    engine.step()
    inside = 0
    with Operations() as counted:
        for runner in runners_of(engine):
            feed = runner.feed

            def outside(*args: Any, feed: Any = feed, **options: Any) -> Any:
                nonlocal inside
                before = counted.count
                found = feed(*args, **options)
                inside += counted.count - before
                return found

            runner.feed = outside  # type: ignore[method-assign]
        for _ in range(ROUNDS):
            engine.step()
    return (counted.count - inside) / ROUNDS


@pytest.mark.parametrize(("rule", "most"), [(Coupled, 75), (Rejection, 58)])
def test_a_plain_round(rule: type[Rule], most: int) -> None:
    assert operations(8, 0, rule()) <= most


@pytest.mark.parametrize(("rule", "most"), [(Coupled, 270), (Rejection, 256)])
def test_a_drafted_round(rule: type[Rule], most: int) -> None:
    """In float64, without kernels: most of it is draws."""
    assert operations(8, 4, rule()) <= most


@pytest.mark.parametrize("k", [0, 4])
def test_operations_do_not_grow_with_the_rows(k: int) -> None:
    """But for the copies of a drafter's catching up, which depend on what was accepted."""
    assert operations(32, k, Coupled()) <= operations(4, k, Coupled()) + (0 if k == 0 else 5)
