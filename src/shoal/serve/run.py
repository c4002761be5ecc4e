"""uvicorn around the app: binding, signals, draining."""

from __future__ import annotations

import asyncio
import copy
import math
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State

from shoal.errors import InternalError, RequestError
from shoal.serve.protocol import LimitedProtocol
from shoal.serve.worker import Worker

NOTICE_SECONDS = 2.0
"""Seconds between SIGTERM and the end of new connections: /ready is red meanwhile, and balancers send requests elsewhere."""
GRACE_SECONDS = 5
"""Seconds that clients have to read what was cut."""
UNREAD_TIMEOUT_SECONDS = 30
"""Seconds after which a client that reads nothing of what it is sent is cut off, where the system can do that (Linux)."""
MAX_CONNECTIONS = 512
"""Most open connections, if no more rows may be in the server."""
PROTOCOL: dict[str, Any] = {"http": LimitedProtocol, "ws": "none", "lifespan": "on", "limit_concurrency": MAX_CONNECTIONS}
"""uvicorn's faster parser, httptools, holds headers of any size."""


def bind(host: str, port: int) -> socket.socket:
    """A socket on which `run` may listen; port 0 takes any that is free.

    Raises:
        RequestError: the address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_TIMEOUT_SECONDS))
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RequestError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listening


def run(app: FastAPI, listening: socket.socket, drain: float, log_level: str, ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then drains.

    After Ctrl-C at once, after SIGTERM `NOTICE_SECONDS` later, no new connections are accepted, and open requests have `drain`
    seconds to finish. Samples that are unfinished then, or at a second signal, are returned as they are.

    Args:
        ready: called once requests are answered.

    Raises:
        KeyboardInterrupt: at the end, if it was Ctrl-C.
        InternalError: the engine's thread has ended by itself; what was open has been told so. A supervisor should start anew.
    """
    worker: Worker = app.state.worker
    timeout = math.ceil(drain + GRACE_SECONDS)
    config = uvicorn.Config(
        app, log_level=log_level, log_config=_logging(log_level), timeout_graceful_shutdown=timeout,
        **{**PROTOCOL, "limit_concurrency": max(MAX_CONNECTIONS, 2 * worker.capacity)},
    )  # fmt: skip
    # uvicorn raises the signals it caught once more when it is done; by then SIGTERM has been obeyed.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        _Server(config, drain, ready, app.state).run([listening])
    finally:
        signal.signal(signal.SIGTERM, previous)
        worker.stop()
    if worker.thread.failure is not None:
        raise InternalError(f"the engine's thread has ended: {worker.thread.failure!r}")


class _Server(uvicorn.Server):
    """Says when it is ready and when no more, cuts what is open at the end of its patience, and ends without an engine."""

    def __init__(self, config: uvicorn.Config, drain: float, ready: Callable[[], None], state: State) -> None:
        super().__init__(config)
        self._drain, self._ready, self._state = drain, ready, state
        self._leaving: tuple[int, float] | None = None  # the signal, and when it counts
        self._hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._leaving is not None and time.monotonic() >= self._leaving[1]:
            super().handle_exit(self._leaving[0], None)
        return await super().on_tick(counter) or not self._state.worker.thread.alive

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining = True
        timer = asyncio.get_running_loop().call_later(self._drain, self._state.worker.cut)
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first SIGTERM counts after the notice, Ctrl-C at once; a second signal cuts what is open."""
        self._state.draining = True
        if self._leaving is None:
            self._leaving = sig, time.monotonic() + (NOTICE_SECONDS if sig == signal.SIGTERM else 0)
        elif not self._hurried:
            self._hurried = True
            self._leaving = self._leaving[0], 0.0
            self._state.worker.cut()
        else:
            super().handle_exit(sig, frame)


def _logging(level: str) -> dict[str, Any]:
    """uvicorn's own, and ours in its form; but all on stderr, where uvicorn would log requests on stdout."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["shoal"] = {"handlers": ["default"], "level": level.upper()}
    return config
