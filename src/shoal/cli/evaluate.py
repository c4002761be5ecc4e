"""`shoal eval`: quality within a time budget, by every decoding method."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import EXIT_INTERRUPTED, stderr
from shoal.cli.eval_kinds import execute_solutions
from shoal.cli.eval_output import EXPORT_HELP, Export, read_exports, show_summary, with_progress
from shoal.cli.eval_set import EvalSet, SandboxOptions, SetOptions
from shoal.cli.option_groups import option_groups, output_option, sampling_option, speed_option
from shoal.cli.options import (
    JsonOption,
    ModelSource,
    NewTokensOption,
    SampleOptions,
    SpeculationOptions,
    TopPOption,
    parse_lookahead,
)
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.grading import Grader
    from shoal.evaluation.run import Evaluation
    from shoal.evaluation.sampling import SamplingConfig


@dataclass(frozen=True)
class EvalSampling(SampleOptions):
    """The sampling options of an evaluation, and its methods."""

    max_new_tokens: NewTokensOption = 256
    temperature: Annotated[float, sampling_option(help="0 = greedy.")] = 0.2
    top_p: TopPOption = 0.95
    seed: Annotated[
        int | None,
        sampling_option(
            help="The same seed gives the same samples by every method; fresh entropy without."
        ),
    ] = None
    time_budget: Annotated[
        str,
        sampling_option(
            metavar="SECONDS,...",
            help="Budgets at which one run is looked at; inf: none. Rows are cut at the longest.",
        ),
    ] = "inf"
    methods: Annotated[
        str | None,
        speed_option(
            metavar="METHOD,...",
            show_default="all that there is a drafter for",
            help="plain; single: speculation sample after sample; batched: speculation on all "
            "samples at once.",
        ),
    ] = None

    def config(self, source: ModelSource, speculation: SpeculationOptions) -> SamplingConfig:
        """Returns the sampling settings, checked before a model is loaded.

        Raises:
            RequestError: the options cannot be sampled with.
        """
        from shoal.evaluation.sampling import METHODS, PLAIN, SamplingConfig

        lookahead = parse_lookahead(speculation.lookahead or "auto")
        speculative = (source.model is None or source.draft is not None) and lookahead not in (
            "off",
            0,
        )
        possible = METHODS if speculative else (PLAIN,)
        named = tuple(part.strip() for part in (self.methods or "").split(",") if part.strip())
        chosen = possible if self.methods is None else named
        if not speculative and set(chosen) - {PLAIN}:
            raise RequestError(
                "only --methods plain is left without a drafter or with --lookahead off"
            )
        longest = max(parse_budgets(self.time_budget))
        options = {
            "rule": speculation.rule,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "time_budget": None if math.isinf(longest) else longest,
        }
        return SamplingConfig(self.n, options, lookahead, self.seed, chosen)


@dataclass(frozen=True)
class EvalOutputOptions:
    """The places that results go to."""

    out: Annotated[
        Path | None,
        output_option(
            "--output",
            "-o",
            help="Directory for results, summary, figure and report. The same command goes on "
            "where it stopped.",
        ),
    ] = None
    plot: Annotated[
        bool, output_option("--plot/--no-plot", help="Draw the figure (with --output).")
    ] = True
    export: Annotated[
        list[str] | None, output_option("--export", metavar="FORMAT:FILE", help=EXPORT_HELP)
    ] = None
    json: JsonOption = False

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Yields the given directory, or a temporary one that is removed afterwards."""
        if self.out is not None:
            yield self.out
            return
        with tempfile.TemporaryDirectory(prefix="shoal-eval-") as directory:
            yield Path(directory)


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
    speculation: SpeculationOptions,
    source: ModelSource,
    programs: SandboxOptions,
    output: EvalOutputOptions,
) -> int:
    """Measure how good the samples are that are ready in time.

    Samples each problem once by plain decoding, by speculation one sample after the other and by
    batched speculation, executes the programs, and tells for every budget what the samples finished
    by then come to: Pass@First (the one ranked first by mean log-probability), Pass@All, pass@k,
    each with a 95 % bootstrap interval over problems. Programs run in a sandbox. With --cut: how
    many programs pass that were cut inside a token and continued.
    """
    if output.out is not None:
        from shoal.bench.machine import require_place

        require_place(output.out)
    if output.export and (
        solutions is not None or chosen.set_ == "jsonschema" or chosen.cut is not None
    ):
        raise RequestError(
            "--export writes samples of whole programs: leave out --solutions and --cut, and "
            "take another set"
        )
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
        from shoal.evaluation.run import Evaluation

        evaluation = Evaluation(
            directory, eval_set.tasks, config, _settings(eval_set, source, config)
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

    options, source = _options(sampling, speculation), replace(source, max_batch=sampling.n)
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

    options, source = _options(sampling, speculation), replace(source, max_batch=sampling.n)
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


def _options(sampling: EvalSampling, speculation: SpeculationOptions) -> dict[str, Any]:
    """Returns the options of `Shoal.generate`."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "lookahead": parse_lookahead(speculation.lookahead or "auto"),
        "rule": speculation.rule,
    }


def parse_budgets(text: str) -> list[float]:
    """Reads the budgets in seconds, rising; inf is no budget.

    Raises:
        RequestError: a budget is no number > 0, or there is none.
    """
    try:
        budgets = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        budgets = []
    if not budgets or not all(budget > 0 for budget in budgets):
        raise RequestError(
            f"--time-budget must be seconds > 0 separated by commas, or inf, got {text!r}"
        )
    return budgets


def _settings(eval_set: EvalSet, source: ModelSource, config: SamplingConfig) -> dict[str, Any]:
    """Returns all settings that the samples and their times depend on."""
    import torch

    from shoal import __version__

    models = {
        name: str(value) for name, value in vars(source).items() if value not in (None, False)
    }
    return {
        "set": eval_set.name,
        "file": eval_set.file,
        "fingerprint": eval_set.fingerprint,
        "chat": eval_set.chat,
        "model": "bundled pair",
        **models,
        "n": config.n,
        **config.options,
        "lookahead": config.lookahead,
        "seed": config.seed,
        "methods": list(config.methods),
        "threads": torch.get_num_threads(),
        "shoal": __version__,
    }


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
    from shoal.evaluation.grading import code_grader, rouge_grader

    if not eval_set.problems:
        yield rouge_grader(eval_set.documents), {}
        return
    with programs.open() as sandbox:
        yield (
            code_grader(eval_set.problems, sandbox, programs.workers),
            {"isolation": sandbox.isolation},
        )
