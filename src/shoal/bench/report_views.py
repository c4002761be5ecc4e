"""A report as it is shown: tables, and plots.

Tables are for a terminal of 110 columns; the same are Markdown for the pages of docs/. Each has two
plots: speed-up over plain decoding by batch size, and latency against throughput.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.bench.decoding_methods import PLAIN
from shoal.bench.machine import LIMIT
from shoal.bench.report import Report, ReportLine, Spread
from shoal.config import LOSSY_RULES
from shoal.errors import RequestError

WIDTH = 110
Column = tuple[str, Callable[[ReportLine], str]]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f}..{spread.high:.2f}"


def _disturbed(one: ReportLine) -> str:
    return f"{one.disturbed}/{len(one.runs)}" if one.disturbed else ""


def _identity(one: ReportLine) -> str:
    """Writes how many rows equal plain greedy decoding.

    In 16 bit the control is added, which shows how many rows batching changes by itself.
    """
    if one.identity is None:
        return ""
    shown = f"{one.identity.same}/{one.identity.rows}"
    if one.identity.control_rows is None:
        return shown
    return f"{shown} ({one.identity.control_same}/{one.identity.control_rows})"


SPEED: tuple[Column, ...] = (
    ("batch", lambda one: str(one.batch)),
    ("setting", lambda one: one.label),
    ("tokens/s", lambda one: f"{one.tokens_per_second.median:.0f}"),
    ("v plain", lambda one: f"{one.speedup.median:.2f}x"),
    ("min..max", lambda one: _range(one.speedup)),
    ("ms/token first", lambda one: f"{one.ms_first:.2f}"),
    ("mean", lambda one: f"{one.ms_mean:.2f}"),
    ("last", lambda one: f"{one.ms_last:.2f}"),
    ("accept. length", lambda one: _figure(one.acceptance_length, ".2f")),
    ("greedy same", _identity),
    ("disturbed", _disturbed),
)


def _work(report: Report) -> tuple[Column, ...]:
    """Returns the columns on the work done, and on the share of the machine's ceilings."""

    def share(one: ReportLine, what: str) -> str:
        done, limit = getattr(one, what), report.ceiling(what)
        return _figure(done / limit, ".1%") if done is not None and limit else ""

    stages = ("draft", "verify", "accept", "commit", "other")
    return (
        ("batch", lambda one: str(one.batch)),
        ("setting", lambda one: one.label),
        ("decoding tokens/s", lambda one: _figure(one.decoding, ".0f")),
        ("drafted", lambda one: _figure(one.drafted, ".0f")),
        ("accepted", lambda one: _figure(one.accepted, ".0f")),
        *((name, lambda one, name=name: _figure(one.stages.get(name), ".2f")) for name in stages),
        ("FLOPs", lambda one: share(one, "flops")),
        ("bytes", lambda one: share(one, "bytes")),
        ("peak MiB", lambda one: _figure(one.peak_bytes and one.peak_bytes / 2**20, ".0f")),
    )


def heading(report: Report, lines: Sequence[ReportLine]) -> str:
    """Describes a table in a line."""
    config, one = report.config, lines[0]
    layout = {"different": "all prompts different", "same": "all rows from one prompt"}.get(
        one.layout, f"groups of {config['n']}"
    )
    text = (
        f"{layout}, T={one.temperature:g}, {config['max_new_tokens']} new tokens, {config['dtype']}"
    )
    if config["acceptance"] is not None:
        text += f", IMPOSED acceptance {config['acceptance']:g}"
    if config.get("guidance"):  # older files have none
        text += f", guidance {config['guidance']:g} by {config['guide']['name']}"
    if config["rule"] in LOSSY_RULES:
        text += f", LOSSY: rule {config['rule']}"
    return text


def tables(report: Report) -> Iterator[tuple[str, Sequence[Column], list[ReportLine]]]:
    """Yields (title, columns, lines) of every table.

    Per layout and temperature, one is about speed, the other about where the time goes.
    """
    for lines in report.tables().values():
        title = heading(report, lines)
        yield f"Speed: {title}", SPEED, lines
        yield (
            f"Work: {title}; ms per round by stage, share of measured ceilings",
            _work(report),
            lines,
        )


