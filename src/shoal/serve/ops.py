"""The routes for operators: health, readiness, metrics. They need no key."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

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
        """Whether there is an engine to decode; a supervisor restarts the process if not."""
        return _status(None if worker.thread.alive else "the engine has stopped")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=Health, responses=UNAVAILABLE)
    async def ready(request: Request) -> Response:
        """Whether to send requests here: there is an engine, it gets on, and the server is not
        about to stop."""
        return _status(_unready(worker, request.app.state.draining))

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def prometheus(request: Request) -> Response:
        """What is counted, in Prometheus' text format."""
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
