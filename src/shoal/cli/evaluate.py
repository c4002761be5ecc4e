"""`shoal eval`: quality within a time budget, by every method of decoding."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shoal.cli.console import plain_table, printable, stderr, stdout
from shoal.cli.options import (
    OUTPUT,
    SAMPLING,
    SPEED,
    AttentionOption,
    CompileOption,
    DeviceOption,
    DraftOption,
    DraftRevisionOption,
    DtypeOption,
    JsonOption,
    LocalOption,
    LookaheadOption,
    ModelOption,
    NewTokensOption,
    QuantizeOption,
    RevisionOption,
    RuleOption,
    SamplesOption,
    Source,
    StrictOption,
    TrustOption,
    parse_lookahead,
)
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.evaluation.grading import Grader
    from shoal.evaluation.problems import Problem
    from shoal.evaluation.run import Evaluation
    from shoal.evaluation.sampling import SamplingConfig
    from shoal.evaluation.sandbox import Sandbox
    from shoal.evaluation.tasks import Task

EXIT_INTERRUPTED = 130
UNBOUNDED = 10_000  # columns
Set = Literal["humaneval", "mbxp", "functions", "infilling", "summarize"]
Isolation = Literal["auto", "bubblewrap", "namespaces", "limits"]
Value = TypeVar("Value")


def evaluate(
    set_: Annotated[Set, typer.Argument(metavar="SET", help="humaneval, mbxp, functions, infilling or summarize.")],
    data: Annotated[
        Path | None,
        typer.Option(help="The set, .jsonl or .jsonl.gz; functions needs none. Nothing is downloaded."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems; functions: 200 without it.")] = None,
    solutions: Annotated[
        str | None,
        typer.Option(
            metavar="canonical|FILE",
            help="Judge these completions (JSON Lines of task_id, completion) and no model's.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Programs executed at a time.", show_default="the number of cores")
    ] = None,
    sandbox: Annotated[
        Isolation,
        typer.Option(
            help="What isolates programs; auto: the strongest that keeps them from files and network here, or none. "
            "limits leaves the network open."
        ),
    ] = "auto",
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    draft_revision: DraftRevisionOption = None,
    local_files_only: LocalOption = False,
    trust_remote_code: TrustOption = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask by the model's chat template.", rich_help_panel=SAMPLING)
    ] = False,
    n: SamplesOption = 8,
    max_new_tokens: NewTokensOption = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.", rich_help_panel=SAMPLING)] = 0.2,
    top_p: Annotated[
        float, typer.Option(help="Smallest set of tokens with this mass; 1 = off.", rich_help_panel=SAMPLING)
    ] = 0.95,
    seed: Annotated[
        int | None,
        typer.Option(help="The same seed gives the same samples by every method; fresh entropy without.", rich_help_panel=SAMPLING),
    ] = None,
    time_budget: Annotated[
        str,
        typer.Option(
            metavar="SECONDS,...", rich_help_panel=SAMPLING,
            help="Budgets at which one run is looked at; inf: none. Rows are cut at the longest.",
        ),
    ] = "inf",
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD,...", show_default="all that there is a drafter for", rich_help_panel=SPEED,
            help="plain; single: speculation sample after sample; batched: speculation on all samples at once.",
        ),
    ] = None,
    lookahead: LookaheadOption = "auto",
    rule: RuleOption = "auto",
    attention: AttentionOption = "auto",
    compile_passes: CompileOption = "auto",
    quantize: QuantizeOption = "off",
    strict: StrictOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for results, summary, figure and report. The same command goes on where it stopped.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot/--no-plot", help="Draw the figure (with --out).", rich_help_panel=OUTPUT)
    ] = True,
    json_output: JsonOption = False,
) -> int:  # fmt: skip
    """Measure how good the samples are that are ready in time.

    Samples each problem once by plain decoding, by speculation one sample after the other and by batched speculation, executes the
    programs, and tells for every budget what the samples finished by then come to: Pass@First (the one ranked first by mean
    log-probability), Pass@All, pass@k, each with a 95 % bootstrap interval over problems. Programs run in a sandbox.
    """
    if out is not None:
        from shoal.bench.provenance import require_place

        require_place(out)
    if solutions is not None:
        with _directory(out) as directory:
            return _judge(Suite.read(set_, data, limit, chat), solutions, workers, sandbox, directory, as_json=json_output)
    budgets = parse_budgets(time_budget)
    suite = Suite.read(set_, data, limit, chat)  # first: a broken file is told before torch is there
    source = Source(
        model, draft, dtype, device, revision, draft_revision, attention, max(n, 1), trust_remote_code, local_files_only,
        compile_passes, quantize, strict,
    )  # fmt: skip
    plan = _plan(
        source, methods, n, lookahead or "auto", seed, rule=rule, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, time_budget=None if math.isinf(max(budgets)) else max(budgets),
    )  # fmt: skip
    if plot and out is not None:
        from shoal.evaluation.figure import require_matplotlib

        require_matplotlib()
    with _directory(out) as directory:
        from shoal.evaluation.run import Evaluation

        evaluation = Evaluation(directory, suite.tasks, plan, _settings(suite, source, plan))
        drawn = plot and out is not None
        return _evaluate(evaluation, suite, source, budgets, workers, sandbox, plot=drawn, as_json=json_output)


@dataclass(frozen=True)
class Suite:
    """A set as it was read.

    Attributes:
        tasks: what models are asked. problems: to be judged; empty for summaries. documents: of summaries.
        fingerprint: of the file; "" for the generated set.
    """

    name: str
    tasks: Sequence[Task]
    problems: Sequence[Problem] = ()
    documents: Sequence[Any] = ()
    chat: bool = False
    file: str = ""
    fingerprint: str = ""

    @staticmethod
    def read(name: str, data: Path | None, limit: int | None, chat: bool) -> Suite:
        """Raises RequestError for a missing or wrong file."""
        from shoal.evaluation import problems, tasks

        if name == "functions":
            if data is not None:
                raise RequestError("the set functions is generated: leave out --data")
            found = tasks.function_problems(limit or tasks.FUNCTIONS)
            return Suite(name, tasks.code_tasks(found, chat=chat), found, chat=chat)
        if data is None:
            raise RequestError(f"give the file of the set: shoal eval {name} --data FILE; nothing is bundled or downloaded")
        file: dict[str, Any] = {"chat": chat, "file": data.name}
        if name == "summarize":
            documents = tasks.read_documents(data)[:limit]
            return Suite(
                name, tasks.summary_tasks(documents, chat=chat), documents=documents, fingerprint=_digest(data), **file
            )
        if name == "infilling" and chat:
            raise RequestError("a middle is filled in by special tokens, not in a chat: leave out --chat")
        read = problems.read_mbxp if name == "mbxp" else problems.read_humaneval
        found = read(data)[:limit]
        made = tasks.infilling_tasks(found) if name == "infilling" else tasks.code_tasks(found, chat=chat)
        return Suite(name, made, found, fingerprint=_digest(data), **file)

    @property
    def scores(self) -> Sequence[str]:
        """What its grades hold, the most important first."""
        from shoal.evaluation.grading import PASSED, ROUGE

        return (PASSED,) if self.problems else ROUGE


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def parse_budgets(text: str) -> list[float]:
    """Seconds, rising; inf is no budget. Raises RequestError."""
    try:
        budgets = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        budgets = []
    if not budgets or not all(budget > 0 for budget in budgets):
        raise RequestError(f"--time-budget must be seconds > 0 separated by commas, or inf, got {text!r}")
    return budgets


def _plan(source: Source, methods: str | None, n: int, lookahead: str, seed: int | None, **options: Any) -> SamplingConfig:
    """Checked before a model is loaded."""
    from shoal.evaluation.sampling import METHODS, PLAIN, SamplingConfig

    length = parse_lookahead(lookahead)
    speculative = (source.model is None or source.draft is not None) and length not in ("off", 0)
    possible = METHODS if speculative else (PLAIN,)
    chosen = possible if methods is None else tuple(part.strip() for part in methods.split(",") if part.strip())
    if not speculative and set(chosen) - {PLAIN}:
        raise RequestError("only --methods plain is left without a drafter or with --lookahead off")
    return SamplingConfig(n, options, length, seed, chosen)


def _settings(suite: Suite, source: Source, plan: SamplingConfig) -> dict[str, Any]:
    """All that the samples and their times depend on."""
    import torch

    from shoal import __version__

    models = {name: str(value) for name, value in vars(source).items() if value not in (None, False)}
    return {
        "set": suite.name, "file": suite.file, "fingerprint": suite.fingerprint, "chat": suite.chat,
        "model": "bundled pair", **models, "n": plan.n, **plan.options, "lookahead": plan.lookahead, "seed": plan.seed,
        "methods": list(plan.methods), "threads": torch.get_num_threads(), "shoal": __version__,
    }  # fmt: skip


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    """The given directory, or one that is gone afterwards."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="shoal-eval-") as directory:
        yield Path(directory)


