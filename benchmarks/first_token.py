"""`python benchmarks/first_token.py --model DIR --model FILE.gguf`: the seconds of a command to its first token.

A run is `shoal generate --max-new-tokens 1` in a process of its own: imports, load and one token. Another checkout may
take turns with this one. Beside the seconds that pass stand those of the processor, which other work on the machine
changes less. The first run of each line warms the caches of files, kernels and checks, and does not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
from provenance import require_place, write_results
from shoal.bench.machine import commit, machine
from shoal.errors import RequestError

HERE = Path(__file__).resolve().parents[1]
COMMAND = "-m shoal generate -p 1 -n 1 --max-new-tokens 1 --json".split()
BUNDLED = "bundled"


def seconds(checkout: Path, python: Path, model: str) -> tuple[float, float]:
    """The seconds of one run, and those of the processor.

    Raises:
        RequestError: the command failed.
    """
    named = [] if model == BUNDLED else ["--model", model]
    variables = os.environ | {"PYTHONPATH": str(checkout / "src")}
    began, before = time.perf_counter(), os.times()
    ended = subprocess.run([python, *COMMAND, *named], env=variables, capture_output=True, text=True)
    wall, after = time.perf_counter() - began, os.times()
    if ended.returncode:
        raise RequestError(f"{checkout}: {model} ended with {ended.returncode}: {ended.stderr[-300:]}")
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, used


def main(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="A directory or a GGUF file; repeatable. Without, the bundled pair.")
    ] = None,
    before: Annotated[Path | None, typer.Option(help="Another checkout, which takes turns with this one.")] = None,
    python: Annotated[Path, typer.Option(help="The Python of the other checkout.")] = Path(sys.executable),
    repeats: Annotated[int, typer.Option(help="Runs of each line that count.")] = 6,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every run there.")] = None,
) -> None:
    """Seconds to the first token: medians of runs in turns."""
    require_place(json_path)
    places = {"this": (HERE, Path(sys.executable))} | ({} if before is None else {"before": (before, python)})
    lines = [(model, name) for model in models or [BUNDLED] for name in reversed(places)]
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {line: [] for line in lines}
    for repeat in range(repeats + 1):
        for model, name in lines:
            found = seconds(*places[name], model)
            runs[model, name] += [found] if repeat else []
    table = Table("model", "checkout", "seconds", "of the processor", "least to most seconds")
    for (model, name), each in runs.items():
        walls, used = zip(*each, strict=True)
        figures = f"{median(walls):.2f}", f"{median(used):.2f}", f"{min(walls):.2f} to {max(walls):.2f}"
        table.add_row(Path(model).name, name, *figures)
    Console().print(table)
    if json_path is not None:
        commits = {name: commit(place / "src" / "shoal") for name, (place, _) in places.items()}
        found = [{"model": Path(model).name, "checkout": name, "runs": each} for (model, name), each in runs.items()]
        report = {"machine": machine(torch.device("cpu")), "commits": commits, "lines": found}
        write_results(json_path, report)


if __name__ == "__main__":
    command.run(main)
