"""The answers of a server while its model is loaded: it lives, and is not ready."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from shoal.serve.api_errors import ApiError
from shoal.serve.protocol import LimitedProtocol
from shoal.serve.tls import Tls

RETRY_SECONDS = 5
STATUS = {"status": "a model is being loaded"}


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers while the model is loaded: /health with 200, all other paths with 503."""
    if scope["type"] != "http":
        return
    retry = {"retry-after": str(RETRY_SECONDS)}
    if scope["path"] in ("/health", "/ready"):
        found: Response = (
            JSONResponse(STATUS, 200)
            if scope["path"] == "/health"
            else JSONResponse(STATUS, 503, retry)
        )
    else:
        found = ApiError(
            503, "a model is being loaded: try again soon", code="loading", headers=retry
        ).response()
    await found(scope, receive, send)


@contextmanager
def answered(listening: socket.socket, tls: Tls | None = None) -> Iterator[None]:
    """Answers on the socket on a thread, for as long as the block lasts.

    The socket stays open for the server that follows.
    """
    options: dict[str, Any] = tls.uvicorn_options() if tls else {}
    config = uvicorn.Config(
        answer,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        **options,
    )
    server = uvicorn.Server(config)
    own = listening.dup()  # uvicorn closes the sockets that it gets
    own.listen(
        config.backlog
    )  # whoever comes before the thread has begun waits, and is not refused
    thread = threading.Thread(target=server.run, args=([own],), name="shoal-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
