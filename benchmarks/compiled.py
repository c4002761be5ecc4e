"""`python benchmarks/compiled.py`: what passes of fixed shape are worth, on the bundled pair (docs/how-to/compile.md).

First milliseconds per pass: made to measure, static, static and compiled (or captured, on CUDA); least of interleaved runs. Then
tokens per second, plain and speculative, each with and without: plain decoding gets the same treatment. Building is part of no
figure, and is listed by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
import shoal
from precision import a_pass
from shoal.api import Shoal
from shoal.bench.machine import machine
from shoal.bench.measure import interleave
from shoal.bench.provenance import require_place, write_results
from shoal.models.compiled import executor_for
from shoal.models.loading import bundled, load_runner
from shoal.problems.generator import generate as problems

ORDINARY, EAGER = "ordinary", "static"


def pass_ms(part: str, shapes: Sequence[tuple[int, int]], repeats: int) -> dict[str, Any]:
    """Least milliseconds per pass of a bundled model by method and shape, and the seconds that building took."""
    runners = {}
    for method in (ORDINARY, EAGER, "built"):
        runners[method] = load_runner(bundled(part))
        name = executor_for("on", runners[method].device) if method == "built" else {ORDINARY: None, EAGER: "eager"}[method]
        runners[method].use_static_passes(name)
    found: dict[str, Any] = {method: {} for method in runners}
    for rows, columns in shapes:
        runs = {method: a_pass(runner, rows, columns) for method, runner in runners.items()}
        for run in runs.values():
            run()  # builds
        for method, times in interleave(runs, repeats).items():
            found[method][f"{rows}x{columns}"] = min(times)
    found["seconds_building"] = runners["built"].seconds_building
    return found


def speeds(batch: int, tokens: int, lookahead: str, repeats: int) -> dict[str, Any]:
    """Median tokens per second of one batch of one prompt, with and without, plain and speculative; T = 0.8."""
    prompt = problems(20, 1, "templates")[0].prompt
    pairs = {mode: shoal.load(compile=mode, max_batch=batch) for mode in ("off", "on")}

    def rate(pair: Shoal, ahead: str) -> float:
        options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": tokens, "eos": (), "seed": 1}
        return pair.generate(prompt, batch, lookahead=ahead, **options).stats.tokens_per_second

    methods: dict[str, Callable[[], float]] = {
        f"{name}, compile {mode}": partial(rate, pair, ahead)
        for mode, pair in pairs.items()
        for name, ahead in (("plain", "off"), ("speculative", lookahead))
    }
    for _ in range(2):  # builds; twice, as a controller may take other lengths the second time
        for method in methods.values():
            method()
    found: dict[str, Any] = {name: median(rates) for name, rates in interleave(methods, repeats).items()}
    for mode in pairs:
        found[f"ratio, compile {mode}"] = found[f"speculative, compile {mode}"] / found[f"plain, compile {mode}"]
    models = [model for model in (pairs["on"].target, pairs["on"].draft_model) if model is not None]
    return found | {
        "seconds_building": sum(model.seconds_building for model in models),
        "failures": [model.static.failure for model in models if model.static is not None and model.static.failure],
    }


def main(
    shapes: Annotated[str, typer.Option(help="ROWSxCOLUMNS, comma-separated.")] = "1x1,8x1,1x7,8x7",
    batch_sizes: Annotated[str, typer.Option(help="Of the whole runs, comma-separated; empty = no whole runs.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="New tokens per row.")] = 128,
    lookahead: Annotated[str, typer.Option(help="Of the speculative runs.")] = "fixed:6",
    repeats: int = 9,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measures ordinary, static and compiled passes."""
    require_place(json_path)
    sizes = [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in shapes.split(","))]
    report: dict[str, Any] = {
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "ms_per_pass": {part: pass_ms(part, sizes, repeats) for part in ("target", "drafter")},
        "runs": {
            size: speeds(int(size), tokens, lookahead, max(3, repeats // 3)) for size in batch_sizes.split(",") if size
        },
    }
    if json_path is not None:
        write_results(json_path, report)
    console = Console(width=110)
    for part, found in report["ms_per_pass"].items():
        seconds = found.pop("seconds_building")
        table = Table("ms per pass", *found[ORDINARY], title=part, caption=f"built in {seconds:.0f} s")
        for method, times in found.items():
            table.add_row(method, *(f"{ms:.2f}" for ms in times.values()))
        console.print(table)
    for size, found in report["runs"].items():
        table = Table("", "", title=f"batch {size}, {tokens} new tokens, T = 0.8, {lookahead}")
        for name, value in found.items():
            table.add_row(name, f"{value:.2f}" if isinstance(value, float) else "; ".join(value) or "none")
        console.print(table)
    console.print(json.dumps(report["machine"]), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    command.run(main)
