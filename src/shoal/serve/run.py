"""Runs the application with uvicorn: binding, signals, draining.

While the model is loaded, the server answers that it lives and is not ready.

uvicorn's protocol gets time limits for requests and readers, and a limit of connections.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.errors import InternalError, RequestError
from shoal.serve import logs
from shoal.serve.access import BODY_TIMEOUT_SECONDS, Tls
from shoal.serve.api_errors import ApiError
from shoal.serve.worker import Worker

ARRIVAL_TIMEOUT_SECONDS: dict[Any, float] = {
    h11.IDLE: 15.0,
    h11.SEND_BODY: BODY_TIMEOUT_SECONDS + 5,
}
"""The seconds for the headers and for the body of a request, by the state of h11. Bytes that arrive
do not restart them. Handlers that read a body have a slightly shorter timeout, and answer."""
READ_TIMEOUT_SECONDS, MIN_READ_BYTES = 30.0, 2**14
"""The bytes that a client must read in this many seconds, unless fewer wait for it; else the
connection is closed. Through TLS it must read 48 KiB: of its transport's 64 KiB of encrypted bytes
only a drop to 16 KiB is seen."""


class LimitedProtocol(H11Protocol):
    """One connection.

    Connections beyond `limit_concurrency` are closed; uvicorn would keep them open and refuse their
    requests.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._phase: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # pause_writing is called as soon as the socket's buffer is full. With high=0 the transports
        # of TLS would call it when nothing waits, and never resume.
        transport.set_write_buffer_limits(high=1)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            message = f"this server has {self._max_connections} open connections, and takes no more"
            self._refuse(ApiError(503, message, code="too_many_connections"))
        else:
            self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        self._stop_timer()  # uvicorn's keep-alive timeout runs until the next request begins
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:
            self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()

    def _start_read_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(READ_TIMEOUT_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        """Closes the connection if the client has read too little.

        While writing is paused nothing is added to the buffer: the client has read the bytes that
        the buffer lost.
        """
        if self.transport.get_write_buffer_size() > before - MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._start_read_timer()

    def _stop_read_timer(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _update_timer(self) -> None:
        """Runs a timer while the headers or the body of a request are incomplete."""
        phase = self.conn.their_state
        if phase is self._phase or self.transport.is_closing():
            return
        self._stop_timer()
        if phase in ARRIVAL_TIMEOUT_SECONDS:
            self._phase = phase
            self._timer = self.loop.call_later(ARRIVAL_TIMEOUT_SECONDS[phase], self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._phase = self._timer = None

    def _time_out(self) -> None:
        if self.conn.our_state is h11.IDLE:
            self._refuse(
                ApiError(408, "the request did not arrive in time", code="request_timeout")
            )
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers in the place of the application, and closes the connection."""
        content = json.dumps(error.body()).encode()
        length = str(len(content)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", length),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=error.status_code, headers=headers),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


NOTICE_SECONDS = 2.0
"""The time between SIGTERM and the end of new connections. /ready fails meanwhile, so that
balancers send requests elsewhere."""
GRACE_SECONDS = 5
"""The time for clients to read the samples that were cut at the end of the drain."""
UNREAD_TIMEOUT_SECONDS = 30
"""The seconds without an acknowledgement after which a client is disconnected, if the system has
TCP_USER_TIMEOUT (Linux)."""
MAX_CONNECTIONS = 512
"""The most open connections; more if the server's capacity is larger."""
KEEP_ALIVE_SECONDS = 100
"""The time after which an idle connection is closed. Clients close theirs earlier (httpx after 5 s,
aiohttp 15, nginx 60, Go 90): if the server closes a connection first, a request may be on its way,
and fail."""
PROTOCOL: dict[str, Any] = {
    "http": LimitedProtocol,
    "ws": "none",
    "lifespan": "on",
    "limit_concurrency": MAX_CONNECTIONS,
    "timeout_keep_alive": KEEP_ALIVE_SECONDS,
}
"""The options of uvicorn: h11, because uvicorn's faster parser, httptools, accepts headers of any
size."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket for `run`; port 0 = any free one.

    Raises:
        RequestError: the address is in use, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by its connections
        listening.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_TIMEOUT_SECONDS)
        )
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror or error}"
        ) from error
    return listening


def run(
    app: FastAPI,
    listening: socket.socket,
    drain: float,
    log_level: str,
    ready: Callable[[], None],
    tls: Tls | None = None,
    log_format: logs.LogFormat = "text",
) -> None:
    """Serves until SIGTERM or Ctrl-C, then drains.

    After Ctrl-C at once, after SIGTERM `NOTICE_SECONDS` later, no new connections are accepted, and
    open requests have `drain` seconds to finish. Samples that are unfinished then, or at a second
    signal, are returned as they are.

    Args:
        app: the application.
        drain: the seconds that open requests have to finish.
        log_level: see `shoal.serve.logs`.
        ready: called as soon as requests are answered.
        tls: encrypts all connections; None = HTTP.
        log_format: see `shoal.serve.logs`.

    Raises:
        KeyboardInterrupt: at the end, if it was Ctrl-C.
        InternalError: the engine's thread has ended by an error, and open requests have failed: a
            supervisor should restart the process.
    """
    worker: Worker = app.state.worker
    options = {**PROTOCOL, "limit_concurrency": max(MAX_CONNECTIONS, 2 * worker.capacity)}
    options |= tls.uvicorn_options() if tls else {}
    # uvicorn raises the signals that it caught again at its end; SIGTERM has been handled by then.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        config = uvicorn.Config(
            app,
            log_level=log_level,
            log_config=logs.config(log_level, log_format),
            access_log=False,
            timeout_graceful_shutdown=math.ceil(drain + GRACE_SECONDS),
            **options,
        )
        _Server(config, drain, ready, app.state).run([listening])
    finally:
        signal.signal(signal.SIGTERM, previous)
        worker.stop()
        logs.restore()
    if worker.thread.failure is not None:
        raise InternalError(f"the engine's thread has ended: {worker.thread.failure!r}")


class _Server(uvicorn.Server):
    """A server that reports readiness, cuts samples after the drain, and ends with its engine."""

    def __init__(
        self, config: uvicorn.Config, drain: float, ready: Callable[[], None], state: State
    ) -> None:
        super().__init__(config)
        self._drain, self._ready, self._state = drain, ready, state
        self._exit_signal: tuple[int, float] | None = None  # the signal, and when it takes effect
        self._cut = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._exit_signal is not None and time.monotonic() >= self._exit_signal[1]:
            super().handle_exit(self._exit_signal[0], None)
        return await super().on_tick(counter) or not self._state.worker.thread.alive

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining = True
        timer = asyncio.get_running_loop().call_later(self._drain, self._state.worker.cut)
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: the first SIGTERM takes effect after `NOTICE_SECONDS`, Ctrl-C at once.

        A second signal cuts open samples.
        """
        self._state.draining = True
        if self._exit_signal is None:
            self._exit_signal = (
                sig,
                time.monotonic() + (NOTICE_SECONDS if sig == signal.SIGTERM else 0),
            )
        elif not self._cut:
            self._cut = True
            self._exit_signal = self._exit_signal[0], 0.0
            self._state.worker.cut()
        else:
            super().handle_exit(sig, frame)


RETRY_SECONDS = 5
STATUS = {"status": "a model is being loaded"}


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers while the model is loaded: /health with 200, all other paths with 503."""
    if scope["type"] != "http":
        return
    retry = {"retry-after": str(RETRY_SECONDS)}
    if scope["path"] in ("/health", "/ready"):
        response: Response = (
            JSONResponse(STATUS, 200)
            if scope["path"] == "/health"
            else JSONResponse(STATUS, 503, retry)
        )
    else:
        response = ApiError(
            503, "a model is being loaded: try again soon", code="loading", headers=retry
        ).response()
    await response(scope, receive, send)


@contextmanager
def answered(listening: socket.socket, tls: Tls | None = None) -> Iterator[None]:
    """Answers on the socket on a thread within the block, and leaves it open for the server."""
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
