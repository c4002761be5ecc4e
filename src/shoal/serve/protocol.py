"""uvicorn's HTTP with limits: how long a request may take to arrive, and how many connections there may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.serve.api_errors import ApiError
from shoal.serve.bodies import BODY_TIMEOUT_SECONDS

ARRIVAL_TIMEOUT_SECONDS: dict[Any, float] = {h11.IDLE: 15.0, h11.SEND_BODY: BODY_TIMEOUT_SECONDS + 5}
"""Seconds that a client may take for its headers and for its body, by h11's name of what it is at. However it trickles, no byte
starts them anew. Handlers that read a body give up a little sooner, and say so."""
READ_TIMEOUT_SECONDS, MIN_READ_BYTES = 30.0, 2**14
"""Seconds in which a client must read so many bytes of what waits for it, or all that does; else it is cut off."""


class LimitedProtocol(H11Protocol):
    """One connection. Of `limit_concurrency` there may be so many; uvicorn itself would hold more, and refuse their requests."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._phase: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing pauses as soon as the system takes no more
        if self._most is not None and len(self.connections) > self._most:
            message = f"this server has {self._most} open connections, and takes no more"
            self._refuse(ApiError(503, message, code="too_many_connections"))
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._forget()  # from now on uvicorn's time for idle connections counts, until the next request begins
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._all_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._all_read()
        super().resume_writing()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(READ_TIMEOUT_SECONDS, self._look_at_reader, unread)

    def _look_at_reader(self, before: int) -> None:
        """Nothing is written while writing pauses: what has gone meanwhile has been read."""
        if self.transport.get_write_buffer_size() > before - MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

    def _all_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _watch(self) -> None:
        """A timer runs as long as a part of a request is on its way."""
        phase = self.conn.their_state
        if phase is self._phase or self.transport.is_closing():
            return
        self._forget()
        if phase in ARRIVAL_TIMEOUT_SECONDS:
            self._phase, self._timer = phase, self.loop.call_later(ARRIVAL_TIMEOUT_SECONDS[phase], self._give_up)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._phase = self._timer = None

    def _give_up(self) -> None:
        if self.conn.our_state is h11.IDLE:
            self._refuse(ApiError(408, "the request did not arrive in time", code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, fault: ApiError) -> None:
        """Answers instead of the application, and closes."""
        content = json.dumps(fault.body()).encode()
        length = str(len(content)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=fault.status_code, headers=headers),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
