"""The regret of a draft length controller.

It is how much slower the controller is than the best fixed draft length, which is not known
beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.bench.methods import PLAIN
from shoal.bench.report import Line, Report
from shoal.bench.tables import heading

SWEEP = (1, 2, 3, 4, 5, 6, 8, 10, 12)
"""The fixed draft lengths that are tried beside 0."""
CONTROLLERS = ("auto", "bass", "heuristic")
LOOKAHEADS = (PLAIN, *(f"fixed:{k}" for k in SWEEP), *CONTROLLERS)


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
    best: Line
    regrets: dict[str, float]
    over_plain: dict[str, float]


def regrets(lines: Sequence[Line]) -> Iterator[Regret]:
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


def _lost(one: Line, best: Line) -> float:
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
            table.add_row(
                str(one.batch), one.best.setting, f"{one.best.speedup.median:.2f}", *figures
            )
        console.print(table)
        console.print()


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
