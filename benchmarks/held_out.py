"""What scripts that compare drafters of the bundled target have in common: held-out prompts, and engines run to their end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "pair"))  # for those that import this module, too

import shoal
from problems.generator import FunctionProblem, generate
from shoal.engine.engine import Engine
from shoal.types.requests import Request
from shoal.types.stats import Stats


def problems(count: int, seed: int = 20) -> list[FunctionProblem]:
    """So many problems whose templates were held out of training; without a seed, those that `shoal bench` takes."""
    return generate(seed, count, "templates")


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
