"""The record of each request once its answer has ended, for the log and the metrics."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.api_errors import api_error_of
from shoal.serve.bodies import CLIENT_GONE

HEADER = "x-request-id"
VALID = re.compile(r"[\x21-\x7e]{1,128}")
"""The ids that are kept; other ids of clients are replaced: they could not be searched for in a
log."""
MOST_REASON = 300
"""The number of characters of an error's message that are kept."""


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        scope: the ASGI scope of the request.
        id: the x-request-id that the client sent, or a new one; the answer has it.
        status: the status of the answer; 499 if its client left before its end, 500 if the
            application raised.
        reason: the message of an error.
        seconds: the time from the request to the end of its answer.
        begun: True once the status is sent.
    """

    scope: Scope
    id: str
    status: int = CLIENT_GONE
    reason: str | None = None
    seconds: float = 0.0
    begun: bool = False
    _started: float = field(default_factory=time.perf_counter)
    _complete: bool = False

    @property
    def route(self) -> str:
        """The template of its path; "other" if no route fits.

        Clients could send any number of paths.
        """
        return getattr(self.scope.get("route"), "path", "other")

    @property
    def computed(self) -> dict[str, Any]:
        """The token counts of its route, from the function `request.state.computed`."""
        found = self.scope["state"].get("computed")
        return {} if found is None else found()

    def sent(self, message: Message) -> None:
        """Records a part of the answer, once it is sent."""
        if message["type"] == "http.response.start":
            self.status, self.begun = message["status"], True
            return
        if self.status >= 400 and self.reason is None:
            self.reason = _reason(message.get("body", b""))
        self._complete = self._complete or not message.get("more_body")

    def failed(self) -> None:
        """Records that the application has raised an error."""
        self.status, self._complete = 500, True

    def end(self) -> None:
        """Records that the answer has ended."""
        self.seconds = time.perf_counter() - self._started
        self.status = self.status if self._complete else CLIENT_GONE


class Exchanges:
    """A middleware (ASGI) that gives answers the id of their request, and reports each exchange.

    Args:
        app: the application.
        ended: functions called with each exchange once its answer has ended, or its client has
            gone.
    """

    def __init__(self, app: ASGIApp, ended: Sequence[Callable[[Exchange], None]]) -> None:
        self.app, self.ended = app, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards everything to the application, and answers errors before its answer begins."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})
        exchange = Exchange(scope, _id(Headers(scope=scope).get(HEADER, "")))

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = exchange.id
            await send(message)
            exchange.sent(message)

        try:
            await self.app(scope, receive, observed)
        except Exception as error:
            if not exchange.begun:
                await api_error_of(error).response()(scope, receive, observed)
            exchange.failed()
            raise
        finally:
            exchange.end()
            for tell in self.ended:
                tell(exchange)


def _id(given: str) -> str:
    return given if VALID.fullmatch(given) else secrets.token_hex(16)


def _reason(body: bytes) -> str | None:
    """Returns the message of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])[:MOST_REASON]
    except (ValueError, KeyError, TypeError):
        return None
