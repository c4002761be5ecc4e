"""Planning beside sampling plus filter, problem by problem, and the results of both.

Both methods may spend the same new tokens on a problem. Planning goes first. The seconds that it
took are the budget of the second comparison: the filter goes on until it has spent both, and its
choice is made twice, among the programs that each budget allows. Where planning has ended early,
the filter has at least the seconds of its tokens. Either method ends early at a program that passes
all public tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from shoal.api import Shoal
from shoal.drafting.protocol import Drafter
from shoal.errors import RequestError
from shoal.evaluation.planning import (
    BY_SECONDS,
    BY_TOKENS,
    LOSSY,
    PLANNED,
    PLANS,
    PlanConfig,
    ProblemRun,
    Spent,
    TriedProgram,
    best_of,
    filter_samples,
    plan,
    siblings,
)
from shoal.evaluation.public_tests import PublicTests, Rewards
from shoal.evaluation.sandbox import Sandbox
from shoal.evaluation.summary import Bootstrap, Results, permutation_test
from shoal.evaluation.tasks import PASSED, Task

PREFIX_BYTES = 1 << 29
"""The bytes for the keys and values of a problem's texts."""
PASSES = (
    "target_passes",
    "prefill_tokens",
    "restored_tokens",
    "drafted",
    "accepted",
    "rounds",
    "row_rounds",
)
AMOUNTS = ("tokens", "seconds", "programs", "executed", *PASSES)
WARM_UP = 8  # tokens


