"""The output of `shoal eval`: progress on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from shoal.cli.bench_progress import progress_bar
from shoal.cli.console import plain_table, printable, stdout

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
