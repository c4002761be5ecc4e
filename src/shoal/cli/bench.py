"""`shoal bench`: decoding methods measured on the same work, once their greedy tokens were compared."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cli.console import stderr
from shoal.cli.files import listed_prompts, require_writable, write_whole
from shoal.cli.generate import EXIT_INTERRUPTED
from shoal.cli.options import (
    MODELS,
    OUTPUT,
    PROMPTS_HELP,
    SAMPLING,
    SPEED,
    AttentionOption,
    CompileOption,
    DeviceOption,
    DraftOption,
    DraftRevisionOption,
    DtypeOption,
    LocalOption,
    ModelOption,
    NewTokensOption,
    QuantizeOption,
    RevisionOption,
    Source,
    StrictOption,
    TrustOption,
    parse_lookahead,
)
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.bench.report import Report
    from shoal.bench.runner import Job

PROBLEMS_SEED, POOL = 20, 64  # held-out problems that are the default prompts

Value = TypeVar("Value")


def bench(
    model: ModelOption = None,
    draft: DraftOption = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights instead: 7.8b/310m, 16b/350m, 13b/125m or tiny.", rich_help_panel=MODELS),
    ] = None,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="Shuffle the drafter's weights.", rich_help_panel=MODELS)
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    draft_revision: DraftRevisionOption = None,
    local_files_only: LocalOption = False,
    trust_remote_code: TrustOption = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"{PROMPTS_HELP} Repeatable. Without any, held-out problems of the bundled pair's training.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the random prompts of a --shape.", rich_help_panel=SAMPLING)
    ] = 128,
    layout: Annotated[
        str,
        typer.Option(
            help="different: a prompt per row; same: one prompt for all rows; grouped: -n rows per prompt; both: the first two.",
            rich_help_panel=SAMPLING,
        ),
    ] = "different",
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Rows per prompt when grouped.", rich_help_panel=SAMPLING)] = 8,
    temperature: Annotated[
        str, typer.Option(metavar="T,...", help="0 = greedy.", rich_help_panel=SAMPLING)
    ] = "0.8",
    max_new_tokens: NewTokensOption = 128,
    stop_at_eos: Annotated[
        bool,
        typer.Option("--eos", help="Rows end at EOS; otherwise all have the same length.", rich_help_panel=SAMPLING),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the samples and of random weights.", rich_help_panel=SAMPLING)] = 0,
    batch_sizes: Annotated[
        str, typer.Option(metavar="B,...", help="Rows decoded together.", rich_help_panel=SPEED)
    ] = "1,2,4,8,16,32",
    lookahead: Annotated[
        str, typer.Option("--lookahead", "--k", "-k", metavar="K,...", help="Draft lengths and rules.", rich_help_panel=SPEED)
    ] = "off,fixed:4,bass,auto",
    baselines: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Transformers' own: hf, hf-static (compiled), hf-continuous, hf-assisted.",
            rich_help_panel=SPEED,
        ),
    ] = "hf",
    rule: Annotated[
        Literal["rejection", "coupled"], typer.Option(help="How drafts are judged; see Speculation.", rich_help_panel=SPEED)
    ] = "rejection",
    acceptance: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Impose an acceptance rate per draft; the text then means nothing.", rich_help_panel=SPEED),
    ] = None,
    regret: Annotated[
        bool,
        typer.Option("--regret", help="Sweep draft lengths and compare the rules with the best.", rich_help_panel=SPEED),
    ] = False,
    attention: AttentionOption = "auto",
    compile_passes: CompileOption = "auto",
    quantize: QuantizeOption = "off",
    strict: StrictOption = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; medians are shown.", rich_help_panel=SPEED)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all, every repeat.", rich_help_panel=OUTPUT)] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write two plots (.png, .svg).", rich_help_panel=OUTPUT)] = None,
    results: Annotated[
        Path | None, typer.Option(help="Directory for a JSON file named by date and machine.", rich_help_panel=OUTPUT)
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show a JSON file again instead of measuring.", rich_help_panel=OUTPUT)
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.", rich_help_panel=OUTPUT)] = False,
) -> int:  # fmt: skip
    """Measure speculative against plain decoding and Transformers' own methods.

    First decodes greedily at every batch size, layout and draft length: in float32 the tokens must be those of plain decoding, or
    nothing is shown. Then runs all methods in turns on the same prompts and shows medians.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler, which counts memory, talks; read at its import
    source = Source(
        model, draft, dtype, device, revision, draft_revision, attention, trust_remote_code=trust_remote_code,
        local_files_only=local_files_only, compile=compile_passes, quantize=quantize, strict=strict,
    )  # fmt: skip
    source.quieten_transformers()
    target = Destination(json_file, plot_file, results, as_markdown, regret)
    if replay is not None:
        target.deliver(_read(replay))
        return 0
    return _measure(
        source, target, shape, shuffled,
        texts=listed_prompts(prompts or []), prompt_tokens=prompt_tokens, stop_at_eos=stop_at_eos,
        batches=_list(batch_sizes, int, "--batch-sizes"), n=n, repeats=repeats, max_new_tokens=max_new_tokens, seed=seed,
        layouts=("different", "same") if layout == "both" else _list(layout, str, "--layout"),
        temperatures=_list(temperature, float, "--temperature"), rule=rule, acceptance=acceptance,
        lookaheads=_lookaheads(lookahead, regret), baselines=() if regret else _list(baselines, str, "--baselines"),
    )  # fmt: skip


