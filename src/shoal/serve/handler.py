"""`ApiHandler.handle`: from a request's fields to its answer, for HTTP and for batch files
alike.

Batch files come without HTTP: each of their lines is answered by the same handler.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from fastapi.concurrency import run_in_threadpool

from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.errors import InternalError
from shoal.models.pretrained import own_sampling
from shoal.serve import access
from shoal.serve.api_errors import RESPONSES, ApiError, Json, naming
from shoal.serve.api_formats import FORMATS
from shoal.serve.batch_lines import BatchLine
from shoal.serve.compiled_grammars import FirstTrials
from shoal.serve.infill import InfillResponse, parsed_infill
from shoal.serve.item_format import ItemFormat
from shoal.serve.item_models import ResponsesRequest
from shoal.serve.item_response import ItemResponse, parsed_items, renamed
from shoal.serve.message_models import InfillRequest
from shoal.serve.prometheus_metrics import Metrics
from shoal.serve.prompts import PromptEncoder
from shoal.serve.request_builder import (
    ParsedRequest,
    RequestBuilder,
    require_logprobs,
    require_members,
    require_range,
    require_truncation,
)
from shoal.serve.request_fields import LIMITLESS
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest
from shoal.serve.request_parser import RequestParser, alternatives, require_consistent
from shoal.serve.responses import ApiResponse
from shoal.serve.settings import Settings, given_grammar, limits_of, sampling_of
from shoal.serve.worker import Worker


def validated(path: str, fields: dict[str, Any], settings: Settings) -> Any:
    """Returns the fields of a request as an object of the API, as far as no model is needed.

    Args:
        path: the API's path, a key of `FORMATS` or `RESPONSES`.

    Raises:
        ApiError: the request names another model.
        RequestValidationError: a field is wrong.
    """
    kind = ResponsesRequest if path == RESPONSES else FORMATS[path].request_model
    request = access.validated(kind, fields)
    if request.model and request.model not in settings.names:
        raise no_model(request.model, settings)
    return request


def no_model(name: str, settings: Settings) -> ApiError:
    """Returns the error of a name that is not one of the served model's."""
    names = ", ".join(map(repr, settings.names))
    message = f"there is no model {name!r} here; this server has {names}"
    return ApiError(404, message, param="model", code="model_not_found")


