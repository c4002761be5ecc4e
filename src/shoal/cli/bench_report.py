"""The files and tables that `shoal bench` writes its results to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from shoal.cli.files import require_writable, write_whole
from shoal.cli.option_groups import output_option
from shoal.cli.options import JsonOption
from shoal.errors import RequestError

if TYPE_CHECKING:
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
        """Checks, before anything is measured, that the files can be written.

        Raises:
            RequestError: a file could not be written.
        """
        for path in (self.output, self.plot):
            if path is not None:
                require_writable(path)
        if self.results is not None and not self.results.is_dir():
            raise RequestError(f"--results {str(self.results)!r} is not a directory")
        if self.plot is not None:
            from shoal.bench.plots import require_matplotlib

            require_matplotlib()

    def deliver(self, report: Report) -> None:
        """Writes the files first, then the tables, or every repeat as JSON, to stdout."""
        from shoal.bench import tables
        from shoal.bench.machine import require_place

        files = [self.output] if self.output else []
        files += [self.results / _file_name(report)] if self.results else []
        for path in files:
            require_place(path, made_at=str(report.machine["commit"]))
            write_whole(path, json.dumps(report.to_dict(), indent=1) + "\n")
        if self.plot is not None and report.lines:
            from shoal.bench.plots import plot

            plot(report, self.plot)
        if self.json:
            print(json.dumps(report.to_dict()))
            return
        if self.markdown:
            print(tables.markdown(report))
            return
        tables.show(report, _console(tables.WIDTH))


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
    """Reads a report that `--output` wrote.

    Raises:
        RequestError: the file is no such report.
    """
    from shoal.bench.report import Report

    try:
        return Report.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"cannot replay {str(file)!r}: {error}") from error
