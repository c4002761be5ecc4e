"""The one thread that owns the models. Between two rounds it runs the event loop's jobs.

A failed pass fails all rows, and a new engine replaces the failed one. Any other error, and a
second failed pass before a round has finished, ends the thread: no call is left without a result,
later calls are rejected, and `shoal.serve.run` ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from shoal.engine.engine import Engine
from shoal.errors import InternalError, ModelError, OutOfStep, ShoalError
from shoal.models.device import explained
from shoal.models.structure import ask_again, asked_once
from shoal.serve.api_errors import ApiError
from shoal.types.rounds import Commit

LOG = logging.getLogger(__name__)
T = TypeVar("T")
SWITCH_SECONDS = 2e-4
"""The time after which the event loop gives way to the engine's thread where CUDA computes.

The device stands still meanwhile. Python's 5 ms are most of a round there.
"""
MAX_FAILURES = 2
"""The number of passes that fail in a row, without a finished round between them, before the thread
ends."""


class EngineThread:
    """A thread that runs an engine.

    Args:
        make_engine: called now, and again after a failed pass.
        on_commits: called on the thread with the commits of a round.
        on_failed_pass: called on the thread with an error message: the engine and all its rows are
            lost.
        on_end: called on the event loop when the thread has ended.

    Attributes:
        stats: the statistics of all its engines.
        failure: the error that ended the thread.
        busy_since: the time when the current round or job began, by `time.perf_counter`; None = the
            thread waits for a job.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        on_commits: Callable[[Iterable[Commit]], None],
        on_failed_pass: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._make_engine = make_engine
        self._on_commits = on_commits
        self._on_failed_pass = on_failed_pass
        self._on_end = on_end
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._engine: Engine | None = self._made_engine()
        self.stats = self._engine.stats
        self.failure: BaseException | None = None
        self.busy_since: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._calls: set[asyncio.Future[Any]] = set()
        self._failures = 0

    @property
    def engine(self) -> Engine:
        """The current engine.

        Other threads may read its counters, and must not keep a reference to it.

        Raises:
            ApiError: 503, while a failed engine is replaced.
        """
        if self._engine is None:
            raise ApiError(
                503, "the engine failed, and a new one is being made", code="pass_failed"
            )
        return self._engine

    @property
    def alive(self) -> bool:
        """True if rows can be decoded. False before or as soon as the last open call has failed."""
        return self._thread.is_alive() and not self._over

    # ── called on the event loop ──────────────────────────────────────────────────────────────────

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; `loop` receives the results of calls."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current round."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def post(self, job: Callable[[], object]) -> None:
        """Runs a job that cannot fail on the thread, and does not wait for it."""
        self._jobs.put(job)

    def give_back(self) -> None:
        """Gives the memory of the caches back between two rounds, if there is no row then.

        Room that captured rounds know stays.
        """

        @torch.inference_mode()
        def job() -> None:
            engine = self.engine
            if engine.scheduler.idle and engine.target.captures is None:
                engine.memory.allocate(engine.scheduler.release_free_slots(), idle=True)

        self.post(job)

    async def call(self, job: Callable[[], T]) -> T:
        """Runs a job on the thread between two rounds.

        Raises:
            ApiError: 503, the thread has ended.
            Exception: the error that the job raised.
        """
        if not self.alive:
            raise engine_stopped()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                with explained("the server"):
                    result = job()
            except Exception as error:
                self.notify(_settle, future, error, None)
            else:
                self.notify(_settle, future, None, result)

        self._jobs.put(run)
        return await future

    def _end(self) -> None:
        self._over = True
        for future in list(self._calls):
            _settle(future, engine_stopped(), None)
        self._on_end()

    # ── called on the thread ──────────────────────────────────────────────────────────────────────

    def notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the event loop, unless the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        try:
            with _quick_switches(self.engine.target.device), asked_once():
                while self._run_jobs():
                    self.busy_since = time.perf_counter()
                    self._run_round()
        except BaseException as error:  # also an exception that another thread raised in this one
            self.failure = error
            LOG.critical("the engine's thread has ended", exc_info=error)
        finally:
            self.notify(self._end)

    def _run_jobs(self) -> bool:
        """Runs the jobs that are queued now; later ones wait for a round.

        While no row is active it builds the captures and kernels of later rounds, then blocks.
        Returns False to stop.
        """
        due = self._jobs.qsize()
        while due > 0 or self.engine.scheduler.idle:
            if not due and self._jobs.empty():
                self.busy_since = time.perf_counter()
                if self.engine.build_ahead():
                    continue
            self.busy_since = None
            job = self._jobs.get()
            self.busy_since = time.perf_counter()
            if job is None:
                return False
            job()
            del job  # it would keep its rows until the next one
            ask_again()
            due -= 1
        return True

    def _run_round(self) -> None:
        rounds = self.stats.rounds
        try:
            commits = self.engine.step()
        except (InternalError, OutOfStep):
            raise  # a new engine does not help against a lost process of the model
        except ShoalError as error:
            reason = str(error)  # the error itself is not kept: its traceback refers to the engine
        else:
            self._failures = 0 if self.stats.rounds > rounds else self._failures
            self._on_commits(commits)
            return
        self._replace_engine(reason)

    def _replace_engine(self, reason: str) -> None:
        """Replaces the engine after a failed pass.

        The content of the caches is then unknown: all rows fail, and a new engine takes the next
        ones.

        Raises:
            ModelError: `MAX_FAILURES` passes in a row have failed, so a new engine would fail as
                well.
        """
        LOG.error("a pass failed, and the rows in it: %s", reason)
        self._on_failed_pass(reason)
        self._failures += 1
        if self._failures == MAX_FAILURES:
            raise ModelError(
                f"{MAX_FAILURES} passes in a row have failed, the last one with: {reason}"
            )
        self._release_engine()
        self._engine = self._made_engine()
        self._engine.continue_stats(self.stats)

    def _made_engine(self) -> Engine:
        """Returns a new engine, whose long prompts let jobs run between their pieces."""
        engine = self._make_engine()
        engine.scheduler.waiting.interrupted = lambda: not self._jobs.empty()
        return engine

    def _release_engine(self) -> None:
        """Frees the engine's memory before a new engine is made: both may not fit."""
        releases = self.engine.releases()
        self._engine = None
        gc.collect()
        for release in releases:
            release()
        gc.collect()  # captured rounds know themselves
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def _quick_switches(device: torch.device) -> Iterator[None]:
    """Lets the thread go on soon after a wait for a CUDA device, though the event loop computes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS if device.type == "cuda" else before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def engine_stopped() -> ApiError:
    """Returns the error of requests that have no engine."""
    return ApiError(
        503, "the engine has stopped; this server must be restarted", code="engine_stopped"
    )


def _settle(future: asyncio.Future[T], error: Exception | None, result: T) -> None:
    """Sets a result or an error, unless the caller has cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
