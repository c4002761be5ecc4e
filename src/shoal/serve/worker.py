"""Admits submissions, hands their rows to the engine's thread, and distributes the updates of the
rows."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import torch

from shoal.constraints.grammar import GrammarConstraint
from shoal.engine.engine import Engine
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.compiled_grammars import GrammarReader
from shoal.serve.engine_thread import EngineThread, engine_stopped
from shoal.serve.prometheus_metrics import Metrics
from shoal.serve.submissions import RowUpdate, Submission
from shoal.types.requests import Row
from shoal.types.rounds import Commit

MAX_RETRY_SECONDS = 60
"""The largest value of Retry-After."""


class Worker:
    """The submissions of a server and the engine that decodes their rows.

    Args:
        make_engine: see `EngineThread`.
        queue: the number of rows that may wait beside the decoded ones.
        metrics: the server's metrics.

    Attributes:
        thread: the engine's thread.
        capacity: the most rows in the engine, decoded and waiting.
        rows: the number of rows in the engine now, as the event loop knows.
        scoring: the lock of prompt scoring: one prompt at a time takes memory beside the rows.
    """

    def __init__(self, make_engine: Callable[[], Engine], queue: int, metrics: Metrics) -> None:
        self._metrics = metrics
        self.thread = EngineThread(make_engine, self._deliver, self._fail_rows, self._fail_all)
        engine = self.thread.engine
        self.capacity = engine.scheduler.capacity + queue
        self.rows = 0
        self.scoring = asyncio.Lock()
        self._submissions: set[Submission] = set()
        # The engine thread's own: unfinished rows, with their submission and index.
        self._rows: dict[Row, tuple[Submission, int]] = {}
        self._finished = 0
        self._grammars = GrammarReader(engine.validator.tokenizer, engine.validator.vocab_size)

    # ── called on the event loop ──────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Ends the thread after the current round; unfinished rows fail."""
        self.thread.stop()
        self._grammars.close()

    def cut(self) -> None:
        """Ends all rows after the current round; their samples are returned as "cancelled"."""
        self.thread.post(lambda: self._deliver(self.thread.engine.cancel(list(self._rows))))

    def give_back(self) -> None:
        """Gives the memory of the caches back between two rounds, if there is no row then.

        Room that captured rounds know stays.
        """

        @torch.inference_mode()
        def job() -> None:
            engine = self.thread.engine
            if engine.scheduler.idle and engine.target.captures is None:
                engine.memory.allocate(engine.scheduler.release_free_slots(), idle=True)

        self.thread.post(job)

    @asynccontextmanager
    async def serving(self, submission: Submission) -> AsyncIterator[None]:
        """Keeps the submission's rows in the engine within the context.

        Rows that are unfinished at its end are cancelled.

        Raises:
            ApiError: too many rows (429), or no engine (503).
            RequestError: the engine does not accept a request.
        """
        self._admit(submission)
        self.rows += submission.rows
        submission.held = submission.rows
        self._submissions.add(submission)
        try:
            constraints = await self._read_grammars(submission)
            await self.thread.call(lambda: self._submit(submission))
            del constraints
            yield
        finally:
            self._release(submission, submission.held)
            self._submissions.discard(submission)
            if submission.open:
                self.thread.post(lambda: self._cancel(submission))

    async def _read_grammars(self, submission: Submission) -> list[GrammarConstraint]:
        """Reads the submission's grammars.

        The engine's thread finds them compiled as long as the returned list is kept.
        """
        constraints: list[GrammarConstraint] = []
        for request in submission.requests:
            grammar = request.sampling.grammar
            if grammar is None:
                continue
            with naming(submission.grammar_field):
                constraints.append(await self._grammars.read(grammar, request.limits.time_budget))
        return constraints

    def _admit(self, submission: Submission) -> None:
        """Raises ApiError (429) if the submission's rows exceed the capacity.

        Retry-After follows the pace so far.
        """
        excess = self.rows + submission.rows - self.capacity
        if excess > 0:
            stats = self.thread.stats
            pace = (stats.seconds_rounds + stats.seconds_prefill) / max(self._finished, 1)
            seconds = min(max(math.ceil(excess * pace), 1), MAX_RETRY_SECONDS)
            message = (
                f"{self.rows} samples run or wait already, and {self.capacity} may; try "
                f"again in {seconds} s"
            )
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(seconds)})

    def _distribute(self, updates: dict[Submission, list[RowUpdate]]) -> None:
        for submission, items in updates.items():
            if submission not in self._submissions:
                continue
            # Ended rows free their capacity whether or not the updates are read.
            self._release(submission, sum(item.sample is not None for item in items))
            if not submission.put(items):
                self.thread.post(partial(self._cancel, submission))
                self._fail(
                    [submission],
                    ApiError(503, "the stream was not read, and is cut", code="stream_not_read"),
                )

    def _fail(self, submissions: Iterable[Submission], error: Exception) -> None:
        for submission in submissions:
            self._release(submission, submission.held)
            submission.inbox.put_nowait(error)

    def _release(self, submission: Submission, rows: int) -> None:
        """Frees the capacity of rows that have ended."""
        self.rows -= rows
        submission.held -= rows

    def _fail_all(self) -> None:
        """Fails all submissions: the engine's thread has ended."""
        self._fail(self._submissions, engine_stopped())

    # ── called on the engine's thread ─────────────────────────────────────────────────────────────

    def _submit(self, submission: Submission) -> None:
        needs_text = submission.stream or submission.detailed
        groups = self.thread.engine.submit_all(submission.requests, stream=needs_text)
        submission.members = [row for rows in groups for row in rows]
        self._rows |= {row: (submission, index) for index, row in enumerate(submission.members)}

    def _cancel(self, submission: Submission) -> None:
        rows = [row for row in submission.members if row in self._rows]
        self.thread.engine.cancel(rows)
        for row in rows:
            del self._rows[row]

    def _deliver(self, commits: Iterable[Commit]) -> None:
        """Sends each submission the updates of its rows."""
        updates: dict[Submission, list[RowUpdate]] = {}
        now = time.perf_counter()
        for commit in commits:
            submission, index = self._rows[commit.row]
            submission.timeline.record(self._metrics, index, commit, now)
            update = submission.update(index, commit)
            if update is not None:
                updates.setdefault(submission, []).append(update)
            if commit.sample is not None:
                del self._rows[commit.row]
                self._finished += 1
        if updates:
            self.thread.notify(self._distribute, updates)

    def _fail_rows(self, reason: str) -> None:
        """Fails the submissions that have rows in the engine."""
        submissions = {submission for submission, _ in self._rows.values()}
        self._rows.clear()
        self.thread.notify(self._fail, submissions, ApiError(503, reason, code="pass_failed"))
