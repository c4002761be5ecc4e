"""`python benchmarks/gpu/budget.py`: what a round should take on a GPU, computed from counted budgets. **Computed, not measured.**

Counted: launches of a captured round of tiny models of the same layout, whose layers and draws are Triton kernels
(tests/helpers/fused_launches.py); copies and waits, on a device that pretends to be a GPU (tests/helpers/pretend.py);
bytes of weights, and of keys and values. Given: the bandwidth and the operations per second that the manufacturer
names, and what a launch in a graph, a copy, a wait and the host's part of a round (host.py) take. A round is then the
longer of reading and computing, for each pass, and its launches, copies and waits. Not in it: what distributions over the
vocabulary read and write (a few MB), and whatever keeps kernels from the nominal bandwidth.

No GPU is needed, and none is asked for anything.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from rich.console import Console
from rich.table import Table

from fused_launches import of_a_round
from pretend import Pretend, moved
from provenance import place_of_results, write_results
from recorder import Recorder
from shoal.bench.machine import machine as this_machine
from shoal.bench.random_pairs import SHAPES, LlamaShape
from shoal.config import Limits, Sampling
from shoal.drafting.captured_kinds import PENDING
from shoal.lookahead.controller import Fixed
from shoal.models import loading
from shoal.models.attention.fused import Card, tiling
from shoal.models.compiled import EXECUTORS
from shoal.models.compiled.block import reservation
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rejection
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

LAYER = 9
"""Launches of a fused layer (`tests/gpu/layers_cases.py -k nine`); one more where several programs share the keys of a query."""
CARD = Card(processors=132, shared=227 * 1024)
"""An H200, and an H100."""
BYTES = 2
"""Of a number in bfloat16."""


@dataclass(frozen=True)
class Machine:
    """Of an H200 by its data sheet (SXM, dense bfloat16), and assumptions: seconds of a launch within a graph beside the work of
    its kernel, of a copy, of the host between another wait and the next launch; measured by host.py: between two rounds."""

    bandwidth: float
    operations: float
    launch: float
    copy: float
    wait: float
    host: float


@dataclass(frozen=True)
class Budget:
    """Counted of one round: launches outside layers, and in all; functions, copies, waits."""

    others: int
    launches: int
    functions: int
    uploads: int
    downloads: int


def counted(lookahead: Any, target: LlamaShape, drafter: LlamaShape, drafts: int, rows: int, context: int) -> Budget:
    """A round in which nothing is built, in layers of these shapes over caches for rows of `context` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        launched = of_a_round(lookahead(), drafts > 0, "rejection", patch)
    if launched["heads"] != drafts + 1:  # layers: one of the target, and one of the drafter in each step
        raise RuntimeError(f"{launched['heads']} layers in a round of {drafts} drafts")
    others, crossed = launched.total() - LAYER * (drafts + 1), crossings(lookahead(), drafts)
    layers = target.layers * launches_of(target, rows, drafts + 1, context)
    layers += sum(drafter.layers * launches_of(drafter, rows, 1 if j else PENDING, context) for j in range(drafts))
    return Budget(others, others + layers, crossed["replay"], crossed["upload"], crossed["download"])


def launches_of(shape: LlamaShape, rows: int, columns: int, context: int) -> int:
    """Of one layer."""
    capacity, dim = reservation(rows, context, by_kernel=True)[1], shape.width // shape.heads
    query, key = (
        torch.empty(rows, heads, tokens, dim, dtype=torch.bfloat16, device="meta")
        for heads, tokens in ((shape.heads, columns), (shape.kv_heads or shape.heads, capacity))
    )
    return LAYER + (tiling(query, key, dim, capacity, CARD).splits > 1)


def crossings(lookahead: Any, drafts: int) -> Counter[str]:
    """What a round asks of the host."""
    device = Pretend()
    before, EXECUTORS["graphed"] = EXECUTORS["graphed"], Recorder.on(device)
    try:
        with device:
            runners = [_runner(seed) for seed in (0, 1)]
            made = engine_of(runners[0], runners[1] if drafts else None, lookahead, rule=Rejection(), max_batch=8)
            for i in range(3):
                made.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=60)))
            while True:
                counts, building = device.counts.copy(), made.target.seconds_building
                made.step()
                if made.stats.rounds > 8 and made.target.seconds_building == building:
                    return device.counts - counts
    finally:
        EXECUTORS["graphed"] = before


