"""The output of `shoal eval`: progress on stderr, tables on stdout, files for other evaluators.

`--export FORMAT:FILE` writes the samples for another evaluator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from shoal.cli.console import plain_table, printable, stderr, stdout
from shoal.cli.files import require_writable, write_whole
from shoal.cli.progress import progress_bar
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.cli.eval_set import EvalSet
    from shoal.evaluation.exports import ExportFormat
    from shoal.evaluation.run import Evaluation


UNBOUNDED = 10_000  # columns
Value = TypeVar("Value")


def with_progress(what: str, results: Iterable[Value], total: int) -> Iterator[Value]:
    """Yields the results, with a bar and the time left on stderr."""
    with progress_bar() as bar:
        bar.expect(total)
        for result in results:
            bar.step(what)
            yield result


def show_summary(summary: dict[str, Any], directory: Path | None) -> None:
    """Prints the table of a summary, then its findings."""
    from shoal.evaluation.figure import title
    from shoal.evaluation.tables import columns, findings, legend, rows

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
    wide = stdout()
    wide.width = UNBOUNDED
    widest = wide.measure(table).maximum
    if widest <= console.width or not console.is_terminal:
        wide.width = max(console.width, widest)  # a file takes lines of any length
        wide.print(table)
        return
    for budget in dict.fromkeys(line[0] for line in lines):
        chosen = [line for line in lines if line[0] == budget]
        table = plain_table(f"budget: {budget}", *(line[1] for line in chosen))
        for place, head in enumerate(heads[2:], 2):
            table.add_row(head, *(line[place] for line in chosen))
        console.print(table)
        console.print()


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
