"""What of a request crosses between the event loop and the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.samples import Sample, TopLogprobs

MAX_UNREAD_BYTES = 4 * 2**20
"""Bytes of news that may wait for whoever reads a stream."""


class TokenUpdate(NamedTuple):
    """One token of a sample: `text` is what it adds, `top` the most probable ones there, if they were asked for."""

    id: int
    text: str
    logprob: float | None
    from_draft: bool
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class RowUpdate:
    """What became of one row since the last news of it.

    Attributes:
        place: which row of the ticket, prompt by prompt.
        text, tokens: new ones; tokens only if details were asked for, each as soon as all its text may be shown.
        committed, drafted, accepted, rounds: so far. sample: set when the row ended; error: if it failed, why.
    """

    place: int
    text: str
    tokens: tuple[TokenUpdate, ...]
    committed: int
    drafted: int
    accepted: int
    rounds: int
    sample: Sample | None
    error: ShoalError | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes until it is read, about."""
        tops = sum(0 if token.top is None else len(token.top.raw) for token in self.tokens)
        return 500 + 4 * len(self.text) + 250 * len(self.tokens) + 100 * tops


class Submission:
    """One HTTP request: what the engine is asked, and the news of it.

    Attributes:
        requests: one per prompt; none if nothing is to be generated. rows: asked for. open: rows whose ends have not been read.
        held: rows that still have a place in the engine. unread: bytes of news that wait to be read.
        stream: news of every round, not only of each row's end. detailed: news tell their tokens.
        members: its rows in the engine, prompt by prompt; the engine thread's own.
        inbox: where the event loop finds news, or what ended them all.
    """

    def __init__(self, requests: Sequence[Request], rows: int, *, stream: bool, detailed: bool) -> None:
        self.requests, self.rows, self.stream, self.detailed = list(requests), rows, stream, detailed
        self.open = sum(request.n for request in requests)
        self.members: list[Row] = []
        self.held = self.unread = 0
        self.inbox: asyncio.Queue[list[RowUpdate] | Exception] = asyncio.Queue()

    async def news(self) -> AsyncIterator[RowUpdate]:
        """All news, until the last row has ended.

        Raises:
            Exception: whatever ended all rows at once.
        """
        while self.open:
            got = await self.inbox.get()
            if isinstance(got, Exception):
                raise got
            self.unread -= sum(news.size for news in got)
            for news in got:
                self.open -= news.sample is not None
                yield news

    def tell(self, news: list[RowUpdate]) -> bool:
        """Queues updates for the reader. False if more than `MAX_UNREAD_BYTES` of a stream wait: all of them are dropped then.
        Updates of an answer in one piece are not limited."""
        self.unread += sum(one.size for one in news)
        if self.stream and self.unread > MAX_UNREAD_BYTES:
            self.inbox = asyncio.Queue()
            return False
        self.inbox.put_nowait(news)
        return True


@dataclass(eq=False)
class RowStream:
    """The engine thread's side of one row: makes news of commits, and remembers what was told."""

    ticket: Submission
    place: int
    told: int = 0

    def news(self, commit: Commit) -> RowUpdate | None:
        """None when there is nothing to tell yet."""
        row, sample = commit.row, commit.sample
        if sample is None and not self.ticket.stream:
            return None
        tokens = self._tokens(row, sample) if self.ticket.detailed else ()
        text = commit.text if self.ticket.stream or sample is None else sample.text
        return RowUpdate(self.place, text, tokens, row.new_tokens, row.drafted, row.accepted, row.rounds, sample, row.error)

    def _tokens(self, row: Row, sample: Sample | None) -> tuple[TokenUpdate, ...]:
        """Those whose text is out, and that no stop string can take back."""
        text = row.detokenizer
        start, self.told = self.told, len(sample.token_ids) if sample else text.covering(text.shown)
        tops: Sequence[TopLogprobs | None] = row.top_logprobs or [None] * row.new_tokens
        return tuple(
            TokenUpdate(row.tokens[row.prompt_length + i], text.piece(i), row.logprobs[i], row.from_draft[i], tops[i])
            for i in range(start, self.told)
        )
