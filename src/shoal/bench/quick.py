"""The figures of `shoal bench --quick`: how fast a model is here, in a few lines.

At each batch size it has the tokens per second of plain decoding and of `auto`, and the share of
the machine's measured ceilings that plain decoding reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar, cast

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.bench.decoding_methods import PLAIN
from shoal.bench.report import Report, ReportLine
from shoal.bench.report_views import footer

AUTO = "auto"
OPTIONS: dict[str, Any] = {
    "batch_sizes": "1,8",
    "lookahead": f"{PLAIN},{AUTO}",
    "baselines": "",
    "max_new_tokens": 64,
}
"""The values of options that are not given, in place of their defaults."""
WAIT = 5.0
"""The seconds that are waited for a quiet machine, in place of the default."""
CEILINGS = {"flops": "arithmetic", "bytes": "memory"}
"""The bound of a run, in words."""


Options = TypeVar("Options")
"""The options of the command: a frozen dataclass with the fields of `OPTIONS`."""


def smaller(options: Options) -> Options:
    """Returns the options; those of `OPTIONS` that have their defaults have its values."""
    defaults = {each.name: each.default for each in fields(cast(Any, options))}
    left = [name for name in OPTIONS if getattr(options, name) == defaults[name]]
    return replace(cast(Any, options), **{name: OPTIONS[name] for name in left})


@dataclass(frozen=True)
class QuickFigures:
    """The figures of a batch size.

    Attributes:
        plain: the tokens per second of plain decoding.
        auto: the tokens per second of `auto`; None without a drafter.
        share: the share of the nearer ceiling that plain decoding reached; None if it is not known.
        bound: the name of this ceiling in `CEILINGS`.
        disturbed: the number of runs beside which another process was busy.
    """

    batch: int
    plain: float
    auto: float | None
    share: float | None
    bound: str | None
    disturbed: int


def figures(report: Report) -> list[QuickFigures]:
    """Computes the figures of a report, by batch size."""
    by_batch: dict[int, dict[str, ReportLine]] = {}
    for one in report.lines:
        by_batch.setdefault(one.batch, {})[one.setting] = one
    return [_of(report, batch, lines) for batch, lines in by_batch.items()]


def _of(report: Report, batch: int, lines: dict[str, ReportLine]) -> QuickFigures:
    plain, auto = lines[PLAIN], lines.get(AUTO)
    shares = {}
    for name in CEILINGS:
        done, limit = getattr(plain, name), report.ceiling(name)
        if done is not None and limit:
            shares[name] = done / limit
    bound = max(shares, key=lambda name: shares[name], default=None)
    return QuickFigures(
        batch,
        plain=plain.tokens_per_second.median,
        auto=None if auto is None else auto.tokens_per_second.median,
        share=None if bound is None else shares[bound],
        bound=bound,
        disturbed=sum(one.disturbed for one in lines.values()),
    )


def document(report: Report) -> dict[str, Any]:
    """Returns the report as an object for JSON, with the figures."""
    return report.to_dict() | {"figures": [asdict(one) for one in figures(report)]}


def show(report: Report, console: Console) -> None:
    """Prints the figures and the machine as a table."""
    config = report.config
    title = f"{config['target']['name']}, {config['dtype']}, {config['max_new_tokens']} new tokens"
    console.print(title, style="bold", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rows", "plain tokens/s", "auto tokens/s", "auto v plain", "of the ceiling", ""):
        table.add_column(name, justify="left" if not name else "right")
    for cells in _cells(report):
        table.add_row(*cells)
    console.print(table)
    for text in footer(report):
        console.print(text, markup=False, soft_wrap=True)


def _cells(report: Report) -> Iterator[tuple[str, ...]]:
    for one in figures(report):
        notes = [f"{one.disturbed} runs disturbed"] if one.disturbed else []
        drafted = ("-", "-")
        if one.auto is not None:
            drafted = f"{one.auto:.0f}", f"{one.auto / one.plain:.2f}x"
        share = "-"
        if one.share is not None and one.bound is not None:
            share = f"{one.share:.0%} ({CEILINGS[one.bound]})"
        yield str(one.batch), f"{one.plain:.0f}", *drafted, share, ", ".join(notes)
