"""The answer of /v1/responses, whole or as typed events."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.serve.api_errors import ApiError, Json, api_error_of
from shoal.serve.api_formats import FINISH_REASONS
from shoal.serve.item_format import ItemFormat, ItemWriter
from shoal.serve.item_models import NAMES, ResponsesRequest
from shoal.serve.request_builder import ParsedRequest
from shoal.serve.request_parser import RequestParser
from shoal.serve.responses import KEEP_ALIVE, KEEP_ALIVE_SECONDS, ApiResponse, event, failure
from shoal.serve.worker import RowUpdate, Submission
from shoal.types.samples import Sample

STATUSES = {"stop": "completed", "length": "incomplete", "error": "failed"}
"""The `status` by the `finish_reason` of a chat's choice."""
IGNORED = "x-shoal-ignored"
"""The header that names fields without effect."""
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The `error.code` of a failed answer by HTTP status; for other statuses it is server_error."""


def parsed_items(parser: RequestParser, request: ResponsesRequest) -> ParsedRequest:
    """Returns the request, parsed as the chat request with the same meaning.

    Raises:
        ApiError: the request cannot be served.
        RequestError: the request cannot be served.
    """
    with renamed():
        parsed = parser.parse(request.chat())
        if parsed.reasoning is not None and parsed.top_logprobs is not None:
            message = "log-probabilities of a text behind reasoning: /v1/chat/completions has them"
            raise ApiError(400, message, param="include")
    headers = {name: _renamed(value) for name, value in parsed.headers.items()}
    others = headers.pop(IGNORED, "").split(", ")  # of the chat: the schema's, the forced call's
    if ignored := [*filter(None, dict.fromkeys([*request.ignored, *map(_renamed, others)]))]:
        headers[IGNORED] = ", ".join(ignored)
    return replace(parsed, headers=headers)


FIRST_NAME = re.compile(rf"^([A-Z][a-z ]*'|)({'|'.join(NAMES)})(?=[' =.])")
"""The field that a message is about."""


@contextmanager
def renamed() -> Iterator[None]:
    """Renames the fields in the block's errors as /v1/responses names them."""
    try:
        yield
    except ApiError as error:
        if error.param in NAMES:
            error.param, error.detail = NAMES[error.param], _renamed(error.detail)
        raise


def _renamed(text: str) -> str:
    """Replaces the name of a field at the beginning of a text, or the first one in quotes."""
    return FIRST_NAME.sub(lambda match: match[1] + NAMES[match[2]], text)


@dataclass
class ItemResponse(ApiResponse):
    """The answer to one request, computed by `whole` or `events`.

    Attributes:
        request: the request as it was sent.
    """

    request: ResponsesRequest = field(kw_only=True)

    async def whole(self) -> Json:
        """Returns the answer, once the row has ended.

        Raises:
            ApiError: see `Worker.serving`, or the error of the row.
            RequestError: see `Worker.serving`, or the error of the row.
        """
        submission, form, writer = self._submission(), self._form(), ItemWriter(self.key)
        async with self._serving(submission):
            [end] = [update async for update in self._updates(submission) if update is not None]
        if end.error is not None:
            raise failure(end.error)
        self._write(form, writer, end)
        return self._ended(form, writer, end.sample)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the answer as server-sent events; errors after the first item are events.

        Raises:
            ApiError: before the first item.
            RequestError: before the first item.
        """
        submission, form, writer = self._submission(), self._form(), ItemWriter(self.key)
        sample = None
        async with self._serving(submission):
            begun = self._answer(writer, "in_progress")
            yield _sent([writer.event(kind, response=begun) for kind in ("created", "in_progress")])
            try:
                async for update in self._updates(submission, KEEP_ALIVE_SECONDS):
                    if update is None:
                        yield KEEP_ALIVE
                        continue
                    yield _sent(self._write(form, writer, update))
                    sample = update.sample
                    if update.error is not None:
                        raise failure(update.error)
            except Exception as error:  # the status has been sent
                yield _sent(self._failed(writer, api_error_of(error)))
                return
        answer = self._ended(form, writer, sample)
        yield _sent([writer.event(answer["status"], response=answer)])

    @asynccontextmanager
    async def _serving(self, submission: Submission) -> AsyncIterator[None]:
        with renamed():
            async with super()._serving(submission):
                yield

    def _form(self) -> ItemFormat:
        form = self._choice(0)
        assert isinstance(form, ItemFormat)
        return form

    def _write(self, form: ItemFormat, writer: ItemWriter, update: RowUpdate) -> list[Json]:
        events = writer.add(form.pieces(update), form.logprobs(update))
        return events if update.sample is None else events + writer.end(_item_status(update.sample))

    # ── JSON ──────────────────────────────────────────────────────────────────────────────────────

    def _ended(self, form: ItemFormat, writer: ItemWriter, sample: Sample | None) -> Json:
        """Returns the answer at its end."""
        assert sample is not None
        status = STATUSES[FINISH_REASONS[sample.finish_reason]]
        return self._answer(writer, status) | {
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "usage": _usage(self._usage([sample], [sample], [form])),
            **({} if form.details is None else {"shoal": form.details}),
        }

    def _failed(self, writer: ItemWriter, error: ApiError) -> list[Json]:
        """Returns the events of an answer that fails after its status has been sent."""
        events = writer.end("incomplete")
        said = {"code": ERROR_CODES.get(error.status_code, "server_error"), "message": error.detail}
        return [
            *events,
            writer.event("failed", response=self._answer(writer, "failed") | {"error": said}),
        ]

    def _answer(self, writer: ItemWriter, status: str) -> Json:
        request = self.request
        choice, tools = request.tool_choice or "auto", request.functions
        sampling = self.parsed.requests[0].sampling
        wanted = request.text.format if request.text and request.text.format else None
        return {
            "id": self.api.id_prefix + self.key,
            "object": self.api.object_name,
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": list(writer.items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": _dumped(wanted) or {"type": "text"}},
            "temperature": _or(request.temperature, sampling.temperature),
            "tool_choice": _dumped(choice),
            "tools": [{"parameters": None, "strict": None, **_dumped(tool)} for tool in tools],
            "top_logprobs": self.parsed.top_logprobs or 0,
            "top_p": _or(request.top_p, sampling.top_p),
            "truncation": "disabled",
            "usage": None,
        }


def _item_status(sample: Sample) -> str:
    return "completed" if FINISH_REASONS[sample.finish_reason] == "stop" else "incomplete"


def _or(said: float | None, default: float) -> float:
    return default if said is None else said


def _dumped(value: object) -> Any:
    """Returns a model of a request as JSON; other values unchanged."""
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(by_alias=True, exclude_none=True)


def _usage(usage: Json) -> Json:
    """Returns a chat's `usage` in the form of /v1/responses, without tokens of kept prompts."""
    named = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    cached = usage.pop("prompt_tokens_details")
    reasoning = usage.pop("completion_tokens_details", {"reasoning_tokens": 0})
    return {named.get(name, name): value for name, value in usage.items()} | {
        "input_tokens_details": {**cached, "cache_write_tokens": 0},
        "output_tokens_details": reasoning,
    }


def _sent(events: Sequence[Json]) -> bytes:
    """Returns the events as bytes, each under its name."""
    return b"".join(f"event: {one['type']}\n".encode() + event(one) for one in events)
