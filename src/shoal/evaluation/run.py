"""An evaluation in a directory: sample, grade, report. A killed step continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.figure import png, svg
from shoal.evaluation.grading import Grader, grade_entries
from shoal.evaluation.journal import Journal, ShowProgress, open_directory
from shoal.evaluation.page import page
from shoal.evaluation.sampling import Sampler, SamplingConfig
from shoal.evaluation.summary import Results, summarize
from shoal.evaluation.tasks import Task

SAMPLES, GRADES = "samples.jsonl", "grades.jsonl"
SUMMARY, FIGURE, PAGE = "summary.json", "quality.png", "report.html"


class Evaluation:
    """An evaluation: tasks with their samples and grades.

    Args:
        settings: everything that the samples depend on; a directory with results of other settings
            is refused.

    Raises:
        RequestError: the directory cannot be used, see `shoal.evaluation.journal`.
    """

    def __init__(
        self,
        directory: Path,
        tasks: Sequence[Task],
        config: SamplingConfig,
        settings: Mapping[str, Any],
    ) -> None:
        if not tasks:
            raise RequestError("nothing to evaluate: give a --limit of at least 1")
        open_directory(directory, dict(settings))
        self.directory, self.tasks, self.config, self.settings = (
            directory,
            list(tasks),
            config,
            dict(settings),
        )
        self.samples, self.grades = Journal(directory / SAMPLES), Journal(directory / GRADES)

    @property
    def missing(self) -> list[Task]:
        """The tasks without samples."""
        return [task for task in self.tasks if task.task_id not in self.samples.entries]

    def sample(self, sampler: Sampler, watch: ShowProgress[dict[str, Any]]) -> None:
        """Draws the missing samples."""
        missing = self.missing
        for entry in watch("sampling", sampler.run(missing), len(missing)):
            self.samples.append(entry)

    def grade(self, grader: Grader, watch: ShowProgress[dict[str, Any]]) -> None:
        """Grades the samples that have no grades."""
        names = [task.task_id for task in self.tasks if task.task_id not in self.grades.entries]
        entries = [self.samples.entries[name] for name in names if name in self.samples.entries]
        with closing(grade_entries(entries, grader)) as grades:
            for entry in watch("grading", grades, len(entries)):
                self.grades.append(entry)

    def loaded(self) -> list[dict[str, Any]]:
        """Returns the distinct settings with which the models were loaded.

        There may be several, as a run may be continued on another machine.
        """
        found = [entry["loaded"] for entry in self.samples.entries.values() if "loaded" in entry]
        return [settings for i, settings in enumerate(found) if settings not in found[:i]]

    def results(self, scores: Sequence[str]) -> Results:
        """Returns all samples and grades."""
        names = [task.task_id for task in self.tasks]
        return Results(
            names,
            self.config.methods,
            self.config.n,
            scores,
            self.samples.entries,
            self.grades.entries,
        )

    def report(
        self,
        scores: Sequence[str],
        budgets: Sequence[float],
        extra: Mapping[str, Any],
        *,
        plot: bool,
    ) -> dict[str, Any]:
        """Writes summary, figure and page; returns the summary."""
        results = self.results(scores)
        summary = {
            "settings": self.settings,
            "loaded": self.loaded(),
            **extra,
            **summarize(results, budgets),
        }
        text = json.dumps(summary, allow_nan=False) + "\n"
        (self.directory / SUMMARY).write_text(text, encoding="utf-8")
        if plot:
            (self.directory / FIGURE).write_bytes(png([summary]))
        prompts = {task.task_id: task.prompt for task in self.tasks}
        whole = page(summary, results, prompts, svg(summary) if plot else None)
        (self.directory / PAGE).write_text(whole, encoding="utf-8")
        return summary
