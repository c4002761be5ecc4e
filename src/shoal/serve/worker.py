"""The requests of a server in its engine: each a `Submission`, which the `Worker` admits.

The worker hands the rows to the engine's thread, and makes the updates that their readers get.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import anyio

from shoal.engine.engine import Engine
from shoal.errors import ShoalError
from shoal.serve.api_errors import ApiError
from shoal.serve.compiled_grammars import GrammarReader
from shoal.serve.engine_thread import EngineThread, engine_stopped
from shoal.serve.prometheus_metrics import Metrics, Timeline
from shoal.types.arguments import with_line_ends
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.samples import Sample, TopLogprobs

MAX_RETRY_SECONDS = 60
"""The largest value of Retry-After."""
MAX_UNREAD_BYTES = 4 * 2**20
"""The size of the updates of a stream that may wait to be read."""


class TokenUpdate(NamedTuple):
    """One token.

    Attributes:
        id: the token's id.
        text: the text that it adds to the row's text.
        logprob: its log-probability.
        drafter: the name of the drafter whose draft it is; None for one of the target's own.
        top: the most probable tokens at its position, if requested.
    """

    id: int
    text: str
    logprob: float | None
    drafter: str | None
    top: TopLogprobs | None = None


class RoundUpdate(NamedTuple):
    """One round of a row.

    Attributes:
        start: the place of its first token among the row's tokens.
        committed: the number of its tokens.
        accepted: the number of these tokens, the first ones, that were drafts.
        rejected: ids and drafters of the drafts that were not kept.
    """

    start: int
    committed: int
    accepted: int
    rejected: Sequence[tuple[int, str]]


@dataclass(frozen=True)
class RowUpdate:
    """The progress of one row since its last update.

    Attributes:
        index: the number of the row among those of its submission, prompt by prompt.
        text: the new text.
        tokens: the new tokens, only of a detailed submission, each as soon as all its text may be
            shown.
        committed: the total of the row's committed tokens.
        drafted: the total of its drafted tokens.
        accepted: the total of its accepted drafts.
        rounds: the total of its rounds.
        sample: set when the row has ended.
        error: the reason of its failure.
        by_round: its rounds since the last update, of a submission with `rounds`.
    """

    index: int
    text: str
    tokens: tuple[TokenUpdate, ...]
    committed: int
    drafted: int
    accepted: int
    rounds: int
    sample: Sample | None
    error: ShoalError | None = None
    by_round: tuple[RoundUpdate, ...] = ()

    def with_line_ends(self, end: str) -> RowUpdate:
        """Returns the update with texts whose lines end so."""
        tokens = tuple(one._replace(text=with_line_ends(one.text, end)) for one in self.tokens)
        return replace(self, text=with_line_ends(self.text, end), tokens=tokens)

    @property
    def size(self) -> int:
        """The approximate number of bytes that the update takes until it is read."""
        alternatives = sum(0 if token.top is None else len(token.top.raw) for token in self.tokens)
        rejected = sum(len(done.rejected) for done in self.by_round)
        return (
            500
            + 4 * len(self.text)
            + 250 * len(self.tokens)
            + 100 * (alternatives + len(self.by_round) + rejected)
        )


class Submission:
    """The rows of one request in the engine, and the queue of their updates.

    Args:
        requests: one per prompt; none if nothing is to be generated.
        rows: the number of samples, which take capacity.
        stream: True for updates after every round, not only at each row's end.
        detailed: True if updates have tokens.
        rounds: True if updates have rounds.
        grammar_field: the field of the request that its grammar came from, for messages.

    Attributes:
        open: the number of rows whose end has not been read.
        held: the number of rows that take capacity.
        unread: bytes of updates in the inbox.
        members: the rows in the engine, prompt by prompt; the engine thread's own.
        timeline: the times of these rows; the engine thread's own.
        inbox: updates, or the error that ended all rows.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        rows: int,
        *,
        stream: bool,
        detailed: bool,
        rounds: bool = False,
        grammar_field: str = "grammar",
    ) -> None:
        self.grammar_field = grammar_field
        self.requests = list(requests)
        self.rows = rows
        self.stream = stream
        self.detailed = detailed
        self.open = sum(request.n for request in requests)
        self.members: list[Row] = []
        self.timeline = Timeline(self.open)
        self.held = self.unread = 0
        self.inbox: asyncio.Queue[list[RowUpdate] | Exception] = asyncio.Queue()
        self._sent_tokens = [0] * self.open
        self._rounds: list[list[RoundUpdate]] | None = (
            [[] for _ in range(self.open)] if rounds else None
        )

    async def updates(self, silence: float = math.inf) -> AsyncIterator[RowUpdate | None]:
        """Yields all updates, and None after each `silence` seconds without an update.

        Raises:
            Exception: the error that ended all rows.
        """
        while self.open:
            updates: list[RowUpdate] | Exception | None = None
            with anyio.move_on_after(silence):
                updates = await self.inbox.get()
            if updates is None:
                yield None
                continue
            if isinstance(updates, Exception):
                raise updates
            self.unread -= sum(update.size for update in updates)
            for update in updates:
                self.open -= update.sample is not None
                yield update

    def put(self, updates: list[RowUpdate]) -> bool:
        """Queues updates for the reader.

        Returns False if more than `MAX_UNREAD_BYTES` of a stream wait: all of them are dropped
        then. Without `stream` there is no limit: the server itself reads.
        """
        self.unread += sum(update.size for update in updates)
        if self.stream and self.unread > MAX_UNREAD_BYTES:
            self.inbox = asyncio.Queue()
            return False
        self.inbox.put_nowait(updates)
        return True

    def update(self, index: int, commit: Commit) -> RowUpdate | None:
        """Returns a row's update after a commit, made on the engine's thread.

        It returns None if the row has not ended and nothing is streamed.
        """
        row, sample = commit.row, commit.sample
        by_round = self._new_rounds(index, commit)
        if sample is None and not self.stream:
            return None
        tokens = self._new_tokens(index, row, sample) if self.detailed else ()
        text = commit.text if self.stream or sample is None else sample.text
        return RowUpdate(
            index,
            text,
            tokens,
            committed=row.new_tokens,
            drafted=row.drafted,
            accepted=row.accepted,
            rounds=row.rounds,
            sample=sample,
            error=row.error,
            by_round=by_round,
        )

    def _new_rounds(self, index: int, commit: Commit) -> tuple[RoundUpdate, ...]:
        """Keeps the round, if rounds are asked for; returns the unsent rounds once possible."""
        if self._rounds is None:
            return ()
        waiting = self._rounds[index]
        if commit.tokens or commit.drafts:  # a row that was cut before a round has none
            start = commit.row.new_tokens - len(commit.tokens)
            if not start:  # a row that began again
                waiting.clear()
            # Without drafts a round has one token: several are those of a run of rounds.
            counts = [len(commit.tokens)] if commit.drafts else [1] * len(commit.tokens)
            waiting += [
                RoundUpdate(start + place, count, commit.accepted, commit.rejected)
                for place, count in enumerate(counts)
            ]
        if not self.stream and commit.sample is None:
            return ()
        self._rounds[index] = []
        return tuple(waiting)

    def _new_tokens(self, index: int, row: Row, sample: Sample | None) -> tuple[TokenUpdate, ...]:
        """Returns unsent tokens whose text is complete and that no stop string can remove."""
        text = row.detokenizer
        start = self._sent_tokens[index]
        end = len(sample.token_ids) if sample else text.covering(text.shown)
        self._sent_tokens[index] = end
        tops: Sequence[TopLogprobs | None] = row.top_logprobs or [None] * row.new_tokens
        return tuple(
            TokenUpdate(
                row.tokens[row.prompt_length + i],
                text.piece(i),
                row.logprobs[i],
                row.drafters[i],
                tops[i],
            )
            for i in range(start, end)
        )


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
            constraints = await self._grammars.of_requests(
                submission.requests, submission.grammar_field
            )
            await self.thread.call(lambda: self._submit(submission))
            del constraints
            yield
        finally:
            self._release(submission, submission.held)
            self._submissions.discard(submission)
            if submission.open:
                self.thread.post(lambda: self._cancel(submission))

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
                reason = "the stream was not read, and is cut"
                self._fail([submission], ApiError(503, reason, code="stream_not_read"))

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
