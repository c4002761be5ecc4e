"""`python benchmarks/busy.py MODEL`: plain decoding alone and beside a process that keeps a core busy.

Told are tokens per second (docs/explanation/decisions.md), with the pauses of the threads that `team.h` makes and without them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.api import Shoal
from shoal.bench.machine import machine
from shoal.native import build

PROMPTS = (
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time",
    "The weather",
    "A prime",
    "My food",
    "To be",
    "Paris",
)
TOKENS, REPEATS = 32, 5
LOOP = "while True: pass"
SOURCE = "int64_t team(int64_t threads) {"
LIBRARY = build.sources()


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", LOOP]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def rate(model: Shoal, rows: int) -> float:
    """The median of tokens per second."""
    options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": TOKENS, "eos": (), "lookahead": "off"}
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        model.generate(PROMPTS[:rows], 1, **options)
        found.append(rows * TOKENS / (time.perf_counter() - begin))
    return statistics.median(found)


def without_pauses() -> None:
    """Lets all regions have all threads: the next library is one of its own."""
    text = LIBRARY["team.h"].decode()
    assert SOURCE in text
    texts = {**LIBRARY, "team.h": text.replace(SOURCE, f"{SOURCE} return threads;").encode()}
    build.sources = lambda: texts
    build._attempt.cache_clear()


def main(
    model: Annotated[str, typer.Argument(help="A directory or GGUF file.")],
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measures plain decoding alone and beside a busy process."""
    require_place(json_path)
    report: dict[str, Any] = {"machine": machine(torch.device("cpu")), "model": Path(model).name}
    table = Table("", "rows", "with pauses, tokens/s", "without")
    figures: dict[tuple[bool, int], list[float]] = {}
    for _ in ("with", "without"):
        with shoal.load(model) as loaded:
            for beside in (False, True):
                with busy(beside):
                    for rows in (1, len(PROMPTS)):
                        figures.setdefault((beside, rows), []).append(rate(loaded, rows))
        without_pauses()
    for (beside, rows), (ours, other) in figures.items():
        name = "beside a busy process" if beside else "alone"
        table.add_row(name, str(rows), f"{ours:.0f}", f"{other:.0f}")
        report[f"{name}, {rows}"] = {"with": ours, "without": other}
    if json_path is not None:
        write_results(json_path, report)
    Console(width=100).print(table)


if __name__ == "__main__":
    command.run(main)
