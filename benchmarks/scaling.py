"""`python benchmarks/scaling.py`: what passes and rounds cost as a pair is scaled up, and what the cost model says of them.

Every second point of a sweep is shown to a `CostCurve`, which is all that `lookahead="auto"` knows of costs; the points between are
predicted and the error is printed beside them. A pass is timed on caches of zeros: what a token is does not change what it costs.
The last table predicts whole runs: the speed-up at a draft length, from rounds at other ones.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.bench import in_turns
from shoal.bench.machine import machine
from shoal.bench.random_pairs import imposing
from shoal.bench.report_views import COLOURS, DPI, require_matplotlib
from shoal.bench.work import timed
from shoal.lookahead.costs import CostCurve
from shoal.models.runner import Runner
from shoal.types.requests import Prefix
from shoal.types.stats import Stats

BATCH, CONTEXT, DRAFTS, PROMPT = 8, 160, 4, 512
"""Rows, tokens that each has already, draft length and prompt length where a sweep does not vary them."""
WIDTH = 120
"""Columns where stdout is no terminal."""


@dataclass
class Point:
    """One kind of pass or run.

    Attributes:
        at: what was varied, by name. size: what a `CostCurve` knows it by. shown: to the curve; otherwise predicted by it.
        seconds: measured, one per repeat. predicted: seconds, or None for a point that was shown.
    """

    at: dict[str, int]
    size: int
    shown: bool
    seconds: list[float] = field(default_factory=list)
    predicted: float | None = None

    @property
    def measured(self) -> float:
        """Seconds, the median."""
        return median(self.seconds)

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return vars(self) | {"measured": self.measured, "error": self.error}


@dataclass(frozen=True)
class Sweep:
    """Points along one or two axes. `make` prepares a point and returns what is timed."""

    name: str
    points: list[Point]
    make: Callable[[Point], Callable[[], object]]

    def measure(self, device: torch.device, repeats: int) -> None:
        """Times all points in turns, the first turn for nothing, shows the curve its share and asks it for the rest."""
        curve = CostCurve()
        for repeat, i in in_turns([str(i) for i in range(len(self.points))], repeats + 1):
            point = self.points[int(i)]
            work = self.make(point)
            with timed(device) as watch:
                work()
            if repeat:
                point.seconds.append(watch.seconds)
                if point.shown:
                    curve.observe(point.size, watch.seconds)
        table = curve.table(max(point.size for point in self.points))
        for point in self.points:
            point.predicted = None if point.shown else float(table[point.size])


# ── passes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def prepared_pass(runner: Runner, rows: int, q: int, context: int, shared: bool = False) -> Callable[[], object]:
    """A pass over q tokens of each of `rows` rows that have `context` already, each its own or all the same.

    Positions beyond the model's own context are computed like its last.
    """
    prefix = Prefix(0, context) if shared else None
    runner.memory.reserve(rows, q + (0 if shared else context), context if shared else 0)
    for slot in range(rows):
        runner.cache.enter(slot, prefix)
        runner.cache.lengths[slot] = context
    block = torch.ones(rows, q, dtype=torch.long, device=runner.device)
    return lambda: runner.feed(range(rows), block, [q] * rows)


def grid(runner: Runner, rows: Sequence[int], ks: Sequence[int]) -> Sweep:
    """A verify pass by rows and draft length: one curve over rows x (k + 1) must do for both, as it must in `auto`."""
    runner = runner.fork()
    points = [
        Point({"rows": b, "k": k}, b * (k + 1), (i + j) % 2 == 0)
        for (i, b), (j, k) in product(enumerate(rows), enumerate(ks))
    ]
    name = f"target pass by rows and draft length k, {CONTEXT} tokens before it"
    return Sweep(name, points, lambda p: prepared_pass(runner, p.at["rows"], p.at["k"] + 1, CONTEXT))


def line(name: str, axis: str, values: Sequence[int], make: Callable[[int], Callable[[], object]]) -> Sweep:
    """Passes along one axis; the curve is over that axis."""
    points = [Point({axis: value}, value, i % 2 == 0) for i, value in enumerate(values)]
    return Sweep(name, points, lambda point: make(point.at[axis]))


def pass_sweeps(
    pair: shoal.Shoal, rows: Sequence[int], ks: Sequence[int], lengths: Sequence[int], ns: Sequence[int]
) -> Iterator[Sweep]:
    """All sweeps over single passes. Those over prompts have a verify pass of `DRAFTS` drafts."""
    yield grid(pair.target, rows, ks)
    if pair.draft_model is not None:
        draft = pair.draft_model.fork()
        yield line(
            f"drafter step by rows, {CONTEXT} tokens before it", "rows", rows, lambda b: prepared_pass(draft, b, 1, CONTEXT)
        )
    long = pair.target.fork()
    yield line(
        f"target pass by prompt length, {BATCH} rows, k = {DRAFTS}", "prompt", lengths,
        lambda length: prepared_pass(long, BATCH, DRAFTS + 1, length),
    )  # fmt: skip
    for method in ("copied", "shared") if pair.target.shares else ("copied",):
        name = f"target pass by n, one prompt of {PROMPT} tokens {method}, k = {DRAFTS}"
        yield line(name, "n", ns, partial(_samples, pair.target.fork(), method == "shared"))


def _samples(runner: Runner, shared: bool, n: int) -> Callable[[], object]:
    return prepared_pass(runner, n, DRAFTS + 1, PROMPT, shared)


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Gain:
    """Speed-up over plain decoding at draft length k; predicted from rounds at other draft lengths, or None for one of those."""

    k: int
    measured: float
    predicted: float | None


def gains(pair: shoal.Shoal, ks: Sequence[int], acceptance: float, new_tokens: int, repeats: int) -> list[Gain]:
    """Speed-up by draft length with an imposed acceptance rate, every second draft length predicted.

    The prediction is `auto`'s own: (1 + a + ... + a^k) tokens per row and round, which cost what a `CostCurve` over verified
    positions says of everything but drafting, and k drafter steps.
    """
    loaded = imposing(pair, acceptance)
    context = min(model.context for model in (pair.target, pair.draft_model) if model is not None)
    prompt = [1] * min(CONTEXT, context - new_tokens)
    runs: defaultdict[int, list[Stats]] = defaultdict(list)
    for repeat, name in in_turns([str(k) for k in ks], repeats + 1):
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos": (), "temperature": 0.8, "seed": repeat}
        stats = loaded.generate([prompt], BATCH, lookahead=int(name), **options).stats
        if repeat:
            runs[int(name)].append(stats)
    verify, steps = CostCurve(), []
    for k in ks[::2]:
        for stats in runs[k]:
            verify.observe(BATCH * (k + 1), (stats.seconds_rounds - stats.seconds_propose) / stats.rounds)
            steps += [stats.seconds_propose / stats.draft_passes] if k else []
    table = verify.table(BATCH * (max(ks) + 1))

    def rate(k: int) -> float:
        """Tokens per row and second."""
        return float(sum(acceptance**i for i in range(k + 1)) / (table[BATCH * (k + 1)] + (k and k * median(steps))))

    def measured(k: int) -> float:
        return median(stats.committed / stats.seconds_rounds for stats in runs[k])

    return [Gain(k, measured(k) / measured(ks[0]), rate(k) / rate(ks[0]) if i % 2 else None) for i, k in enumerate(ks)]


# ── output ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def show(sweep: Sweep, console: Console) -> None:
    """A table: the first axis down, the second, if any, across."""
    down, *across = sweep.points[0].at
    columns = sorted({point.at[across[0]] for point in sweep.points}) if across else [None]
    table = _table(down, *(["ms (prediction's error)"] if not across else [f"{across[0]} = {value}" for value in columns]))
    for value in sorted({point.at[down] for point in sweep.points}):
        table.add_row(str(value), *(_cell(point) for point in sweep.points if point.at[down] == value))
    errors = [abs(point.error) for point in sweep.points if point.error is not None]
    console.print(sweep.name, style="bold", markup=False)
    console.print(table)
    if errors:
        console.print(f"error of {len(errors)} predictions: median {median(errors):.0%}, worst {max(errors):.0%}\n")


def _cell(point: Point) -> str:
    """Milliseconds; in brackets the error of a prediction."""
    return f"{1000 * point.measured:.2f}" + ("" if point.error is None else f" ({point.error:+.0%})")


def show_gains(found: Sequence[Gain], title: str, console: Console) -> None:
    """A table of speed-ups by draft length."""
    table = _table("k", "x plain", "predicted", "error")
    for gain in found:
        guess = (
            ("", "") if gain.predicted is None else (f"{gain.predicted:.2f}", f"{gain.predicted / gain.measured - 1:+.0%}")
        )
        table.add_row(str(gain.k), f"{gain.measured:.2f}", *guess)
    console.print(title, style="bold", markup=False)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def plot(sweeps: Sequence[Sweep], path: Path) -> None:
    """One panel per sweep: medians as a line over the curve's size, predictions as crosses. Raises RequestError without
    matplotlib."""
    pyplot = require_matplotlib()
    rows, columns = -(-len(sweeps) // 3), min(3, len(sweeps))
    figure, panels = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, layout="constrained")
    for panel in panels.flat[len(sweeps) :]:
        panel.remove()
    for panel, sweep in zip(panels.flat, sweeps, strict=False):
        points = sorted(sweep.points, key=lambda point: point.size)
        guesses = [(point.size, 1000 * point.predicted) for point in points if point.predicted is not None]
        panel.plot([p.size for p in points], [1000 * p.measured for p in points], "o", color=COLOURS[0], label="measured")
        panel.plot(*zip(*guesses, strict=True), "x", color=COLOURS[1], label="predicted")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_ylim(bottom=0)
        panel.set(ylabel="ms", xlabel=" x ".join(sweep.points[0].at).replace("k", "(k + 1)"))
        panel.set_title(sweep.name.replace(", ", "\n"), fontsize=9, loc="left")
        panel.legend(frameon=False)
        panel.grid(True, alpha=0.25)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def numbers(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]."""
    return [int(part) for part in text.split(",")]


