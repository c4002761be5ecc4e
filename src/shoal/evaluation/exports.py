"""The samples of an evaluation as files of EvalPlus and of the BigCode evaluation harness.

Both get whole programs, prompt included, so neither has to know the prompt that the model got.
EvalPlus finds the problem of a program by its task id, the BigCode harness by its place in the
list: the list has to begin with the first problem and to leave none out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.problems import Problem

Programs = Mapping[str, Sequence[str]]
"""The whole programs by task id, in the order of the evaluator's problems."""


@dataclass(frozen=True)
class EvaluatorSet:
    """An evaluator's problem set: its task ids are `prefix` and a number below `size`."""

    prefix: str
    size: int

    def place(self, task_id: str) -> int | None:
        """Returns the number of a problem; None for the id of another set."""
        found = re.fullmatch(rf"{re.escape(self.prefix)}(0|[1-9]\d*)", task_id)
        return int(found[1]) if found and int(found[1]) < self.size else None


@dataclass(frozen=True)
class ExportFormat:
    """The format of the files that an evaluator reads.

    Attributes:
        tool: the evaluator's name for messages.
        suffix: the ending of its files.
        sets: its problem sets, by the set of `shoal eval`.
        write: programs -> the text of a file.
        command: the command that evaluates them; a format string with file, set, problems, and
            samples per problem.
        by_place: programs have no task ids.
        whole: it evaluates the whole set, or nothing.
    """

    tool: str
    suffix: str
    sets: Mapping[str, EvaluatorSet]
    write: Callable[[Programs], str]
    command: str
    by_place: bool = False
    whole: bool = False

    def check(self, set_name: str, problems: Sequence[Problem]) -> None:
        """Checks, before anything is computed, that the evaluator has the problems.

        Raises:
            RequestError: the evaluator does not have them.
        """
        known = self.sets.get(set_name)
        if known is None:
            raise RequestError(
                f"{self.tool} has no task with the problems of {set_name}: "
                f"{', '.join(self.sets)} can be exported"
            )
        places = {problem.task_id: known.place(problem.task_id) for problem in problems}
        if foreign := [task_id for task_id, place in places.items() if place is None]:
            raise RequestError(
                f"{self.tool} has no problem {foreign[0]!r}: its ids are {known.prefix}0 to "
                f"{known.size - 1}"
            )
        missing = set(range(len(places))) - set(places.values())
        if self.by_place and missing:
            raise RequestError(
                f"{self.tool} finds problems by their places, and {known.prefix}{min(missing)} "
                f"is missing in the file of the set"
            )

    def render(self, set_name: str, programs: Programs) -> str:
        """Returns the text of a file, in the order of the evaluator's problems."""
        known = self.sets[set_name]
        return self.write(
            dict(sorted(programs.items(), key=lambda item: known.place(item[0]) or 0))
        )

    def hint(self, set_name: str, file: str, programs: Programs) -> str:
        """Tells how the evaluator is called on a file, and which problems it will miss."""
        many, size = len(programs), self.sets[set_name].size
        samples = max(map(len, programs.values()))
        said = self.command.format(set=set_name, file=file, problems=many, samples=samples)
        return (
            f"{said} ({many} of its {size} problems: it needs all)"
            if self.whole and many < size
            else said
        )


def _solutions(programs: Programs) -> str:
    return "".join(
        json.dumps({"task_id": task_id, "solution": program}) + "\n"
        for task_id, found in programs.items()
        for program in found
    )


def _generations(programs: Programs) -> str:
    return json.dumps([list(found) for found in programs.values()]) + "\n"


HUMANEVAL = {"humaneval": EvaluatorSet("HumanEval/", 164)}
FORMATS: Mapping[str, ExportFormat] = {
    "evalplus": ExportFormat(
        "EvalPlus",
        ".jsonl",
        HUMANEVAL,
        _solutions,
        "evalplus.evaluate --dataset {set} --samples {file}",
        whole=True,
    ),
    "bigcode": ExportFormat(
        "the BigCode evaluation harness",
        ".json",
        HUMANEVAL,
        _generations,
        "main.py --tasks {set} --limit {problems} --n_samples {samples} --load_generations_path "
        "{file} --allow_code_execution",
        by_place=True,
    ),
}


def programs_of(
    problems: Sequence[Problem], entries: Mapping[str, Mapping[str, Any]], method: str, n: int
) -> dict[str, list[str]]:
    """Returns n programs of each problem from a journal of samples.

    A problem that was refused has its prompt n times: evaluators want whole sets, and it counts as
    failed, as in the summary.
    """
    programs = {}
    for problem in problems:
        attempt = entries[problem.task_id]["attempts"].get(method)
        completions = (
            [""] * n if attempt is None else [sample["completion"] for sample in attempt["samples"]]
        )
        programs[problem.task_id] = [
            f"{problem.prompt}{completion}{problem.suffix}" for completion in completions
        ]
    return programs
