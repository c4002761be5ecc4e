"""Batch files without HTTP: the `ApiHandler` that also serves HTTP requests answers each line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.errors import InternalError
from shoal.serve.api_errors import ApiError
from shoal.serve.api_paths import Json
from shoal.serve.batch_lines import BatchLine
from shoal.serve.handler import ApiHandler, validated
from shoal.serve.settings import Settings


def refusal(line: BatchLine, settings: Settings) -> Json | None:
    """Returns the answer to a line that is wrong whatever the model is; None for the others."""
    try:
        validated(*line.request(), settings)
    except Exception as error:
        return line.failure(error)
    return None


class Offline:
    """A pair that answers lines as `shoal serve` answers requests.

    Args:
        shoal: the pair.
        make_engine: makes engines of `shoal`, see `EngineThread`.
        settings: limits of a line's fields; `queue` is not used.

    Attributes:
        made: properties of the loaded target that change tokens; the field "shoal" of each result
            has them.
    """

    def __init__(self, shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> None:
        self.shoal, self._settings = shoal, replace(settings, queue=sys.maxsize)
        self._make_engine = make_engine
        target = shoal.loaded["target"] or {}
        self.made = {name: target[name] for name in ("dtype", "quantize", "strict")}

    def answer(self, lines: Iterable[BatchLine], done: Callable[[Json], None]) -> None:
        """Answers all lines, as many at a time as the batch has slots.

        Args:
            done: called with each output line as soon as it is complete.

        Raises:
            InternalError: the engine's thread has ended.
            Exception: the error that `done` raised.
        """
        asyncio.run(self._answer_all(lines, done))

    async def _answer_all(self, lines: Iterable[BatchLine], done: Callable[[Json], None]) -> None:
        handler = ApiHandler(self.shoal, self._make_engine, self._settings)
        worker, waiting = handler.worker, iter(lines)

        async def work() -> None:
            for line in waiting:
                done(await self._answer(line, handler))

        slots = worker.thread.engine.scheduler.capacity
        worker.thread.start(asyncio.get_running_loop())
        try:
            await asyncio.gather(*(work() for _ in range(slots)))
        finally:
            worker.stop()

    async def _answer(self, line: BatchLine, handler: ApiHandler) -> Json:
        made: Json = {**self.made}
        try:
            response = await handler.handle(*line.request())
            if response.parsed.stream:
                raise ApiError(400, "an answer in a file cannot be streamed", param="stream")
            made |= {"notes": dict(response.parsed.headers)} if response.parsed.headers else {}
            entry = line.result(await response.whole())
        except Exception as error:
            thread = handler.worker.thread
            if not thread.alive:
                raise InternalError(f"the engine's thread has ended: {thread.failure!r}") from error
            entry = line.failure(error)
        return {**entry, "shoal": made}
