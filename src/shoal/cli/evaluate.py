"""`shoal eval`: quality within a time budget, by every decoding method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import EXIT_INTERRUPTED, imports_shown, stderr
from shoal.cli.eval_kinds import Export, execute_solutions, read_exports, show_summary
from shoal.cli.eval_options import (
    EvalOutputOptions,
    EvalSampling,
    EvalSet,
    SandboxOptions,
    SetOptions,
    options_of,
    parse_budgets,
    settings_of,
)
from shoal.cli.eval_planned import PlanOptions, evaluate_planned
from shoal.cli.option_groups import option_groups
from shoal.cli.options import ModelSource, SpeculationOptions
from shoal.cli.progress import with_progress
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.journal import Evaluation
    from shoal.evaluation.tasks import Grader


@option_groups(without={"max_batch", "tensor_parallel"})
def evaluate(
    chosen: SetOptions,
    *,
    solutions: Annotated[
        str | None,
        typer.Option(
            metavar="canonical|FILE",
            help="Execute these completions (JSON Lines of task_id, completion); no model is "
            "loaded.",
        ),
    ] = None,
    sampling: EvalSampling,
    planning: PlanOptions,
    speculation: SpeculationOptions,
    source: ModelSource,
    programs: SandboxOptions,
    output: EvalOutputOptions,
) -> int:
    """Measure how good the samples are that are ready in time.

    Samples each problem once by plain decoding, by speculation one sample after the other and by
    batched speculation, executes the programs, and scores for every budget the samples finished by
    then: Pass@First (the one ranked first by mean log-probability), Pass@All, pass@k, each with a
    95 % bootstrap interval over problems. Programs run in a sandbox. With --cut: how many
    programs pass that were cut inside a token and continued. With --methods planned: programs
    planned with public tests, beside samples filtered by them.
    """
    _require_outputs(chosen, output, samples=solutions is None)
    source.require_guide(sampling.guidance)
    if solutions is not None:
        with output.directory() as directory:
            return execute_solutions(
                chosen.read(), solutions, programs, directory, as_json=output.json
            )
    if chosen.set_ == "jsonschema":
        return _evaluate_schemas(chosen, sampling, speculation, source, output)
    if chosen.cut is not None:
        return _evaluate_cuts(
            chosen,
            chosen.cut,
            sampling,
            speculation=speculation,
            source=source,
            programs=programs,
            output=output,
        )
    if "planned" in (sampling.methods or ""):
        return evaluate_planned(
            chosen,
            sampling,
            planning,
            speculation=speculation,
            source=source,
            programs=programs,
            output=output,
        )
    if planning != PlanOptions():
        raise RequestError("--plan-... and --public-tests are options of --methods planned")
    return _evaluate_programs(chosen, sampling, speculation, source, programs, output)


def _require_outputs(chosen: SetOptions, output: EvalOutputOptions, *, samples: bool) -> None:
    """Raises RequestError if results cannot be written where they are to go.

    Args:
        samples: True if samples are drawn.
    """
    if output.out is not None:
        with imports_shown():
            from shoal.bench.machine import require_place

        require_place(output.out)
    if output.export and (not samples or chosen.set_ == "jsonschema" or chosen.cut is not None):
        raise RequestError(
            "--export writes samples of whole programs: leave out --solutions and --cut, and "
            "take another set"
        )


def _evaluate_programs(
    chosen: SetOptions,
    sampling: EvalSampling,
    speculation: SpeculationOptions,
    source: ModelSource,
    programs: SandboxOptions,
    output: EvalOutputOptions,
) -> int:
    """Samples whole programs, executes them and reports; returns the exit code."""
    budgets = parse_budgets(sampling.time_budget)
    eval_set = chosen.read()  # before torch is imported, which takes seconds
    exports = read_exports(output.export or (), eval_set)
    source = replace(source, max_batch=sampling.n)
    config = sampling.config(source, speculation)
    drawn = output.plot and output.out is not None
    if drawn:
        from shoal.evaluation.figure import require_matplotlib

        require_matplotlib()
    with output.directory() as directory:
        with imports_shown():
            from shoal.evaluation.journal import Evaluation

        evaluation = Evaluation(
            directory, eval_set.tasks, config, settings_of(eval_set, source, config)
        )
        return _evaluate(
            evaluation,
            eval_set,
            source,
            budgets,
            programs,
            exports,
            plot=drawn,
            as_json=output.json,
        )


def _evaluate_cuts(
    chosen: SetOptions,
    kind: str,
    sampling: EvalSampling,
    speculation: SpeculationOptions,
    source: ModelSource,
    programs: SandboxOptions,
    output: EvalOutputOptions,
) -> int:
    """Evaluates cut programs.

    Raises:
        RequestError: an option does not go with cuts.
    """
    _require_one_run(sampling, output, "--cut compares ways to begin, once each")
    from shoal.cli.eval_kinds import evaluate_cuts

    options, source = options_of(sampling, speculation), replace(source, max_batch=sampling.n)
    return evaluate_cuts(
        chosen.read(), kind, sampling.n, options, source, programs, as_json=output.json
    )


def _evaluate_schemas(
    chosen: SetOptions,
    sampling: EvalSampling,
    speculation: SpeculationOptions,
    source: ModelSource,
    output: EvalOutputOptions,
) -> int:
    """Evaluates schemas.

    Raises:
        RequestError: an option does not go with schemas.
    """
    _require_one_run(sampling, output, "each schema is tried once")
    if chosen.data is None:
        raise RequestError(
            "give the directory of the schemas: shoal eval jsonschema --data DIR; nothing is "
            "downloaded"
        )
    if chosen.cut is not None or chosen.chat:
        raise RequestError("documents are written after the schema: leave out --cut and --chat")
    from shoal.cli.eval_kinds import evaluate_schemas

    options, source = options_of(sampling, speculation), replace(source, max_batch=sampling.n)
    return evaluate_schemas(
        chosen.data, chosen.limit, sampling.n, options, source, as_json=output.json
    )


def _require_one_run(sampling: EvalSampling, output: EvalOutputOptions, why: str) -> None:
    """Refuses options that ask for several runs, or for files of one.

    Raises:
        RequestError: there are such options; `why` is in the message.
    """
    if sampling.methods is not None or sampling.time_budget != "inf" or output.out is not None:
        raise RequestError(f"{why}: leave out --methods, --time-budget and --output")


def _evaluate(
    evaluation: Evaluation,
    eval_set: EvalSet,
    source: ModelSource,
    budgets: list[float],
    programs: SandboxOptions,
    exports: Sequence[Export],
    *,
    plot: bool,
    as_json: bool,
) -> int:
    """Draws samples, exports, grades and reports.

    After Ctrl-C it tells how to go on.
    """
    from shoal.bench.machine import machine
    from shoal.evaluation.sampling import Sampler

    try:
        with _grader(eval_set, programs) as (grader, extra):
            if evaluation.missing:
                evaluation.sample(Sampler(source.load(), evaluation.config), with_progress)
            for export in exports:
                export.write(evaluation, eval_set)
            evaluation.grade(grader, with_progress)
    except KeyboardInterrupt:
        done, many = len(evaluation.tasks) - len(evaluation.missing), len(evaluation.tasks)
        stderr().print(
            f"interrupted: {done} of {many} problems sampled; with --output, the same command "
            f"goes on"
        )
        return EXIT_INTERRUPTED
    import torch

    extra = {"machine": machine(torch.device("cpu")), **extra}
    summary = evaluation.report(eval_set.scores, budgets, extra, plot=plot)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        show_summary(summary, evaluation.directory if plot else None)
    return 0


@contextmanager
def _grader(eval_set: EvalSet, programs: SandboxOptions) -> Iterator[tuple[Grader, dict[str, Any]]]:
    """Yields the grader of a set, and the entries that the summary adds about it."""
    from shoal.evaluation.tasks import code_grader, rouge_grader

    if not eval_set.problems:
        yield rouge_grader(eval_set.documents), {}
        return
    with programs.open() as sandbox:
        yield (
            code_grader(eval_set.problems, sandbox, programs.workers),
            {"isolation": sandbox.isolation},
        )