@dataclass(frozen=True)
class Destination:
    """Where results go; wrong places are refused before anything is measured."""

    json: Path | None
    plot: Path | None
    results: Path | None
    markdown: bool
    regret: bool

    def __post_init__(self) -> None:
        for path in (self.json, self.plot):
            if path is not None:
                require_writable(path)
        if self.results is not None and not self.results.is_dir():
            raise RequestError(f"--results {str(self.results)!r} is not a directory")
        if self.plot is not None:
            from shoal.bench.plots import require_matplotlib

            require_matplotlib()

    def deliver(self, report: Report) -> None:
        """Files first, then the tables on stdout."""
        from shoal.bench import regret, tables
        from shoal.bench.provenance import write_results

        files = [self.json] if self.json else []
        files += [self.results / _file_name(report)] if self.results else []
        for path in files:
            write_results(path, report.to_dict(), write_whole)
        if self.plot is not None and report.lines:
            from shoal.bench.plots import plot

            plot(report, self.plot)
        if self.markdown:
            print(tables.markdown(report))
            return
        console = _console(tables.WIDTH)
        tables.show(report, console)
        if self.regret:
            regret.show(report, console)


def _console(width: int) -> Console:
    """As wide as the terminal, or as the tables need in a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def _file_name(report: Report) -> str:
    """Such as 2026-11-21-x86_64-2-threads.json; an earlier file of the day is replaced."""
    machine = report.machine
    parts = [machine["date"], machine["device"], f"{machine['threads']}-threads"]
    parts += ["imposed"] if report.config["acceptance"] is not None else []
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-") + ".json"


def _measure(
    source: Source, target: Destination, shape: str | None, shuffled: bool, *, texts: list[str], prompt_tokens: int,
    stop_at_eos: bool, **job: Any,
) -> int:  # fmt: skip
    """Loads, measures and delivers; after Ctrl-C delivers what there is."""
    from dataclasses import replace

    from shoal.bench.provenance import require_place
    from shoal.bench.runner import BenchmarkRunner, Job

    require_place(target.json, target.results)
    if not Job(**job).cases:  # and whatever else is wrong with it is said before a model is loaded
        raise RequestError("nothing to measure: give at least one batch size, layout and temperature")
    with _progress() as bar:
        bar.say("loading ...")
        pair = _pair(replace(source, max_batch=max(job["batches"])), shape, shuffled, job["seed"])
        chosen = Job(**job, eos=tuple(pair.eos) if stop_at_eos else ())
        runner = BenchmarkRunner(pair, chosen, _pool(pair, texts, prompt_tokens, chosen), bar.step)
        bar.expect(runner.steps)
        interrupted = False
        try:
            runner.check()
            bar.note(f"measuring will take about {_minutes(runner.warm_up())}")
            for _ in runner.measure():
                pass
        except KeyboardInterrupt:
            interrupted = True
    target.deliver(runner.report)
    return EXIT_INTERRUPTED if interrupted else 0


def _pair(source: Source, shape: str | None, shuffled: bool, seed: int) -> Shoal:
    from shoal.bench.shapes import shaped_pair, shuffle_weights

    if shape is None:
        pair = source.load()
    elif source.model is not None:
        raise RequestError("--shape makes its own models: leave out --model and --draft")
    else:
        placed = {
            name: getattr(source, name) for name in ("dtype", "device", "max_batch", "attention", "compile", "quantize")
        }
        pair = shaped_pair(shape, seed=seed, **placed)
    if shuffled:
        if pair.draft_model is None:
            raise RequestError("--shuffled needs a drafter: give --draft")
        shuffle_weights(pair.draft_model, seed)
    return pair


def _pool(pair: Shoal, texts: list[str], prompt_tokens: int, job: Job) -> list[tuple[int, ...]]:
    """The prompts as ids: those given, random ones for a pair without tokenizer, or held-out problems."""
    size = max(POOL, *job.batches)
    if pair.tokenizer is None:
        if texts:
            raise RequestError("--shape has no tokenizer: its prompts are random, leave out --prompts")
        import random

        dice = random.Random(job.seed)
        return [tuple(dice.choices(range(pair.target.vocab_size), k=prompt_tokens)) for _ in range(size)]
    if not texts:
        from shoal.problems.generator import generate

        texts = [problem.prompt for problem in generate(PROBLEMS_SEED, size, "templates")]
    return [tuple(pair.tokenizer.encode(text)) for text in texts]


def _read(file: Path) -> Report:
    from shoal.bench.report import Report

    try:
        return Report.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"cannot replay {str(file)!r}: {error}") from error


def _list(text: str, kind: Callable[[str], Value], option: str) -> tuple[Value, ...]:
    """Values separated by commas; an empty text is an empty list."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise RequestError(f"{option} must be values separated by commas, got {text!r}") from None


def _lookaheads(text: str, regret: bool) -> tuple[str, ...]:
    from shoal.bench.regret import LOOKAHEADS

    names = LOOKAHEADS if regret else _list(text, str, "--lookahead")
    for name in names:
        parse_lookahead(name)
    return tuple("off" if name in ("0", "fixed:0") else name for name in names)


def _minutes(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


class Bar:
    """Runs made so far, on stderr; silent but for notes where stderr is no terminal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("", total=None)

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def expect(self, steps: int) -> None:
        self.progress.update(self.task, total=steps)

    def step(self, text: str) -> None:
        """One more run begins."""
        self.progress.update(self.task, description=text, advance=1)

    def note(self, text: str) -> None:
        """A line that stays."""
        self.progress.console.print(text)


@contextmanager
def _progress() -> Iterator[Bar]:
    console = stderr()
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress)
