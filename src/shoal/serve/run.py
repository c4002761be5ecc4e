"""uvicorn around the app: binding, signals, draining."""

from __future__ import annotations

import copy
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from shoal.errors import RequestError


def bind(host: str, port: int) -> socket.socket:
    """A socket on which `run` may listen; port 0 takes any that is free.

    Raises:
        RequestError: the address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RequestError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listening


def run(app: FastAPI, listening: socket.socket, drain: float, log_level: str, ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then takes no new connections and gives those it has `drain` seconds to finish.

    Args:
        ready: called once requests are answered.

    Raises:
        KeyboardInterrupt: after draining, if it was Ctrl-C. A second signal cuts the draining short.
    """
    config = uvicorn.Config(
        app,
        log_level=log_level,
        log_config=_logging(log_level),
        timeout_graceful_shutdown=max(round(drain), 1),
        lifespan="on",
    )
    server = _Server(config)
    server.ready = ready
    # uvicorn raises the signals it caught once more when it is done; by then SIGTERM has been obeyed.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run([listening])
    finally:
        signal.signal(signal.SIGTERM, previous)
        app.state.worker.stop()


def _logging(level: str) -> dict[str, Any]:
    """uvicorn's own, and ours in its form; but all on stderr, where uvicorn would log requests on stdout."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["shoal"] = {"handlers": ["default"], "level": level.upper()}
    return config


class _Server(uvicorn.Server):
    """Says when it is ready."""

    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()
