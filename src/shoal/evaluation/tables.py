"""The estimates as rows of text for the terminal and the page, and the findings in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.config import LOSSY_RULES
from shoal.evaluation.figure import LABELS, metric_name
from shoal.evaluation.grading import PASSED


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
    return (
        "–"
        if mean is None or low is None or high is None
        else f"{100 * mean:.1f} [{100 * low:.0f}, {100 * high:.0f}]"
    )


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
        f"tokens: of a finished sample; "
        "s: until a problem's last sample, or the budget."
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
    found = pair[which]
    low, high = (
        f"{100 * found[end]['difference']:+.1f} points at {found[end]['budget']:.3g} s"
        for end in ("loss", "gain")
    )
    return (
        f"{_names(pair)}, {metric_name(summary['scores'][0], which)}: better at "
        f"{found['better']} and worse at {found['worse']} of "
        f"{found['budgets']} budgets (95 % interval of the difference); from {low} to {high}."
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