def show(report: Report, console: Console) -> None:
    """Prints everything; `console` should be `WIDTH` columns wide."""
    for title, columns, lines in tables(report):
        console.print(title, style="bold", markup=False)
        console.print(_table(columns, lines))
        console.print()
    for text in footer(report):
        console.print(text, markup=False, soft_wrap=True)


def _table(columns: Sequence[Column], lines: Sequence[ReportLine]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name, _ in columns:
        table.add_column(
            name, justify="left" if name == "setting" else "right", no_wrap=name == "setting"
        )
    for i, one in enumerate(lines):
        ends = i + 1 < len(lines) and lines[i + 1].batch != one.batch
        table.add_row(*(figure(one) for _, figure in columns), end_section=ends)
    return table


def footer(report: Report) -> Iterator[str]:
    """Yields the settings that were not available, the machine, and whether it stayed the same."""
    for reason, entries in _by_reason(report).items():
        yield f"not available: {entries}: {reason}"
    for role in ("target", "draft"):
        for reason in (report.config.get(role) or {}).get("failures", ()):
            yield f"{role}, {reason}"
    machine = report.machine
    parts = [
        f"{machine['device']}, {machine['threads']} threads, shoal {machine['shoal']} "
        f"({machine['commit']})"
    ]
    parts.append(
        f"torch {machine['torch']}, transformers {machine['transformers']}, {machine['date']}"
    )
    parts.append(LOSSY_RULES.get(report.config["rule"], f"rule {report.config['rule']}"))
    for when in ("before", "after"):
        if limit := machine.get(f"ceilings_{when}"):
            parts.append(
                f"{when}: {limit['flops'] / 1e9:.0f} GFLOP/s, {limit['bytes'] / 1e9:.1f} GB/s"
            )
    yield "; ".join(parts)
    if busy := _busy(report):
        yield f"disturbed, by another process that used more than {LIMIT:.0%} of a core: {busy}"
    if not report.complete:
        yield "interrupted: the last lines rest on fewer repeats, or are missing"


def _busy(report: Report) -> str:
    """Names the processes that disturbed repeats, each with the most that it used."""
    most: dict[str, float] = {}
    for processes in (
        one for each in report.lines for run in each.runs for one in run.get("busy") or ()
    ):
        most[processes["name"]] = max(processes["cores"], most.get(processes["name"], 0.0))
    return ", ".join(
        f"{name} (up to {cores:.0%})"
        for name, cores in sorted(most.items(), key=lambda entry: -entry[1])
    )


def _by_reason(report: Report) -> dict[str, str]:
    counts_by_reason: dict[str, dict[str, list[int]]] = {}
    for entry in report.unavailable:
        batches = counts_by_reason.setdefault(entry["reason"], {}).setdefault(entry["setting"], [])
        if entry["batch"] not in batches:
            batches.append(entry["batch"])
    return {
        reason: ", ".join(
            f"{name} (batch {', '.join(map(str, batches))})" for name, batches in settings.items()
        )
        for reason, settings in counts_by_reason.items()
    }


def markdown(report: Report) -> str:
    """Returns all tables as Markdown, for the pages of docs/."""
    blocks = []
    for title, columns, lines in tables(report):
        rows = [[name for name, _ in columns], ["---"] * len(columns)]
        rows += [[figure(one) for _, figure in columns] for one in lines]
        blocks.append(
            "\n".join([f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in rows)])
        )
    return "\n\n".join([*blocks, *footer(report)]) + "\n"


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito without its yellow, for readers with any colour vision."""
MARKERS = "osD^vPX"
GREY = "#777777"
DPI = 150
GAP = 0.06
"""The least distance of two names at the ends of lines, in heights of a plot."""


def require_matplotlib() -> Any:
    """Imports the plotting module, or raises RequestError with the way to install it."""
    try:
        import matplotlib
    except ImportError:
        raise RequestError("plots need matplotlib: pip install '.[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(report: Report, path: Path) -> None:
    """Writes one picture, a row of two plots per layout and temperature; needs matplotlib."""
    pyplot = require_matplotlib()
    tables = report.tables()
    figure, grid = pyplot.subplots(
        len(tables), 2, figsize=(12, 4.6 * len(tables)), squeeze=False, layout="constrained"
    )
    for axes, lines in zip(grid, tables.values(), strict=True):
        styles = _styles(lines)
        _speedups(axes[0], lines, styles)
        _pareto(axes[1], lines, styles)
        hollow = (
            "\nhollow: disturbed by another process" if any(one.disturbed for one in lines) else ""
        )
        axes[0].set_title(
            f"{heading(report, lines)}\n{_device(report)}{hollow}", loc="left", fontsize=9, pad=10
        )
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _device(report: Report) -> str:
    models = [
        report.config[role]["name"].rsplit("/", 1)[-1]
        for role in ("target", "draft")
        if report.config[role]
    ]
    return (
        f"{' + '.join(models)} on {report.machine['device']}, {report.machine['threads']} threads"
    )


def _styles(lines: Sequence[ReportLine]) -> dict[str, dict[str, Any]]:
    """Returns a colour and a marker per setting.

    Transformers' own methods are dashed, plain decoding is grey.
    """
    styles: dict[str, dict[str, Any]] = {}
    for one in lines:
        if one.label not in styles:
            i = sum(style["color"] != GREY for style in styles.values())
            colour = GREY if one.setting == PLAIN else COLOURS[i % len(COLOURS)]
            styles[one.label] = {
                "color": colour,
                "marker": MARKERS[i % len(MARKERS)],
                "linestyle": "--" if one.baseline else "-",
                "linewidth": 1.8,
                "markersize": 5,
            }
    return styles


def _speedups(axes: Any, lines: Sequence[ReportLine], styles: dict[str, dict[str, Any]]) -> None:
    """Draws the median speed-up with its range over the repeats."""
    batches = sorted({one.batch for one in lines})
    ends = []
    for label, style in styles.items():
        own = sorted((one for one in lines if one.label == label), key=lambda one: one.batch)
        x, middle = [one.batch for one in own], [one.speedup.median for one in own]
        axes.plot(x, middle, **style)
        _hollow(axes, [(one.batch, one.speedup.median) for one in own if one.disturbed], style)
        axes.fill_between(
            x,
            [one.speedup.low for one in own],
            [one.speedup.high for one in own],
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )
        ends.append((middle[-1], label, style["color"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="batch size (rows)", ylabel="tokens/s over plain decoding (shading: min to max)"
    )
    _finish(axes)
    _label_ends(axes, ends)


def _pareto(axes: Any, lines: Sequence[ReportLine], styles: dict[str, dict[str, Any]]) -> None:
    """Draws each batch size as a point with its number; the lower right is best."""
    for label, style in styles.items():
        own = sorted((one for one in lines if one.label == label), key=lambda one: one.batch)
        axes.plot(
            [one.tokens_per_second.median for one in own], [one.ms_mean for one in own], **style
        )
        _hollow(
            axes,
            [(one.tokens_per_second.median, one.ms_mean) for one in own if one.disturbed],
            style,
        )
        for one in own:
            place = one.tokens_per_second.median, one.ms_mean
            axes.annotate(
                str(one.batch),
                place,
                (4, 4),
                textcoords="offset points",
                fontsize=7,
                color=style["color"],
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="throughput, tokens/s",
        ylabel="ms per token of a row (mean over rows)",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(
            lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else ""
        )  # all of them overlap
    axes.tick_params(which="minor", labelsize=7)
    axes.set_title("numbers: batch size; lower right is better", loc="left", fontsize=9, pad=10)
    _finish(axes)


def _hollow(axes: Any, points: Sequence[tuple[float, float]], style: dict[str, Any]) -> None:
    """Marks the points that another process disturbed."""
    if points:
        axes.plot(
            *zip(*points, strict=True),
            **style | {"linestyle": "", "markerfacecolor": "white", "zorder": 3},
        )


def _finish(axes: Any) -> None:
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names the lines at their right ends, not in a legend; moves names apart if they overlap."""
    low, high = axes.get_ylim()
    lowest = 0.0
    for value, label, colour in sorted(ends):
        height = max((value - low) / (high - low), lowest)
        lowest = height + GAP
        axes.text(
            1.02, height, label, color=colour, transform=axes.transAxes, va="center", fontsize=9
        )
