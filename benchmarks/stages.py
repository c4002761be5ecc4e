"""`python benchmarks/stages.py`: where a round's time outside the models goes, on the bundled pair.

Every listed function is wrapped in a stopwatch, which costs a microsecond or two per call. Functions contain each other:
`acceptance` contains one draw and the target's distributions, the drafter's proposal contains its passes.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table

import shoal
from held_out import problems
from shoal.drafting import model as draft_model
from shoal.engine import commit, engine
from shoal.models import cache, runner
from shoal.models.lean.steps import LeanSteps
from shoal.models.runner import Runner
from shoal.sampling import acceptance, distributions
from shoal.types.stats import Stats

WATCHED: dict[str, tuple[Any, str]] = {
    "drafter: draws": (draft_model, "draws"),
    "drafter: steps in one call": (LeanSteps, "__call__"),
    "noise": (acceptance.Rejection, "uniforms"),
    "target: distributions": (distributions.Scores, "p"),
    "acceptance": (acceptance.Rejection, "decide"),
    "log-probabilities": (commit, "logprobs_of"),
    "commit": (engine, "commit"),
    "plans": (runner.Plan, "__init__"),
    "cache: begin": (cache.SlotCache, "begin"),
    "cache: end": (cache.SlotCache, "end"),
}


@contextmanager
def stopwatches(seconds: defaultdict[str, float], calls: Counter[str]) -> Iterator[None]:
    """Adds up time and calls of every watched function meanwhile."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds[name] += time.perf_counter() - started
                calls[name] += 1

        return run

    with ExitStack() as stack:
        for name, (owner, attribute) in WATCHED.items():
            watched: Any = timed(name, getattr(owner, attribute))
            static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
            stack.enter_context(patch.object(owner, attribute, staticmethod(watched) if static else watched))
        yield


def pass_ms(model: Runner, n: int, context: int = 128, repeats: int = 40) -> float:
    """Median milliseconds of one model's forward call over one token of each of n rows."""
    runner, slots = model.fork(), range(n)
    runner.memory.reserve(n, context + 1)
    runner.feed(slots, torch.ones(n, context, dtype=torch.long, device=runner.device), [context] * n)
    times = []
    for _ in range(repeats):
        runner.counts.take()
        runner.feed(slots, torch.ones(n, 1, dtype=torch.long, device=runner.device), [1] * n)
        times.append(1000 * runner.counts.take()[1])
        for slot in slots:
            runner.cache.rollback(slot, context)
    return median(times)


def main(n: int = 8, max_new_tokens: int = 128, lookahead: str = "auto", dtype: str = "float32", repeats: int = 4) -> None:
    """Prints milliseconds and calls per round."""
    pair = shoal.load(dtype=dtype, max_batch=n)
    prompt = problems(1)[0].prompt
    seconds, calls, stats = defaultdict[str, float](float), Counter[str](), Stats()
    for seed in range(-1, repeats):
        if seed < 0:  # warm up
            pair.generate(prompt, n, max_new_tokens=max_new_tokens, lookahead=lookahead, seed=0)
            continue
        with stopwatches(seconds, calls):
            options: dict[str, Any] = {
                "max_new_tokens": max_new_tokens,
                "lookahead": lookahead,
                "temperature": 0.8,
                "eos": (),
                "rule": "rejection",
            }
            stats += pair.generate(prompt, n, seed=seed, **options).stats
    table = Table("stage", "ms per round", "calls per round")
    for name, spent in sorted(((name, seconds[name]) for name in WATCHED), key=lambda item: -item[1]):
        table.add_row(name, f"{1000 * spent / stats.rounds:.2f}", f"{calls[name] / stats.rounds:.1f}")
    models = stats.seconds_target + stats.seconds_draft
    table.add_section()
    table.add_row("both models' forward calls", f"{1000 * models / stats.rounds:.2f}", "")
    table.add_row("whole round", f"{1000 * stats.seconds_rounds / stats.rounds:.2f}", "")
    Console().print(table)
    assert pair.draft_model is not None
    target, drafter = pass_ms(pair.target, n), pass_ms(pair.draft_model, n)
    typer.echo(f"one token of {n} rows: target {target:.2f} ms, drafter {drafter:.2f} ms, ratio {target / drafter:.1f}")


if __name__ == "__main__":
    typer.run(main)
