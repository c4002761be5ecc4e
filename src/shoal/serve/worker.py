"""The one thread that owns the models. Between rounds it does what it is asked; the event loop hears of everything by itself.

Whatever happens there, nobody waits for ever: a failed pass fails all rows, and a new engine replaces the old one. Anything
unforeseen, and a second failure before any round has finished, ends the thread: then whatever is open fails, whatever comes is
refused, and `shoal.serve.run` ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from shoal.constraints.grammar import Constraint
from shoal.engine.engine import Engine
from shoal.errors import InternalError, ModelError, RequestError, ShoalError
from shoal.models.out_of_memory import explained
from shoal.serve.api_errors import ApiError
from shoal.serve.grammars import GrammarReader
from shoal.serve.submissions import RowStream, RowUpdate, Submission
from shoal.types.requests import Row
from shoal.types.rounds import Commit
from shoal.types.samples import Sample

LOG = logging.getLogger(__name__)
T = TypeVar("T")
MAX_RETRY_SECONDS = 60
"""Seconds; the most that a refused client is told to wait."""
MAX_FAILURES = 2
"""Passes that fail one after the other, without a finished round between, before the thread gives up."""


class Observer(Protocol):
    """Who counts what happens on the engine's thread."""

    def began(self, seconds: float) -> None:
        """A row committed its first tokens, `seconds` after it was asked for."""
        ...

    def ended(self, sample: Sample) -> None:
        """A row ended."""
        ...


