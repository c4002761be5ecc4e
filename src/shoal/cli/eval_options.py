"""The options of `shoal eval`: set, sandbox, samples, the place of results; all as settings."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.console import imports_shown, stderr
from shoal.cli.option_groups import output_option, sampling_option, speed_option
from shoal.cli.options import (
    GuidanceOption,
    JsonOption,
    ModelSource,
    NewTokensOption,
    PlausibilityOption,
    SampleOptions,
    SpeculationOptions,
    TopPOption,
    parse_lookahead,
)
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.journal import Evaluation
    from shoal.evaluation.problems import Problem
    from shoal.evaluation.sampling import SamplingConfig
    from shoal.evaluation.sandbox import Sandbox
    from shoal.evaluation.tasks import Task

Name = Literal[
    "humaneval", "mbxp", "multipl-e", "functions", "infilling", "summarize", "jsonschema"
]

Kind = Literal["word", "space", "punctuation", "prefix-sep", "prefix-indent", "all"]


@dataclass(frozen=True)
class EvalSet:
    """An evaluation set.

    Attributes:
        tasks: the tasks that models are asked.
        problems: the problems to be judged; empty for summaries.
        documents: the documents of summaries.
        fingerprint: the fingerprint of the file; "" for the generated set.
    """

    name: str
    tasks: Sequence[Task]
    problems: Sequence[Problem] = ()
    documents: Sequence[Any] = ()
    chat: bool = False
    file: str = ""
    fingerprint: str = ""

    @property
    def scores(self) -> Sequence[str]:
        """The names of the scores in its grades, the most important first."""
        from shoal.evaluation.tasks import PASSED, ROUGE

        return (PASSED,) if self.problems else ROUGE


def digest(file: Path) -> str:
    """Returns a fingerprint of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class SetOptions:
    """The evaluation set, and the way that models are asked."""

    set_: Annotated[
        Name,
        typer.Argument(
            metavar="SET",
            help="humaneval, mbxp, multipl-e, functions, infilling, summarize or jsonschema.",
        ),
    ]
    data: Annotated[
        Path | None,
        typer.Option(
            help="The set, .jsonl or .jsonl.gz; of jsonschema a directory; functions needs "
            "none. Nothing is downloaded."
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Only the first so many problems; functions: 200 without it, 1996 at most."
        ),
    ] = None
    chat: Annotated[bool, sampling_option("--chat", help="Ask by the model's chat template.")] = (
        False
    )
    cut: Annotated[
        Kind | None,
        sampling_option(
            "--cut",
            help="Cut each solution inside a token of this class, and go on: as it is, with "
            "--align, and from where the token begins.",
        ),
    ] = None

    def read(self) -> EvalSet:
        """Reads the set; raises RequestError if a file is missing or wrong."""
        from shoal.evaluation import tasks

        if self.set_ == "functions":
            if self.data is not None:
                raise RequestError("the set functions is bundled: leave out --data")
            problems = tasks.function_problems(self.limit or tasks.FUNCTIONS)
            return EvalSet(
                self.set_, tasks.code_tasks(problems, chat=self.chat), problems, chat=self.chat
            )
        if self.data is None:
            raise RequestError(
                f"give the file of the set: shoal eval {self.set_} --data FILE; nothing is "
                f"bundled or downloaded"
            )
        if self.set_ == "infilling" and self.chat:
            raise RequestError(
                "a middle is filled in by special tokens, not in a chat: leave out --chat"
            )
        return self._read_file(self.data)

    def _read_file(self, data: Path) -> EvalSet:
        from shoal.evaluation import problems, tasks

        chat = self.chat
        file: dict[str, Any] = {"chat": chat, "file": data.name}
        if self.set_ == "summarize":
            documents = tasks.read_documents(data)[: self.limit]
            asked = tasks.summary_tasks(documents, chat=chat)
            return EvalSet(self.set_, asked, documents=documents, fingerprint=digest(data), **file)
        readers = {"mbxp": problems.read_mbxp, "multipl-e": problems.read_multipl_e}
        problem_set = readers.get(self.set_, problems.read_humaneval)(data)[: self.limit]
        asked = (
            tasks.infilling_tasks(problem_set)
            if self.set_ == "infilling"
            else tasks.code_tasks(problem_set, chat=chat)
        )
        return EvalSet(self.set_, asked, problem_set, fingerprint=digest(data), **file)


