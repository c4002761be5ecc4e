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
    EvalOptions,
    EvalOutputOptions,
    EvalSampling,
    EvalSet,
    SandboxOptions,
    SetOptions,
    interrupted,
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
    source = replace(source, max_batch=sampling.n)
    call = EvalOptions(chosen, sampling, speculation, source, programs, output)
    if chosen.set_ == "jsonschema":
        return _evaluate_schemas(call)
    if chosen.cut is not None:
        return _evaluate_cuts(call, chosen.cut)
    if "planned" in (sampling.methods or ""):
        return evaluate_planned(call, planning)
    if planning != PlanOptions():
        raise RequestError("--plan-... and --public-tests are options of --methods planned")
    return _evaluate_programs(call)


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


def _evaluate_programs(call: EvalOptions) -> int:
    """Samples whole programs, executes them and reports; returns the exit code."""
    budgets, output = parse_budgets(call.sampling.time_budget), call.output
    eval_set = call.chosen.read()  # before torch is imported, which takes seconds
    exports = read_exports(output.export or (), eval_set)
    config = call.sampling.config(call.source, call.speculation)
    drawn = output.plot and output.out is not None
    if drawn:
        from shoal.evaluation.figure import require_matplotlib

        require_matplotlib()
    with output.directory() as directory:
        with imports_shown():
            from shoal.evaluation.journal import Evaluation

        settings = settings_of(eval_set, call.source, config)
        evaluation = Evaluation(directory, eval_set.tasks, config, settings)
        try:
            extra = _judged(evaluation, eval_set, call, exports)
        except KeyboardInterrupt:
            stderr().print(interrupted(evaluation, "sampled"))
            return EXIT_INTERRUPTED
        summary = evaluation.report(eval_set.scores, budgets, extra, plot=drawn)
        if output.json:
            print(json.dumps(summary, allow_nan=False))
        else:
            show_summary(summary, evaluation.directory if drawn else None)
    return 0


def _judged(
    evaluation: Evaluation, eval_set: EvalSet, call: EvalOptions, exports: Sequence[Export]
) -> dict[str, Any]:
    """Draws samples, exports and grades; returns further entries of the summary."""
    import torch

    from shoal.bench.machine import machine
    from shoal.evaluation.sampling import Sampler

    with _grader(eval_set, call.programs) as (grader, extra):
        if evaluation.missing:
            evaluation.sample(Sampler(call.source.load(), evaluation.config), with_progress)
        for export in exports:
            export.write(evaluation, eval_set)
        evaluation.grade(grader, with_progress)
    return {"machine": machine(torch.device("cpu")), **extra}


def _evaluate_cuts(call: EvalOptions, kind: str) -> int:
    """Evaluates cut programs; raises RequestError for options that do not go with cuts."""
    call.require_one_run("--cut compares ways to begin, once each")
    from shoal.cli.eval_kinds import evaluate_cuts

    options, n = options_of(call.sampling, call.speculation), call.sampling.n
    return evaluate_cuts(
        call.chosen.read(), kind, n, options, call.source, call.programs, as_json=call.output.json
    )


def _evaluate_schemas(call: EvalOptions) -> int:
    """Evaluates schemas; raises RequestError for options that do not go with schemas."""
    call.require_one_run("each schema is tried once")
    chosen = call.chosen
    if chosen.data is None:
        raise RequestError(
            "give the directory of the schemas: shoal eval jsonschema --data DIR; nothing is "
            "downloaded"
        )
    if chosen.cut is not None or chosen.chat:
        raise RequestError("documents are written after the schema: leave out --cut and --chat")
    from shoal.cli.eval_kinds import evaluate_schemas

    options, n = options_of(call.sampling, call.speculation), call.sampling.n
    return evaluate_schemas(
        chosen.data, chosen.limit, n, options, call.source, as_json=call.output.json
    )


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