def _evaluate(
    evaluation: Evaluation, suite: Suite, source: Source, budgets: list[float], workers: int | None, sandbox: Isolation, *,
    plot: bool, as_json: bool,
) -> int:  # fmt: skip
    """Samples, grades and reports; after Ctrl-C says how to go on."""
    from shoal.bench.machine import machine
    from shoal.evaluation.sampling import Sampler

    try:
        with _grader(suite, workers, sandbox) as (grader, extra):
            if evaluation.missing:
                evaluation.sample(Sampler(source.load(), evaluation.config), _watch)
            evaluation.grade(grader, _watch)
    except KeyboardInterrupt:
        done, many = len(evaluation.tasks) - len(evaluation.missing), len(evaluation.tasks)
        stderr().print(f"interrupted: {done} of {many} problems sampled; with --out, the same command goes on")
        return EXIT_INTERRUPTED
    import torch

    extra = {"machine": machine(torch.device("cpu")), **extra}
    summary = evaluation.report(suite.scores, budgets, extra, plot=plot)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        _show(summary, evaluation.directory if plot else None)
    return 0


@contextmanager
def _grader(suite: Suite, workers: int | None, isolation: Isolation) -> Iterator[tuple[Grader, dict[str, Any]]]:
    """What grades the suite, and what the summary should say of it."""
    from shoal.evaluation.grading import code_grader, rouge_grader

    if not suite.problems:
        yield rouge_grader(suite.documents), {}
        return
    with _sandbox(isolation) as sandbox:
        yield code_grader(suite.problems, sandbox, workers), {"isolation": sandbox.isolation}


