"""`python benchmarks/precision.py`: what number formats, weight order, 8 bits and strict passes cost, on the bundled pair.

The costs of number formats: single products and whole passes, least of interleaved runs; the drafter's
acceptance in float32 and int8; and how many greedy rows stay the same when only the batch or the draft length changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

import shoal
from held_out import problems
from shoal.bench import compared, interleave
from shoal.models import weights
from shoal.models.loading import LoadOptions, load_runner
from shoal.models.runner import Runner
from shoal.models.sources import bundled
from shoal.models.weights import matrix

SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 7), (4, 7), (8, 5), (8, 7))
"""Rows x positions."""
PRODUCTS = ((256, 256), (256, 640), (640, 256), (256, 2048))
"""Features in and out of the target's linear layers."""
CONTEXT = 160
"""Tokens that every row has before the pass."""


@torch.inference_mode()
def seconds(shape: tuple[int, int], tokens: int, dtype: torch.dtype, input_major: bool = False) -> float:
    """Least time of three products [tokens, in] x [in, out]. shape: in, out. input_major: the weight's order in memory."""
    features_in, features_out = shape
    weight, x = torch.ones(features_out, features_in, dtype=dtype), torch.ones(tokens, features_in, dtype=dtype)
    if input_major:
        weight = matrix.input_major(weight)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        linear(x, weight)
        times.append(time.perf_counter() - started)
    return min(times)


def usual_order(part: str, **options: Any) -> Runner:
    """A bundled model whose weights stay in the order of the checkpoint."""
    with patch.object(weights, "lay_out", lambda hf, choose: "as-is"):
        return load_runner(bundled(part), LoadOptions(**options))


def variants(part: str) -> dict[str, Runner]:
    """The same model in every format and weight order that is compared."""

    def load(**options: Any) -> Runner:
        return load_runner(bundled(part), LoadOptions(**options))

    return {
        "float32, usual order": usual_order(part, dtype="float32"),
        "float32": load(dtype="float32"),
        "float32, strict": load(dtype="float32", strict=True),
        "int8": load(dtype="float32", quantize="int8"),
        "bfloat16": load(dtype="bfloat16"),
        "bfloat16, strict": load(dtype="bfloat16", strict=True),
    }


def product_table(repeats: int) -> Table:
    """Least microseconds of one linear layer: kinds down, tokens across."""
    tokens = (1, 4, 8, 16, 32, 56)
    table = Table("linear layer: us per product", *map(str, tokens))
    kinds = {
        "float32": (torch.float32, False),
        "float32, input-major": (torch.float32, True),
        "bfloat16": (torch.bfloat16, False),
    }
    for shape in PRODUCTS:
        for name, kind in kinds.items():
            times = (min(seconds(shape, many, *kind) for _ in range(repeats)) for many in tokens)
            table.add_row(f"{shape[0]} -> {shape[1]}, {name}", *(f"{1e6 * time:.0f}" for time in times))
    return table


def a_pass(model: Runner, rows: int, positions: int) -> Callable[[], float]:
    """A function that makes one pass over a filled cache, leaves the cache as it was, and returns the milliseconds."""
    runner, slots = model.fork(), range(rows)
    runner.memory.reserve(rows, CONTEXT + positions)
    runner.feed(slots, torch.ones(rows, CONTEXT, dtype=torch.long), [CONTEXT] * rows, want_logits=False)
    tokens = torch.ones(rows, positions, dtype=torch.long)

    def run() -> float:
        runner.counts.take()
        runner.feed(slots, tokens, [positions] * rows)
        for slot in slots:
            runner.cache.rollback(slot, CONTEXT)
        return 1000 * runner.counts.take()[1]

    return run


def pass_table(part: str, runners: Mapping[str, Runner], repeats: int) -> Table:
    """Least milliseconds per pass: variants down, rows x positions across."""
    table = Table(part, *(f"{rows}x{positions}" for rows, positions in SHAPES))
    found: dict[str, list[str]] = {name: [] for name in runners}
    for rows, positions in SHAPES:
        runs = {name: a_pass(runner, rows, positions) for name, runner in runners.items()}
        for name, times in interleave(runs, repeats).items():
            found[name].append(f"{min(times):.1f}")
    for name, cells in found.items():
        table.add_row(name, *cells)
    return table


def acceptance_table(texts: list[str], n: int, max_new_tokens: int) -> Table:
    """The acceptance length of the drafter as it is and in int8, draft length 6."""
    table = Table("drafter", "T = 0.8", "greedy")
    for form in ("off", "int8"):
        pair = shoal.load(quantize={"draft": form}, max_batch=n, dtype="float32")
        run = partial(pair.generate, texts, n, max_new_tokens=max_new_tokens, lookahead=6, seed=0, eos=())
        lengths = [run(temperature=temperature).stats.acceptance_length for temperature in (0.8, 0.0)]
        table.add_row("float32" if form == "off" else form, *(f"{length:.2f}" for length in lengths))
    return table


def identity_table(texts: list[str], n: int, max_new_tokens: int) -> Table:
    """Greedy rows whose ids are those of plain decoding of their prompt by itself: batched, and batched and speculative."""
    table = Table("same greedy rows", "batched", "batched, 6 drafted")
    for dtype in ("float32", "bfloat16"):
        for strict in (False, True):
            pair = shoal.load(strict=strict, max_batch=n * len(texts), dtype=dtype)
            run = partial(pair.generate, temperature=0.0, max_new_tokens=max_new_tokens, eos=())
            alone = [[run(text, lookahead="off")[0].samples[0].token_ids] * n for text in texts]
            cells = []
            for lookahead in ("off", 6):
                found = run(texts, n, lookahead=lookahead)
                ids = [[sample.token_ids for sample in output.samples] for output in found]
                same = compared(alone, ids, found.stats.drafted)
                cells.append(f"{same.same} of {same.rows}")
            table.add_row(f"{dtype}, strict" if strict else dtype, *cells)
    return table


def main(n: int = 8, max_new_tokens: int = 96, prompts: int = 3, repeats: int = 25) -> None:
    """Prints the tables of products, passes and acceptance."""
    console = Console(width=120)
    texts = [problem.prompt for problem in problems(prompts)]
    console.print(product_table(repeats))
    for part in ("target", "drafter"):
        runners = variants(part)
        for name, runner in runners.items():
            console.print(f"{part}, {name}: {runner.notes}", style="dim")
        console.print(pass_table(f"{part}: ms per pass, {CONTEXT} tokens before", runners, repeats))
    console.print(acceptance_table(texts, n, max_new_tokens))
    console.print(identity_table(texts, n, max_new_tokens))


if __name__ == "__main__":
    typer.run(main)
