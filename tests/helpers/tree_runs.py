"""Runs of the engine over trees of drafts."""

from __future__ import annotations

from typing import Any

from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rule
from shoal.types.requests import Request, Row

V = 7


def run(
    target: Runner, made: Any, k: int = 4, rule: Rule | None = None, max_batch: int = 3, n: int = 3, new: int = 14,
    prefix_sharing: str = "auto", **sampling: Any,
) -> tuple[Engine, list[Row]]:  # fmt: skip
    engine = Engine(target, made, Fixed(k), max_batch=max_batch, rule=rule or Coupled(), prefix_sharing=prefix_sharing)
    rows: list[Row] = []
    for length in range(1, 4):
        prompt = tuple(i % V for i in range(length))
        rows += engine.submit(Request(prompt, n, Sampling(**({"seed": 3} | sampling)), Limits(max_new_tokens=new)))
        engine.step()
    while engine.step():
        pass
    return engine, rows
