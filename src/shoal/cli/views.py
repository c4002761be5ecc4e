"""What the commands print: consoles, the progress line, samples, the live board, tables."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from shoal.types.samples import Increment, Output, Sample

ACCEPTED, DRAWN = "green", "yellow"
REFRESH = 0.08  # seconds between two pictures
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
PLAIN_WIDTH = 100  # columns where stdout is no terminal


def stdout() -> Console:
    """The console of results; of fixed width where its reader is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def stderr() -> Console:
    """The console of progress and errors."""
    return Console(stderr=True, highlight=False)


class Status:
    """One line on stderr that is overwritten; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self.console = stderr()
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.shown_at = 0.0

    def __enter__(self) -> Status:
        if self.console.is_terminal and os.environ.get("RANK", "0") == "0":  # of torchrun's processes, the first
            self.live.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.live.stop()

    def say(self, text: str, now: bool = True) -> None:
        """Shows a line; with now=False at most so often as a reader can follow."""
        if self.live.is_started and (now or time.perf_counter() - self.shown_at > REFRESH):
            self.shown_at = time.perf_counter()
            self.live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)

    def clear(self) -> None:
        """Empties the line, so that stdout can be printed to on the same screen."""
        self.say("")


class _Notes(logging.Handler):
    """Puts what the library has to say of long work on the status line."""

    def __init__(self, status: Status) -> None:
        super().__init__(logging.INFO)
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        self.status.say(record.getMessage())


class Progress(Status):
    """Rows finished and tokens so far, from a stream's increments."""

    def __enter__(self) -> Progress:
        super().__enter__()
        self.say("loading ...")
        self.notes, log = _Notes(self), logging.getLogger("shoal")
        self.level = log.level
        log.addHandler(self.notes)
        log.setLevel(logging.INFO)
        return self

    def __exit__(self, *exception: Any) -> None:
        log = logging.getLogger("shoal")
        log.removeHandler(self.notes)
        log.setLevel(self.level)
        super().__exit__(*exception)

    def expect(self, rows: int) -> None:
        """Starts counting."""
        self.rows, self.finished, self.tokens = rows, 0, 0
        self.started_at = time.perf_counter()
        self.say("reading the prompts ...")

    def add(self, increment: Increment) -> None:
        """Counts what a round added to a row."""
        self.tokens += len(increment.token_ids)
        self.finished += increment.finish_reason is not None
        seconds = time.perf_counter() - self.started_at
        self.say(
            f"{self.finished}/{self.rows} samples, {self.tokens} tokens, {self.tokens / seconds:.0f} tokens/s", now=False
        )


def show_output(console: Console, output: Output, title: str | None, by_rank: bool) -> None:
    """The samples of one prompt, each under a header line; rows that Ctrl-C cut are left out."""
    if title:
        console.print(Rule(Text(title, overflow="ellipsis", no_wrap=True), align="left"))
    rank = {id(sample): number for number, sample in enumerate(output.ranked, 1)}
    samples = [(number, sample) for number, sample in enumerate(output.samples, 1) if sample.finish_reason != "cancelled"]
    for number, sample in sorted(samples, key=lambda item: rank[id(item[1])]) if by_rank else samples:
        header = f"# sample {number}, rank {rank[id(sample)]} of {len(rank)}: {describe(sample)}"
        console.print(Text(header, style="bold"), soft_wrap=True)
        text = python_text(printable(sample.text)) if console.is_terminal else Text(sample.text)
        text.rstrip()
        console.print(text, soft_wrap=True)
        console.print()


def python_text(text: str) -> Text:
    """Text highlighted as Python in the terminal's own colours."""
    return Syntax("", "python", theme="ansi_dark", background_color="default").highlight(text)


def printable(text: str) -> str:
    """Text that a terminal shows and never obeys: control characters but line break and tab are replaced."""
    return text.translate(CONTROLS)


def describe(sample: Sample) -> str:
    """One line on a sample: rank figure, end, size, and what it took."""
    per_pass = len(sample.token_ids) / sample.rounds if sample.rounds else 0.0
    late = " after the time budget" if not sample.in_time and sample.finish_reason in ("eos", "stop", "length") else ""
    return (
        f"mean logprob {sample.mean_logprob:.3f}, {sample.finish_reason}{late}, {len(sample.token_ids)} tokens, "
        f"acceptance length {per_pass:.2f}"
    )


