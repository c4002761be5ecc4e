"""The views of samples while they grow.

They are one running text, several texts side by side, or events for a program.

The board has the rows of `shoal demo` and `shoal generate` while they fill in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.cli.console import REFRESH, printable, stderr
from shoal.cli.printed_samples import describe
from shoal.values import counted

if TYPE_CHECKING:
    from shoal.types.samples import Increment, Result, Sample

    Decode = Callable[[list[int]], str]


ACCEPTED, DRAWN = "green", "yellow"
BESIDE_ROWS = 4
"""The lines of a board that are no rows."""


def tinted(
    increment: Increment, ids: list[int], decode: Callable[[list[int]], str], drawn: str = DRAWN
) -> Text:
    """Returns the text that a round added to a row, coloured by the model that chose the tokens.

    The accepted draft tokens come first in it.

    Args:
        ids: the token ids of the row before the round.
        drawn: the style of the text that the target drew.
    """
    accepted = (
        len(decode([*ids, *increment.token_ids[: increment.accepted]])) - len(decode(ids))
        if increment.accepted
        else 0
    )
    text = Text()
    text.append(printable(increment.text[:accepted]), ACCEPTED)
    text.append(printable(increment.text[accepted:]), drawn)
    return text


@dataclass
class BoardRow:
    """A row of the board: its text so far, coloured by the model that chose the tokens."""

    text: Text = field(default_factory=Text)
    ids: list[int] = field(default_factory=list)
    rounds: int = 0
    finish_reason: str | None = None

    def add(self, increment: Increment, decode: Callable[[list[int]], str]) -> None:
        """Appends a round's text."""
        self.text.append(tinted(increment, self.ids, decode))
        self.ids += increment.token_ids
        self.rounds += increment.rounds
        self.finish_reason = increment.finish_reason

    @property
    def title(self) -> str:
        """The number of tokens, the tokens per round, and the row's end."""
        per_round = len(self.ids) / self.rounds if self.rounds else 0.0
        return f"{counted(len(self.ids), 'token')}, {per_round:.2f}/round" + (
            f", {self.finish_reason}" if self.finish_reason else ""
        )


class Board:
    """A board of all rows while they fill in, with running counters.

    Args:
        counts: the number of rows of each prompt.
        transient: the picture is removed in the end.
        acceptance: show the acceptance length so far.
    """

    def __init__(
        self,
        console: Console,
        counts: Sequence[int],
        decode: Callable[[list[int]], str],
        *,
        transient: bool = False,
        acceptance: bool = True,
    ) -> None:
        self.acceptance = acceptance
        self.rows = [BoardRow() for _ in range(sum(counts))]
        self.first = [0, *accumulate(counts)]
        self.console = console
        self.decode = decode
        self.started_at = time.perf_counter()
        self.shown_at = 0.0
        self.live = Live(
            console=console, auto_refresh=False, vertical_overflow="crop", transient=transient
        )

    def __enter__(self) -> Board:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.update(self.render(), refresh=True)
        self.live.stop()

    def add(self, increment: Increment) -> None:
        """Adds a round's text to its row, and redraws at most every `REFRESH` seconds."""
        self.rows[self.first[increment.prompt] + increment.sample].add(increment, self.decode)
        if time.perf_counter() - self.shown_at > REFRESH:
            self.live.update(self.render(), refresh=True)
            self.shown_at = time.perf_counter()

    def render(self) -> RenderableType:
        """Returns the whole picture: panels if they fit, else a line per row."""
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
        text = row.text.copy()
        if row.finish_reason:
            text.rstrip()  # a line break at the end would take the place of a line of text
        wrapped = text.wrap(self.console, width)
        end = Text("\n").join(wrapped[-(height - 2) :])
        border = "dim" if row.finish_reason else "blue"
        return Panel(
            end,
            title=f"row {index}: {row.title}",
            title_align="left",
            height=height,
            border_style=border,
        )

    def _lines(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(3):
            table.add_column(no_wrap=True)
        for index, row in enumerate(self.rows, 1):
            line = row.text.copy()
            line.plain = line.plain.replace("\n", " ")
            table.add_row(
                f"row {index}",
                line[-max(10, self.console.width - 50) :],
                Text(row.title, style="dim"),
            )
        return table

    def _counters(self) -> Text:
        tokens = sum(len(row.ids) for row in self.rows)
        rounds = sum(row.rounds for row in self.rows)
        seconds = time.perf_counter() - self.started_at
        said = [f"round {max(row.rounds for row in self.rows)}"]
        if self.acceptance:
            said.append(f"acceptance length {tokens / max(1, rounds):.2f}")
        said += [f"{tokens} tokens", f"{tokens / seconds:.0f} tokens/s"]
        return Text("   ".join(said), style="bold")

    def _legend(self) -> Text:
        return Text.assemble(
            ("accepted draft token", ACCEPTED),
            "   ",
            ("replacement or bonus token, drawn from the target", DRAWN),
        )


class RunView(Protocol):
    """The view of a run while it goes on; a context manager."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> Any: ...

    def add(self, increment: Increment) -> None:
        """Shows the text that a round added to a row."""


class Unseen:
    """A view that shows nothing, and the base of views that need no beginning and no end."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def add(self, increment: Increment) -> None:
        """Shows nothing."""


class RunningText(Unseen):
    """The text of one sample, as it is committed; accepted draft tokens are green in a terminal."""

    def __init__(self, console: Console, decode: Decode) -> None:
        self._console, self._decode = console, decode
        self._ids: list[int] = []
        self._line_begins = True

    def __exit__(self, *_exception: object) -> None:
        if not self._line_begins:
            self._console.file.write("\n")
            self._console.file.flush()

    def add(self, increment: Increment) -> None:
        """Prints the text that a round added."""
        if increment.text:
            self._line_begins = increment.text.endswith("\n")
            if self._console.is_terminal:
                text = tinted(increment, self._ids, self._decode, drawn="")
                self._console.print(text, end="", soft_wrap=True)
            else:
                self._console.file.write(increment.text)
            self._console.file.flush()
        self._ids += increment.token_ids


def show_end(sample: Sample) -> None:
    """Prints how a sample that was shown as running text ended, in a line on stderr."""
    stderr().print(Text(f"# {describe(sample)}", style="dim"), soft_wrap=True)


class Events(Unseen):
    """A view that writes a JSON object per line.

    An "increment" is a round's addition to a row, a "sample" is a row that has ended, and "end" is
    last.

    Args:
        document: makes the JSON object of a sample.
    """

    def __init__(self, document: Callable[[Sample], dict[str, Any]]) -> None:
        self._document = document

    def add(self, increment: Increment) -> None:
        """Writes one or two events."""
        place = {"prompt": increment.prompt, "sample": increment.sample}
        added = {
            "text": increment.text,
            "token_ids": list(increment.token_ids),
            "accepted": increment.accepted,
        }
        self._write({"event": "increment", **place, **added})
        if increment.result is not None:
            self._write({"event": "sample", **place, **self._document(increment.result)})

    def end(self, result: Result, interrupted: bool) -> None:
        """Writes the last event."""
        self._write({"event": "end", "interrupted": interrupted, "stats": result.stats.to_dict()})

    @staticmethod
    def _write(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event, allow_nan=False) + "\n")
        sys.stdout.flush()


def decoder(tokenizer: Any) -> Decode:
    """Returns a function that decodes ids to the text that is shown."""
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
