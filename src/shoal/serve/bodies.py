"""How large a request may be: a body is read before anything else looks at it, and one that is too large is never held."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.faults import Fault

PATIENCE = 64 * 2**20
"""Bytes that are read and dropped for the sake of the answer: a client still sending when the connection closes never sees it."""


class BodyLimit:
    """ASGI middleware that answers 413 to bodies of more than `most` bytes, whether or not they tell their length."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything else on, the body as one message."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = await self._read(receive)
        if body is None:
            message, close = f"the body is larger than {self.most} bytes", {"connection": "close"}
            await Fault(413, message, code="body_too_large", headers=close).response()(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, replayed, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or None if it is too large."""
        body, size, more = bytearray(), 0, True
        while more and size <= PATIENCE:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size <= self.most:
                body += part
            more = message.get("more_body", False)
        return bytes(body) if size <= self.most else None
