"""Reading a request's body: at most so many bytes within so many seconds, JSON, and judged on a thread of its own.

Handlers call this, so a body is read only after the key has been checked.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import anyio
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from shoal.serve.api_errors import ApiError

T = TypeVar("T", bound=BaseModel)
MAX_DISCARDED_BYTES = 64 * 2**20
"""Bytes that are read and dropped for the sake of the answer: a client still sending when the connection closes never sees it."""
BODY_TIMEOUT_SECONDS = 60.0
"""Seconds that a body may take to arrive."""
CLIENT_GONE = 499
"""Status under which answers are counted that nobody waited for."""
MAX_VALIDATION_ERRORS = 100
"""Errors that a body may come to: no list of them grows with it."""
CLOSE = {"connection": "close"}


async def read(request: Request, model: type[T], most: int) -> T:
    """The body as a `model`.

    Raises:
        ApiError: larger than `most` bytes (413), too slow (408), no JSON object (400).
        RequestValidationError: not what `model` takes.
    """
    try:
        with anyio.fail_after(BODY_TIMEOUT_SECONDS):
            body = await _received(request, most)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers=CLOSE) from error
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "the client has gone") from error
    if not _is_json(request.headers.get("content-type", "")):
        raise _no_object()
    return await run_in_threadpool(parse, model, body)


def parse(model: type[T], body: bytes) -> T:
    """A body as a `model`. Raises ApiError or RequestValidationError, as `read` does."""
    try:
        fields = json.loads(body)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise _no_object()
    return validated(model, fields)


def validated(model: type[T], fields: dict[str, Any]) -> T:
    """An object as a `model`. Raises RequestValidationError, as FastAPI does."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found], body=fields) from error


def _no_object() -> ApiError:
    return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")


def _is_json(content_type: str) -> bool:
    """Browsers send this type to another origin only if the server lets them (CORS)."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def _received(request: Request, most: int) -> bytes:
    """The body. Raises ApiError: it is too large, whether or not it told its length."""
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            body += part
        elif size > MAX_DISCARDED_BYTES:
            break
    if size > most:
        raise ApiError(413, f"the body is larger than {most} bytes", code="body_too_large", headers=CLOSE)
    return bytes(body)
