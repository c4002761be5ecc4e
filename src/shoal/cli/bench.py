"""`shoal bench`: decoding methods, measured on the same work after their greedy tokens agreed.

The results are written to files and tables.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from rich.console import Console

from shoal.bench.machine import TIMEOUT, QuietGate
from shoal.cli.console import EXIT_INTERRUPTED, StatusLine, imports_shown
from shoal.cli.files import listed_prompts, require_writable, write_whole
from shoal.cli.option_groups import (
    models_option,
    option_groups,
    output_option,
    sampling_option,
    speed_option,
)
from shoal.cli.options import (
    PROMPTS_HELP,
    GuidanceOption,
    JsonOption,
    ModelSource,
    NewTokensOption,
    PairNames,
    PlausibilityOption,
    parse_lookahead,
)
from shoal.cli.progress import duration, progress_bar
from shoal.errors import RequestError
from shoal.stored_problems import stored_problems

if TYPE_CHECKING:
    from shoal.api import Shoal
    from shoal.bench.decoding_methods import Job
    from shoal.bench.report import Report


@dataclass(frozen=True)
class ReportOptions:
    """The files for the results, and the form of the tables."""

    output: Annotated[
        Path | None, output_option("--output", "-o", help="Write every repeat to a JSON file.")
    ] = None
    plot: Annotated[Path | None, output_option("--plot", help="Write two plots (.png, .svg).")] = (
        None
    )
    results: Annotated[
        Path | None, output_option(help="Directory for a JSON file named by date and machine.")
    ] = None
    replay: Annotated[
        Path | None, output_option(help="Show a JSON file again instead of measuring.")
    ] = None
    markdown: Annotated[bool, output_option("--markdown", help="Tables as Markdown.")] = False
    json: JsonOption = False

    def __post_init__(self) -> None:
        if self.json and self.markdown:
            raise RequestError("--json prints no tables: leave out --markdown")

    def require_writable(self) -> None:
        """Raises RequestError, before anything is measured, if a file cannot be written."""
        for path in (self.output, self.plot):
            if path is not None:
                require_writable(path)
        if self.results is not None and not self.results.is_dir():
            raise RequestError(f"--results {str(self.results)!r} is not a directory")
        if self.plot is not None:
            from shoal.bench.report_views import require_matplotlib

            require_matplotlib()

    def deliver(self, report: Report, *, quick: bool = False) -> None:
        """Writes the files first, then the tables (`quick`: a small one), or JSON, to stdout."""
        from shoal.bench import quick as short
        from shoal.bench import report_views
        from shoal.bench.machine import require_place

        files = [self.output] if self.output else []
        files += [self.results / _file_name(report)] if self.results else []
        for path in files:
            require_place(path, made_at=str(report.machine["commit"]))
            write_whole(path, json.dumps(report.to_dict(), indent=1) + "\n")
        if self.plot is not None and report.lines:
            from shoal.bench.report_views import plot

            plot(report, self.plot)
        if self.json:
            print(json.dumps(short.document(report) if quick else report.to_dict()))
            return
        if self.markdown:
            print(report_views.markdown(report))
            return
        (short if quick else report_views).show(report, _console(report_views.WIDTH))


def _console(width: int) -> Console:
    """Returns a console as wide as the terminal; in a file it is as wide as the tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def _file_name(report: Report) -> str:
    """Returns a name such as 2026-11-21-x86_64-2-threads.json.

    An earlier file of the same day is replaced.
    """
    machine = report.machine
    parts = [machine["date"], machine["device"], f"{machine['threads']}-threads"]
    parts += ["imposed"] if report.config["acceptance"] is not None else []
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-") + ".json"


def read_report(file: Path) -> Report:
    """Reads a report that `--output` wrote; raises RequestError for any other file."""
    from shoal.bench.report import Report

    try:
        return Report.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(f"cannot replay {str(file)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"cannot replay {str(file)!r}: it is no report, the .json that shoal bench wrote into "
            f"the directory of --output"
        ) from error


POOL = 64  # held-out problems that are the default prompts

Value = TypeVar("Value")