@contextmanager
def _sandbox(isolation: Isolation) -> Iterator[Sandbox]:
    """A sandbox that says, before the first program, what it keeps programs from."""
    from shoal.evaluation.sandbox import Sandbox

    with Sandbox(isolation) as sandbox:
        stderr().print(f"programs are executed in: {sandbox.isolation}", markup=False, soft_wrap=True)
        yield sandbox


def _watch(what: str, results: Iterable[Value], total: int) -> Iterator[Value]:
    """Passes results on with a bar and the time left on stderr; silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(results, total=total, description=what)


def _show(summary: dict[str, Any], directory: Path | None) -> None:
    """The table, then what it says."""
    from shoal.evaluation.figure import title
    from shoal.evaluation.tables import columns, findings, legend, rows

    console = stdout()
    console.print(title(summary), style="bold", markup=False)
    table = plain_table(*columns(summary))
    table.columns[1].justify = "left"
    for row in rows(summary):
        table.add_row(*row)
    wide = stdout()
    wide.width = UNBOUNDED  # a wide table that the terminal wraps can be read, one that is cut cannot
    wide.width = max(console.width, wide.measure(table).maximum)
    wide.print(table)
    for line in (legend(summary), *findings(summary)):
        console.print(printable(line), markup=False)
    if directory is not None:
        console.print(f"written to {directory}", markup=False)


def _judge(
    suite: Suite, solutions: str, workers: int | None, isolation: Isolation, directory: Path, *, as_json: bool
) -> int:  # fmt: skip
    """Judges given completions; says how many passed, and which did not. After Ctrl-C of those that were judged by then."""
    from shoal.evaluation.execution import read_solutions
    from shoal.evaluation.solutions import Solutions

    if not suite.problems:
        raise RequestError("summaries are not judged: leave out --solutions")
    pairs = read_solutions(solutions, suite.problems)
    code = 0
    with _sandbox(isolation) as sandbox:
        held = Solutions(directory, pairs, _judging(suite, solutions, sandbox))
        try:
            held.execute(sandbox, workers, _watch)
        except KeyboardInterrupt:
            stderr().print(f"interrupted: {len(held.results)} of {len(pairs)} judged; with --out, the same command goes on")
            code = EXIT_INTERRUPTED
    summary = held.report(suite.problems, {"isolation": sandbox.isolation})
    if as_json:
        print(json.dumps(summary))
    else:
        _show_verdicts(summary)
    return code


def _judging(suite: Suite, solutions: str, sandbox: Sandbox) -> dict[str, Any]:
    """All that the verdicts depend on."""
    given = {"solutions": solutions, "solutions_fingerprint": "" if solutions == "canonical" else _digest(Path(solutions))}
    return {
        "set": suite.name, "file": suite.file, "fingerprint": suite.fingerprint, "problems": len(suite.problems), **given,
        "sandbox": sandbox.backend,
    }  # fmt: skip


def _show_verdicts(summary: dict[str, Any]) -> None:
    """What failed, then a table of the languages."""
    console = stdout()
    for failure in summary["failures"]:
        console.print(
            printable(f"{failure['task_id']}: {failure['outcome']}: {failure['headline']}"), markup=False, soft_wrap=True
        )
    table = plain_table("language", "problems", "without a solution", "passed", "of", "per cent")
    for name, counts in summary["languages"].items():
        share = f"{100 * counts['passed'] / counts['total']:.1f}" if counts["total"] else "–"
        columns = ("problems", "without_solution", "passed", "total")
        table.add_row(name, *(str(counts[column]) for column in columns), share)
    console.print(table)