def _runner(seed: int) -> Runner:
    made = loading.wrap(moved(tiny_model("llama", seed=seed, layers=1)), "tiny", "pad", checked=False)
    made.capture_rounds("graphed")
    return made


def weight_bytes(shape: LlamaShape) -> float:
    """Read by a pass: layers and head."""
    layer = 2 * shape.width * (shape.width + shape.kv_width) + 3 * shape.width * shape.mlp
    return float(BYTES * (shape.layers * layer + shape.width * shape.vocabulary))


def pass_seconds(shape: LlamaShape, rows: int, columns: int, context: int, machine: Machine) -> float:
    """The longer of reading weights, keys and values, and of the products."""
    kv = 2.0 * BYTES * shape.layers * shape.kv_width * rows * context
    read = (weight_bytes(shape) + kv) / machine.bandwidth
    return max(read, weight_bytes(shape) / BYTES * 2 * rows * columns / machine.operations)


def line(
    name: str, budget: Budget, shapes: tuple[LlamaShape, LlamaShape], rows: int, drafts: int, context: int, acceptance: float,
    machine: Machine,
) -> dict[str, str | int | float]:  # fmt: skip
    """Computes a round; the keys are the columns of the table."""
    target, drafter = shapes
    passes = pass_seconds(target, rows, drafts + 1, context, machine)
    passes += drafts * pass_seconds(drafter, rows, 1, context, machine)
    small = budget.launches * machine.launch + (budget.uploads + budget.downloads) * machine.copy
    seconds = passes + small + machine.host + (budget.downloads - 1) * machine.wait
    tokens = sum(acceptance**i for i in range(drafts + 1))
    milliseconds = (round(1000 * value, 2) for value in (passes, seconds, seconds / tokens))
    return {
        "round": name, "launches": budget.launches, "besides layers": budget.others, "functions": budget.functions,
        "uploads": budget.uploads, "waits": budget.downloads,
        **dict(zip(("ms of passes", "ms", "ms per token"), milliseconds, strict=True)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7.8b/310m", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=768, help="tokens of a row, on average")
    parser.add_argument("--drafts", default="4,6", help="draft lengths")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second")
    parser.add_argument("--operations", type=float, default=989e12, help="per second")
    parser.add_argument("--launch-us", type=float, default=1.5)
    parser.add_argument("--copy-us", type=float, default=5.0)
    parser.add_argument("--wait-us", type=float, default=40.0)
    parser.add_argument("--host-us", type=float, default=325.0)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write the computed figures there")
    asked = parser.parse_args()
    microseconds = (1e-6 * value for value in (asked.launch_us, asked.copy_us, asked.wait_us, asked.host_us))
    machine, shapes = Machine(asked.bandwidth, asked.operations, *microseconds), SHAPES[asked.shape]
    kinds = [("plain", lambda: Fixed(0), 0)]
    for k in map(int, asked.drafts.split(",")):
        kinds.append((f"k = {k}", lambda k=k: Fixed(k), k))  # type: ignore[misc]
    lines = []
    for name, lookahead, drafts in kinds:
        budget = counted(lookahead, *shapes, drafts, asked.rows, asked.context)
        lines.append(line(name, budget, shapes, asked.rows, drafts, asked.context, asked.acceptance, machine))
    table = Table(*lines[0])
    table.title = f"COMPUTED, NOT MEASURED: {asked.shape}, {asked.rows} rows of {asked.context} tokens"
    table.title += f", acceptance {asked.acceptance:g}"
    for one in lines:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in one.values()))
    Console(width=132).print(table)
    if asked.json:
        options = vars(asked) | {"json": asked.json.name}
        where = this_machine(torch.device("cpu"))
        write_results(asked.json, {"machine": where, "arguments": options, "computed, not measured": lines})


if __name__ == "__main__":
    main()
