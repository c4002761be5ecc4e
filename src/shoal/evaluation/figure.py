"""The BASS figure: quality over the time budget, a curve per method of decoding.

python -m shoal.evaluation.figure PICTURE.png SUMMARY.json ...     one picture of several runs

The same estimates stand in tables as rows of text, with their findings in sentences.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config import LOSSY_RULES
from shoal.errors import RequestError
from shoal.evaluation.sampling import BATCHED, PLAIN, PLAIN_SINGLE, SINGLE
from shoal.evaluation.tasks import PASSED

COLOURS = {PLAIN: "#8a8a8a", PLAIN_SINGLE: "#CC79A7", SINGLE: "#D55E00", BATCHED: "#0072B2"}
"""The colours of the methods, from Okabe and Ito's palette.

They are distinguishable with any colour vision, on light and dark backgrounds.
"""
LABELS = {
    PLAIN: "no drafter, all samples at once",
    PLAIN_SINGLE: "no drafter, one by one",
    SINGLE: "speculative, one by one",
    BATCHED: "speculative, all at once",
}
DPI = 150
INK = "#808080"  # of the page's figure: readable on light and dark backgrounds


def require_matplotlib() -> Any:
    """Imports the plotting module, or raises RequestError with the way to install it."""
    try:
        import matplotlib
    except ImportError:
        raise RequestError(
            "the figure needs matplotlib: pip install '.[eval]', or leave it out with --no-plot"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(summaries: Sequence[Mapping[str, Any]], *, ink: str = "black") -> Any:
    """Draws a matplotlib figure: a row of two plots per summary, first and all, with intervals."""
    pyplot = require_matplotlib()
    with pyplot.rc_context({"svg.fonttype": "none", **dict.fromkeys(INKED, ink)}):
        figure, grid = pyplot.subplots(
            len(summaries),
            2,
            figsize=(11, 4.2 * len(summaries)),
            squeeze=False,
            layout="constrained",
            sharex=True,
            sharey=True,
        )
        for axes, summary in zip(grid, summaries, strict=True):
            for plot, metric in zip(axes, ("first", "all"), strict=True):
                _curves(plot, summary, metric)
                plot.set_ylim(0, _top(summaries))
            axes[0].set_title(title(summary), loc="left", fontsize=9, pad=10)
            _legend(axes[1], summary)
        pyplot.close(figure)
    return figure


INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def png(summaries: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the figure for documents, on a white background."""
    target = io.BytesIO()
    draw(summaries).savefig(target, format="png", dpi=DPI)
    return target.getvalue()


def svg(summary: Mapping[str, Any]) -> str:
    """Returns the figure for a page, with a transparent background."""
    target = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    draw([summary], ink=INK).savefig(target, format="svg", transparent=True, metadata=nothing)
    text = target.getvalue()
    return text[text.index("<svg") :]


def title(summary: Mapping[str, Any]) -> str:
    """Returns the settings of the measurement in one line."""
    settings = summary["settings"]
    return (
        f"{settings['set']}: {summary['problems']} problems, n = {summary['samples_per_problem']}, "
        f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
    )


def metric_name(score: str, which: str) -> str:
    """Returns a metric's name, such as Pass@First or ROUGE-L@All."""
    name = {"passed": "Pass"}.get(score, score.replace("rouge", "ROUGE-"))
    return f"{name}@{which.capitalize()}"


