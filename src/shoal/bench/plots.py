"""The plots of a report.

Each table has two: speed-up over plain decoding by batch size, and latency against throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench.decoding_methods import PLAIN
from shoal.bench.report import Report, ReportLine
from shoal.bench.report_tables import heading
from shoal.errors import RequestError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito without its yellow, for readers with any colour vision."""
MARKERS = "osD^vPX"
GREY = "#777777"
DPI = 150


def require_matplotlib() -> Any:
    """Imports the plotting module.

    Raises:
        RequestError: it is not installed; the message tells how to install it.
    """
    try:
        import matplotlib
    except ImportError:
        raise RequestError("plots need matplotlib: pip install '.[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(report: Report, path: Path) -> None:
    """Writes one picture, a row of two plots per layout and temperature.

    Raises:
        RequestError: without matplotlib.
    """
    pyplot = require_matplotlib()
    found = report.tables()
    figure, grid = pyplot.subplots(
        len(found), 2, figsize=(12, 4.6 * len(found)), squeeze=False, layout="constrained"
    )
    for axes, lines in zip(grid, found.values(), strict=True):
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


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]], gap: float = 0.06) -> None:
    """Names the lines at their right ends, in place of a legend.

    Names that would overlap are moved apart.
    """
    low, high = axes.get_ylim()
    lowest = 0.0
    for value, label, colour in sorted(ends):
        height = max((value - low) / (high - low), lowest)
        lowest = height + gap
        axes.text(
            1.02, height, label, color=colour, transform=axes.transAxes, va="center", fontsize=9
        )
