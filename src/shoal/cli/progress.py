"""The progress of `shoal bench`, `shoal eval` and `shoal batch` on stderr."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from shoal.cli.console import StatusLine, stderr

if TYPE_CHECKING:
    from shoal.serve.api_errors import Json

Value = TypeVar("Value")


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

    def expect(self, steps: int, text: str = "") -> None:
        """Sets the number of steps, and the name of the first one."""
        self.steps, self.started = steps, monotonic()
        self.progress.update(self.task, description=text, total=steps)
        self.line.say(", ".join(filter(None, [f"0 of {steps}", text])))

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


@dataclass
class BatchProgress:
    """The progress of a batch: its counts, and the seconds since the models began to load.

    Attributes:
        lines: the number of lines of the input.
        kept: the number of lines that an earlier run answered.
        answered: the number of lines answered in this run.
        failed: the number of those answers that are an error.
        lossy: the note about a lossy rule that answers carry.
        loaded: the choices made when the models were loaded; None if Ray's processes loaded them.
    """

    lines: int
    kept: int
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    by_drafter: dict[str, dict[str, int]] = field(default_factory=dict)
    loaded: Json | None = None
    lossy: str = ""
    started_at: float = field(default_factory=time.perf_counter)

    def add(self, entry: Json) -> None:
        """Counts an answer."""
        from shoal.serve.batch_lines import has_failed, lossy_of, usage_of_choices

        self.answered += 1
        self.failed += has_failed(entry)
        self.lossy = self.lossy or lossy_of(entry)
        for took in usage_of_choices(entry):
            self.tokens += took["completion_tokens"]
            self.drafted += took["drafted"]
            self.accepted += took["accepted"]
            for name, counts in took["by_drafter"].items():
                known = self.by_drafter.setdefault(name, dict.fromkeys(counts, 0))
                known.update({what: known[what] + more for what, more in counts.items()})

    @property
    def seconds(self) -> float:
        """The seconds since the models began to load."""
        return time.perf_counter() - self.started_at

    @property
    def speed(self) -> float:
        """The number of tokens per second."""
        return self.tokens / self.seconds

    def document(self) -> dict[str, Any]:
        """Returns the object that --json prints."""
        counts = {name: value for name, value in vars(self).items() if name != "started_at"}
        return {**counts, "seconds": self.seconds, "tokens_per_second": self.speed}

    def __str__(self) -> str:
        before = f" ({self.kept} of them before)" if self.kept else ""
        failed = f", {self.failed} with an error" if self.failed else ""
        return (
            f"{self.kept + self.answered} of {self.lines} lines answered{before}{failed}: "
            f"{self.tokens} tokens, {self.accepted} of {self.drafted} drafts accepted, "
            f"{self.speed:.0f} tokens/s" + (f"; {self.lossy}" if self.lossy else "")
        )


@contextmanager
def displayed(progress: BatchProgress) -> Iterator[Callable[[], None]]:
    """Shows progress on stderr during the block: a bar on a terminal, elsewhere a `StatusLine`.

    Yields:
        A function to call when the progress has changed.
    """
    if stderr().is_terminal:
        with _bar(progress) as update:
            yield update
        return
    with StatusLine() as line:
        line.say(str(progress))
        yield lambda: line.say(str(progress))


@contextmanager
def _bar(progress: BatchProgress) -> Iterator[Callable[[], None]]:
    pace = TextColumn("{task.fields[pace]}")
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        pace,
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=stderr(), transient=True) as bar,
        StatusLine.suspendable(bar.live),
    ):
        task = bar.add_task("", total=progress.lines, completed=progress.kept, pace="")
        yield lambda: bar.update(
            task, completed=progress.kept + progress.answered, pace=f"{progress.speed:.0f} tokens/s"
        )


def with_progress(what: str, results: Iterable[Value], total: int) -> Iterator[Value]:
    """Yields the results, with a bar and the time left on stderr."""
    with progress_bar() as bar:
        bar.expect(total, what)
        for result in results:
            bar.step(what)
            yield result