def main(
    model: Annotated[str | None, typer.Option(help="Target; without it, the bundled pair.")] = None,
    draft: Annotated[str | None, typer.Option(help="Drafter.")] = None,
    dtype: str = "auto",
    device: str = "auto",
    rows: Annotated[str, typer.Option(help="Rows of a pass.")] = "1,2,4,8,16,32,64",
    ks: Annotated[str, typer.Option(help="Draft lengths, from 0 on.")] = "0,1,2,3,4,6,8",
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "64,128,256,512,1024,1536,2048",
    ns: Annotated[str, typer.Option(help="Samples of one prompt.")] = "1,2,4,8,16,24,32",
    acceptance: Annotated[float, typer.Option(help="Imposed on the runs.")] = 0.8,
    new_tokens: Annotated[int, typer.Option(help="Per row of a run.")] = 96,
    repeats: int = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw the sweeps there (needs matplotlib).")] = None,
) -> None:
    """Prints measured costs, and predictions of every second of them."""
    require_place(json_path)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    pair = shoal.load(model, draft, dtype=dtype, device=device, max_batch=BATCH)
    sweeps = []
    for sweep in pass_sweeps(pair, numbers(rows), numbers(ks), numbers(lengths), numbers(ns)):
        sweep.measure(pair.target.device, repeats)
        show(sweep, console)
        sweeps.append(sweep)
    found = gains(pair, numbers(ks), acceptance, new_tokens, max(1, repeats // 2)) if pair.draft_model is not None else []
    if found:
        title = f"speed-up over plain by draft length k, {BATCH} rows, acceptance {acceptance:g} imposed"
        show_gains(found, title, console)
    if json_path is not None:
        report = {
            "machine": machine(pair.target.device),
            "sweeps": [{"name": sweep.name, "points": [point.to_dict() for point in sweep.points]} for sweep in sweeps],
            "gains": [vars(gain) for gain in found],
        }
        write_results(json_path, report)
    if plot_path is not None:
        plot(sweeps, plot_path)


if __name__ == "__main__":
    command.run(main)