class PlannedRuns:
    """Both methods, with the drafter of each.

    Args:
        pair: the models.
        config: the settings.
        tests: the public tests by problem.
        sandbox: the sandbox that runs them.
        workers: the number of programs executed at a time.

    Raises:
        RequestError: the models have no tokenizer.
    """

    def __init__(
        self,
        pair: Shoal,
        config: PlanConfig,
        tests: Mapping[str, PublicTests],
        sandbox: Sandbox,
        workers: int | None = None,
    ) -> None:
        if pair.tokenizer is None:
            raise RequestError("an evaluation needs a tokenizer, and this model has none")
        self.config, self._tests, self._loaded = config, tests, pair.loaded
        self._sandbox, self._workers = sandbox, workers
        self.pair = pair.beside(max_batch=config.n, prefix_memory=PREFIX_BYTES)
        self._drafters = siblings(self.pair, config), siblings(self.pair, config)

    def run(self, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
        """Yields a journal entry per problem; a refused problem has an "error" and no attempts."""
        for place, task in enumerate(tasks):
            common = {"task_id": task.task_id, "loaded": self._loaded}
            try:
                if not place:
                    warm = self._begin(task, None)
                    warm.write([warm.prompt], self.config.n, max_new_tokens=WARM_UP)
                yield {**common, "error": None, **self._attempts(task)}
            except RequestError as error:
                yield {**common, "error": str(error), "attempts": {}}

    def _begin(self, task: Task, drafter: Drafter | None) -> ProblemRun:
        """Begins a run that knows of earlier ones only the texts that its drafter has read."""
        if self.pair.prefixes is not None:
            self.pair.prefixes.clear()
        rewards = Rewards(self._tests[task.task_id], self._sandbox, self._workers)
        return ProblemRun(self.pair, task, self.config, rewards, drafter)

    def _attempts(self, task: Task) -> dict[str, Any]:
        planned = self._begin(task, self._drafters[0])
        plan(planned)
        tokens = self.config.tokens if self.config.horizon is None else planned.tokens
        seconds = planned.seconds
        filtered = self._begin(task, self._drafters[1])
        filter_samples(filtered, tokens, seconds)
        by_tokens = best_of(filtered.programs, tokens=tokens)
        if planned.tokens < tokens:
            seconds = max(seconds, by_tokens[1].seconds)
        choices = {
            PLANNED: best_of(planned.programs, tokens=tokens),
            BY_TOKENS: by_tokens,
            BY_SECONDS: best_of(filtered.programs, seconds=seconds),
        }
        attempts = {method: _attempt(*choice) for method, choice in choices.items()}
        return {"attempts": attempts, "budget": {"tokens": tokens, "seconds": seconds}}


def _attempt(chosen: TriedProgram | None, spent: Spent) -> dict[str, Any]:
    stats = {name: getattr(spent.stats, name) for name in PASSES}
    sample = {
        "completion": "" if chosen is None else chosen.completion,
        "token_ids": [] if chosen is None else list(chosen.token_ids),
        "mean_logprob": None
        if chosen is None or math.isinf(chosen.mean_logprob)
        else chosen.mean_logprob,
        "public": 0.0 if chosen is None else chosen.reward,
        "finished": chosen is not None,
        "finished_at": spent.seconds,
    }
    return {
        "tokens": spent.tokens,
        "seconds": spent.seconds,
        "programs": spent.programs,
        "executed": spent.executed,
        **stats,
        "samples": [sample],
    }


def summary_of(
    names: Sequence[str],
    samples: Mapping[str, Mapping[str, Any]],
    grades: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Summarizes complete journals, ready for JSON.

    Returns:
        By method pass@1 of the chosen programs with its interval, the share of problems whose
        choice passes all public tests, and the means per problem of the passes and seconds spent;
        the differences between planning and the filter; the problems that were refused. All refused
        problems count as failed.
    """
    results = Results(names, PLANS, 1, (PASSED,), samples, grades)
    tables = {method: results.table(method, PASSED) for method in PLANS}
    bootstrap = Bootstrap(len(names))

    def estimate(values: Any) -> dict[str, float]:
        low, high = bootstrap.interval(values)
        return {"mean": float(values.mean()), "low": float(low), "high": float(high)}

    passed = {method: table.at(1, math.inf) for method, table in tables.items()}
    attempts = [samples[name]["attempts"] for name in names if samples[name]["attempts"]]
    methods = {
        method: {
            "pass@1": estimate(passed[method]),
            "public": sum(each[method]["samples"][0]["public"] == 1 for each in attempts)
            / len(names),
            **{name: mean([each[method][name] for each in attempts] or [0]) for name in AMOUNTS},
        }
        for method in PLANS
    }
    against = {
        other: {
            **estimate(passed[PLANNED] - passed[other]),
            "p": permutation_test(tables[PLANNED], tables[other], 1),
        }
        for other in (BY_TOKENS, BY_SECONDS)
    }
    return {
        "lossless": False,
        "note": LOSSY,
        "problems": len(names),
        "methods": methods,
        "against": against,
        "errors": results.errors(),
    }


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "pass@1, %": lambda line: (
        f"{100 * line['pass@1']['mean']:.1f} [{100 * line['pass@1']['low']:.0f}, "
        f"{100 * line['pass@1']['high']:.0f}]"
    ),
    "public tests, %": lambda line: f"{100 * line['public']:.1f}",
    "programs": lambda line: f"{line['programs']:.1f}",
    "tokens": lambda line: f"{line['tokens']:.0f}",
    "passes": lambda line: f"{line['target_passes']:.0f}",
    "drafted": lambda line: f"{line['drafted']:.0f}",
    "accepted": lambda line: f"{line['accepted']:.0f}",
    "s": lambda line: f"{line['seconds']:.2f}",
}
"""The columns of the table behind the method, each with the text of its cell."""


def sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields the findings."""
    yield f"Means per problem, with 95 % intervals; {summary['note']}."
    for other, one in summary["against"].items():
        yield (
            f"{PLANNED} against {other}: {100 * one['mean']:+.1f} points of pass@1 "
            f"[{100 * one['low']:+.1f}, {100 * one['high']:+.1f}], p = {one['p']:.3g}."
        )
    if summary.get("left_out"):
        yield f"Left out, as they have no public tests: {summary['left_out']}."
    for name, error in summary["errors"].items():
        yield f"{name} could not be asked, and counts as failed: {error}"
