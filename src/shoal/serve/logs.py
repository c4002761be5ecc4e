"""What a server logs: a line per request when its answer has ended, and all other messages, as text or as JSON objects."""

from __future__ import annotations

import json
import logging
import time
from datetime import datetime, timezone
from typing import Any, Final, Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.bodies import CLIENT_GONE
from shoal.serve.request_ids import HEADER

LOG = logging.getLogger("shoal.requests")
LogFormat = Literal["text", "json"]
PROBES = ("/health", "/ready", "/metrics")
"""Requests of supervisors; they are logged at the level debug."""
MOST_REASON = 300
"""Characters of an error's message that are logged."""
STDERR: Final[dict[str, Any]] = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}
FIELDS = ("request_id", "method", "path", "status", "seconds", "prompt_tokens", "completion_tokens", "samples", "reason")
"""What a line of a request tells. The path is without its query, which may hold secrets."""


class RequestLog:
    """ASGI middleware that logs each request once its answer has ended, or its client has gone (status 499).

    A route says what it computed by `request.state.computed`, a function that returns fields.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards everything to the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, fields, complete = time.perf_counter(), dict[str, Any](status=CLIENT_GONE), False
        scope.setdefault("state", {})

        async def note(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                fields.update(status=message["status"], request_id=Headers(raw=message["headers"]).get(HEADER, ""))
            elif fields["status"] >= 400 and "reason" not in fields:
                fields["reason"] = _reason(message.get("body", b""))
            await send(message)
            complete = complete or (message["type"] == "http.response.body" and not message.get("more_body"))

        try:
            await self.app(scope, receive, note)
        except Exception:
            fields["status"], complete = 500, True  # answered so by the application's outermost layer
            raise
        finally:
            if not complete:
                fields["status"] = CLIENT_GONE
            fields.update(method=scope["method"], path=scope["path"], seconds=round(time.perf_counter() - started, 4))
            computed = scope["state"].get("computed")
            fields.update(computed() if computed is not None else {})
            level = (
                logging.DEBUG if scope["path"] in PROBES else logging.WARNING if fields["status"] >= 500 else logging.INFO
            )
            LOG.log(
                level,
                _sentence(fields),
                extra={"fields": {name: fields[name] for name in FIELDS if fields.get(name) is not None}},
            )


def _reason(body: bytes) -> str | None:
    """The message of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])[:MOST_REASON]
    except (ValueError, KeyError, TypeError):
        return None


def _sentence(fields: dict[str, Any]) -> str:
    parts = [f"{fields['method']} {fields['path']!r}"[:200], str(fields["status"]), f"{fields['seconds']:.3f} s"]
    if "completion_tokens" in fields:
        parts.append(f"{fields['prompt_tokens']}+{fields['completion_tokens']} tokens, {fields['samples']} samples")
    parts += [f"id {fields['request_id']}"] if fields.get("request_id") else []
    return " ".join(parts) + (f": {fields['reason']!r}" if fields.get("reason") else "")


class TextFormatter(logging.Formatter):
    """Time with zone, level, message."""

    def format(self, record: logging.LogRecord) -> str:
        """A line, and a traceback if there is one."""
        text = f"{_time(record)} {record.levelname:<8} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The fields of a request beside time, level, logger and message."""
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
    return datetime.fromtimestamp(record.created, timezone.utc).astimezone().isoformat(timespec="milliseconds")


def config(level: str, form: LogFormat, handler: dict[str, Any] = STDERR) -> dict[str, Any]:
    """For `logging.config`: uvicorn's messages and ours to one handler; requests are logged by `RequestLog` alone."""
    logger = {"handlers": ["shoal"], "level": level.upper(), "propagate": False}
    return {
        "version": 1, "disable_existing_loggers": False,
        "formatters": {"shoal": {"()": JsonFormatter if form == "json" else TextFormatter}},
        "handlers": {"shoal": {**handler, "formatter": "shoal"}},
        "loggers": {
            "uvicorn": logger, "uvicorn.error": {"level": level.upper()}, "shoal": logger,
            "uvicorn.access": {"handlers": [], "propagate": False},
        },
    }  # fmt: skip


def restore() -> None:
    """Takes back what `config` has set: a process may go on after its server, and stderr may be another one then."""
    for name in ("uvicorn", "uvicorn.error", "shoal"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