@dataclass(frozen=True)
class RandomWeights(PairNames):
    """The option for random weights."""

    shape: Annotated[
        str | None,
        models_option(
            help="Random weights instead: 7.8b/310m, 16b/350m, 13b/125m, 8b/1.24b or tiny."
        ),
    ] = None


@dataclass(frozen=True)
class BenchSource(ModelSource, RandomWeights):
    """The pair that is measured.

    Python reads bases from the right, so the fields of `RandomWeights` precede ModelSource's own.
    """

    def pair(self, seed: int) -> Shoal:
        """Returns the pair; raises RequestError if options contradict each other."""
        from shoal.bench.random_pairs import shaped_pair

        if self.shape is None:
            return self.load()
        if self.model is not None or self.draft is not None:
            raise RequestError("--shape makes its own models: leave out --model and --draft")
        if self.guide is not None or self.expert is not None:
            raise RequestError("--shape makes no guide: leave out --guide and --expert")
        placed = {
            name: getattr(self, name)
            for name in ("dtype", "device", "max_batch", "attention", "compile", "quantize")
        }
        return shaped_pair(self.shape, seed=seed, **placed)


@dataclass(frozen=True)
class WorkOptions:
    """The work that is decoded; every combination of the lists is measured."""

    quick: Annotated[
        bool,
        speed_option(
            "--quick",
            help="Your own figures in a minute: plain, auto, and the share of what the machine can "
            "do, at batch 1 and 8.",
        ),
    ] = False
    prompts: Annotated[
        list[Path] | None,
        sampling_option(
            help=f"{PROMPTS_HELP} Repeatable. Without any, held-out problems of the bundled "
            f"pair's training."
        ),
    ] = None
    prompt_tokens: Annotated[
        int, sampling_option(min=1, help="Length of the random prompts of a --shape.")
    ] = 128
    layout: Annotated[
        str,
        sampling_option(
            help="different: a prompt per row; same: one prompt for all rows; grouped: -n "
            "samples per prompt; both: the first two."
        ),
    ] = "different"
    n: Annotated[
        int,
        sampling_option(
            "-n", "--samples", min=1, help="Samples per prompt where --layout is grouped."
        ),
    ] = 8
    temperature: Annotated[str, sampling_option(metavar="T,...", help="0 = greedy.")] = "0.8"
    guidance: GuidanceOption = 0.0
    plausibility: PlausibilityOption = 0.0
    max_new_tokens: NewTokensOption = 128
    eos: Annotated[
        bool, sampling_option("--eos", help="Rows end at EOS; otherwise all have the same length.")
    ] = False
    seed: Annotated[int, sampling_option(help="Of the samples and of random weights.")] = 0
    batch_sizes: Annotated[str, speed_option(metavar="B,...", help="Rows decoded together.")] = (
        "1,2,4,8,16,32"
    )
    lookahead: Annotated[
        str,
        speed_option("--lookahead", "--k", "-k", metavar="K,...", help="Draft lengths and rules."),
    ] = "off,fixed:4,bass,auto"
    baselines: Annotated[
        str,
        speed_option(
            metavar="NAME,...",
            help="Transformers' own: hf, hf-static (compiled), hf-continuous, hf-assisted.",
        ),
    ] = "hf"
    rule: Annotated[
        Literal["rejection", "coupled", "typical"],
        speed_option(
            help="How drafts are accepted; see shoal generate. typical: lossy; tables say so."
        ),
    ] = "rejection"
    acceptance: Annotated[
        float | None,
        speed_option(
            min=0, max=1, help="Impose an acceptance rate per draft; the text then means nothing."
        ),
    ] = None

    def job(self, repeats: int) -> Job:
        """Returns the job without the ids that end rows; raises RequestError for a faulty list."""
        with imports_shown():
            from shoal.bench.decoding_methods import Job

        return Job(
            batches=_list(self.batch_sizes, int, "--batch-sizes"),
            n=self.n,
            layouts=("different", "same")
            if self.layout == "both"
            else _list(self.layout, str, "--layout"),
            temperatures=_list(self.temperature, float, "--temperature"),
            lookaheads=_lookaheads(self.lookahead),
            baselines=_list(self.baselines, str, "--baselines"),
            max_new_tokens=self.max_new_tokens,
            repeats=repeats,
            seed=self.seed,
            rule=self.rule,
            acceptance=self.acceptance,
            guidance=self.guidance,
            plausibility=self.plausibility,
        )


