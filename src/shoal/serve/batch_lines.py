"""Lines of batch files, and blocks of them for workers.

A request has the API's own fields and an id, or is a line of OpenAI's batch API; results
correspond. A block whose worker died is halved, until the line that kills workers is alone in its
block.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from shoal.errors import RequestError
from shoal.serve.api_errors import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ApiError,
    Json,
    api_error_of,
    read_json,
)

ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
"""The fields of OpenAI's batch lines; the API has no fields of these names."""

URLS = (COMPLETIONS, CHAT, RESPONSES)
"""The paths that OpenAI's batch lines may name."""


class LineError(ApiError):
    """An error outside of a request's fields: in OpenAI's results it stands without a response."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    Attributes:
        number: the line's number, from 1.
        text: the line's text, unchanged.
        id: the value of "id" or "custom_id"; "line-NUMBER" if it is missing or neither a text nor
            an integer.
        seeded: True if the request has a seed.
        enveloped: True if the line is one of OpenAI's batch lines.
    """

    number: int
    text: str
    id: str | int
    seeded: bool = False
    enveloped: bool = False

    @property
    def digest(self) -> str:
        """The digest of the text: it identifies the request that a result answers."""
        return digest(self.text.strip())

    def request(self) -> tuple[str, Json]:
        """Returns the API's path, and the fields of the request.

        Raises:
            ApiError: for any error outside of the fields.
        """
        try:
            fields = read_json(self.text)
        except (ValueError, RecursionError) as error:
            raise ApiError(
                400, f"the line is not valid JSON: {error}", code="invalid_json"
            ) from error
        if not isinstance(fields, dict):
            raise ApiError(400, "the line must be a JSON object", code="invalid_json")
        if _is_enveloped(fields):
            return _unwrapped(fields)
        if not _is_id(fields.pop("id", "")):
            raise ApiError(400, "id must be a text or an integer", param="id", code="invalid_value")
        return (CHAT if "messages" in fields else COMPLETIONS), fields

    def result(self, body: Json) -> Json:
        """Returns the output line for an answer of the API."""
        return self._wrapped(200, body) if self.enveloped else {**body, "id": self.id}

    def failure(self, error: Exception) -> Json:
        """Returns the output line for an error."""
        api_error = api_error_of(error)
        if not self.enveloped:
            return {**api_error.body(), "id": self.id}
        if isinstance(api_error, LineError):
            return self._wrapped(None, {"code": api_error.code, "message": api_error.detail})
        return self._wrapped(api_error.status_code, api_error.body())

    def _wrapped(self, status: int | None, body: Json) -> Json:
        """Returns a result of OpenAI's batch API.

        Without a status, `body` is the error of a line that was no request.
        """
        key = secrets.token_hex(12)
        response = (
            None
            if status is None
            else {"status_code": status, "request_id": f"req_{key}", "body": body}
        )
        error = body if status is None else None
        return {
            "id": f"batch_req_{key}",
            "custom_id": self.id,
            "response": response,
            "error": error,
        }


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yields the lines of an input that are not empty; they are validated when they are answered.

    Raises:
        RequestError: the file cannot be read, or two lines have the same id.
    """
    seen: dict[str | int, int] = {}
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = _line(number, text)
                if line.id in seen:
                    raise RequestError(
                        f"{path}: lines {seen[line.id]} and {number} have the same id {line.id!r}"
                    )
                seen[line.id] = number
                yield line
    except OSError as error:
        raise RequestError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _line(number: int, text: str) -> BatchLine:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    enveloped = _is_enveloped(fields)
    named = fields.get("custom_id" if enveloped else "id")
    body = fields.get("body") if enveloped else fields
    seeded = isinstance(body, dict) and body.get("seed") is not None
    return BatchLine(number, text, named if _is_id(named) else f"line-{number}", seeded, enveloped)


def _unwrapped(fields: Json) -> tuple[str, Json]:
    """Returns path and fields of one of OpenAI's batch lines; raises LineError for a bad one."""
    if unknown := [name for name in fields if name not in ENVELOPE and fields[name] is not None]:
        raise LineError(
            400,
            f"unknown field {unknown[0]!r} beside custom_id, method, url and body",
            code="unknown_field",
        )
    if not isinstance(fields.get("custom_id"), str):
        raise LineError(400, "custom_id must be a text", code="invalid_custom_id")
    if fields.get("method") != "POST":
        raise LineError(
            400, f"method must be 'POST', got {fields.get('method')!r}", code="invalid_method"
        )
    if fields.get("url") not in URLS:
        raise LineError(
            400,
            f"url must be one of {', '.join(URLS)}, got {fields.get('url')!r}",
            code="invalid_url",
        )
    if not isinstance(fields.get("body"), dict):
        raise LineError(400, "body must be a JSON object", code="invalid_body")
    return fields["url"], fields["body"]


