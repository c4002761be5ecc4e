"""An evaluation in a directory: sample, grade, report. Each step goes on where a killed one stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import RequestError
from shoal.evaluation.figure import png, svg
from shoal.evaluation.grading import Grader, grade_entries
from shoal.evaluation.journal import Journal, settle
from shoal.evaluation.page import page
from shoal.evaluation.sampling import Plan, Sampler
from shoal.evaluation.summary import Results, summarize
from shoal.evaluation.tasks import Task

SETTINGS, SAMPLES, GRADES = "settings.json", "samples.jsonl", "grades.jsonl"
SUMMARY, FIGURE, PAGE = "summary.json", "quality.png", "report.html"

Value = TypeVar("Value")
Watch = Callable[[str, Iterable[Value], int], Iterable[Value]]
"""(what is done, its results as they come, how many there will be) -> the same results; shows progress."""


class Evaluation:
    """Tasks and what is known of them.

    Args:
        settings: everything that the samples depend on; a directory with results of other settings is refused.

    Raises:
        RequestError: if the directory cannot be used, see `shoal.evaluation.journal`.
    """

    def __init__(self, directory: Path, tasks: Sequence[Task], plan: Plan, settings: Mapping[str, Any]) -> None:
        if not tasks:
            raise RequestError("nothing to evaluate: give a --limit of at least 1")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"cannot use {str(directory)!r}: {error.strerror}") from error
        settle(directory / SETTINGS, dict(settings))
        self.directory, self.tasks, self.plan, self.settings = directory, list(tasks), plan, dict(settings)
        self.samples, self.grades = Journal(directory / SAMPLES), Journal(directory / GRADES)

    @property
    def missing(self) -> list[Task]:
        """Tasks without samples."""
        return [task for task in self.tasks if task.task_id not in self.samples.entries]

    def sample(self, sampler: Sampler, watch: Watch[dict[str, Any]]) -> None:
        """Draws what is missing."""
        missing = self.missing
        for entry in watch("sampling", sampler.run(missing), len(missing)):
            self.samples.append(entry)

    def grade(self, grader: Grader, watch: Watch[dict[str, Any]]) -> None:
        """Grades what was sampled and has no grades."""
        names = [task.task_id for task in self.tasks if task.task_id not in self.grades.entries]
        entries = [self.samples.entries[name] for name in names if name in self.samples.entries]
        with closing(grade_entries(entries, grader)) as grades:
            for entry in watch("grading", grades, len(entries)):
                self.grades.append(entry)

    def loaded(self) -> list[dict[str, Any]]:
        """What was chosen when the models were loaded, each choice once: a run that went on elsewhere may have had others."""
        found = [entry["loaded"] for entry in self.samples.entries.values() if "loaded" in entry]
        return [one for i, one in enumerate(found) if one not in found[:i]]

    def results(self, scores: Sequence[str]) -> Results:
        """All of it."""
        names = [task.task_id for task in self.tasks]
        return Results(names, self.plan.ways, self.plan.n, scores, self.samples.entries, self.grades.entries)

    def report(
        self, scores: Sequence[str], budgets: Sequence[float], extra: Mapping[str, Any], *, plot: bool
    ) -> dict[str, Any]:
        """Writes summary, figure and page; returns the summary."""
        results = self.results(scores)
        summary = {"settings": self.settings, "loaded": self.loaded(), **extra, **summarize(results, budgets)}
        text = json.dumps(summary, allow_nan=False) + "\n"
        (self.directory / SUMMARY).write_text(text, encoding="utf-8")
        if plot:
            (self.directory / FIGURE).write_bytes(png([summary]))
        prompts = {task.task_id: task.prompt for task in self.tasks}
        whole = page(summary, results, prompts, svg(summary) if plot else None)
        (self.directory / PAGE).write_text(whole, encoding="utf-8")
        return summary