@option_groups(without={"max_batch", "tensor_parallel"})
def bench(
    work: WorkOptions,
    source: BenchSource,
    output: ReportOptions,
    repeats: Annotated[
        int, speed_option(min=1, help="Timed runs of each method; medians are shown.")
    ] = 3,
    wait: Annotated[
        float,
        speed_option(min=0, metavar="SECONDS", help="Wait for a quiet machine, in all at most."),
    ] = TIMEOUT,
) -> int:
    """Measure speculative against plain decoding and the methods of Transformers.

    First decodes greedily at every batch size, layout and draft length: in float32 the tokens must
    be those of plain decoding, or nothing is shown. Then waits for a quiet machine, runs all
    methods in turns on the same prompts and shows medians; results measured while another process
    used more than a fifth of a core are marked as disturbed.
    """
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # keeps torch's profiler, which counts memory, quiet; read at its import
    output.require_writable()
    if output.replay is not None:
        output.deliver(read_report(output.replay))
        return 0
    if work.quick:
        from shoal.bench import quick

        work, wait = quick.smaller(work), quick.WAIT if wait == TIMEOUT else wait
    return _measure(source, work, repeats, wait, output)


def _measure(
    source: BenchSource, work: WorkOptions, repeats: int, wait: float, output: ReportOptions
) -> int:
    """Loads, measures and delivers; after Ctrl-C it delivers the finished measurements."""
    texts = listed_prompts(work.prompts or [])
    source.require_guide(work.guidance)
    job = work.job(repeats)
    from shoal.bench.job_runner import BenchmarkRunner
    from shoal.bench.machine import require_place

    require_place(output.output, output.results)
    if not job.cases:  # before a model is loaded
        raise RequestError(
            "nothing to measure: give at least one batch size, layout and temperature"
        )
    with StatusLine() as status:
        status.say("loading ...")
        pair = replace(source, max_batch=max(job.batches)).pair(job.seed)
    if work.quick and pair.drafter_name is None:
        job = replace(job, lookaheads=())
    with progress_bar() as bar:
        job = replace(job, eos=tuple(pair.eos) if work.eos else ())
        gate = QuietGate(timeout=wait, say=bar.note)
        runner = BenchmarkRunner(
            pair, job, _pool(pair, texts, work.prompt_tokens, job), bar.step, gate
        )
        bar.left = lambda: runner.seconds_left
        bar.expect(runner.steps)
        interrupted = False
        try:
            runner.check()
            bar.note(f"measuring will take about {duration(runner.warm_up())}")
            for _ in runner.measure():
                pass
        except KeyboardInterrupt:
            interrupted = True
    output.deliver(runner.report, quick=work.quick)
    return EXIT_INTERRUPTED if interrupted else 0


def _pool(pair: Shoal, texts: list[str], prompt_tokens: int, job: Job) -> list[tuple[int, ...]]:
    """Returns the prompts as ids: the given ones, or held-out problems.

    A pair without a tokenizer gets random ids.
    """
    size = max(POOL, *job.batches)
    if pair.tokenizer is None:
        if texts:
            raise RequestError(
                "--shape has no tokenizer: its prompts are random, leave out --prompts"
            )
        import random

        generator = random.Random(job.seed)
        return [
            tuple(generator.choices(range(pair.target.vocab_size), k=prompt_tokens))
            for _ in range(size)
        ]
    if not texts:
        texts = [problem.prompt for problem in stored_problems("held_out")[:size]]
    return [tuple(pair.tokenizer.encode(text)) for text in texts]


def _list(text: str, kind: Callable[[str], Value], option: str) -> tuple[Value, ...]:
    """Splits values separated by commas; an empty text is an empty list."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise RequestError(f"{option} must be values separated by commas, got {text!r}") from None


def _lookaheads(text: str) -> tuple[str, ...]:
    names = _list(text, str, "--lookahead")
    for name in names:
        parse_lookahead(name)
    return tuple("off" if name in ("0", "fixed:0") else name for name in names)