def _is_enveloped(fields: Mapping[str, Any]) -> bool:
    """Returns True if an object is one of OpenAI's batch lines, valid or not."""
    return not ENVELOPE.isdisjoint(fields)


def _is_id(value: object) -> TypeGuard[str | int]:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def digest(text: str) -> str:
    """Returns 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


# ── output lines ──────────────────────────────────────────────────────────────────────────────────


def id_of(entry: object) -> str | int | None:
    """Returns the id of the line that an output line answers; None if it is not an answer."""
    if not isinstance(entry, dict):
        return None
    if "custom_id" in entry:
        named, known = entry["custom_id"], {"response", "error"} <= entry.keys()
    else:
        named, known = entry.get("id"), bool(entry.keys() & {"choices", "error"})
    return named if known and _is_id(named) else None


def has_failed(entry: Mapping[str, Any]) -> bool:
    """Returns True if an output line is an error."""
    response = entry.get("response")
    return bool(entry.get("error")) or (response is not None and response["status_code"] != 200)


def usage_of_choices(entry: Mapping[str, Any]) -> list[Json]:
    """Returns `usage.choices` of an output line; an empty list for an error."""
    return list(_usage(entry).get("choices", ()))


def lossy_of(entry: Mapping[str, Any]) -> str:
    """Returns an output line's sentence about a lossy rule, "" for an exact rule or an error."""
    return str(_usage(entry).get("lossy") or "")


def _usage(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    body = (entry.get("response") or {}).get("body", {}) if "custom_id" in entry else entry
    return body.get("usage", {})


MAX_BLOCK_LINES = 64
"""The most lines of a block. Larger blocks repeat more work when a worker dies; in smaller ones
more slots of the worker's batch are empty at the end."""
BLOCKS_PER_WORKER = 4
"""The number of blocks per worker, if there are enough lines; faster workers take more of them."""
MAX_DEATHS = 3
"""The number of workers that may die while they answer one line alone: machines also fail for other
reasons."""


@dataclass(frozen=True)
class LineBlock:
    """The lines that one worker answers, all or none.

    Attributes:
        deaths: the number of workers that died with this block, if it has one line.
    """

    lines: tuple[BatchLine, ...]
    deaths: int = 0


class Blocks:
    """The blocks that no worker has yet."""

    def __init__(self, lines: Sequence[BatchLine], workers: int) -> None:
        size = min(max(math.ceil(len(lines) / (BLOCKS_PER_WORKER * workers)), 1), MAX_BLOCK_LINES)
        starts = range(0, len(lines), size)
        self._waiting = deque(LineBlock(tuple(lines[start : start + size])) for start in starts)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> LineBlock | None:
        """Returns the next block; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def died(self, block: LineBlock) -> BatchLine | None:
        """Returns a block whose worker died to the queue, in halves and after the others.

        Returns:
            The line that is given up, if `MAX_DEATHS` workers died with it alone; else None.
        """
        if len(block.lines) > 1:
            half = len(block.lines) // 2
            self._waiting += [LineBlock(block.lines[:half]), LineBlock(block.lines[half:])]
            return None
        if block.deaths + 1 == MAX_DEATHS:
            return block.lines[0]
        self._waiting.append(LineBlock(block.lines, block.deaths + 1))
        return None
