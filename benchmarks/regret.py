"""The regret of draft length controllers on the wall clock, from a file of `shoal bench`; for quiet machines.

It is how much slower a controller is than the best fixed draft length, which is not known beforehand.

    shoal bench --lookahead off,fixed:1,fixed:2,fixed:3,fixed:4,fixed:5,fixed:6,fixed:8,fixed:10,fixed:12,auto,bass,heuristic \\
        --baselines "" --output FILE
    python benchmarks/regret.py FILE
    python benchmarks/regret.py --shuffle DIR    # a pair for `shoal bench --model DIR/target --draft DIR/drafter`
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import command
from never_slower import shuffled
from shoal.bench.decoding_methods import PLAIN
from shoal.bench.report import Report, ReportLine
from shoal.bench.report_views import WIDTH, heading
from shoal.cli.bench import read_report
from shoal.errors import RequestError
from shoal.models.sources import bundled

SWEEP = (1, 2, 3, 4, 5, 6, 8, 10, 12)
"""The fixed draft lengths that are tried beside 0."""
CONTROLLERS = ("auto", "bass", "heuristic")


@dataclass(frozen=True)
class Regret:
    """The regret of one case.

    Attributes:
        best: the fixed setting with the highest median throughput; picked after the fact, so noise
            favours it.
        regrets: controller -> share of the best setting's tokens/s that it loses; the median over
            repeats, negative if it is faster.
        over_plain: controller -> its speed-up over plain decoding.
    """

    batch: int
    best: ReportLine
    regrets: dict[str, float]
    over_plain: dict[str, float]


def regrets(lines: Sequence[ReportLine]) -> Iterator[Regret]:
    """Yields the regrets of each batch size that has a controller and a fixed setting."""
    for batch, group in groupby(lines, key=lambda one: one.batch):
        by_name = {one.setting: one for one in group}
        fixed = [one for name, one in by_name.items() if name == PLAIN or name.startswith("fixed:")]
        chosen = [name for name in CONTROLLERS if name in by_name]
        if fixed and chosen:
            best = max(fixed, key=lambda one: one.tokens_per_second.median)
            yield Regret(
                batch,
                best,
                {name: _lost(by_name[name], best) for name in chosen},
                {name: by_name[name].speedup.median for name in chosen},
            )


def _lost(one: ReportLine, best: ReportLine) -> float:
    pairs = zip(one.runs, best.runs, strict=False)
    return 1 - median(_rate(a) / _rate(b) for a, b in pairs)


def _rate(run: dict[str, list[int]]) -> float:
    return float(sum(run["tokens"]) / run["seconds"])  # type: ignore[operator]


def show(report: Report, console: Console) -> None:
    """Prints a table per layout and temperature."""
    for lines in report.tables().values():
        console.print(f"Regret: {heading(report, lines)}", style="bold", markup=False)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        names = (
            "batch",
            "best fixed",
            "its v plain",
            *(f"{name} {what}" for name in CONTROLLERS for what in ("regret", "v plain")),
        )
        for name in names:
            table.add_column(name, justify="right")
        for one in regrets(lines):
            figures = [
                text
                for name in CONTROLLERS
                for text in (
                    _text(one.regrets.get(name), "+.1%"),
                    _text(one.over_plain.get(name), ".2f"),
                )
            ]
            table.add_row(str(one.batch), one.best.setting, f"{one.best.speedup.median:.2f}", *figures)
        console.print(table)
        console.print()


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main(
    file: Annotated[Path | None, typer.Argument(help="What `shoal bench --output` wrote.")] = None,
    shuffle: Annotated[
        Path | None, typer.Option(help="Write the bundled pair there, the drafter's weights shuffled.")
    ] = None,
) -> None:
    """Prints the regrets in a file, or writes a pair whose drafter is as fast as the bundled one and useless."""
    if (file is None) == (shuffle is None):
        raise RequestError("give FILE or --shuffle DIR")
    if file is not None:
        show(read_report(file), Console(highlight=False, width=WIDTH))
    if shuffle is not None:
        shutil.copytree(bundled("target").parent, shuffle, dirs_exist_ok=True)
        shuffled(AutoModelForCausalLM.from_pretrained(bundled("drafter"))).save_pretrained(shuffle / "drafter")


if __name__ == "__main__":
    command.run(main)