class ApiHandler:
    """A handler that answers the requests of the API with a pair.

    Args:
        shoal: the pair.
        make_engine: makes engines of `shoal`, see `EngineThread`.

    Attributes:
        worker: the caller starts its thread, on its event loop.
        encoder: the encoder of prompts.
        parser: the parser of completions and chats.
        context: the number of tokens that the model takes.
    """

    def __init__(self, shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> None:
        self.shoal, self.settings, self.metrics = shoal, settings, Metrics()
        self.worker = Worker(make_engine, settings.queue, self.metrics)
        engine, capacity = self.worker.thread.engine, self.worker.capacity
        self.context = engine.context
        self.encoder = PromptEncoder(
            shoal.tokenizer, engine.target.vocab_size, settings.chat_template
        )
        ends = shoal.eos
        own = getattr(shoal.tokenizer, "eos_token_id", None)
        if settings.chat_template is not None and own is not None:
            ends = (*ends, *({int(own)} - {*ends}))
        defaults = own_sampling(engine.target.hf) if settings.generation_config else {}
        vocab_size, context = engine.target.vocab_size, engine.context
        self._builder = RequestBuilder(
            self.encoder,
            ends,
            vocab_size,
            context=context,
            capacity=capacity,
            settings=settings,
            defaults=defaults,
        )
        self.parser = RequestParser(self._builder)

    async def handle(self, path: str, fields: dict[str, Any], owner: str = "") -> ApiResponse:
        """Validates a request, on another thread: long texts take time.

        Args:
            path: the API's path, a key of `FORMATS` or `RESPONSES`.
            fields: the JSON object of the body.
            owner: the owner of the request (`shoal.types.requests.Request`).

        Raises:
            ApiError: the request cannot be served.
            RequestError: the request cannot be served.
            RequestValidationError: the request cannot be served.
        """
        name = str(fields.get("model") or self.settings.model)
        request = await run_in_threadpool(validated, path, fields, self.settings)
        if path == RESPONSES:
            parsed = await run_in_threadpool(parsed_items, self.parser, request)
            return ItemResponse(
                self.worker,
                self.shoal.tokenizer,
                name,
                ItemFormat,
                self._owned(parsed, owner),
                request=request,
            )
        parsed = self._owned(await run_in_threadpool(self.parser.parse, request), owner)
        return ApiResponse(self.worker, self.shoal.tokenizer, name, FORMATS[path], parsed)

    async def infill(self, fields: dict[str, Any], owner: str = "") -> InfillResponse:
        """Validates a request of /infill.

        Raises:
            ApiError: the request cannot be served.
            RequestError: the request cannot be served.
            RequestValidationError: the request cannot be served.
        """
        request, (parsed, truncated) = await run_in_threadpool(self._parsed_infill, fields)
        parsed = self._owned(parsed, owner)
        return InfillResponse(
            self.worker, self.shoal.tokenizer, self.settings.model, request, parsed, truncated
        )

    def _parsed_infill(
        self, fields: dict[str, Any]
    ) -> tuple[InfillRequest, tuple[ParsedRequest, bool]]:
        request = access.validated(InfillRequest, fields)
        return request, parsed_infill(self._builder, request)

    def require_model(self, name: str | None) -> None:
        """Raises ApiError for a name that is not the served model's; None is the model itself."""
        if name is not None and name not in self.settings.names:
            raise no_model(name, self.settings)

    def _owned(self, parsed: ParsedRequest, owner: str) -> ParsedRequest:
        """Returns the request as the owner's, with the owner's weight."""
        whose: dict[str, Any] = {"owner": owner, "weight": self.settings.weights.get(owner, 1.0)}
        return replace(parsed, requests=[replace(request, **whose) for request in parsed.requests])


def refusal(line: BatchLine, settings: Settings, trials: FirstTrials) -> Json | None:
    """Returns the answer to a line that is wrong whatever the model is; None for the others."""
    try:
        path, fields = line.request()
        request = validated(path, fields, settings)
        with renamed() if path == RESPONSES else nullcontext():
            _require_right(request.chat() if path == RESPONSES else request, settings, trials)
    except Exception as error:
        return line.failure(error)
    return None


def _require_right(request: BaseRequest, settings: Settings, trials: FirstTrials) -> None:
    """Raises ApiError or RequestError for a request that is wrong whatever the model is."""
    require_consistent(request)
    for name in ("n", "best_of"):
        require_range(name, getattr(request, name, None) or 1, 1, settings.max_n)
    least = 0 if getattr(request, "echo", None) else 1
    for name in ("max_tokens", "max_completion_tokens"):
        if (wanted := getattr(request, name, None)) not in (None, *LIMITLESS):
            require_range(name, min(wanted, settings.max_tokens), least, settings.max_tokens)
    if request.stream:
        raise ApiError(400, "an answer in a file cannot be streamed", param="stream")
    require_truncation(request)
    require_logprobs(request, alternatives(request), settings)
    if isinstance(request, CompletionRequest):
        require_members(request, settings)
    sampling = sampling_of(request, sys.maxsize, settings, {})
    limits_of(request, 1, (), sys.maxsize, settings.timeout)
    calls = isinstance(request, ChatRequest) and request.tools and request.tool_choice != "none"
    if sampling.grammar is not None and not calls:  # of calls it is a part, or left out
        with naming((given_grammar(request) or ("grammar",))[0]):
            trials.require(sampling.grammar)


class Offline:
    """A pair that answers lines as `shoal serve` answers requests.

    Args:
        shoal: the pair.
        make_engine: makes engines of `shoal`, see `EngineThread`.
        settings: limits of a line's fields; `queue` is not used.

    Attributes:
        made: properties of the loaded target that change tokens; the field "shoal" of each result
            has them.
    """

    def __init__(self, shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> None:
        self.shoal, self._settings = shoal, replace(settings, queue=sys.maxsize)
        self._make_engine = make_engine
        target = shoal.loaded["target"] or {}
        self.made = {name: target[name] for name in ("dtype", "quantize", "strict", "kv")}

    def answer(self, lines: Iterable[BatchLine], done: Callable[[Json], None]) -> None:
        """Answers all lines, as many at a time as the batch has slots.

        Args:
            done: called with each output line as soon as it is complete.

        Raises:
            InternalError: the engine's thread has ended.
            Exception: the error that `done` raised.
        """
        asyncio.run(self._answer_all(lines, done))

    async def _answer_all(self, lines: Iterable[BatchLine], done: Callable[[Json], None]) -> None:
        handler = ApiHandler(self.shoal, self._make_engine, self._settings)
        worker, waiting = handler.worker, iter(lines)

        async def work() -> None:
            for line in waiting:
                done(await self._answer(line, handler))

        slots = worker.thread.engine.scheduler.capacity
        worker.thread.start(asyncio.get_running_loop())
        try:
            await asyncio.gather(*(work() for _ in range(slots)))
        finally:
            worker.stop()

    async def _answer(self, line: BatchLine, handler: ApiHandler) -> Json:
        made: Json = {**self.made}
        try:
            response = await handler.handle(*line.request())
            if response.parsed.stream:
                raise ApiError(400, "an answer in a file cannot be streamed", param="stream")
            made |= {"notes": dict(response.parsed.headers)} if response.parsed.headers else {}
            entry = line.result(await response.whole())
        except Exception as error:
            thread = handler.worker.thread
            if not thread.alive:
                raise InternalError(f"the engine's thread has ended: {thread.failure!r}") from error
            entry = line.failure(error)
        return {**entry, "shoal": made}
