"""What a server logs: a line per request when its answer has ended, and all other messages, as text
or as JSON objects."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from logging.config import dictConfig
from typing import Any, Final, Literal

from shoal.serve.exchanges import Exchange

LOG = logging.getLogger("shoal.requests")
LogFormat = Literal["text", "json"]
PROBES = ("/health", "/ready", "/metrics")
"""Requests of supervisors; they are logged at the level debug."""
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
"""What a line of a request tells. The path is without its query, which may hold secrets."""


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
    """A path as it is; in quotes and escaped if it has blanks, quotes, backslashes or what cannot
    be printed."""
    return path if path.isprintable() and not set(path) & set(" '\"\\") else repr(path)


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
    return (
        datetime.fromtimestamp(record.created, timezone.utc)
        .astimezone()
        .isoformat(timespec="milliseconds")
    )


def config(level: str, form: LogFormat, handler: dict[str, Any] = STDERR) -> dict[str, Any]:
    """For `logging.config`: uvicorn's messages and ours to one handler; requests are logged by
    `RequestLog` alone."""
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
    """Messages are written as `config` says for as long as the block lasts."""
    dictConfig(config(level, form))
    try:
        yield
    finally:
        restore()


def restore() -> None:
    """Takes back what `config` has set: a process may go on after its server, and stderr may be
    another one then."""
    for name in ("uvicorn", "uvicorn.error", "shoal"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