def _curves(axes: Any, summary: Mapping[str, Any], metric: str) -> None:
    budgets = summary["curves"]["budgets"]
    for method in _methods(summary) if budgets else ():
        bands, colour = summary["curves"][method][metric], COLOURS[method]
        axes.plot(budgets, bands["mean"], color=colour, linewidth=1.8, drawstyle="steps-post")
        if method in _shaded(summary):
            look = {"color": colour, "alpha": 0.15, "linewidth": 0, "step": "post"}
            axes.fill_between(budgets, bands["low"], bands["high"], **look)
    if budgets:
        _log_scale(axes)
    axes.set(xlabel="time budget, seconds", ylabel=metric_name(summary["scores"][0], metric))
    axes.tick_params(labelleft=True)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _top(summaries: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the top of the scale of all plots: 1, or less where all bands lie in the lower half.

    None is the top that the curves of another score than passing need.
    """
    if summaries[0]["scores"][0] != PASSED:
        return None
    curves = [one["curves"][method] for one in summaries for method in _methods(one)]
    highest = max(
        (value for own in curves for band in own.values() for value in band["high"]), default=1.0
    )
    return 1.0 if highest > 0.5 or not highest else 1.25 * highest


def _methods(summary: Mapping[str, Any]) -> list[str]:
    return [method for method in COLOURS if method in summary["curves"]]


def _shaded(summary: Mapping[str, Any]) -> list[str]:
    """Returns the methods with bands; the bands of more than three would hide each other."""
    methods = _methods(summary)
    return methods if len(methods) <= 3 else [one for one in methods if one in (PLAIN, BATCHED)]


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def _legend(axes: Any, summary: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    methods = _methods(summary)
    handles = [Line2D([], [], color=COLOURS[method], linewidth=2) for method in methods]
    labels = [LABELS[method] for method in methods]
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # beside curves of any shape
    axes.legend(handles, labels, fontsize=8, frameon=False, **place)
    which = "" if _shaded(summary) == methods else ", of two methods alone"
    said = f"shading: 95 % bootstrap over problems{which}"
    axes.set_title(said, loc="left", fontsize=8, pad=10)


def columns(summary: Mapping[str, Any]) -> list[str]:
    """Returns the column heads."""
    scores = [
        metric_name(score, which) for score in summary["scores"] for which in ("first", "all")
    ]
    return [
        "budget",
        "method",
        *scores,
        *(["pass@1", "syntax err."] if _is_code(summary) else []),
        "finished",
        "tokens",
        "s",
    ]


def rows(summary: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields a row per budget and method; shares are in per cent with their intervals."""
    names = [f"{score}_{which}" for score in summary["scores"] for which in ("first", "all")]
    names += ["pass@1", "syntax_errors"] if _is_code(summary) else []
    for line in summary["lines"]:
        budget = "none" if line["budget"] is None else f"{line['budget']:g} s"
        shares = [percent(line[name]) for name in [*names, "finished"]]
        yield [
            budget,
            line["method"],
            *shares,
            number(line["tokens"], ".1f"),
            number(line["seconds"], ".3f"),
        ]


def percent(estimate: Mapping[str, float | None]) -> str:
    """Writes an estimate such as "61.5 [58, 65]"."""
    mean, low, high = estimate["mean"], estimate["low"], estimate["high"]
    if mean is None or low is None or high is None:
        return "–"
    return f"{100 * mean:.1f} [{100 * low:.0f}, {100 * high:.0f}]"


def number(estimate: Mapping[str, float | None], form: str) -> str:
    """Writes a mean without its interval."""
    return "–" if estimate["mean"] is None else format(estimate["mean"], form)


def legend(summary: Mapping[str, Any]) -> str:
    """Explains the columns."""
    methods = "; ".join(
        f"{method}: {LABELS[method]}"
        for method in dict.fromkeys(line["method"] for line in summary["lines"])
    )
    syntax = " syntax err.: of those, what does not parse or compile;" if _is_code(summary) else ""
    return (
        f"Per cent with 95 % intervals; {methods}. finished: of all samples, in time;{syntax} "
        "tokens: of a finished sample; s: until a problem's last sample, or the budget."
    )


def findings(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields sentences about a lossy rule, then about method against method."""
    if (rule := summary["settings"].get("rule")) in LOSSY_RULES:
        yield f"All figures: {LOSSY_RULES[rule]}."
    for pair in summary["against"]:
        yield from (
            _over_budgets(summary, pair, which)
            for which in ("first", "all")
            if pair[which]["budgets"]
        )
        yield (
            f"{_names(pair)}: the same token ids in {pair['same_ids']} of {pair['samples']} "
            f"samples."
        )
        if pair["same_ids"] < pair["samples"]:
            yield from _without_budget(pair)
    for name, error in summary["errors"].items():
        yield f"{name} could not be asked, and counts as failed: {error}"


def _over_budgets(summary: Mapping[str, Any], pair: Mapping[str, Any], which: str) -> str:
    curve = pair[which]
    low, high = (
        f"{100 * curve[end]['difference']:+.1f} points at {curve[end]['budget']:.3g} s"
        for end in ("loss", "gain")
    )
    return (
        f"{_names(pair)}, {metric_name(summary['scores'][0], which)}: better at "
        f"{curve['better']} and worse at {curve['worse']} of "
        f"{curve['budgets']} budgets (95 % interval of the difference); from {low} to {high}."
    )


def _without_budget(pair: Mapping[str, Any]) -> Iterator[str]:
    for name in _pass_at(pair):
        one = pair[name]
        yield (
            f"{_names(pair)}, {name} without a budget: {100 * one['mean']:+.2f} points "
            f"[{100 * one['low']:+.2f}, {100 * one['high']:+.2f}], p = {one['p']:.3g} "
            f"(permutation within problems)."
        )


def _pass_at(pair: Mapping[str, Any]) -> Sequence[str]:
    return [name for name in pair if name.startswith("pass@")]


def _names(pair: Mapping[str, Any]) -> str:
    return f"{pair['method']} against {pair['other']}"


def _is_code(summary: Mapping[str, Any]) -> bool:
    return bool(summary["scores"][0] == PASSED)


if __name__ == "__main__":
    picture, *files = map(Path, sys.argv[1:])
    picture.write_bytes(png([json.loads(file.read_text(encoding="utf-8")) for file in files]))
