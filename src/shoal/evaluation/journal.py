"""Evaluations in a directory, whose results survive a kill.

A journal has one JSON line per problem, on the disk before the next problem begins. An evaluation
samples, grades and reports, and a killed step continues where it stopped; completions that are
given are graded in the same way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from shoal.durable import mend, sync, sync_entry, write_synced
from shoal.errors import RequestError
from shoal.evaluation.execution import ExecutionResult, Solution, execute_all, pass_counts
from shoal.evaluation.exports import page
from shoal.evaluation.figure import png, svg
from shoal.evaluation.problems import Problem
from shoal.evaluation.sampling import Sampler, SamplingConfig
from shoal.evaluation.sandbox import Sandbox
from shoal.evaluation.summary import Results, summarize
from shoal.evaluation.tasks import Grader, Task, grade_entries

SETTINGS = "settings.json"
Value = TypeVar("Value")
ShowProgress = Callable[[str, Iterable[Value], int], Iterable[Value]]
"""A function that passes results on and shows progress.

It takes (task, results as they come, their number), and returns the same results.
"""


class Journal:
    """An append-only JSON Lines file of objects with a "task_id".

    Opening it repairs a file after a kill or a crash: a damaged end is cut off, and its problems
    are done again.

    Raises:
        RequestError: for a line in the middle that is no such object, with its number; for a file
            that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        try:
            with path.open("a+b") as file:
                mend(file, self._keep)
                sync(file)
            sync_entry(path)
        except OSError as error:
            raise RequestError(f"cannot use {str(path)!r}: {error.strerror}") from error

    def _keep(self, number: int, line: bytes) -> None:
        entry = _entry(line, f"{self.path}:{number}")
        self.entries[entry["task_id"]] = entry

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one problem's results and waits until they are on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            sync(file)
        self.entries[entry["task_id"]] = entry


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(
            f"{where} is not JSON ({error}): the file was changed by something else; remove the "
            f"line"
        ) from error
    if not isinstance(entry, dict) or not isinstance(entry.get("task_id"), str):
        raise RequestError(f'{where} must be an object with a text "task_id"')
    return entry


def open_directory(directory: Path, settings: dict[str, Any]) -> None:
    """Makes the directory if necessary, and writes the settings of a new run (atomically).

    It compares the settings with the directory's old ones if there are any.

    Raises:
        RequestError: it cannot be used, or holds results of other settings; names the first that
            differs.
    """
    path, settings = directory / SETTINGS, json.loads(json.dumps(settings))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot use {str(directory)!r}: {error.strerror}") from error
    if not path.exists():
        write_synced(path, json.dumps(settings, indent=1) + "\n")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{str(path)!r} is not JSON: {error}") from error
    for name in [*settings, *(set(before) - set(settings))]:
        if before.get(name) != settings.get(name):
            raise RequestError(
                f"{str(path.parent)!r} holds results with {name} = {before.get(name)!r}, asked for "
                f"is {settings.get(name)!r}: give another --output, or the same settings to go on"
            )


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
        self.directory = directory
        self.tasks = list(tasks)
        self.config = config
        self.settings = dict(settings)
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
        reports = [entry["loaded"] for entry in self.samples.entries.values() if "loaded" in entry]
        return [settings for i, settings in enumerate(reports) if settings not in reports[:i]]

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


RESULTS = "results.jsonl"


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
    """Returns the task ids; the second completion of a problem is "ID (2)", and so on."""
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
