"""The routes about the server itself: health, readiness, metrics, the model that is served.

The first three are for operators and need no key. While a server runs, freed memory is given back
to the system. Kept prompts come and go in many sizes; the C library keeps freed memory between
pieces in use, in up to eight heaps per core, and over an hour of load the heaps grew by hundreds of
MiB that nothing used.

`/tokenize`, `/detokenize` and `/tokenizer_info` are about the tokenizer, in the form of vLLM's
server, for clients such as lm-eval. Routes whose bodies FastAPI does not parse itself are described
here for `/openapi.json`.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from shoal.api import Shoal
from shoal.constraints.fim import middle_tokens
from shoal.constraints.syntax import installed_languages
from shoal.models.sources import people_call
from shoal.serve import access, response_models
from shoal.serve.api_errors import ApiError
from shoal.serve.handler import ApiHandler
from shoal.serve.message_models import Message, Tool
from shoal.serve.request_fields import NonNegative, StrictModel, Text, optional
from shoal.serve.request_models import ChatRequest
from shoal.serve.response_models import ErrorAnswer, Health
from shoal.serve.worker import Worker
from shoal.types.arguments import chat_template_of

HUNG_PASS_SECONDS = 120.0
"""The duration from which a round counts as stuck. Capturing rounds of a large model may take one
or two minutes."""
UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "Not now; the status says why."}
}


def ops_routes(worker: Worker) -> APIRouter:
    """Returns the routes `/health`, `/ready` and `/metrics`.

    Some load balancers request the first two by HEAD; the application's state writes the metrics.
    """
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=Health, responses=UNAVAILABLE)
    async def health() -> Response:
        """Tells if there is an engine to decode; a supervisor restarts the process if not."""
        return _status(None if worker.thread.alive else "the engine has stopped")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=Health, responses=UNAVAILABLE)
    async def ready(request: Request) -> Response:
        """Tells if requests should be sent here: there is an engine, it gets on, and the server is
        not about to stop."""
        return _status(_unready(worker, request.app.state.draining))

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def prometheus(request: Request) -> Response:
        """The metrics, in Prometheus' text format."""
        return Response(await request.app.state.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _unready(worker: Worker, draining: bool) -> str | None:
    """Returns the reason why no requests should be sent now; None if there is none."""
    if not worker.thread.alive:
        return "the engine has stopped"
    since = worker.thread.busy_since
    if since is not None and (age := time.perf_counter() - since) > HUNG_PASS_SECONDS:
        return f"the engine has been at one pass for {age:.0f} seconds"
    return "the server is stopping" if draining else None


def _status(problem: str | None) -> Response:
    return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)


INTERVAL_SECONDS = 60.0


@cache
def trimmer() -> Callable[[], None] | None:
    """Returns a function that gives all free pages of the process's heaps back to the system.

    The function runs on the calling thread and without the interpreter's lock. None if the C
    library has no `malloc_trim` (it is glibc's).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int

    def call() -> None:
        trim(0)

    return call


async def give_back_freed_memory(
    give_back: Callable[[], None], interval: float = INTERVAL_SECONDS
) -> None:
    """Gives memory back every `interval` seconds until it is cancelled.

    Args:
        give_back: begins to free the caches that no row uses.
        interval: the seconds.
    """
    trim = trimmer()
    while True:
        await asyncio.sleep(interval)
        give_back()
        if trim is not None:
            await asyncio.to_thread(trim)


def model_routes(handler: ApiHandler) -> APIRouter:
    """Returns the routes about the model under each of its names, and its abilities."""
    router = APIRouter()
    models_by_name = {name: _model(handler, name) for name in handler.settings.names}

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> response_models.ModelList:
        """The model that is served, under each of its names."""
        return response_models.ModelList(object="list", data=list(models_by_name.values()))

    @router.head("/v1/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def one_model(name: str) -> response_models.Model:
        """The model with this name."""
        handler.require_model(name)
        return models_by_name[name]

    return router


def _model(handler: ApiHandler, name: str) -> response_models.Model:
    shoal, settings, engine = handler.shoal, handler.settings, handler.worker.thread.engine
    about = {
        "context": engine.context,
        "rows": engine.scheduler.capacity,
        "max_n": settings.max_n,
        "max_tokens": settings.max_tokens,
        "speculation": shoal.drafter_name is not None,
        "seeds": settings.seeds,
        "chat": bool(settings.chat_template or shoal.tokenizer.chat_template),
        "fill_in_middle": middle_tokens(shoal.tokenizer) is not None,
        "syntax": installed_languages(),
        "members": settings.members,
        "loaded": shoal.loaded,
        "names": _names(shoal),
        "lossy": engine.stats.lossy or None,
    }
    return response_models.Model(
        id=name,
        object="model",
        created=int(time.time()),
        owned_by="shoal",
        max_model_len=engine.context,
        shoal=about,
    )


def _names(shoal: Shoal) -> dict[str, str | None]:
    """Returns the names of the two models, see `people_call`."""
    drafter = shoal.drafter_name
    return {
        "target": people_call(shoal.target.name),
        "drafter": None if drafter is None else people_call(drafter),
    }


TOKENIZE, DETOKENIZE, TOKENIZER_INFO = "/tokenize", "/detokenize", "/tokenizer_info"


class TokenizeRequest(StrictModel):
    """POST /tokenize: a text, or a conversation as the chat template writes it."""

    model: str | None = optional("The served model's name, as /v1/models tells it.")
    prompt: Text | None = optional("A text; or `messages`.")
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = optional(
        "A conversation."
    )
    add_special_tokens: bool | None = optional(
        "Those that the tokenizer adds to a text; true. Chat templates write their own."
    )
    return_token_strs: bool | None = optional("The tokens as the vocabulary writes them, too.")
    add_generation_prompt: bool | None = optional("With messages, as in a chat; true.")
    continue_final_message: bool | None = optional("With messages, as in a chat.")
    split_special_tokens: bool | None = optional("With messages, as in a chat; true.")
    chat_template_kwargs: dict[str, Any] | None = optional("With messages, as in a chat.")
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = optional(
        "With messages, as in a chat."
    )


OF_CHATS = (
    *("messages", "tools", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "split_special_tokens"),
)
"""The fields of /tokenize with the same meaning as in a chat."""


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int = Field(description="Tokens of the model's context.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = optional("The served model's name, as /v1/models tells it.")
    tokens: Annotated[list[NonNegative], Field(fail_fast=True)]


class Detokenized(BaseModel):
    """Answer of /detokenize."""

    prompt: str


def token_routes(handler: ApiHandler) -> APIRouter:
    """Returns the three routes; long texts are encoded and decoded on another thread."""
    router, most = APIRouter(), handler.settings.max_body

    @router.post(
        TOKENIZE, response_model=Tokens, **described(TokenizeRequest, Tokens, stream=False)
    )
    async def tokenize(request: Request) -> Tokens:
        """The token ids of a text or a conversation."""
        fields = access.validated(TokenizeRequest, await access.read_body(request, most))
        return await run_in_threadpool(_tokenized, handler, fields)

    @router.post(
        DETOKENIZE,
        response_model=Detokenized,
        **described(DetokenizeRequest, Detokenized, stream=False),
    )
    async def detokenize(request: Request) -> Detokenized:
        """The text of token ids."""
        fields = access.validated(DetokenizeRequest, await access.read_body(request, most))
        handler.require_model(fields.model)
        return await run_in_threadpool(
            lambda: Detokenized(prompt=handler.encoder.decode(fields.tokens, "tokens"))
        )

    @router.get(TOKENIZER_INFO, responses={401: REFUSALS[401]})
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template."""
        return information(handler.shoal.tokenizer, handler.settings.chat_template)

    return router


