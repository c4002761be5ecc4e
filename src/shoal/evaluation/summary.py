"""The estimates with intervals, from journals of samples and grades.

They hold at given budgets, over all budgets, and method against method.

The metrics are those of samples with finishing times and scores, within a time budget. They are
pure functions on arrays. Shapes: P problems, n samples of each, in row order; B budgets. Every
estimate is a mean over problems; its interval is the middle 95 % of the means of resampled problems
(percentile bootstrap, Efron 1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.evaluation.tasks import PASSED

Floats = npt.NDArray[np.float64]

RESAMPLES, SHUFFLES = 2000, 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class SampleTable:
    """The table of all samples of one method.

    Attributes:
        finished_at: the seconds from submission, [P, n]; inf for a sample that never finished.
        mean_logprob: the mean log-probability, [P, n]; -inf if there is none.
        score: the score, 0..1, [P, n].
        tokens: the number of tokens of each sample, [P, n].
        syntax_error: 1 for a sample with a syntax error, [P, n].
        seconds: the seconds until the last sample of a problem was finished, [P].
    """

    finished_at: Floats
    mean_logprob: Floats
    score: Floats
    tokens: Floats
    syntax_error: Floats
    seconds: Floats

    @property
    def n(self) -> int:
        return self.finished_at.shape[1]

    def finished(self, budget: float) -> npt.NDArray[np.bool_]:
        """Returns which samples were finished in time, [P, n]."""
        return (self.finished_at <= budget) & np.isfinite(self.finished_at)

    def first(self, budget: float) -> Floats:
        """Returns Pass@First of each problem, [P].

        It is the score of the finished sample with the best mean log-probability, 0 without any.
        Ties go to the first row.
        """
        done = self.finished(budget)
        lowest = np.finfo(np.float64).min
        rank = np.where(done, np.maximum(self.mean_logprob, lowest), -np.inf)
        best = rank.argmax(axis=1)[:, None]
        return np.take_along_axis(self.score * done, best, axis=1)[:, 0]

    def best(self, budget: float) -> Floats:
        """Returns Pass@All: the best score among the finished samples, [P]."""
        return (self.score * self.finished(budget)).max(axis=1)

    def at(self, k: int, budget: float) -> Floats:
        """Returns the unbiased estimate of pass@k of each problem, [P].

        The estimator is taken from Chen et al. 2021, arXiv 2107.03374, section 2.1. A sample that
        is not finished in time has not passed; only scores of 1 pass.
        """
        return pass_at(self.passed(budget).sum(axis=1), self.n, k)

    def passed(self, budget: float) -> npt.NDArray[np.bool_]:
        """Returns which samples passed in time, [P, n]."""
        return self.finished(budget) & (self.score == 1)


def pass_at(passed: npt.NDArray[np.int64], n: int, k: int) -> Floats:
    """Computes 1 - C(n - passed, k) / C(n, k).

    It is the probability that k of n samples, drawn without replacement, include one that passed.
    """
    factors = [1 - k / np.arange(n - c + 1, n + 1) for c in range(n + 1)]
    table = np.array([1 - np.prod(f) if n - c >= k else 1.0 for c, f in enumerate(factors)])
    return table[passed]


class Bootstrap:
    """The resamples of P problems.

    They are the same for every estimate, so that estimates of two methods can be subtracted.

    Attributes:
        weights: the share of each problem in each resample, [resamples, P].
        ends: the percentiles of an interval.
    """

    def __init__(self, problems: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = (
            rng.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES) / problems
        )
        tail = 50 * (1 - CONFIDENCE)
        self.ends = (tail, 100 - tail)

    def interval(self, values: Floats) -> tuple[Floats, Floats]:
        """Computes the lower and upper ends of the interval for the mean over problems.

        Args:
            values: [P] or [P, B].

        Returns:
            The ends, [] or [B].
        """
        low, high = np.percentile(self.weights @ values, self.ends, axis=0)
        return low, high


def permutation_test(table: SampleTable, other: SampleTable, k: int, seed: int = 0) -> float:
    """Computes the two-sided p-value of "pass@k is the same by both methods", without a budget.

    It is a permutation test within problems. It is exact: if samples of both methods have the same
    distribution, a problem's 2n outcomes are exchangeable between them.
    """
    ours, theirs = table.passed(np.inf), other.passed(np.inf)
    problems, n = ours.shape
    total = ours.sum(axis=1) + theirs.sum(axis=1)
    draws = np.random.default_rng(seed).hypergeometric(
        total, 2 * n - total, n, size=(SHUFFLES, problems)
    )
    null = (pass_at(draws, n, k) - pass_at(total - draws, n, k)).mean(axis=1)
    seen = (table.at(k, np.inf) - other.at(k, np.inf)).mean()
    return float((1 + (np.abs(null) >= abs(seen) - 1e-12).sum()) / (1 + SHUFFLES))


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
    if grid:
        return np.stack([metric(table, budget) for budget in grid], axis=1)
    return np.zeros((len(table.seconds), 0))


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
    comparison: dict[str, Any] = {
        "method": method,
        "other": other,
        "samples": len(results.names) * results.n,
    }
    comparison["same_ids"] = sum(
        mine["token_ids"] == theirs["token_ids"]
        for name in results.names
        for mine, theirs in zip(*(_samples(results, name, w) for w in (method, other)), strict=True)
    )
    for name, metric in METRICS.items():
        bands = _bands(
            _over(tables[method], grid, metric) - _over(tables[other], grid, metric), bootstrap
        )
        comparison[name] = _dominance(bands, grid)
    if results.scores[0] == PASSED:
        for k in _ks(results.n):
            difference = tables[method].at(k, math.inf) - tables[other].at(k, math.inf)
            low, high = bootstrap.interval(difference)
            comparison[f"pass@{k}"] = {
                "mean": float(difference.mean()),
                "low": float(low),
                "high": float(high),
                "p": permutation_test(tables[method], tables[other], k),
            }
    return comparison


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
