"""The consoles, the status line and the tables that commands print, and their exit codes."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from shoal.cli.options import PairNames
    from shoal.types.samples import Increment


EXIT_FAILURE, EXIT_REQUEST, EXIT_INTERRUPTED = 1, 2, 130
"""The exit codes for our failure, for a wrong request or model, and for Ctrl-C."""


REFRESH = 0.08  # seconds between two pictures
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
PLAIN_WIDTH = 100  # columns where stdout is no terminal
PACE = 2.0  # seconds between two lines of progress where stderr is no terminal


def stdout() -> Console:
    """Returns the console of results; it has a fixed width if its reader is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def stderr() -> Console:
    """Returns the console of progress and errors."""
    return Console(stderr=True, highlight=False)


def is_first() -> bool:
    """Tells whether the process is the first of torchrun's, which alone tells of progress."""
    return os.environ.get("RANK", "0") == "0"


def hint_drafter(source: PairNames, lookahead: str | int) -> None:
    """Prints in a terminal that there are drafters which need no training, if none was given."""
    console, plain = stderr(), source.model is not None and source.draft is None
    if plain and lookahead not in ("off", 0) and console.is_terminal and is_first():
        text = "hint: decoding is plain; --draft auto drafts without training, and is exact"
        console.print(text, style="dim", highlight=False, soft_wrap=True)


def _dim(text: str) -> Text:
    """Returns dim text in one line, cut at the edge of the terminal."""
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


class StatusLine:
    """A line on stderr that is overwritten.

    Where stderr is no terminal, the line is printed every `PACE` seconds with the seconds since the
    first one was opened: a command that ends sooner prints nothing. Lines that follow each other
    have one clock.
    """

    shown: ClassVar[list[Live]] = []
    """The displays that are open on stderr, bars included; the last one is shown."""
    printed: ClassVar[list[StatusLine]] = []
    """The lines that are open where stderr is no terminal; the last one is printed."""
    began_at: ClassVar[float] = 0.0
    """The time when the first of them was opened."""
    quiet_since: ClassVar[float] = 0.0
    """The time when one was last printed, or the first was opened."""
    ended_at: ClassVar[float] = -math.inf
    """The time when one was last closed."""

    def __init__(self) -> None:
        self.console = stderr()
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.shown_at = 0.0
        self.text = ""
        self.ended = threading.Event()

    def __enter__(self) -> StatusLine:
        if not is_first():
            return self
        if self.console.is_terminal:
            self.live.start()
            self.shown.append(self.live)
            return self
        now = time.monotonic()
        if not self.printed and now - StatusLine.ended_at > PACE:
            StatusLine.began_at = StatusLine.quiet_since = now
        self.printed.append(self)
        threading.Thread(target=self._print, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self in self.printed:
            self.printed.remove(self)
            StatusLine.ended_at = time.monotonic()
        self.live.stop()
        if self.live in self.shown:
            self.shown.remove(self.live)

    def _print(self) -> None:
        """Prints the line until it is closed, unless a later one is open.

        After the first minute the lines come more and more slowly, as a job may take days.
        """
        due = 0.0
        while not self.ended.wait(max(due - time.monotonic(), min(PACE, 0.1))):
            seconds = time.monotonic() - StatusLine.began_at
            due = StatusLine.quiet_since + max(PACE, seconds / 30)
            if time.monotonic() >= due and self.text and self.printed[-1:] == [self]:
                StatusLine.quiet_since = time.monotonic()
                self.console.print(f"{seconds:.0f} s: {self.text}", markup=False, soft_wrap=True)

    @classmethod
    @contextmanager
    def suspendable(cls, live: Live) -> Iterator[None]:
        """Registers a display, such as a bar, that `suspended` stops during the block."""
        cls.shown.append(live)
        try:
            yield
        finally:
            cls.shown.remove(live)

    @classmethod
    @contextmanager
    def suspended(cls) -> Iterator[None]:
        """Stops the open displays during the block, so that another line takes their place."""
        for live in cls.shown:
            live.stop()
        try:
            yield
        finally:
            for live in cls.shown:
                live.start()

    def say(self, text: str, now: bool = True) -> None:
        """Shows a line; with now=False at most every `REFRESH` seconds."""
        self.text = text
        if self.live.is_started and (now or time.perf_counter() - self.shown_at > REFRESH):
            self.shown_at = time.perf_counter()
            self.live.update(_dim(text), refresh=True)

    def clear(self) -> None:
        """Empties the line, so that stdout can be printed to on the same screen.

        Where stderr is no terminal, the line goes on being printed: a command is never silent.
        """
        if self.live.is_started:
            self.say("")


class _Notes(logging.Handler):
    """A handler that shows the library's log records by a function."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Takes records during the block; the root's handlers, of whatever package, do not."""
        log = logging.getLogger("shoal")
        level, propagate = log.level, log.propagate
        log.propagate = False
        log.addHandler(self)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(self)
            log.setLevel(level)
            log.propagate = propagate


@contextmanager
def loading_shown() -> Iterator[None]:
    """Shows the stages of `shoal.load` on stderr during the block.

    A spinner and a line that is overwritten take the place of an open line or bar; where stderr is
    no terminal, the stages are printed by a `StatusLine`. It is silent if the library's records are
    written already, as by a server.
    """
    console, handlers = stderr(), logging.getLogger("shoal").handlers
    if not is_first() or any(not isinstance(handler, _Notes) for handler in handlers):
        yield
    elif not console.is_terminal:
        with StatusLine() as line, _Notes(line.say).attached():
            line.say("loading ...")
            yield
    else:
        status = console.status(_dim("loading ..."), spinner_style="dim")
        with (
            StatusLine.suspended(),
            status as shown,
            _Notes(lambda text: shown.update(_dim(text))).attached(),
        ):
            yield


@contextmanager
def imports_shown() -> Iterator[None]:
    """Shows on stderr that packages are imported, which takes seconds the first time."""
    with nullcontext() if "transformers" in sys.modules else loading_shown():
        yield


class Progress(StatusLine):
    """The progress of rows: the finished rows and the tokens so far, from a stream's increments."""

    def __enter__(self) -> Progress:
        super().__enter__()
        self.say("loading ...")
        self.notes = ExitStack()
        self.notes.enter_context(_Notes(self.say).attached())
        return self

    def __exit__(self, *exception: Any) -> None:
        self.notes.close()
        super().__exit__(*exception)

    def expect(self, rows: int) -> None:
        """Starts counting."""
        self.rows, self.finished, self.tokens = rows, 0, 0
        self.started_at = time.perf_counter()
        self.say("reading the prompts ...")

    def add(self, increment: Increment) -> None:
        """Counts the tokens that a round added to a row."""
        self.tokens += len(increment.token_ids)
        self.finished += increment.finish_reason is not None
        seconds = time.perf_counter() - self.started_at
        self.say(
            f"{self.finished}/{self.rows} samples, {self.tokens} tokens, "
            f"{self.tokens / seconds:.0f} tokens/s",
            now=False,
        )


def printable(text: str) -> str:
    """Removes control characters except line break and tab, so that a terminal executes nothing."""
    return text.translate(CONTROLS)


def plain_table(*columns: str) -> Table:
    """Returns a table for terminals and files of text: words in the first column, then figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table
