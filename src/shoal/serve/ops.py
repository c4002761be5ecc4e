"""The routes about the server itself: health, readiness, metrics, the model that is served.

The first three are for operators and need no key. While a server runs, freed memory is given back
to the system. Kept prompts come and go in many sizes; the C library keeps freed memory between
pieces in use, in up to eight heaps per core, and over an hour of load the heaps grew by hundreds of
MiB that nothing used.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from shoal.api import Shoal
from shoal.constraints.fim import middle_tokens
from shoal.constraints.syntax.requests import installed_languages
from shoal.serve import response_models
from shoal.serve.handler import ApiHandler
from shoal.serve.model_identity import people_call
from shoal.serve.openapi import REFUSALS
from shoal.serve.response_models import Health
from shoal.serve.worker import Worker

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


async def give_back_freed_memory(interval: float = INTERVAL_SECONDS) -> None:
    """Gives freed memory back every `interval` seconds until it is cancelled.

    Returns at once if the C library cannot give memory back.
    """
    trim = trimmer()
    while trim is not None:
        await asyncio.sleep(interval)
        await asyncio.to_thread(trim)


def model_routes(handler: ApiHandler) -> APIRouter:
    """Returns the routes about the model under each of its names, and its abilities."""
    router = APIRouter()
    models_by_name = {name: _model(handler, name) for name in handler.settings.names}

    @router.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> response_models.ModelList:
        """The model that is served, under each of its names."""
        return response_models.ModelList(object="list", data=list(models_by_name.values()))

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
