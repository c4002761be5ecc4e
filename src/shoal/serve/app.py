"""The routes. Handlers translate, ask the worker, and write down what comes; nothing here touches a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import __version__
from shoal.api import Shoal
from shoal.constraints.fim import middle_tokens
from shoal.engine.engine import Engine
from shoal.serve import api_errors, api_formats, bodies, response_models
from shoal.serve.api_errors import ApiError
from shoal.serve.api_formats import ApiFormat
from shoal.serve.bodies import CLIENT_GONE
from shoal.serve.hosts import HostCheck
from shoal.serve.keys import is_valid_key
from shoal.serve.metrics import Metrics
from shoal.serve.page import page
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest
from shoal.serve.request_parser import ParsedRequest, RequestParser, require_model
from shoal.serve.responses import ApiResponse, EventStream
from shoal.serve.settings import Settings
from shoal.serve.worker import Worker

T = TypeVar("T", bound=BaseRequest)
BEARER = HTTPBearer(auto_error=False, description="The API key, where the server has one.")
NOTES: dict[str, dict[str, Any]] = {
    "x-shoal-ignored": {"description": "Fields that were sent and have no effect.", "schema": {"type": "string"}},
    "x-shoal-clamped": {"description": "Values that were lowered to this server's limit.", "schema": {"type": "string"}},
}
"""Headers that say what was not done as it was asked."""
HUNG_PASS_SECONDS = 120.0
"""Seconds; a round that takes longer is taken for stuck. Building static passes for a large model may take one or two minutes."""
BROKEN: dict[int | str, dict[str, Any]] = {
    503: {"model": response_models.Health, "description": "Not now; the status says why."}
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": response_models.ErrorAnswer, "description": what}
    for status, what in {
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


def make_app(shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> FastAPI:
    """The server's application; its engine's thread lives as long as its lifespan.

    Args:
        make_engine: engines of `shoal`, see `Worker`.
    """
    metrics = Metrics()
    worker = Worker(make_engine, settings.queue, metrics)
    metrics.watch(worker)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        worker.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            await run_in_threadpool(worker.stop)

    app = FastAPI(
        title="shoal", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        summary="Many samples at once, by exact batched speculative sampling.",
    )  # fmt: skip
    app.state.worker, app.state.draining = worker, False
    api_errors.install(app)
    app.include_router(_api(shoal, worker, settings))
    app.include_router(_house(worker, metrics))
    app.include_router(page())
    app.add_middleware(HostCheck, hosts=settings.hosts)
    app.add_middleware(Counted, metrics=metrics)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[*NOTES]
        )
    _describe(app)
    return app


def _api(shoal: Shoal, worker: Worker, settings: Settings) -> APIRouter:
    """What clients use, behind the key if there is one."""

    async def authorised(given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if not is_valid_key(settings.keys, given.credentials if given else ""):
            message = "the API key is wrong" if given else "an API key is needed: send 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    router = APIRouter(prefix="/v1", dependencies=[Depends(authorised)] if settings.keys else [])
    translator = RequestParser(
        shoal.tokenizer, shoal.eos, worker.engine.target.vocab_size, worker.engine.context, worker.capacity, settings
    )
    model = _model(shoal, worker, settings)

    async def answer(request: Request, kind: type[T], form: ApiFormat, translate: Callable[[T], ParsedRequest]) -> Response:
        asked = await bodies.read(request, kind, settings.max_body)
        require_model(asked.model or settings.model, settings)
        order = await run_in_threadpool(translate, asked)  # long texts take their time
        reply = ApiResponse(worker, shoal.tokenizer, settings.model, form, order)
        if order.stream:
            events = reply.events()
            return EventStream(await anext(events), events, order.notes)
        return await _unless_gone(request, reply.whole(), order.notes)

    @router.post("/completions", response_model=None, **_described(CompletionRequest, response_models.Completion))
    async def completions(request: Request) -> Response:
        """Continues texts."""
        return await answer(request, CompletionRequest, api_formats.Completions(), translator.completion)

    @router.post("/chat/completions", response_model=None, **_described(ChatRequest, response_models.ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Continues a conversation."""
        return await answer(request, ChatRequest, api_formats.Chat(), translator.chat)

    @router.get("/models", responses={401: REFUSALS[401]})
    async def models() -> response_models.ModelList:
        """The model that is served."""
        return response_models.ModelList(object="list", data=[model])

    @router.get("/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def one_model(name: str) -> response_models.Model:
        """The same by its name."""
        require_model(name, settings)
        return model

    return router


def _house(worker: Worker, metrics: Metrics) -> APIRouter:
    """What those who run the server use."""
    router = APIRouter()

    @router.get("/health", response_model=response_models.Health, responses=BROKEN)
    async def health() -> Response:
        """Whether there is an engine to decode; a supervisor restarts the process if not."""
        return _status(None if worker.alive else "the engine has stopped")

    @router.get("/ready", response_model=response_models.Health, responses=BROKEN)
    async def ready(request: Request) -> Response:
        """Whether to send requests here: there is an engine, it gets on, and the server is not about to stop."""
        return _status(_unready(worker, request.app.state.draining))

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """What is counted, in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _unready(worker: Worker, draining: bool) -> str | None:
    """Why no requests should come for now."""
    if not worker.alive:
        return "the engine has stopped"
    since = worker.busy_since
    if since is not None and (age := time.perf_counter() - since) > HUNG_PASS_SECONDS:
        return f"the engine has been at one pass for {age:.0f} seconds"
    return "the server is stopping" if draining else None


def _status(trouble: str | None) -> Response:
    return JSONResponse({"status": trouble or "ok"}, 503 if trouble else 200)


def _model(shoal: Shoal, worker: Worker, settings: Settings) -> response_models.Model:
    about = {
        "context": worker.engine.context, "rows": worker.engine.scheduler.capacity, "max_n": settings.max_n,
        "max_tokens": settings.max_tokens, "speculation": shoal.draft_model is not None, "seeds": settings.seeds,
        "chat": bool(settings.chat_template or shoal.tokenizer.chat_template),
        "fill_in_middle": middle_tokens(shoal.tokenizer) is not None, "loaded": shoal.loaded,
    }  # fmt: skip
    return response_models.Model(id=settings.model, object="model", created=int(time.time()), owned_by="shoal", shoal=about)


async def _unless_gone(request: Request, answer: Awaitable[api_formats.Json], headers: Mapping[str, str]) -> Response:
    """The answer, or nothing at all if its client goes before it is there."""
    wanted = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(wanted.result(), headers=headers) if wanted.done() else Response(status_code=CLIENT_GONE)
    finally:
        gone.cancel()
        wanted.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _described(asked: type[BaseRequest], answer: type[response_models.Answer]) -> dict[str, Any]:
    """A route's description: its body, and an answer that is one object, or events that each hold a part of one."""
    schema = {"$ref": f"#/components/schemas/{asked.__name__}"}
    return {
        "responses": REFUSALS | {200: {"model": answer, "content": {"text/event-stream": {}}, "headers": NOTES}},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def _describe(app: FastAPI) -> None:
    """The description tells what is so: bodies are read by the handlers, and those that do not fit are answered with 400."""
    made = app.openapi
    _, asked = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template="#/components/schemas/{model}"
    )

    def openapi() -> dict[str, Any]:
        description = made()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        description["components"]["schemas"] |= asked["$defs"]
        return description

    app.openapi = openapi  # type: ignore[method-assign]


class Counted:
    """ASGI middleware that counts answers by route and status, and times them to their last byte."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), CLIENT_GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = 500  # whoever raises it again outside of here answers so, unless an answer had begun
            raise
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")  # not what was asked for: anybody could invent labels
            self.metrics.answered(path, status, time.perf_counter() - started)
