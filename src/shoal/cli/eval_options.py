"""The options of `shoal eval`: samples, the place of results, and all of it as settings.

Its progress is on stderr and its tables are on stdout; `--export FORMAT:FILE` writes the samples
for another evaluator.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rich.console import Console

from shoal.cli.console import imports_shown, plain_table, printable, stderr, stdout
from shoal.cli.eval_set import EvalSet
from shoal.cli.files import require_writable, write_whole
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
from shoal.cli.progress import progress_bar
from shoal.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.cli.eval_set import EvalSet
    from shoal.evaluation.exports import ExportFormat
    from shoal.evaluation.journal import Evaluation
    from shoal.evaluation.sampling import SamplingConfig


UNBOUNDED = 10_000  # columns
Value = TypeVar("Value")


def with_progress(what: str, results: Iterable[Value], total: int) -> Iterator[Value]:
    """Yields the results, with a bar and the time left on stderr."""
    with progress_bar() as bar:
        bar.expect(total, what)
        for result in results:
            bar.step(what)
            yield result


def show_summary(summary: dict[str, Any], directory: Path | None) -> None:
    """Prints the table of a summary, then its findings."""
    from shoal.evaluation.figure import columns, findings, legend, rows, title

    console = stdout()
    console.print(title(summary), style="bold", markup=False)
    show_table(console, columns(summary), list(rows(summary)))
    for line in (legend(summary), *findings(summary)):
        console.print(printable(line), markup=False)
    if directory is not None:
        console.print(f"written to {directory}", markup=False)


def show_table(console: Console, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a line per budget and method, headed by its first cells.

    A terminal that is too narrow gets a table per budget, with a column per method.
    """
    table = plain_table(*heads)
    table.columns[1].justify = "left"
    for line in lines:
        table.add_row(*line)
    if show_wide(console, table):
        return
    for budget in dict.fromkeys(line[0] for line in lines):
        chosen = [line for line in lines if line[0] == budget]
        table = plain_table(f"budget: {budget}", *(line[1] for line in chosen))
        for place, head in enumerate(heads[2:], 2):
            table.add_row(head, *(line[place] for line in chosen))
        console.print(table)
        console.print()


def show_wide(console: Console, table: Table) -> bool:
    """Prints a table in its full width, which a file always takes.

    Returns:
        False if the terminal is too narrow, and nothing was printed.
    """
    wide = stdout()
    wide.width = UNBOUNDED
    widest = wide.measure(table).maximum
    if widest > console.width and console.is_terminal:
        return False
    wide.width = max(console.width, widest)
    wide.print(table)
    return True


def show_solutions(summary: dict[str, Any]) -> None:
    """Prints the failures, then a table of the languages."""
    console = stdout()
    for failure in summary["failures"]:
        console.print(
            printable(f"{failure['task_id']}: {failure['outcome']}: {failure['headline']}"),
            markup=False,
            soft_wrap=True,
        )
    table = plain_table("language", "problems", "without a solution", "passed", "of", "per cent")
    for name, counts in summary["languages"].items():
        share = f"{100 * counts['passed'] / counts['total']:.1f}" if counts["total"] else "–"
        columns = ("problems", "without_solution", "passed", "total")
        table.add_row(name, *(str(counts[column]) for column in columns), share)
    console.print(table)


EXPORT_HELP = (
    "Write the samples for another evaluator: evalplus:FILE.jsonl, or bigcode:FILE.json for the "
    "BigCode evaluation harness. "
    "Repeatable; of batched speculation, unless --methods leaves it out."
)


@dataclass(frozen=True)
class Export:
    """A file to write."""

    format: ExportFormat
    file: Path

    def write(self, evaluation: Evaluation, eval_set: EvalSet) -> None:
        """Writes the samples of a complete evaluation, and names the evaluator's command.

        Raises:
            RequestError: the file cannot be written.
        """
        from shoal.evaluation.exports import programs_of
        from shoal.evaluation.sampling import METHODS

        config = evaluation.config
        method = max(config.methods, key=METHODS.index)  # batched, or the method closest to it
        programs = programs_of(eval_set.problems, evaluation.samples.entries, method, config.n)
        write_whole(self.file, self.format.render(eval_set.name, programs))
        said = (
            f"{method} samples for {self.format.tool}: "
            f"{self.format.hint(eval_set.name, str(self.file), programs)}"
        )
        stderr().print(said, markup=False, soft_wrap=True)


def read_exports(texts: Sequence[str], eval_set: EvalSet) -> list[Export]:
    """Reads the --export options of a command line.

    Raises:
        RequestError: a format is unknown, a file cannot be written or would not be read by the
            evaluator, or the format does not fit the set.
    """
    from shoal.evaluation.exports import FORMATS

    exports: list[Export] = []
    for text in texts:
        name, _, file = text.partition(":")
        if name not in FORMATS or not file:
            raise RequestError(
                f"--export must be FORMAT:FILE with a format of {', '.join(FORMATS)}; got {text!r}"
            )
        found, path = FORMATS[name], Path(file)
        if path.suffix != found.suffix:
            raise RequestError(
                f"{found.tool} reads {found.suffix} files: --export {name}:FILE{found.suffix}; "
                f"got {text!r}"
            )
        if path in (other.file for other in exports):
            raise RequestError(f"two exports would be written to {file!r}")
        found.check(eval_set.name, eval_set.problems)
        require_writable(path)
        exports.append(Export(found, path))
    return exports


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
            show_default="all that there is a drafter for",
            help="plain; single: speculation sample after sample; batched: speculation on all "
            "samples at once; or planned, alone: programs planned with public tests, not lossless.",
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