@dataclass
class BoardRow:
    """One row of the board: its text so far, coloured by who chose the tokens."""

    text: Text = field(default_factory=Text)
    ids: list[int] = field(default_factory=list)
    rounds: int = 0
    finish_reason: str | None = None

    def add(self, increment: Increment, decode: Callable[[list[int]], str]) -> None:
        """Appends a round's text; the accepted draft tokens come first in it."""
        before = len(decode(self.ids))
        accepted = len(decode([*self.ids, *increment.token_ids[: increment.accepted]])) - before
        self.text.append(printable(increment.text[:accepted]), ACCEPTED)
        self.text.append(printable(increment.text[accepted:]), DRAWN)
        self.ids += increment.token_ids
        self.rounds += 1
        self.finish_reason = increment.finish_reason

    @property
    def title(self) -> str:
        """Tokens, tokens per round, and how the row ended."""
        per_round = len(self.ids) / self.rounds if self.rounds else 0.0
        return f"{len(self.ids)} tokens, {per_round:.2f}/round" + (f", {self.finish_reason}" if self.finish_reason else "")


class Board:
    """All rows of one prompt while they fill in, with running counters."""

    def __init__(self, console: Console, n: int, decode: Callable[[list[int]], str]) -> None:
        self.rows = [BoardRow() for _ in range(n)]
        self.console = console
        self.decode = decode
        self.started_at = time.perf_counter()
        self.shown_at = 0.0
        self.live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Board:
        self.live.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.live.update(self.render(), refresh=True)
        self.live.stop()

    def add(self, increment: Increment) -> None:
        """Takes in what a round added to a row and redraws, at most so often as an eye can follow."""
        self.rows[increment.sample].add(increment, self.decode)
        if time.perf_counter() - self.shown_at > REFRESH:
            self.live.update(self.render(), refresh=True)
            self.shown_at = time.perf_counter()

    def render(self) -> RenderableType:
        """The whole picture: panels where they fit, else a line per row."""
        columns = max(1, min(4, self.console.width // 60))
        lines = -(-len(self.rows) // columns)
        height = min(12, (self.console.height - 4) // lines)
        rows = self._panels(columns, height) if height >= 4 else self._lines()
        return Group(rows, self._counters(), self._legend())

    def _panels(self, columns: int, height: int) -> Table:
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        width = self.console.width // columns - 4
        panels = [self._panel(index, row, width, height) for index, row in enumerate(self.rows, 1)]
        for start in range(0, len(panels), columns):
            grid.add_row(*panels[start : start + columns])
        return grid

    def _panel(self, index: int, row: BoardRow, width: int, height: int) -> Panel:
        wrapped = row.text.wrap(self.console, width)
        end = Text("\n").join(wrapped[-(height - 2) :])
        border = "dim" if row.finish_reason else "blue"
        return Panel(end, title=f"row {index}: {row.title}", title_align="left", height=height, border_style=border)

    def _lines(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(3):
            table.add_column(no_wrap=True)
        for index, row in enumerate(self.rows, 1):
            line = row.text.copy()
            line.plain = line.plain.replace("\n", " ")
            table.add_row(f"row {index}", line[-max(10, self.console.width - 50) :], Text(row.title, style="dim"))
        return table

    def _counters(self) -> Text:
        tokens, rounds = sum(len(row.ids) for row in self.rows), sum(row.rounds for row in self.rows)
        seconds = time.perf_counter() - self.started_at
        return Text(
            f"round {max(row.rounds for row in self.rows)}   acceptance length {tokens / max(1, rounds):.2f}   "
            f"{tokens} tokens   {tokens / seconds:.0f} tokens/s",
            style="bold",
        )

    def _legend(self) -> Text:
        return Text.assemble(
            ("accepted draft token", ACCEPTED), "   ", ("replacement or bonus token, drawn from the target", DRAWN)
        )


def plain_table(*columns: str) -> Table:
    """A table that reads well in a terminal and in a text file: first column words, the others figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table
