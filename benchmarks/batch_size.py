"""`python benchmarks/batch_size.py`: `max_batch="auto"` against the best number of rows, in virtual time.

A round takes what a cost curve says for its rows. What is measured of it is disturbed, as on a machine with other work: times
noise, and now and then much longer. The scheduler and the batch size are those of the engine, and nothing else is. The first call
knows nothing, the third knows what the first two have learned. Regret is the share of the best fixed number's speed that is lost,
for the best of 1, 2, 4, ... 256 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.random import Generator
from rich import box
from rich.console import Console
from rich.table import Table

import command
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.config import Limits
from shoal.engine.batch_size import AutoBatchSize, BatchSize, FixedBatchSize
from shoal.engine.scheduler import Scheduler
from shoal.types.requests import Request, Row

NOISE = 0.1
"""A measured round takes exp(x) times its cost, x exponential with this mean: disturbances only ever slow down."""
SLOW_SHARE, SLOW = 0.01, 10.0
"""Share of the rounds that are measured at so many times their cost."""
SIZES = tuple(1 << i for i in range(9))
CALLS = 3

CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0,
    "linear": lambda rows: float(rows),
    "flat to 16, then linear": lambda rows: max(1.0, rows / 16),
    "flat to 64, then linear": lambda rows: max(1.0, rows / 64),
    "bundled pair, plain": lambda rows: 4.1 + 0.36 * rows,
    "a third slower beyond 64": lambda rows: (4.0 + 0.4 * rows) * (1 if rows <= 64 else 1.33),
}
"""Cost of a round by rows. The bundled pair's is from 1,625 tokens/s at 16 rows and 2,564 at 128."""
WORK: dict[str, Callable[[Generator], Sequence[int]]] = {
    "24 x 64": lambda rng: [64] * 24,
    "128 x 64": lambda rng: [64] * 128,
    "128 x 8-128": lambda rng: rng.integers(8, 129, 128).tolist(),
    "1000 x 8-128": lambda rng: rng.integers(8, 129, 1000).tolist(),
}
"""Tokens of each row."""


def seconds_of_call(batch_size: BatchSize, cost: Callable[[int], float], lengths: Sequence[int], rng: Generator) -> float:
    """Virtual time in which rows of these lengths are decoded, a token of each per round."""
    scheduler = Scheduler(batch_size.most, rows_now=batch_size.rows)
    left = {Row(request(i, n), i, 0, 0, [1], frozenset(), 1 << 20): n for i, n in enumerate(lengths)}
    scheduler.add(list(left))
    total = 0.0
    while left:
        rows = scheduler.next_round().rows
        seconds = cost(len(rows))
        slow = SLOW if rng.random() < SLOW_SHARE else 1.0
        batch_size.learn(len(rows), len(rows), seconds * slow * float(np.exp(rng.exponential(NOISE))))
        total += seconds
        for row in rows:
            left[row] -= 1
        ended = [row for row in rows if not left[row]]
        scheduler.remove(ended)
        for row in ended:
            del left[row]
    return total


def request(number: int, tokens: int) -> Request:
    """One row of so many tokens, with a prompt of its own."""
    return Request((number,), limits=Limits(max_new_tokens=tokens))


@dataclass(frozen=True)
class Regret:
    """One line: the best fixed number of rows, and what the calls of `auto` lose against it (medians over seeds)."""

    curve: str
    work: str
    best: int
    calls: list[float]


def regret(curve: str, work: str, seeds: int) -> Regret:
    """Of one curve and one kind of work."""
    cost, lengths_of = CURVES[curve], WORK[work]
    fixed: dict[int, list[float]] = {size: [] for size in SIZES}
    auto: list[list[float]] = []
    for seed in range(seeds):
        lengths = lengths_of(np.random.default_rng(seed))
        for size, found in fixed.items():
            found.append(seconds_of_call(FixedBatchSize(size), cost, lengths, np.random.default_rng(seed)))
        learned = AutoBatchSize()
        auto.append([seconds_of_call(learned, cost, lengths, np.random.default_rng([seed, 0, i])) for i in range(CALLS)])
    best = min(SIZES, key=lambda size: median(fixed[size]))
    calls = [1 - median(fixed[best][s] / auto[s][i] for s in range(seeds)) for i in range(CALLS)]
    return Regret(curve, work, best, calls)


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each line.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Regret of max_batch="auto" against the best fixed number of rows, in virtual time."""
    require_place(json_path)
    found = [regret(curve, work, seeds) for curve in CURVES for work in WORK]
    table = Table("cost of a round by rows", "rows x tokens", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("best fixed", *(f"call {i + 1}" for i in range(CALLS))):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(one.curve, one.work, str(one.best), *(f"{call:+.1%}" for call in one.calls))
    Console(highlight=False, width=100).print(table)
    if json_path is not None:
        lines = [vars(one) for one in found]
        write_results(json_path, {"machine": machine(torch.device("cpu")), "seeds": seeds, "lines": lines})


if __name__ == "__main__":
    command.run(main)
