"""The body of an HTTP request: limited in size and time, and parsed on another thread.

The routes' handlers call this, after the key has been checked.
"""

from __future__ import annotations

from typing import Any, TypeVar

import anyio
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from shoal.serve.api_errors import ApiError, read_json

T = TypeVar("T", bound=BaseModel)
MAX_DISCARDED_BYTES = 64 * 2**20
"""The most bytes of a too large body that are read and dropped: a client that is still sending when
the connection closes never reads the answer."""
BODY_TIMEOUT_SECONDS = 60.0
"""The time within which a body must arrive."""
CLIENT_GONE = 499
"""The status of requests whose client disconnected before the answer."""
CLOSE = {"connection": "close"}


async def read(request: Request, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object of the body.

    Raises:
        ApiError: larger than `max_bytes` (413), too slow (408), compressed (415), not a JSON object
            (400).
    """
    try:
        with anyio.fail_after(BODY_TIMEOUT_SECONDS):
            body = await _received(request, max_bytes)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers=CLOSE) from error
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "the client has gone") from error
    if not _is_json(request.headers.get("content-type", "")):
        raise _not_an_object()
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        message = f"the body is compressed ({coding[:40]}): send it as it is, in UTF-8"
        headers = {"accept-encoding": "identity"}
        raise ApiError(415, message, code="unsupported_encoding", headers=headers)
    return await run_in_threadpool(parse, body)


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises ApiError (400): the body is no JSON object."""
    try:
        fields = read_json(body)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise _not_an_object()
    return fields


def validated(model: type[T], fields: dict[str, Any]) -> T:
    """Returns an object as a `model`. Raises RequestValidationError, as FastAPI does."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in found], body=fields
        ) from error


def _not_an_object() -> ApiError:
    return ApiError(
        400, "the body must be a JSON object, sent as application/json", code="invalid_json"
    )


def _is_json(content_type: str) -> bool:
    """Returns True for types of JSON.

    Browsers send these types to another origin only if the server allows it (CORS).
    """
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


async def _received(request: Request, max_bytes: int) -> bytes:
    """Returns the body. Raises ApiError if it is too large, whatever its Content-Length says."""
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            body += part
        elif size > MAX_DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise ApiError(
            413, f"the body is larger than {max_bytes} bytes", code="body_too_large", headers=CLOSE
        )
    return bytes(body)
