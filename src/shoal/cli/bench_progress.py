"""The progress of `shoal bench` on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cli.console import stderr


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
def progress_bar() -> Iterator[Bar]:
    """Shows a `Bar` for as long as the block lasts."""
    console = stderr()
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress)
