"""What a round costs outside the models' passes: time, and operations of torch, which no other process disturbs.

    python benchmarks/bookkeeping.py        # bundled pair, float32, draft length 4; about two minutes

Time is the median over `REPEATS` interleaved calls, on a machine with nothing else running.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from provenance import place_of_results, write_results
from shoal.bench.machine import machine

PROMPT = "def is_prime(n: int) -> bool:\n"
REPEATS = 7
TOKENS = 64
CASES: dict[str, dict[str, Any]] = {
    "batch 1, seeded": {"n": 1, "seed": 1},
    "batch 8, seeded": {"n": 8, "seed": 1},
    "batch 8, rejection": {"n": 8, "seed": 1, "rule": "rejection"},
    "batch 8, greedy": {"n": 8, "temperature": 0.0},
    "batch 32, seeded": {"n": 32, "seed": 1},
    "batch 8, penalties": {"n": 8, "seed": 1, "repetition_penalty": 1.2},
    "batch 8, plain": {"n": 8, "seed": 1, "lookahead": "off"},
}


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measured(pair: shoal.Shoal) -> dict[str, dict[str, float]]:
    """Per case: microseconds per round outside passes, and operations per round, those of the passes included."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    found = {}
    for _ in range(REPEATS):
        for name, case in CASES.items():
            stats = pair.generate(PROMPT, max_new_tokens=TOKENS, **{"lookahead": 4, **case}).stats
            times[name].append((stats.seconds_rounds - stats.seconds_target - stats.seconds_draft) / stats.rounds)
    for name, case in CASES.items():
        with Operations() as operations:
            stats = pair.generate(PROMPT, max_new_tokens=TOKENS, **{"lookahead": 4, **case}).stats
        us = statistics.median(times[name]) * 1e6
        found[name] = {"us": round(us, 1), "operations": round(operations.count / stats.rounds, 1), "rounds": stats.rounds}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    found = measured(shoal.load(max_batch=32))
    if options.json is not None:
        write_results(options.json, {"machine": machine(torch.device("cpu")), "cases": found})
    for name, figures in found.items():
        print(
            f"{name:20} {figures['us']:8.0f} us per round {figures['operations']:8.1f} operations {figures['rounds']:5} rounds"
        )


if __name__ == "__main__":
    main()
