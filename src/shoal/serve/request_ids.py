"""The header x-request-id: what the client sent comes back, and a request without one gets one."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
VALID = re.compile(r"[\x21-\x7e]{1,128}")
"""Other ids are replaced: they could not be searched for in a log."""


class RequestIds:
    """ASGI middleware that gives every answer the id of its request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards everything to the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if VALID.fullmatch(given) else secrets.token_hex(16)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self.app(scope, receive, with_id)
