"""The given completions and their results in a directory, where results survive an interruption."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.evaluation.execution import ExecutionResult, Solution, execute_all, pass_counts
from shoal.evaluation.journal import Journal, ShowProgress, open_directory
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox

RESULTS, SUMMARY = "results.jsonl", "summary.json"


class Solutions:
    """The completions to execute.

    A directory that has results of some of them is continued.

    Args:
        settings: everything that the results depend on; a directory with results of other settings
            is refused.

    Raises:
        RequestError: the directory cannot be used, see `shoal.evaluation.journal`.
    """

    def __init__(
        self, directory: Path, pairs: Sequence[Solution], settings: Mapping[str, Any]
    ) -> None:
        open_directory(directory, dict(settings))
        self.directory, self.pairs = directory, list(pairs)
        self._names = _names(pairs)
        self._journal = Journal(directory / RESULTS)

    def execute(
        self, sandbox: Sandbox, workers: int | None, watch: ShowProgress[ExecutionResult]
    ) -> None:
        """Executes the completions without a result.

        Each result is on the disk before the next is awaited.
        """
        missing = self._names[len(self.results) :]
        with closing(execute_all(self.pairs[len(self.results) :], sandbox, workers)) as results:
            for name, result in zip(missing, watch("judging", results, len(missing)), strict=True):
                self._journal.append({"task_id": name, **asdict(result)})

    @property
    def results(self) -> list[ExecutionResult]:
        """The results of the first completions, in their order."""
        entries = [
            self._journal.entries[name] for name in self._names if name in self._journal.entries
        ]
        return [
            ExecutionResult(**{name: entry[name] for name in ExecutionResult.__dataclass_fields__})
            for entry in entries
        ]

    def report(self, problems: Sequence[Problem], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the summary to the directory and returns it."""
        results = self.results
        failures = [
            {
                "task_id": problem.task_id,
                "language": problem.language,
                "headline": result.headline,
                **asdict(result),
            }
            for (problem, _), result in zip(self.pairs, results, strict=False)
            if not result.passed
        ]
        counted = {
            name: asdict(counts)
            for name, counts in pass_counts(problems, self.pairs, results).items()
        }
        summary = {
            **extra,
            "judged": len(results),
            "solutions": len(self.pairs),
            "languages": counted,
            "failures": failures,
        }
        (self.directory / SUMMARY).write_text(json.dumps(summary) + "\n", encoding="utf-8")
        return summary


def _names(pairs: Sequence[Solution]) -> list[str]:
    """Returns the task ids; a further completion of the same problem has its number behind it."""
    seen: Counter[str] = Counter()
    names = []
    for problem, _ in pairs:
        seen[problem.task_id] += 1
        names.append(
            problem.task_id
            if seen[problem.task_id] == 1
            else f"{problem.task_id} ({seen[problem.task_id]})"
        )
    return names
