"""What scripts that compare drafters of the bundled target have in common: held-out prompts, and engines run to their end."""

from __future__ import annotations

from collections.abc import Iterable

import shoal
from shoal.engine.engine import Engine
from shoal.problems.generator import FunctionProblem, generate
from shoal.types.requests import Request
from shoal.types.stats import Stats

SEED = 20


def problems(count: int) -> list[FunctionProblem]:
    """So many problems whose templates were held out of training."""
    return generate(SEED, count, "templates")


def prompts(pair: shoal.Shoal, count: int) -> list[tuple[int, ...]]:
    """Their prompts as token ids."""
    return [tuple(pair.tokenizer.encode(problem.prompt)) for problem in problems(count)]


def decode(engine: Engine, requests: Iterable[Request]) -> Stats:
    """What requests took that are asked all at once."""
    before = engine.stats - Stats()
    engine.submit_all(requests)
    while engine.step():
        pass
    return engine.stats - before
