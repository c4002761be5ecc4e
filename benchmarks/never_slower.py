"""`python benchmarks/never_slower.py`: is `lookahead="auto"` ever slower than plain decoding? Wall clock, so on a quiet machine.

The bundled target with three drafters: its own; one whose weights are shuffled (as fast, and useless); and a copy of the target's
shape with shuffled weights (as dear as the target, and useless). For each drafter and batch, greedy ids are compared first. Then
`auto` and plain decoding take turns on the same work, every other turn in reverse order, and the figure is the median of the
ratios of neighbouring runs. The very first run of a pair, in which `auto` knows nothing, is shown beside it.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import command
import shoal
from held_out import problems
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.errors import InternalError
from shoal.models.loading import wrap

TEMPERATURE = 0.8
DRAFTERS = ("own", "shuffled", "shuffled target")


def shuffled(hf: Any) -> Any:
    """A copy of a model, the entries of each of its matrices in another order."""
    other = copy.deepcopy(hf)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                order = torch.randperm(weight.numel(), generator=generator)
                weight.copy_(weight.flatten()[order].view(weight.shape))
    return other


def pair_with(name: str, most: int) -> shoal.Shoal:
    """The bundled target with one of `DRAFTERS`; knows nothing yet of what drafts bring."""
    pair = shoal.load(max_batch=most)
    assert pair.draft_model is not None
    if name == "own":
        return pair
    source = pair.draft_model if name == "shuffled" else pair.target
    drafter = wrap(shuffled(source.hf), name, checked=False)
    return shoal.Shoal(pair.target, drafter, pair.tokenizer, max_batch=most)


def seconds(pair: shoal.Shoal, lookahead: str, prompts: list[str], seed: int, tokens: int) -> float:
    """Of one run, prompts included."""
    started = time.perf_counter()
    pair.generate(
        prompts, lookahead=lookahead, rule="rejection", seed=seed, temperature=TEMPERATURE, max_new_tokens=tokens, eos=()
    )
    return time.perf_counter() - started


def require_identity(pair: shoal.Shoal, prompts: list[str], tokens: int) -> None:
    """Raises InternalError: greedy ids differ from those of plain decoding."""
    plain, drafted = (
        pair.generate(prompts, lookahead=name, temperature=0.0, max_new_tokens=tokens, eos=()) for name in ("off", 3)
    )
    for one, other in zip(plain, drafted, strict=True):
        if [sample.token_ids for sample in one.samples] != [sample.token_ids for sample in other.samples]:
            raise InternalError(f"greedy ids differ after {one.prompt!r}; nothing that follows would be worth measuring")


def lines(batches: list[int], tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One for each drafter and batch: ratios of the speed of `auto` to that of plain decoding, the first one apart."""
    for drafter in DRAFTERS:
        for batch in batches:
            pair = pair_with(drafter, max(batches))
            prompts = [problem.prompt for problem in problems(batch)]
            require_identity(pair, prompts, min(tokens, 48))
            seconds(pair, "off", prompts, 0, tokens)  # the machine's own warm-up
            first = seconds(pair, "off", prompts, 1, tokens) / seconds(pair, "auto", prompts, 1, tokens)
            ratios = []
            for i in range(repeats):
                turn = ("off", "auto") if i % 2 else ("auto", "off")
                took = {name: seconds(pair, name, prompts, 2 + i, tokens) for name in turn}
                ratios.append(took["off"] / took["auto"])
            yield {"drafter": drafter, "batch": batch, "first": first, "ratios": ratios}


def main(
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="Per row.")] = 128,
    repeats: Annotated[int, typer.Option(help="Pairs of runs.")] = 9,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all ratios there.")] = None,
) -> None:
    """Speed of auto over that of plain decoding, for drafters that bring nothing."""
    require_place(json_path)
    batches = [int(batch) for batch in batch_sizes.split(",")]
    total = len(DRAFTERS) * len(batches)
    found = list(track(lines(batches, tokens, repeats), "decoding", total=total, console=Console(stderr=True)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("drafter", "batch", "auto v plain", "lowest", "highest", "first run"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for line in found:
        ratios = line["ratios"]
        figures = (median(ratios), min(ratios), max(ratios), line["first"])
        table.add_row(line["drafter"], str(line["batch"]), *(f"{figure:.3f}" for figure in figures))
    Console(highlight=False, width=None if sys.stdout.isatty() else 100).print(table)
    if json_path is not None:
        report = {"machine": machine(torch.device("cpu")), "tokens": tokens, "lines": found}
        write_results(json_path, report)


if __name__ == "__main__":
    command.run(main)
