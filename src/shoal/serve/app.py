"""The application: the routes of the API and the checks before them, and its configuration.

Ray sends the configuration to the processes that load the pair. The playground is a client of the
API: a page at / that draws samples and their drafts, a chat at /chat, an editor at /editor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from shoal import __version__
from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.engine.waiting import QUANTUM
from shoal.errors import RequestError
from shoal.models.device import kv_budget
from shoal.models.load_report import LoadStages
from shoal.sampling.acceptance import RULES
from shoal.serve import access, api_errors, logs, response_models, routes
from shoal.serve.access import CLIENT_GONE, HostCheck, is_valid_key, owner_of
from shoal.serve.api_errors import CHAT, COMPLETIONS, INFILL, RESPONSES, ApiError, written
from shoal.serve.handler import ApiHandler, Offline
from shoal.serve.item_models import ResponsesRequest
from shoal.serve.logs import Exchanges
from shoal.serve.message_models import Infill, InfillRequest
from shoal.serve.request_models import ChatRequest, CompletionRequest
from shoal.serve.response_models import ItemAnswer
from shoal.serve.responses import EventStream
from shoal.serve.routes import (
    DetokenizeRequest,
    TokenizeRequest,
    give_back_freed_memory,
    model_routes,
    ops_routes,
    token_routes,
)
from shoal.serve.settings import Settings

if TYPE_CHECKING:
    from importlib.abc import Traversable

LOG = logging.getLogger(__name__)
T = TypeVar("T")

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
    "'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The headers of the page: it runs only scripts of this server, and text of a model cannot become
markup."""
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
PAGES = {"/": "index.html", "/chat": "chat.html", "/editor": "editor.html"}
PREFIX_SHARE = 0.125
"""The share of the memory for keys and values that prompts of earlier requests may take."""
MOST_PREFIX_BYTES = 2**30
"""The most bytes that these prompts take by default."""


def playground() -> APIRouter:
    """Returns the routes of the page and its files, which are kept in memory. They need no key."""
    folder = files("shoal.serve") / "playground"
    parts = {name: part.read_bytes() for name, part in _files(folder)}
    router = APIRouter(include_in_schema=False)

    @router.get("/playground/{name:path}")
    async def part(name: str) -> Response:
        if name not in parts:
            raise ApiError(404, f"the playground has no {name!r}")
        return Response(parts[name], media_type=TYPES[_suffix(name)], headers=HEADERS)

    for path, name in PAGES.items():
        router.add_api_route(path, partial(part, name), methods=["GET", "HEAD"])
    return router


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yields relative paths and files of the page, third-party files (`vendor/`) included."""
    for part in folder.iterdir():
        if part.is_dir():
            yield from _files(part, f"{above}{part.name}/")
        elif _suffix(part.name) in TYPES:
            yield above + part.name, part


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


@dataclass(frozen=True)
class ServeConfig:
    """The configuration of a pair, its engine and its answers; it can be pickled if `load` can.

    Attributes:
        load: loads the pair.
        lookahead: see `Shoal.engine`.
        rule: a name of `shoal.sampling.acceptance.RULES`.
        kv_bytes: memory for keys and values; None = a fraction of the free memory, see
            `shoal.models.device`.
        prefix_bytes: the part of this memory for prompts that are kept for later requests; None =
            `PREFIX_SHARE`.
    """

    load: Callable[[], Shoal]
    settings: Settings
    lookahead: str | int = "auto"
    rule: str = "coupled"
    kv_bytes: int | None = None
    prefix_bytes: int | None = None

    def app(self) -> FastAPI:
        """Loads the pair, and returns the server's application."""
        shoal = self.load()
        return make_app(shoal, self._engines(shoal, QUANTUM), self.settings)

    def offline(self) -> Offline:
        """Loads the pair, and returns it as an `Offline`, which answers batch files."""
        shoal = self.load()
        return Offline(shoal, self._engines(shoal), self.settings)

    def _engines(self, shoal: Shoal, quantum: int | None = None) -> Callable[[], Engine]:
        def make() -> Engine:
            budget = kv_budget(shoal.target.device) if self.kv_bytes is None else self.kv_bytes
            kept, rows = divided(budget, self.prefix_bytes)
            LOG.info(
                "keys and values may take %s bytes",
                "any number of" if rows is None else f"{rows:,}",
            )
            LOG.info("prompts that are kept for later requests may take %s bytes more", f"{kept:,}")
            engine = shoal.engine(
                self.lookahead,
                RULES[self.rule](),
                kv_bytes=rows,
                prefix_bytes=kept,
                quantum=quantum,
            )
            with LoadStages().stage("preparing", "pair"):
                engine.prepare()
            return engine

        return make


def divided(budget: int | None, prefix_bytes: int | None) -> tuple[int, int | None]:
    """Returns the bytes for kept prompts, and the bytes left for rows; None = no limit.

    Raises:
        RequestError: no bytes are left for rows.
    """
    if budget is None:
        return (MOST_PREFIX_BYTES if prefix_bytes is None else prefix_bytes), None
    kept = (
        min(int(PREFIX_SHARE * budget), MOST_PREFIX_BYTES) if prefix_bytes is None else prefix_bytes
    )
    if kept >= budget:
        raise RequestError(
            f"kept prompts may not take all {budget:,} bytes of keys and values: got {kept:,}"
        )
    return kept, budget - kept


