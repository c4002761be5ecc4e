"""The metrics of samples with finishing times and scores, within a time budget.

They are pure functions on arrays. Shapes: P problems, n samples of each, in row order; B budgets.
Every estimate is a mean over problems; its interval is the middle 95 % of the means of resampled
problems (percentile bootstrap, Efron 1979).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
