"""`python benchmarks/cpu_passes.py`: what a pass costs on a CPU by each way to compute it (docs/how-to/compile.md).

Milliseconds per pass: by the modules of Transformers with their weights as they are, the same with packed weights, and by lean
passes. Then tokens per second of whole runs, plain and speculative, by each. Before a
time is taken the logits of every way are compared.
"""

from __future__ import annotations

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
from held_out import problems
from precision import a_pass
from provenance import require_place, write_results
from shoal.api import Shoal
from shoal.bench import interleave
from shoal.bench.machine import machine
from shoal.models.loading import LoadOptions, load_runner
from shoal.models.passes import use_lean_passes, use_padded_attention
from shoal.models.pretrained import load_tokenizer
from shoal.models.runner import Runner
from shoal.models.selfcheck import largest_error, tolerance
from shoal.models.sources import bundled

TARGET, DRAFTER = bundled("target"), bundled("drafter")
WAYS = ("modules", "modules, packed", "lean")


def runner_for(way: str, source: str | Path, dtype: str) -> Runner:
    """A model whose passes are computed in one of `WAYS`."""
    made = load_runner(source, LoadOptions(dtype=dtype, pack=way != WAYS[0]))
    if way == WAYS[2]:
        use_lean_passes(made)
    else:
        use_padded_attention(made)
    error = largest_error(made)
    if not error <= tolerance(made):
        raise SystemExit(f"{way}: logits diverge by {error:.3g} nats; no times")
    return made


def pass_ms(source: Path, dtype: str, shapes: Sequence[tuple[int, int]], repeats: int) -> dict[str, dict[str, float]]:
    """Least milliseconds per pass by way and by rows x columns."""
    runners = {way: runner_for(way, source, dtype) for way in WAYS}
    found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for rows, columns in shapes:
        runs = {way: a_pass(runner, rows, columns) for way, runner in runners.items()}
        for way, times in interleave(runs, repeats).items():
            found[way][f"{rows}x{columns}"] = min(times)
    return found


def speeds(target: Path, draft: Path, dtype: str, batch: int, tokens: int, lookahead: str, repeats: int) -> dict[str, float]:
    """Median tokens per second of one batch of one prompt by way, plain and speculative; T = 0.8."""
    prompt, tokenizer = problems(1)[0].prompt, load_tokenizer(target)
    pairs = {way: Shoal(runner_for(way, target, dtype), runner_for(way, draft, dtype), tokenizer) for way in WAYS}

    def rate(pair: Shoal, ahead: str) -> float:
        options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": tokens, "eos": (), "seed": 1}
        return pair.generate(prompt, batch, lookahead=ahead, **options).stats.tokens_per_second

    methods: dict[str, Callable[[], float]] = {
        f"{name}, {way}": partial(rate, pair, ahead)
        for way, pair in pairs.items()
        for name, ahead in (("plain", "off"), ("speculative", lookahead))
    }
    for method in methods.values():
        method()
    return {name: median(rates) for name, rates in interleave(methods, repeats).items()}


def main(
    target: Annotated[Path, typer.Option(help="Directory.")] = TARGET,
    draft: Annotated[Path, typer.Option(help="Directory.")] = DRAFTER,
    dtype: Annotated[str, typer.Option(help="Of both.")] = "float32",
    shapes: Annotated[str, typer.Option(help="ROWSxCOLUMNS, comma-separated.")] = "1x1,8x1,1x5,8x5",
    batch_sizes: Annotated[str, typer.Option(help="Of the whole runs, comma-separated; empty = no whole runs.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="New tokens per row.")] = 128,
    lookahead: Annotated[str, typer.Option(help="Of the speculative runs.")] = "fixed:4",
    repeats: int = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measures the ways to compute a pass on a CPU."""
    require_place(json_path)
    sizes = [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in shapes.split(","))]
    parts = {"target": target, "drafter": draft}
    report: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "ms_per_pass": {part: pass_ms(source, dtype, sizes, repeats) for part, source in parts.items()},
        "tokens_per_second": {
            size: speeds(target, draft, dtype, int(size), tokens, lookahead, max(3, repeats // 3))
            for size in batch_sizes.split(",")
            if size
        },
    }
    if json_path is not None:
        write_results(json_path, report)
    console = Console(width=110)
    for part, found in report["ms_per_pass"].items():
        table = Table("ms per pass", *found[WAYS[0]], title=part)
        for way, times in found.items():
            table.add_row(way, *(f"{ms:.2f}" for ms in times.values()))
        console.print(table)
    for size, rates in report["tokens_per_second"].items():
        table = Table("tokens per second", *("plain", "speculative"), title=f"batch {size}, T = 0.8, {lookahead}")
        for way in WAYS:
            table.add_row(way, *(f"{rates[f'{name}, {way}']:.0f}" for name in ("plain", "speculative")))
        console.print(table)


if __name__ == "__main__":
    command.run(main)
