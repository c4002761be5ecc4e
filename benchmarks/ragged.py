"""`python benchmarks/ragged.py`: a target pass over rows of unequal lengths, by attention method.

Random keys and values, as time does not depend on them; every line compares its logits with those of `pad`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
from provenance import require_place, write_results
from shoal.bench import interleave
from shoal.bench.machine import machine
from shoal.models.loading import LoadOptions, load_runner
from shoal.models.runner import Runner
from shoal.models.sources import bundled

METHODS = ("pad", "split")
SHORT, LONG = 100, 800
"""Tokens of the two kinds of rows."""


def mixes(rows: int) -> dict[str, list[int]]:
    """Tokens that each row has before the pass."""
    found = {"all short": [SHORT] * rows}
    for name, share in (("one long", rows), ("1/8 long", 8), ("1/4 long", 4), ("1/2 long", 2), ("all long", 1)):
        found[name] = [LONG if row % share == 0 else SHORT for row in range(rows)]
    found["evenly spread"] = [SHORT + (LONG - SHORT) * row // max(rows - 1, 1) for row in range(rows)]
    return found


def a_pass(model: Runner, lengths: list[int], positions: int) -> Callable[[], tuple[float, torch.Tensor]]:
    """A function that makes one pass over a filled cache, leaves it as it was, and returns milliseconds and logits."""
    runner, slots = model.fork(), range(len(lengths))
    runner.memory.reserve(len(lengths), max(lengths) + positions)
    generator = torch.Generator().manual_seed(0)
    fill = torch.randint(runner.vocab_size, (len(lengths), max(lengths)), generator=generator)
    runner.feed(slots, fill, lengths, want_logits=False)
    tokens = fill[:, :positions]

    def run() -> tuple[float, torch.Tensor]:
        runner.counts.take()
        logits = runner.feed(slots, tokens, [positions] * len(lengths))
        assert logits is not None
        for slot, length in zip(slots, lengths, strict=True):
            runner.cache.rollback(slot, length)
        return 1000 * runner.counts.take()[1], logits

    return run


def call_keys(lines: list[dict[str, Any]], rows: int) -> float:
    """Keys of a row that are read in the time of a call: for rows of one length `split` makes a call each where `pad` makes one,
    and `pad` reads the more keys where all rows are long."""
    of = {line["lengths"]: line for line in lines}
    calls = (of["all short"]["split"] - of["all short"]["pad"]) / (rows - 1)
    keys = (of["all long"]["pad"] - of["all short"]["pad"]) / (rows * (LONG - SHORT))
    return float(calls / keys)


def measured(rows: int, positions: int, repeats: int) -> list[dict[str, Any]]:
    """One line per mix: medians of milliseconds by method, and the largest difference of the logits in standard deviations."""
    models = {method: load_runner(bundled("target"), LoadOptions(dtype="float32", attention=method)) for method in METHODS}
    lines: list[dict[str, Any]] = []
    for name, lengths in mixes(rows).items():
        runs = {method: a_pass(model, lengths, positions) for method, model in models.items()}
        expected = runs["pad"]()[1]
        difference = max(float((run()[1] - expected).abs().max() / expected.std()) for run in runs.values())
        times = {method: median(time for time, _ in found) for method, found in interleave(runs, repeats).items()}
        lines.append({"lengths": name, "rows": rows, "positions": positions, "difference": difference, **times})
    return lines


def main(
    rows: int = 32, positions: str = "1,5", repeats: int = 9, output: Path | None = typer.Option(None, "--json")
) -> None:
    """Prints milliseconds per pass of the bundled target, and what a call costs."""
    require_place(output)
    each = [measured(rows, int(many), repeats) for many in positions.split(",")]
    lines, call = [line for part in each for line in part], call_keys(each[0], rows)
    if output is not None:
        write_results(output, {"machine": machine(torch.device("cpu")), "lines": lines, "call_keys": call})
    table = Table("tokens per row", "positions", *METHODS, "logits differ by", title=f"ms per pass, {rows} rows")
    for line in lines:
        cells = [f"{line[method]:.1f}" for method in METHODS]
        table.add_row(line["lengths"], str(line["positions"]), *cells, f"{line['difference']:.0e}")
    console = Console(width=110)
    console.print(table)
    console.print(f"a call takes as long as reading {call:.0f} keys of a row")


if __name__ == "__main__":
    command.run(main)
