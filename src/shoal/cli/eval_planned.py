"""`shoal eval --methods planned`: programs planned with public tests, beside filtered samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shoal.cli.console import EXIT_INTERRUPTED, plain_table, printable, stderr, stdout
from shoal.cli.eval_kinds import show_wide
from shoal.cli.eval_options import (
    EvalOptions,
    EvalSet,
    SandboxOptions,
    interrupted,
    options_of,
    settings_of,
)
from shoal.cli.option_groups import sampling_option
from shoal.cli.options import ModelSource, parse_lookahead
from shoal.cli.progress import with_progress
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.planning import PlanConfig
    from shoal.evaluation.public_tests import PublicTests


@dataclass(frozen=True)
class PlanOptions:
    """The options of `--methods planned`."""

    plan_tokens: Annotated[
        int,
        sampling_option(
            min=1, help="With --methods planned: new tokens of a problem, for either method."
        ),
    ] = 2048
    plan_width: Annotated[
        int, sampling_option(min=1, help="With --methods planned: tokens tried at a place.")
    ] = 3
    plan_entropy: Annotated[
        float,
        sampling_option(
            min=0.0,
            help="With --methods planned: the entropy, in nats, below which a place has one token.",
        ),
    ] = 0.0
    plan_horizon: Annotated[
        int | None,
        sampling_option(
            min=1,
            help="With --methods planned: look ahead by so many tokens and commit the most "
            "probable, without tests (AdaDec); 5 with --plan-entropy 1.",
        ),
    ] = None
    public_tests: Annotated[
        str,
        sampling_option(
            metavar="docstring|first:K",
            help="With --methods planned: the examples in the prompt, or the first tests of the "
            "set, which then do not judge.",
        ),
    ] = "docstring"


def with_public_tests(eval_set: EvalSet, which: str) -> tuple[EvalSet, dict[str, PublicTests], int]:
    """Returns the problems that have public tests, these tests, and the number of the others.

    The problems are left with the tests that judge.

    Raises:
        RequestError: the set has no such problem, or is none of programs in Python.
    """
    from shoal.evaluation.public_tests import published

    if not eval_set.problems or eval_set.name == "infilling":
        raise RequestError(
            f"planning needs tests of functions, and {eval_set.name} has none: take humaneval, "
            f"mbxp or functions"
        )
    public_tests = {problem.task_id: published(problem, which) for problem in eval_set.problems}
    tests = {name: both[0] for name, both in public_tests.items() if both is not None}
    problems = [both[1] for both in public_tests.values() if both is not None]
    if not problems:
        raise RequestError(f"no problem of {eval_set.name} has public tests of kind {which!r}")
    tasks = [task for task in eval_set.tasks if task.task_id in tests]
    return (
        replace(eval_set, tasks=tasks, problems=problems),
        tests,
        len(eval_set.problems) - len(problems),
    )


@dataclass(frozen=True)
class PlannedEvaluation:
    """A planned evaluation that has been asked for.

    Attributes:
        eval_set: the problems, with the tests that judge.
        tests: their public tests.
        left_out: the number of problems without any.
        config: the settings of both methods.
        settings: all settings that the results depend on.
    """

    eval_set: EvalSet
    tests: Mapping[str, PublicTests]
    left_out: int
    config: PlanConfig
    settings: Mapping[str, Any]

    def run(
        self, directory: Path, source: ModelSource, programs: SandboxOptions, *, as_json: bool
    ) -> int:
        """Plans, filters, grades and reports; after Ctrl-C it tells how to go on."""
        import torch

        from shoal.bench.machine import machine
        from shoal.evaluation.journal import SUMMARY, Evaluation
        from shoal.evaluation.planned_runs import PlannedRuns, summary_of
        from shoal.evaluation.tasks import code_grader

        evaluation = Evaluation(directory, self.eval_set.tasks, self.config, self.settings)
        missing = evaluation.missing
        try:
            with programs.open() as sandbox:
                grader = code_grader(self.eval_set.problems, sandbox, programs.workers)
                if missing:
                    pair, workers = source.load(), programs.workers
                    runs = PlannedRuns(pair, self.config, self.tests, sandbox, workers)
                    for entry in with_progress("planning", runs.run(missing), len(missing)):
                        evaluation.samples.append(entry)
                evaluation.grade(grader, with_progress)
                isolation = sandbox.isolation
        except KeyboardInterrupt:
            stderr().print(interrupted(evaluation, "planned"))
            return EXIT_INTERRUPTED
        names = [task.task_id for task in evaluation.tasks]
        summary = {
            "settings": evaluation.settings,
            "machine": machine(torch.device("cpu")),
            "loaded": evaluation.loaded(),
            "isolation": isolation,
            "left_out": self.left_out,
            **summary_of(names, evaluation.samples.entries, evaluation.grades.entries),
        }
        text = json.dumps(summary, allow_nan=False)
        (directory / SUMMARY).write_text(text + "\n", encoding="utf-8")
        if as_json:
            print(text)
        else:
            show_planned(summary)
        return 0


def evaluate_planned(call: EvalOptions, planning: PlanOptions) -> int:
    """Evaluates planned programs; raises RequestError for options that do not go with planning."""
    sampling, output, programs = call.sampling, call.output, call.programs
    others = sampling.methods != "planned" or sampling.time_budget != "inf"
    if others or output.export or call.chosen.chat:
        raise RequestError(
            "planning has budgets and a comparison of its own: give --methods planned alone, and "
            "leave out --time-budget, --export and --chat"
        )
    from shoal.evaluation.planning import PlanConfig

    eval_set, tests, left_out = with_public_tests(call.chosen.read(), planning.public_tests)
    options = {
        name: value
        for name, value in options_of(sampling, call.speculation).items()
        if name not in ("seed", "lookahead")
    }
    config = PlanConfig(
        sampling.n,
        options,
        parse_lookahead(call.speculation.lookahead or "auto"),
        sampling.seed,
        tokens=planning.plan_tokens,
        width=planning.plan_width,
        entropy=planning.plan_entropy,
        horizon=planning.plan_horizon,
    )
    settings = {**settings_of(eval_set, call.source, config), **vars(planning)}
    with output.directory() as directory:
        evaluation = PlannedEvaluation(eval_set, tests, left_out, config, settings)
        return evaluation.run(directory, call.source, programs, as_json=output.json)


def show_planned(summary: Mapping[str, Any]) -> None:
    """Prints the table of the methods, then the findings."""
    from shoal.evaluation.planned_runs import COLUMNS, sentences

    table = plain_table("method", *COLUMNS)
    for method, line in summary["methods"].items():
        table.add_row(method, *(written(line) for written in COLUMNS.values()))
    console = stdout()
    if not show_wide(console, table):
        console.print(table)
    for sentence in sentences(summary):
        console.print(printable(sentence), markup=False)
