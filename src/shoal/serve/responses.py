"""Answers to an order, whole or as a stream of server-sent events: the same rows, followed in two ways."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal.errors import BadLogits, RequestError, ShoalError
from shoal.serve.api_errors import ApiError, api_error_of
from shoal.serve.api_formats import ApiFormat, Choice, Json, usage
from shoal.serve.request_parser import ParsedRequest
from shoal.serve.scoring import scored
from shoal.serve.submissions import RowUpdate, Submission, TokenUpdate
from shoal.serve.token_names import name_and_bytes
from shoal.serve.worker import Worker
from shoal.types.samples import Sample, ranked

NOTHING = Sample("", (), (), (), math.nan, "length", 0.0, 0, 0, 0, 0, ())
"""The sample of a row that was to have no tokens."""


@dataclass
class ApiResponse:
    """One order being answered.

    Attributes:
        model: the name to answer under.
    """

    worker: Worker
    tokenizer: Any
    model: str
    form: ApiFormat
    order: ParsedRequest
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: secrets.token_hex(12))

    async def whole(self) -> Json:
        """The answer, once all rows have ended.

        Raises:
            ApiError, RequestError: see `Worker.serving`; if every row failed, why the first did.
        """
        order, ticket = self.order, self._ticket()
        async with self._serving(ticket):
            prompts = await self._prompts()
            ends = sorted([news async for news in self._news(ticket)], key=lambda news: news.place)
        samples = [news.sample for news in ends if news.sample is not None]
        if all(news.error is not None for news in ends):
            raise _failure(ends[0].error)
        kept = [ends[place] for place in _kept(samples, order)]
        choices = [self._choice(index).whole(news, *self._echoed(news, prompts)) for index, news in enumerate(kept)]
        took = usage(self._prompt_length, samples, [news.sample for news in kept if news.sample is not None])
        return self._body(self.form.whole, choices) | {"usage": took}

    async def events(self) -> AsyncGenerator[bytes]:
        """The same as server-sent events; the first item comes when the engine has taken the order, and may be empty.

        Raises:
            ApiError, RequestError: before the first item, as `whole` does; later errors are events.
        """
        order, ticket = self.order, self._ticket()
        choices = [self._choice(place) for place in range(order.drawn * len(order.prompts))]
        async with self._serving(ticket):
            yield await self._opening(choices)
            samples: dict[int, Sample] = {}
            try:
                async for news in self._news(ticket):
                    yield self._event(choices[news.place].piece(news))
                    if news.sample is not None:
                        samples[news.place] = news.sample
            except Exception as error:  # the status has been sent
                yield _event(api_error_of(error).body())
                return
        if order.usage:
            ended = [samples[place] for place in sorted(samples)]
            yield _event(self._body(self.form.chunk, []) | {"usage": usage(self._prompt_length, ended, ended)})
        yield b"data: [DONE]\n\n"

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ticket(self) -> Submission:
        order = self.order
        detailed = order.details or order.logprobs is not None
        return Submission(order.requests, order.drawn * len(order.prompts), stream=order.stream, detailed=detailed)

    @asynccontextmanager
    async def _serving(self, ticket: Submission) -> AsyncIterator[None]:
        """As `Worker.serving`; what is refused there is refused for its prompt, as the rest has been looked at before."""
        try:
            async with self.worker.serving(ticket):
                yield
        except RequestError as error:
            raise ApiError(400, str(error), param=self.form.asked, code="invalid_value") from error

    async def _news(self, ticket: Submission) -> AsyncIterator[RowUpdate]:
        """Of the ticket; where nothing was to be generated, of rows that ended at once."""
        async for news in ticket.news():
            yield news
        if not self.order.requests:
            for place in range(self.order.drawn * len(self.order.prompts)):
                yield RowUpdate(place, "", (), 0, 0, 0, 0, NOTHING)

    def _choice(self, index: int) -> Choice:
        return Choice(self.form, self._name, index, self.order.logprobs, self.order.details)

    def _name(self, token: int) -> tuple[str, bytes | None]:
        return name_and_bytes(self.tokenizer, token)

    async def _prompts(self) -> list[tuple[TokenUpdate, ...]]:
        """The prompts' own tokens, where they come back with log-probabilities."""
        order = self.order
        if order.echo is None or order.logprobs is None:
            return [()] * len(order.prompts)
        done = await scored(self.worker, order.prompts, order.logprobs, order.deadline)
        return [scoring.tokens(self.tokenizer) for scoring in done]

    def _echoed(self, news: RowUpdate, prompts: Sequence[Sequence[TokenUpdate]]) -> tuple[str, Sequence[TokenUpdate]]:
        prompt = news.place // self.order.drawn
        return (self.order.echo[prompt] if self.order.echo else ""), prompts[prompt]

    async def _opening(self, choices: Sequence[Choice]) -> bytes:
        prompts = await self._prompts()
        echo: Sequence[str | None] = self.order.echo or [None] * len(prompts)
        opened = [
            choice.opening(echo[place // self.order.drawn], prompts[place // self.order.drawn])
            for place, choice in enumerate(choices)
        ]
        return b"".join(self._event(piece) for piece in opened if piece is not None)

    def _event(self, choice: Json) -> bytes:
        return _event(self._body(self.form.chunk, [choice]) | ({"usage": None} if self.order.usage else {}))

    def _body(self, kind: str, choices: Sequence[Json]) -> Json:
        key = self.form.prefix + self.key
        return {"id": key, "object": kind, "created": self.created, "model": self.model, "choices": list(choices)}

    @property
    def _prompt_length(self) -> int:
        return sum(map(len, self.order.prompts))


def _failure(error: ShoalError | None) -> Exception:
    """What failed a row, as an answer: its own request is at fault, or the model is, or there was no memory for now."""
    if isinstance(error, RequestError):
        return error
    return ApiError(500 if isinstance(error, BadLogits) else 503, str(error), code="row_failed")


def _kept(samples: Sequence[Sample], order: ParsedRequest) -> list[int]:
    """Places of the samples that come back: all in order, or each prompt's best."""
    if order.kept == order.drawn:
        return list(range(len(samples)))
    places = {id(sample): place for place, sample in enumerate(samples)}
    groups = [samples[start : start + order.drawn] for start in range(0, len(samples), order.drawn)]
    return [places[id(sample)] for group in groups for sample in ranked(group)[: order.kept]]


def _event(body: Json) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class EventStream(StreamingResponse):
    """Sends the events of a reply, and closes them whatever happens: rows end when their client goes.

    Args:
        first: of the events, taken before there is a response: what the engine refuses still has a status to be told by.
        headers: further ones of the answer.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        self._events = events
        super().__init__(
            _chained(first, events), headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the last event or until the client goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _chained(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in events:
        yield event
