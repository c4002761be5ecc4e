"""The logs of a server: a line per request when its answer has ended, and all other messages.

They are written as text or as JSON objects.
"""

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
