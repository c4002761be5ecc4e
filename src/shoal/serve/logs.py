"""The record of each request once its answer has ended, for the log and the metrics."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from logging.config import dictConfig
from typing import Any, Final, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.access import CLIENT_GONE
from shoal.serve.api_errors import api_error_of

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
        """The template of its path; "other" if no route fits, as clients could send any path."""
        return getattr(self.scope.get("route"), "path", "other")

    @property
    def computed(self) -> dict[str, Any]:
        """The token counts of its route, from the function `request.state.computed`."""
        counts = self.scope["state"].get("computed")
        return {} if counts is None else counts()

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
            # A connection keeps the scope of its last request, which would keep all its rows.
            scope["state"].pop("computed", None)


def _id(given: str) -> str:
    return given if VALID.fullmatch(given) else secrets.token_hex(16)


def _reason(body: bytes) -> str | None:
    """Returns the message of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])[:MOST_REASON]
    except (ValueError, KeyError, TypeError):
        return None


LOG = logging.getLogger("shoal.requests")
LogFormat = Literal["text", "json"]
PROBES = ("/health", "/ready", "/metrics")
"""The paths of supervisors; their requests are logged at the level debug."""
STDERR: Final[dict[str, Any]] = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}
FIELDS = (
    "request_id",
    "method",
    "path",
    "status",
    "seconds",
    "prompt_tokens",
    "completion_tokens",
    "samples",
    "reason",
)
"""The fields of a request's line. The path is without its query, which may hold secrets."""


def log(exchange: Exchange) -> None:
    """Logs a request whose answer has ended."""
    path, status = exchange.scope["path"], exchange.status
    every = {
        "request_id": exchange.id,
        "method": exchange.scope["method"],
        "path": path,
        "status": status,
        "seconds": round(exchange.seconds, 4),
        **exchange.computed,
        "reason": exchange.reason,
    }
    fields = {name: every[name] for name in FIELDS if every.get(name) is not None}
    level = logging.DEBUG if path in PROBES else logging.WARNING if status >= 500 else logging.INFO
    LOG.log(level, _sentence(fields), extra={"fields": fields})


def _sentence(fields: dict[str, Any]) -> str:
    parts = [
        f"{fields['method']} {_shown(fields['path'])}"[:200],
        str(fields["status"]),
        f"{fields['seconds']:.3f} s",
    ]
    if "completion_tokens" in fields:
        parts.append(
            f"{fields['prompt_tokens']}+{fields['completion_tokens']} tokens, "
            f"{fields['samples']} samples"
        )
    parts.append(f"id {fields['request_id']}")
    return " ".join(parts) + (f": {fields['reason']!r}" if "reason" in fields else "")


def _shown(path: str) -> str:
    """Returns a path, quoted and escaped if it has blanks, quotes or unprintable characters.

    Backslashes are escaped, too.
    """
    return path if path.isprintable() and not set(path) & set(" '\"\\") else repr(path)


class TextFormatter(logging.Formatter):
    """A formatter that writes time with zone, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns a line, and a traceback if there is one."""
        text = f"{_time(record)} {record.levelname:<8} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the fields of a request beside time, level, logger and message."""
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, timezone.utc)
        .astimezone()
        .isoformat(timespec="milliseconds")
    )


def config(level: str, form: LogFormat, handler: dict[str, Any] = STDERR) -> dict[str, Any]:
    """Returns a configuration of one handler for uvicorn's messages and ours.

    uvicorn's lines of requests are dropped: only `log` logs requests.
    """
    logger = {"handlers": ["shoal"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"shoal": {"()": JsonFormatter if form == "json" else TextFormatter}},
        "handlers": {"shoal": {**handler, "formatter": "shoal"}},
        "loggers": {
            "uvicorn": logger,
            "uvicorn.error": {"level": level.upper()},
            "shoal": logger,
            "uvicorn.access": {"handlers": [], "propagate": False},
        },
    }


@contextmanager
def written(level: str, form: LogFormat) -> Iterator[None]:
    """Writes messages by `config` for as long as the block lasts."""
    dictConfig(config(level, form))
    try:
        yield
    finally:
        restore()


def restore() -> None:
    """Undoes `config`: a process may go on after its server, and stderr may be another one then."""
    for name in ("uvicorn", "uvicorn.error", "shoal"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
