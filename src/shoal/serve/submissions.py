"""The data between the event loop and the engine's thread: a `Submission` one way, its `RowUpdate`s
the other way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import anyio

from shoal.errors import ShoalError
from shoal.serve.prometheus_metrics import Timeline
from shoal.types.arguments import with_line_ends
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.samples import Sample, TopLogprobs

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

    async def updates(self) -> AsyncIterator[RowUpdate]:
        """Yields all updates until the last row has ended.

        Raises:
            Exception: the error that ended all rows.
        """
        async for update in self.updates_or_silence(math.inf):
            if update is not None:
                yield update

    async def updates_or_silence(self, seconds: float) -> AsyncIterator[RowUpdate | None]:
        """Yields all updates, and None after each `seconds` without an update.

        Raises:
            Exception: the error that ended all rows.
        """
        while self.open:
            updates: list[RowUpdate] | Exception | None = None
            with anyio.move_on_after(seconds):
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