def _tokenized(handler: ApiHandler, fields: TokenizeRequest) -> Tokens:
    handler.require_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "either prompt or messages is needed, and not both", param="prompt")
    encoder = handler.encoder
    if fields.messages is not None:
        given = {name: getattr(fields, name) for name in OF_CHATS}
        ids = handler.parser.conversation_ids(ChatRequest.model_construct(**given))
    else:
        ids = encoder.encode_text(
            fields.prompt or "", special=fields.add_special_tokens is not False
        )
    names = encoder.names(ids) if fields.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=handler.context, tokens=list(ids), token_strs=names)


def information(tokenizer: Any, chat_template: str | None) -> dict[str, Any]:
    """Returns the fields that clients need to write prompts themselves.

    Args:
        tokenizer: the target's.
        chat_template: replaces the tokenizer's.
    """
    special: Mapping[str, Any] = tokenizer.special_tokens_map
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "chat_template": chat_template or chat_template_of(tokenizer),
        **{
            name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        },
    }


TEXT = {"type": "string"}
HEADERS: dict[str, dict[str, Any]] = {
    "x-shoal-ignored": {"description": "Fields that were sent and have no effect.", "schema": TEXT},
    "x-shoal-told": {
        "description": "Fields that a system message tells: the chat template does not know them.",
        "schema": TEXT,
    },
    "x-request-id": {"description": "The request's own, or one made for it.", "schema": TEXT},
    "x-shoal-clamped": {
        "description": "Values that were lowered to this server's limit.",
        "schema": TEXT,
    },
}
"""The headers that say how an answer differs from the request."""
ERRORS = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "content": ERRORS}
    for status, meaning in {
        400: "The request cannot be served; the message says why.",
        401: "The API key is missing or wrong.",
        403: "The server is not asked under this name.",
        404: "There is no such model.",
        408: "The body took too long to arrive.",
        413: "The body is too large.",
        429: "Too much is waiting; Retry-After says when to come again.",
        500: "The model failed.",
        503: "The engine has stopped or lost this request.",
    }.items()
}


def described(
    request: type[BaseModel], answer: type[BaseModel], *, stream: bool = True
) -> dict[str, Any]:
    """Returns a route's description: its body and its answer.

    The answer is one object, or, with `stream`, events that each hold a part of one.
    """
    events: dict[str, Any] = {"content": {"text/event-stream": {}}} if stream else {}
    schema = {"$ref": f"#/components/schemas/{request.__name__}"}
    return {
        "responses": REFUSALS | {200: {"model": answer, "headers": HEADERS, **events}},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
    }


def install(app: FastAPI, requests: Sequence[type[BaseModel]]) -> None:
    """Adds the models of requests and errors, and replaces FastAPI's status 422 by 400."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        _, models = models_json_schema(
            [*((each, "validation") for each in requests), (ErrorAnswer, "serialization")],
            ref_template="#/components/schemas/{model}",
        )
        description = generated()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        description["components"]["schemas"] |= models["$defs"]
        return description

    app.openapi = openapi  # type: ignore[method-assign]
