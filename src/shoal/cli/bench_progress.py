"""The progress of `shoal bench` and `shoal eval` on stderr."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cli.console import StatusLine, stderr


class Bar:
    """A bar of the steps made so far and the time that is left, on stderr.

    Where stderr is no terminal, `line` is printed instead.

    Attributes:
        left: the seconds that are left if they are known; until then they follow from the mean step
            so far.
    """

    def __init__(self, progress: Progress, line: StatusLine) -> None:
        self.progress, self.line = progress, line
        self.task = progress.add_task("", total=None, left="")
        self.left: Callable[[], float | None] = lambda: None
        self.steps, self.made, self.started = 0, 0, monotonic()

    def expect(self, steps: int) -> None:
        self.steps, self.started = steps, monotonic()
        self.progress.update(self.task, total=steps)

    def step(self, text: str) -> None:
        """Counts a step, and shows its name and the time that is left."""
        left = self.seconds_left()
        shown = "" if left is None else f"{duration(left)} left"
        self.progress.update(self.task, description=text, advance=1, left=shown)
        self.line.say(", ".join(filter(None, [f"{self.made + 1} of {self.steps}", text, shown])))
        self.made += 1

    def seconds_left(self) -> float | None:
        """Returns the seconds that are left; None before the first step has ended."""
        known = self.left()
        if known is not None or not self.made:
            return known
        return (monotonic() - self.started) / self.made * (self.steps - self.made)

    def note(self, text: str) -> None:
        """Prints a line that stays above the bar."""
        self.progress.console.print(text, markup=False)


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """Shows a `Bar` for as long as the block lasts."""
    console = stderr()
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with ExitStack() as stack:
        line = StatusLine()
        if not console.is_terminal:
            stack.enter_context(line)
        yield Bar(stack.enter_context(bar), line)


def duration(seconds: float) -> str:
    """Writes seconds as a text such as "12 s" or "3 minutes"."""
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
