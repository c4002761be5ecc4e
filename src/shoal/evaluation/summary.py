"""The estimates with intervals, from journals of samples and grades.

They hold at given budgets, over all budgets, and method against method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from shoal.evaluation.grading import PASSED
from shoal.evaluation.metrics import Bootstrap, Floats, SampleTable, permutation_test

Entries = Mapping[str, Mapping[str, Any]]
Estimate = dict[str, float | None]
"""A mean with the low and high ends of its interval; null without any samples to count."""

CURVE = 96  # number of budgets of a curve


@dataclass(frozen=True)
class Results:
    """The results: all samples and grades.

    Attributes:
        names: the names of the problems, in order.
        methods: the methods as configured.
        n: the number of samples as configured.
        scores: the scores, the most important first.
        attempts: the entries of the journal of samples, by problem.
        grades: the entries of the journal of grades, by problem.
    """

    names: Sequence[str]
    methods: Sequence[str]
    n: int
    scores: Sequence[str]
    attempts: Entries
    grades: Entries

    def table(self, method: str, score: str) -> SampleTable:
        """Returns one method's samples as arrays; a refused problem has no finished samples."""
        shape = len(self.names), self.n
        table = SampleTable(
            finished_at=np.full(shape, np.inf),
            mean_logprob=np.full(shape, -np.inf),
            score=np.zeros(shape),
            tokens=np.zeros(shape),
            syntax_error=np.zeros(shape),
            seconds=np.zeros(len(self.names)),
        )
        for i, name in enumerate(self.names):
            attempt = self.attempts[name]["attempts"].get(method)
            if attempt is None:
                continue
            table.seconds[i] = attempt["seconds"]
            for j, (sample, grade) in enumerate(
                zip(attempt["samples"], self.grades[name]["grades"][method], strict=True)
            ):
                table.tokens[i, j] = len(sample["token_ids"])
                if sample["mean_logprob"] is not None:
                    table.mean_logprob[i, j] = sample["mean_logprob"]
                if grade is not None:
                    table.finished_at[i, j] = sample["finished_at"]
                    table.score[i, j] = grade["scores"][score]
                    table.syntax_error[i, j] = grade["outcome"] == "syntax"
        return table

    def errors(self) -> dict[str, str]:
        """Returns the refused problems with the reasons."""
        return {
            name: self.attempts[name]["error"]
            for name in self.names
            if self.attempts[name]["error"]
        }


def summarize(results: Results, budgets: Sequence[float]) -> dict[str, Any]:
    """Computes all estimates, ready for JSON, where an unlimited budget is null."""
    bootstrap = Bootstrap(len(results.names))
    tables = {
        (method, score): results.table(method, score)
        for method in results.methods
        for score in results.scores
    }
    main = {method: tables[method, results.scores[0]] for method in results.methods}
    grid = _grid(list(main.values()))
    return {
        "problems": len(results.names),
        "samples_per_problem": results.n,
        "scores": list(results.scores),
        "errors": results.errors(),
        "lines": [
            {"method": method, "budget": budget if math.isfinite(budget) else None}
            | _line(
                [tables[method, score] for score in results.scores],
                results.scores,
                budget,
                bootstrap,
            )
            for budget in budgets
            for method in results.methods
        ],
        "curves": {"budgets": grid}
        | {method: _curves(table, grid, bootstrap) for method, table in main.items()},
        "against": [
            _against(results, main, method, other, grid, bootstrap)
            for other, method in combinations(results.methods, 2)
        ],
    }


def _line(
    tables: Sequence[SampleTable], scores: Sequence[str], budget: float, bootstrap: Bootstrap
) -> dict[str, Any]:
    """Computes the estimates of one method at one budget."""
    table = tables[0]
    done = table.finished(budget)
    many, ones = done.sum(axis=1).astype(float), np.ones(len(done))
    estimates = {}
    for name, of in zip(scores, tables, strict=True):
        estimates[f"{name}_first"] = _estimate(of.first(budget), ones, bootstrap)
        estimates[f"{name}_all"] = _estimate(of.best(budget), ones, bootstrap)
    if scores[0] == PASSED:
        for k in _ks(table.n):
            estimates[f"pass@{k}"] = _estimate(table.at(k, budget), ones, bootstrap)
        estimates["syntax_errors"] = _estimate(
            (table.syntax_error * done).sum(axis=1), many, bootstrap
        )
    return estimates | {
        "finished": _estimate(many, ones * table.n, bootstrap),
        "tokens": _estimate((table.tokens * done).sum(axis=1), many, bootstrap),
        "seconds": _estimate(np.minimum(table.seconds, budget), ones, bootstrap),
    }