BEARER = HTTPBearer(auto_error=False, description="The API key, where the server has one.")

REQUESTS = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    InfillRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def make_app(shoal: Shoal, make_engine: Callable[[], Engine], settings: Settings) -> FastAPI:
    """Returns the server's application; the engine's thread runs during its lifespan.

    Args:
        shoal: the pair.
        make_engine: makes engines of `shoal`, see `EngineThread`.
    """
    handler = ApiHandler(shoal, make_engine, settings)
    worker, metrics = handler.worker, handler.metrics
    metrics.collect_from(worker, settings.model)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        worker.thread.start(asyncio.get_running_loop())
        giving_back = asyncio.create_task(give_back_freed_memory(worker.thread.give_back))
        try:
            yield
        finally:
            giving_back.cancel()
            await run_in_threadpool(worker.stop)

    app = FastAPI(
        title="shoal",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        summary="Many samples at once, by exact batched speculative sampling.",
    )
    app.state.worker, app.state.draining = worker, False
    app.state.metrics, app.state.metrics_text = metrics, metrics.text
    api_errors.install(app)
    app.include_router(_api_routes(handler))
    app.include_router(ops_routes(worker))
    app.include_router(playground())
    app.add_middleware(HostCheck, hosts=settings.hosts)
    if settings.origins:
        anything: dict[str, Any] = {
            "allow_methods": ["*"],
            "allow_headers": ["*"],
            "expose_headers": [*routes.HEADERS],
        }
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, **anything)
    app.add_middleware(Exchanges, ended=(metrics.request_ended, logs.log))
    routes.install(app, REQUESTS)
    return app


def _api_routes(handler: ApiHandler) -> APIRouter:
    """Returns the routes for clients, which need the key if there is one."""
    keys = handler.settings.keys
    router = APIRouter(dependencies=[Depends(_key_check(keys))] if keys else [])
    for routes_of in (_answer_routes, model_routes, token_routes):
        router.include_router(routes_of(handler))
    return router


def _key_check(keys: Collection[str]) -> Callable[..., Awaitable[None]]:
    """Returns a dependency that refuses requests without a valid key, and notes their owner."""

    async def authorised(
        request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]
    ) -> None:
        if not is_valid_key(keys, given.credentials if given else ""):
            message = (
                "the API key is wrong"
                if given
                else "an API key is needed: send 'Authorization: Bearer KEY'"
            )
            raise ApiError(
                401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        request.state.owner = owner_of(given.credentials if given else "")

    return authorised


def _answer_routes(handler: ApiHandler) -> APIRouter:
    """Returns the routes with answers of the model."""
    router = APIRouter()

    @router.post(
        COMPLETIONS,
        response_model=None,
        **routes.described(CompletionRequest, response_models.Completion),
    )
    async def completions(request: Request) -> Response:
        """Continues texts."""
        return await _answer(handler, request, COMPLETIONS)

    @router.post(
        CHAT, response_model=None, **routes.described(ChatRequest, response_models.ChatCompletion)
    )
    async def chat_completions(request: Request) -> Response:
        """Continues a conversation."""
        return await _answer(handler, request, CHAT)

    @router.post(RESPONSES, response_model=None, **routes.described(ResponsesRequest, ItemAnswer))
    async def responses(request: Request) -> Response:
        """Continues a conversation; the answer has items."""
        return await _answer(handler, request, RESPONSES)

    @router.post(INFILL, response_model=None, **routes.described(InfillRequest, Infill))
    async def infill(request: Request) -> Response:
        """Fills in at a cursor, for clients of llama.cpp's server."""
        return await _answer(handler, request, INFILL)

    return router


async def _answer(handler: ApiHandler, request: Request, path: str) -> Response:
    fields = await access.read_body(request, handler.settings.max_body)
    owner = getattr(request.state, "owner", "")
    response = await (
        handler.infill(fields, owner) if path == INFILL else handler.handle(path, fields, owner)
    )
    headers, request.state.computed = response.parsed.headers, response.computed
    if response.parsed.stream:
        events = response.events()
        first = await _unless_gone(request, anext(events))
        if first is not None:
            return EventStream(first, events, headers)
    else:
        answer = await _unless_gone(request, response.whole())
        if answer is not None:
            return Response(written(answer), headers=headers, media_type="application/json")
    return Response(status_code=CLIENT_GONE)


async def _unless_gone(request: Request, wanted_soon: Awaitable[T]) -> T | None:
    """Awaits an answer, or the first event of one.

    Returns None if the client disconnects before; the work for it is then cancelled.
    """
    wanted = asyncio.ensure_future(wanted_soon)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        return wanted.result() if wanted.done() else None
    finally:
        gone.cancel()
        wanted.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