PAGE = "docs/explanation/sandbox.md"
Isolation = Literal["auto", "bubblewrap", "namespaces", "limits"]


@dataclass(frozen=True)
class SandboxOptions:
    """The sandbox, and the number of programs executed at a time."""

    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Programs executed at a time.", show_default="the number of cores"
        ),
    ] = None
    sandbox: Annotated[
        Isolation,
        typer.Option(
            help="What isolates programs; auto: the strongest that keeps them from files and "
            "network here, or none. limits leaves the network open."
        ),
    ] = "auto"

    @contextmanager
    def open(self) -> Iterator[Sandbox]:
        """Opens a sandbox, and describes it on stderr before the first program runs."""
        from shoal.evaluation.sandbox import Sandbox

        with Sandbox(self.sandbox) as sandbox:
            first, *more = sandbox.essentials
            for line in (
                f"programs are executed in: {first}",
                *(f"  {line}" for line in more),
                f"  what it prevents, and how: {PAGE}",
            ):
                stderr().print(line, markup=False, highlight=False, soft_wrap=True)
            yield sandbox


EXPORT_HELP = (
    "Write the samples for another evaluator: evalplus:FILE.jsonl, or bigcode:FILE.json for the "
    "BigCode evaluation harness. Repeatable; of batched speculation, unless --methods leaves it "
    "out."
)


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
    guidance: GuidanceOption = 0.0
    plausibility: PlausibilityOption = 0.0
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
            show_default="all that there is a drafter for, but plain-single",
            help="plain; plain-single: sample after sample; single: speculation sample after "
            "sample; batched: speculation on all samples at once; or planned, alone: programs "
            "planned with public tests, not lossless.",
        ),
    ] = None

    @property
    def guided(self) -> dict[str, float]:
        """The options of guidance; none without it."""
        given = {"guidance": self.guidance, "plausibility": self.plausibility}
        return {name: value for name, value in given.items() if value}

    def config(self, source: ModelSource, speculation: SpeculationOptions) -> SamplingConfig:
        """Returns the sampling settings, checked before a model is loaded.

        Raises:
            RequestError: the options cannot be sampled with.
        """
        with imports_shown():
            from shoal.evaluation.sampling import METHODS, PLAIN, UNDRAFTED, SamplingConfig

        lookahead = parse_lookahead(speculation.lookahead or "auto")
        speculative = (source.model is None or source.draft is not None) and lookahead not in (
            "off",
            0,
        )
        possible = METHODS if speculative else (PLAIN,)
        named = tuple(part.strip() for part in (self.methods or "").split(",") if part.strip())
        chosen = possible if self.methods is None else named
        if not speculative and set(chosen) - {*UNDRAFTED}:
            raise RequestError(
                "only --methods plain or plain-single is left without a drafter or with "
                "--lookahead off"
            )
        longest = max(parse_budgets(self.time_budget))
        options = {
            "rule": speculation.rule,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "time_budget": None if math.isinf(longest) else longest,
            **self.guided,
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


@dataclass(frozen=True)
class EvalOptions:
    """The options of `shoal eval` by group; `source` has room for all samples of a problem."""

    chosen: SetOptions
    sampling: EvalSampling
    speculation: SpeculationOptions
    source: ModelSource
    programs: SandboxOptions
    output: EvalOutputOptions

    def require_one_run(self, why: str) -> None:
        """Raises RequestError, with `why`, if options ask for several runs or for files of one."""
        several = self.sampling.methods is not None or self.sampling.time_budget != "inf"
        if several or self.output.out is not None:
            raise RequestError(f"{why}: leave out --methods, --time-budget and --output")


def options_of(sampling: EvalSampling, speculation: SpeculationOptions) -> dict[str, Any]:
    """Returns the options of `Shoal.generate`."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **sampling.guided,
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


def settings_of(eval_set: EvalSet, source: ModelSource, config: SamplingConfig) -> dict[str, Any]:
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


def interrupted(evaluation: Evaluation, done: str) -> str:
    """Returns the message after Ctrl-C, with the verb `done` of the problems that have samples."""
    every, missing = len(evaluation.tasks), len(evaluation.missing)
    return (
        f"interrupted: {every - missing} of {every} problems {done}; with --output, the same "
        f"command goes on"
    )
