"""What the GPU measurements share: the device or a clear refusal, results as a table and as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.models.compiled import EXECUTORS
from shoal.models.runner import Runner

PRETEND = "pretend"
NO_DEVICE = 3
"""Exit code where there is no such device."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", help="cpu and pretend try the script itself out; its times say nothing (default: cuda)"
    )
    parser.add_argument("--results", type=place_of_results, help="directory for a JSON file named by date and device")
    return parser


def device_or_exit(name: str) -> torch.device:
    """Exits with `NO_DEVICE` and a message if it is not there. "pretend" is the GPU of the tests (pretended.py)."""
    if name == PRETEND:
        import pretended

        return pretended.start()
    if name.startswith("cuda") and not torch.cuda.is_available():
        print(f"{sys.argv[0]}: no CUDA device: nothing was measured", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    return torch.device(name)


def dtype_of(name: str) -> str:
    """The number format of models on a device; torch's code in C++ converts 16 bit where it is, and so not on the pretended one."""
    return "float32" if name == PRETEND else "auto"


def failures_of(models: Sequence[Runner | None]) -> list[str]:
    """Why models compute less by captured functions than they should."""
    return [
        reason for model in models if model is not None and model.captures is not None for reason in model.captures.failures
    ]


def microseconds(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> float:
    """The median time of a call among the others, in one CUDA graph; on a CPU one after the other."""
    run = EXECUTORS["graphed" if device.type == "cuda" else "eager"](device)(lambda: [call() for call in calls])
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(1000 * begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            taken.append(1e6 * (time.perf_counter() - started))
    return median(taken) / len(calls)


def deliver(
    title: str,
    columns: Sequence[str],
    lines: Sequence[dict[str, Any]],
    device: torch.device,
    results: Path | None,
    name: str,
) -> None:
    """Prints `lines`, which have a value for each column, and writes them down.

    Args:
        results: directory, or None. name: of the measurement, part of the file's name.
    """
    table = Table(*columns, title=title)
    for line in lines:
        table.add_row(*(f"{line[c]:.3g}" if isinstance(line[c], float) else str(line[c]) for c in columns))
    Console(width=132).print(table)
    if results is not None:
        where = machine(device)
        file = results / "-".join([where["date"], *where["device"].split(), f"{name}.json"])
        write_results(file, {"measurement": name, "machine": where, "lines": lines})
        print(f"written to {file}")
