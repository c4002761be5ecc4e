"""The views of samples while they grow.

They are one running text, several texts side by side, or events for a program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.text import Text

from shoal.cli.board import tinted
from shoal.cli.console import stderr
from shoal.cli.printed_samples import describe

if TYPE_CHECKING:
    from shoal.types.samples import Increment, Result, Sample

    Decode = Callable[[list[int]], str]


class RunView(Protocol):
    """The view of a run while it goes on; a context manager."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any: ...

    def add(self, increment: Increment) -> None:
        """Shows the text that a round added to a row."""


class Unseen:
    """A view that shows nothing, and the base of views that need no beginning and no end."""

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
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
