"""A function that follows a stream to its end.

Ctrl-C cancels the rows and keeps the samples that finished.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.engine.stream import Stream
    from shoal.types.samples import Increment, Result


class Interrupt:
    """A flag that is true once Ctrl-C was pressed.

    A second press raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.pressed = False

    def __bool__(self) -> bool:
        return self.pressed

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Turns Ctrl-C into a flag, so that a round is never left half done."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may set signal handlers, and only it receives Ctrl-C
        return
    previous = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def follow(stream: Stream, show: Callable[[Increment], None]) -> tuple[Result, bool]:
    """Shows every increment and returns the result, and whether Ctrl-C cut it short."""
    with catch_interrupt() as interrupt:
        for increment in stream:
            show(increment)
            if interrupt:
                stream.cancel()
        return stream.result(), bool(interrupt)
