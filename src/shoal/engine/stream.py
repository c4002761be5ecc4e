"""A run in progress: `generate` exhausts it and `stream` returns it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Executor

from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.models.structure import asked_once
from shoal.types.requests import Request
from shoal.types.rounds import Commit
from shoal.types.samples import Increment, Output, Result, Sample


class Stream(Iterator[Increment], AsyncIterator[Increment]):
    """A run in progress.

    Iterating over it, by `for` or by `async for`, computes its rounds. Any thread may cancel or
    close it: a round that another thread computes is finished first. Under `async for` the rounds
    are computed in a thread. When the waiting task is cancelled, the round in progress is finished
    and all rows are cancelled. A stream that is dropped frees its caches. `result()` is complete
    once the stream is exhausted or cancelled.

    Attributes:
        rows: the rows of each prompt.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        text: bool = True,
        executor: Executor | None = None,
    ) -> None:
        """Queues the requests in an engine.

        Args:
            text: True if increments carry text as it grows.
            executor: has the one thread that computes the rounds of `async for`; None = the event
                loop's own.
        """
        self._engine: Engine | None = engine
        self._requests, self._executor, self._stats = list(requests), executor, engine.stats
        self._started = time.perf_counter()
        self.rows = engine.submit_all(self._requests, stream=text)
        self._prompt = {id(row): i for i, rows in enumerate(self.rows) for row in rows}
        self._samples: dict[int, Sample] = {}
        self._queue: deque[Increment] = deque()
        self._turn = threading.RLock()  # held by the thread that is in the engine

    def __next__(self) -> Increment:
        while not self._queue:
            if not self._advance():
                raise StopIteration
        return self._queue.popleft()

    async def __anext__(self) -> Increment:
        while not self._queue:
            if not await self._advance_in_thread():
                raise StopAsyncIteration
        return self._queue.popleft()

    def _advance(self) -> bool:
        """Computes one round; returns False if all rows have ended."""
        with self._turn:
            commits = [] if self._engine is None else self._engine.step()
            self._take(commits)
        return bool(commits)

    async def _advance_in_thread(self) -> bool:
        """Computes one round in the thread; returns False if all rows have ended."""
        if self._engine is None:
            return False
        round_ = asyncio.get_running_loop().run_in_executor(self._executor, self._advance)
        try:
            return await asyncio.shield(round_)
        except asyncio.CancelledError:
            # A round cannot be interrupted, and its caches are in use until it ends.
            await asyncio.wait([round_])
            round_.exception()  # otherwise asyncio reports it as never retrieved
            self.cancel()
            raise

    def run(self, progress: bool = False) -> Result:
        """Computes all rounds.

        Args:
            progress: True = shows a bar in a terminal or a notebook.

        Raises:
            ShoalError: the error of the first row that failed, after all others have ended; its
                `result` has all samples.
        """
        if progress:
            _follow(
                self,
                sum(map(len, self.rows)),
                max(request.limits.max_new_tokens for request in self._requests),
            )
        with asked_once():
            for _ in self:
                pass
        result = self.result()
        failed = next(
            (row.error for rows in self.rows for row in rows if row.error is not None), None
        )
        if failed is not None:
            failed.result = result
            raise failed
        return result

    def cancel(self, prompt: int | None = None, sample: int | None = None) -> None:
        """Ends all rows, the rows of one prompt, or one row.

        Their tokens so far stay in the result, marked "cancelled".
        """
        to_cancel = [
            row
            for i, rows in enumerate(self.rows)
            if prompt in (None, i)
            for row in rows
            if sample in (None, row.index)
        ]
        with self._turn:
            self._take([] if self._engine is None else self._engine.cancel(to_cancel))

    def close(self) -> None:
        """Cancels the rows that run and frees the caches; `result()` stays available."""
        with self._turn:
            self.cancel()
            self._engine = None

    def result(self) -> Result:
        """Returns the samples by prompt, counts and times; raises RequestError while rows run."""
        running = sum(map(len, self.rows)) - len(self._samples)
        if running:
            raise RequestError(
                f"{running} rows are still running: exhaust the stream or cancel it first"
            )
        outputs = tuple(
            Output(
                request.prompt, request.prompt_ids, tuple(self._samples[id(row)] for row in rows)
            )
            for request, rows in zip(self._requests, self.rows, strict=True)
        )
        return Result(outputs, self._stats)

    def _take(self, commits: Sequence[Commit]) -> None:
        if commits:
            self._stats.seconds = time.perf_counter() - self._started
        for c in commits:
            if c.sample is not None:
                self._samples[id(c.row)] = c.sample
            reason = None if c.sample is None else c.sample.finish_reason
            self._queue.append(
                Increment(
                    self._prompt[id(c.row)],
                    c.row.index,
                    c.text,
                    token_ids=tuple(c.tokens),
                    accepted=c.accepted,
                    finish_reason=reason,
                    result=c.sample,
                )
            )


def _follow(increments: Iterable[Increment], rows: int, most: int) -> None:
    """Exhausts the increments and shows a progress bar on stderr.

    The bar is shown in a terminal or a notebook only.

    Args:
        most: the new tokens that each row may have; a row that ends earlier counts as complete.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    visible = sys.stderr.isatty() or console.is_jupyter
    with Progress(*columns, console=console, transient=True, disable=not visible) as bar:
        task = bar.add_task(_description(0, rows, 0), total=rows * most)
        tokens = over = cut = 0
        for increment in increments:
            tokens += len(increment.token_ids)
            if increment.result is not None:
                over, cut = over + 1, cut + most - len(increment.result.token_ids)
            bar.update(task, completed=tokens + cut, description=_description(over, rows, tokens))


def _description(over: int, rows: int, tokens: int) -> str:
    return f"{over}/{rows} rows, {tokens} tokens"