class Worker:
    """Runs an engine on a thread of its own.

    Args:
        make_engine: called now, and again after a failed pass. queue: rows that may wait beyond those that run.

    Attributes:
        stats: of all its engines. capacity: most rows in one, running and waiting.
        rows: in it now, as the event loop knows. failure: what ended the thread.
        scoring: held by whoever scores a prompt: one at a time takes memory beside the rows.
        busy_since: when the thread began what it is doing, by `time.perf_counter`; None = it waits for something to do.
    """

    def __init__(self, make_engine: Callable[[], Engine], queue: int, observer: Observer) -> None:
        self._make_engine, self._observer = make_engine, observer
        self._engine: Engine | None = make_engine()
        self.stats = self._engine.stats
        self.capacity = self._engine.scheduler.capacity + queue
        self.rows = 0
        self.failure: BaseException | None = None
        self.scoring = asyncio.Lock()
        self.busy_since: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._tickets: set[Submission] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._followers: dict[Row, RowStream] = {}
        self._finished = 0
        self._failures = 0
        self._grammars = GrammarReader(self._engine.intake.tokenizer, self._engine.intake.vocab_size)

    @property
    def engine(self) -> Engine:
        """The thread's. Others may look at its figures, and must not keep it.

        Raises:
            ApiError: 503, while a failed one is replaced.
        """
        if self._engine is None:
            raise ApiError(503, "the engine failed, and a new one is being made", code="pass_failed")
        return self._engine

    # ── on the event loop ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on rows are decoded, and `loop` hears of them."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the round it is in; rows still open fail."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._grammars.close()

    def cut(self) -> None:
        """Ends all rows after the round they are in; what they have is returned, marked "cancelled"."""
        self._jobs.put(lambda: self._deliver(self.engine.cancel(list(self._followers))))

    def leave(self, job: Callable[[], object]) -> None:
        """Has the engine's thread do something that cannot fail, and does not wait for it."""
        self._jobs.put(job)

    @property
    def alive(self) -> bool:
        """Whether there is anybody to decode; False at the latest once all that was open has failed: nothing slips in between."""
        return self._thread.is_alive() and not self._over

    @asynccontextmanager
    async def serving(self, ticket: Submission) -> AsyncIterator[None]:
        """The ticket's rows are in the engine for as long as this lasts; those unfinished at its end are cancelled.

        Raises:
            ApiError: too many rows for now (429), or no engine (503). RequestError: what the engine will not take.
        """
        self._admit(ticket)
        self.rows += ticket.rows
        ticket.held = ticket.rows
        self._tickets.add(ticket)
        try:
            read = await self._read_grammars(ticket)
            await self.call(lambda: self._submit(ticket))
            del read
            yield
        finally:
            self._give_back(ticket, ticket.held)
            self._tickets.discard(ticket)
            if ticket.open:
                self._jobs.put(lambda: self._cancel(ticket))

    async def _read_grammars(self, ticket: Submission) -> list[Constraint]:
        """Has the ticket's grammars read, so that the engine's thread finds them for as long as they are kept."""
        read: list[Constraint] = []
        for request in ticket.requests:
            grammar = request.sampling.grammar
            if grammar is None:
                continue
            try:
                read.append(await self._grammars.read(grammar, request.limits.time_budget))
            except RequestError as error:
                param = "grammar" if grammar.kind in ("regex", "lark") else "response_format"
                raise ApiError(400, str(error), param=param, code="invalid_value") from error
        return read

    def _admit(self, ticket: Submission) -> None:
        excess = self.rows + ticket.rows - self.capacity
        if excess > 0:
            pace = (self.stats.seconds_rounds + self.stats.seconds_prefill) / max(self._finished, 1)
            seconds = min(max(math.ceil(excess * pace), 1), MAX_RETRY_SECONDS)
            message = f"{self.rows} samples run or wait already, and {self.capacity} may; try again in {seconds} s"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(seconds)})

    async def call(self, job: Callable[[], T]) -> T:
        """Has the engine's thread do something between two rounds, and waits for the result.

        Raises:
            ApiError: 503, if there is no such thread (any more). Exception: what the job raised.
        """
        if not self.alive:
            raise self._gone()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                with explained("the server"):
                    result = job()
            except Exception as error:
                self._tell(_settle, future, error, None)
            else:
                self._tell(_settle, future, None, result)

        self._jobs.put(run)
        return await future

    def _gone(self) -> ApiError:
        return ApiError(503, "the engine has stopped; this server must be restarted", code="engine_stopped")

    def _hand_out(self, news: dict[Submission, list[RowUpdate]]) -> None:
        for ticket, items in news.items():
            if ticket not in self._tickets:
                continue
            self._give_back(ticket, sum(item.sample is not None for item in items))  # however long it takes to read
            if not ticket.tell(items):
                self._jobs.put(partial(self._cancel, ticket))
                self._fail([ticket], ApiError(503, "the stream was not read, and is cut", code="stream_not_read"))

    def _fail(self, tickets: Iterable[Submission], error: Exception) -> None:
        for ticket in tickets:
            self._give_back(ticket, ticket.held)
            ticket.inbox.put_nowait(error)

    def _give_back(self, ticket: Submission, rows: int) -> None:
        """The places of rows that have ended."""
        self.rows -= rows
        ticket.held -= rows

    def _ended(self) -> None:
        """The thread is over: whoever waits is told."""
        self._over = True
        for future in list(self._calls):
            _settle(future, self._gone(), None)
        self._fail(self._tickets, self._gone())

    # ── on the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._do_jobs():
                self.busy_since = time.perf_counter()
                self._round()
        except BaseException as error:  # also what is raised in a thread to kill it
            self.failure = error
            LOG.critical("the engine's thread has ended", exc_info=error)
        finally:
            self._tell(self._ended)

    def _do_jobs(self) -> bool:
        """Does what has been asked by now; what comes meanwhile waits for a round. Waits while there is nothing to decode.
        False: stop."""
        due = self._jobs.qsize()
        while due > 0 or self.engine.scheduler.idle:
            self.busy_since = None
            job = self._jobs.get()
            self.busy_since = time.perf_counter()
            if job is None:
                return False
            job()
            due -= 1
        return True

    def _submit(self, ticket: Submission) -> None:
        watched = ticket.stream or ticket.detailed
        ticket.members = [row for rows in self.engine.submit_all(ticket.requests, stream=watched) for row in rows]
        self._followers |= {row: RowStream(ticket, place) for place, row in enumerate(ticket.members)}

    def _cancel(self, ticket: Submission) -> None:
        rows = [row for row in ticket.members if row in self._followers]
        self.engine.cancel(rows)
        for row in rows:
            del self._followers[row]

    def _round(self) -> None:
        rounds = self.stats.rounds
        try:
            commits = self.engine.step()
        except InternalError:
            raise
        except ShoalError as error:
            reason = str(error)  # no more of it is kept: its traceback holds the engine
        else:
            self._failures = 0 if self.stats.rounds > rounds else self._failures
            self._deliver(commits)
            return
        self._renew(reason)

    def _deliver(self, commits: Iterable[Commit]) -> None:
        out: dict[Submission, list[RowUpdate]] = {}
        for commit in commits:
            follower = self._followers[commit.row]
            self._observe(commit)
            news = follower.news(commit)
            if news is not None:
                out.setdefault(follower.ticket, []).append(news)
            if commit.sample is not None:
                del self._followers[commit.row]
        if out:
            self._tell(self._hand_out, out)

    def _observe(self, commit: Commit) -> None:
        row = commit.row
        if commit.tokens and row.rounds == 1:
            self._observer.began(time.perf_counter() - row.request.submitted_at)
        if commit.sample is not None:
            self._observer.ended(commit.sample)
            self._finished += 1

    def _renew(self, reason: str) -> None:
        """A pass failed, and what the caches hold is unknown: the rows fail, the next ones get a new engine.

        Raises:
            ModelError: this was not the first failure in a row, and a new engine would fail as well.
        """
        LOG.error("a pass failed, and the rows in it: %s", reason)
        tickets = {follower.ticket for follower in self._followers.values()}
        self._followers.clear()
        self._tell(self._fail, tickets, ApiError(503, reason, code="pass_failed"))
        self._failures += 1
        if self._failures == MAX_FAILURES:
            raise ModelError(f"{MAX_FAILURES} passes in a row have failed, the last one with: {reason}")
        self._free()
        self._engine = self._make_engine()
        self._engine.stats = self.stats

    def _free(self) -> None:
        """Gives back what the engine takes: a new one beside it may not fit."""
        releases = self.engine.releases()
        self._engine = None
        gc.collect()
        for release in releases:
            release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        """Has the event loop do something; nothing if it is over."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)


def _settle(future: asyncio.Future[T], error: Exception | None, result: T) -> None:
    """Whoever waited may be gone."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
