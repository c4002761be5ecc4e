"""Answers without HTTP: lines of a file take the way of requests, from the fields to the objects that come back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.errors import InternalError
from shoal.serve.api_errors import ApiError
from shoal.serve.api_formats import ApiFormat, Chat, Completions
from shoal.serve.batch_lines import ENVELOPE, BatchLine, Json, is_enveloped, is_id
from shoal.serve.batch_results import LineError, answered, failed
from shoal.serve.bodies import validated
from shoal.serve.metrics import Metrics
from shoal.serve.request_models import ChatRequest, CompletionRequest
from shoal.serve.request_parser import ParsedRequest, RequestParser, require_model
from shoal.serve.responses import ApiResponse
from shoal.serve.settings import Settings
from shoal.serve.worker import Worker

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Offline:
    """A pair that answers lines as `shoal serve` answers requests.

    Args:
        make_engine: engines of `shoal`, see `Worker`. settings: what a line may ask; `queue` means nothing here.

    Attributes:
        made: what was chosen when the target was loaded and changes tokens; the field "shoal" of each answer has it.
    """

    def __init__(self, shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> None:
        self.shoal, self.settings = shoal, replace(settings, queue=sys.maxsize)
        self._make_engine = make_engine
        chosen = shoal.loaded["target"] or {}
        self.made = {name: chosen[name] for name in ("dtype", "quantize", "strict")}

    def answer(self, lines: Iterable[BatchLine], done: Callable[[Json], None]) -> None:
        """Answers all lines; so many are open at a time that all slots of a batch are used.

        Args:
            done: called with each answer as it is there, see `shoal.serve.batch_results`.

        Raises:
            InternalError: the engine's thread has ended. Exception: what `done` raised.
        """
        asyncio.run(self._answer_all(lines, done))

    async def _answer_all(self, lines: Iterable[BatchLine], done: Callable[[Json], None]) -> None:
        worker = Worker(self._make_engine, self.settings.queue, Metrics())
        slots = worker.engine.scheduler.capacity
        translator = RequestParser(
            self.shoal.tokenizer, self.shoal.eos, worker.engine.target.vocab_size, worker.engine.context, worker.capacity,
            self.settings,
        )  # fmt: skip
        waiting = iter(lines)

        async def work() -> None:
            for line in waiting:
                done(await self._answer(line, worker, translator))

        worker.start(asyncio.get_running_loop())
        try:
            await asyncio.gather(*(work() for _ in range(slots)))
        finally:
            worker.stop()

    async def _answer(self, line: BatchLine, worker: Worker, translator: RequestParser) -> Json:
        made: Json = {**self.made}
        try:
            form, order = self._order(line, translator)
            made |= {"notes": dict(order.notes)} if order.notes else {}
            entry = answered(line, await ApiResponse(worker, self.shoal.tokenizer, self.settings.model, form, order).whole())
        except Exception as error:
            if not worker.alive:
                raise InternalError(f"the engine's thread has ended: {worker.failure!r}") from error
            entry = failed(line, error)
        return {**entry, "shoal": made}

    def _order(self, line: BatchLine, translator: RequestParser) -> tuple[ApiFormat, ParsedRequest]:
        path, body = _asked(line)
        form: ApiFormat
        if path == CHAT:
            conversation = validated(ChatRequest, body)
            require_model(conversation.model or self.settings.model, self.settings)
            form, order = Chat(), translator.chat(conversation)
        else:
            text = validated(CompletionRequest, body)
            require_model(text.model or self.settings.model, self.settings)
            form, order = Completions(), translator.completion(text)
        if order.stream:
            raise ApiError(400, "an answer in a file cannot be streamed", param="stream")
        return form, order


def _asked(line: BatchLine) -> tuple[str, Json]:
    """The API's path and fields of a line. Raises ApiError for what is wrong outside of the fields."""
    try:
        fields = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the line is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the line must be a JSON object", code="invalid_json")
    if is_enveloped(fields):
        return _opened(fields)
    if not is_id(fields.pop("id", "")):
        raise ApiError(400, "id must be a text or an integer", param="id", code="invalid_value")
    return (CHAT if "messages" in fields else COMPLETIONS), fields


def _opened(fields: Json) -> tuple[str, Json]:
    """The same of one of OpenAI's batch lines."""
    if unknown := [name for name in fields if name not in ENVELOPE and fields[name] is not None]:
        raise LineError(400, f"unknown field {unknown[0]!r} beside custom_id, method, url and body", code="unknown_field")
    if not isinstance(fields.get("custom_id"), str):
        raise LineError(400, "custom_id must be a text", code="invalid_custom_id")
    if fields.get("method") != "POST":
        raise LineError(400, f"method must be 'POST', got {fields.get('method')!r}", code="invalid_method")
    if fields.get("url") not in (COMPLETIONS, CHAT):
        raise LineError(400, f"url must be {COMPLETIONS!r} or {CHAT!r}, got {fields.get('url')!r}", code="invalid_url")
    if not isinstance(fields.get("body"), dict):
        raise LineError(400, "body must be a JSON object", code="invalid_body")
    return fields["url"], fields["body"]