def _ks(n: int) -> list[int]:
    """Returns 1, 2, 4, ... and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def _estimate(values: Floats, counts: Floats, bootstrap: Bootstrap) -> Estimate:
    """Computes the ratio of two sums over problems, with its interval."""
    if not counts.any():
        return {"mean": None, "low": None, "high": None}
    with np.errstate(invalid="ignore"):
        ratios = (bootstrap.weights @ values) / (bootstrap.weights @ counts)
    low, high = np.nanpercentile(ratios, bootstrap.ends)
    return {"mean": float(values.sum() / counts.sum()), "low": float(low), "high": float(high)}


def _grid(tables: Sequence[SampleTable]) -> list[float]:
    """Returns the budgets from just before the first finished sample to just after the last."""
    times = np.concatenate([table.finished_at[np.isfinite(table.finished_at)] for table in tables])
    if not len(times):
        return []
    return [float(b) for b in np.geomspace(times.min() * 0.9, times.max() * 1.1, CURVE)]


METRICS: dict[str, Callable[[SampleTable, float], Floats]] = {
    "first": SampleTable.first,
    "all": SampleTable.best,
}


def _curves(table: SampleTable, grid: Sequence[float], bootstrap: Bootstrap) -> dict[str, Any]:
    return {name: _bands(_over(table, grid, metric), bootstrap) for name, metric in METRICS.items()}


def _over(
    table: SampleTable, grid: Sequence[float], metric: Callable[[SampleTable, float], Floats]
) -> Floats:
    """Computes a metric at each budget of a grid, [P, B]."""
    return (
        np.stack([metric(table, budget) for budget in grid], axis=1)
        if grid
        else np.zeros((len(table.seconds), 0))
    )


def _bands(values: Floats, bootstrap: Bootstrap) -> dict[str, list[float]]:
    low, high = bootstrap.interval(values)
    return {"mean": values.mean(axis=0).tolist(), "low": low.tolist(), "high": high.tolist()}


def _against(
    results: Results,
    tables: Mapping[str, SampleTable],
    method: str,
    other: str,
    grid: Sequence[float],
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """Compares one method with another: over all budgets, and without a budget."""
    found: dict[str, Any] = {
        "method": method,
        "other": other,
        "samples": len(results.names) * results.n,
    }
    found["same_ids"] = sum(
        mine["token_ids"] == theirs["token_ids"]
        for name in results.names
        for mine, theirs in zip(*(_samples(results, name, w) for w in (method, other)), strict=True)
    )
    for name, metric in METRICS.items():
        bands = _bands(
            _over(tables[method], grid, metric) - _over(tables[other], grid, metric), bootstrap
        )
        found[name] = _dominance(bands, grid)
    if results.scores[0] == PASSED:
        for k in _ks(results.n):
            difference = tables[method].at(k, math.inf) - tables[other].at(k, math.inf)
            low, high = bootstrap.interval(difference)
            found[f"pass@{k}"] = {
                "mean": float(difference.mean()),
                "low": float(low),
                "high": float(high),
                "p": permutation_test(tables[method], tables[other], k),
            }
    return found


def _samples(results: Results, name: str, method: str) -> Sequence[Mapping[str, Any]]:
    return results.attempts[name]["attempts"].get(method, {"samples": ()})["samples"]


def _dominance(bands: Mapping[str, Sequence[float]], grid: Sequence[float]) -> dict[str, Any]:
    """Counts the budgets with a significant gain or loss, and finds the largest gain and loss."""
    if not grid:
        return {"budgets": 0}
    most, least = (int(choose(bands["mean"])) for choose in (np.argmax, np.argmin))
    return {
        "budgets": len(grid),
        "better": sum(low > 0 for low in bands["low"]),
        "worse": sum(high < 0 for high in bands["high"]),
        "gain": {"budget": grid[most], "difference": bands["mean"][most]},
        "loss": {"budget": grid[least], "difference": bands["mean"][least]},
    }
