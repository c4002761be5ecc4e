"""uvicorn's HTTP protocol with time limits for requests and readers, and a limit of connections."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.serve.api_errors import ApiError
from shoal.serve.bodies import BODY_TIMEOUT_SECONDS

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
            self._phase, self._timer = (
                phase,
                self.loop.call_later(ARRIVAL_TIMEOUT_SECONDS[phase], self._time_out),
            )

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
