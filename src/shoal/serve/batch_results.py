"""A batch's answers as objects: those of the API with the line's id, or OpenAI's batch results."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from shoal.serve.api_errors import ApiError, api_error_of
from shoal.serve.batch_lines import BatchLine, Json, is_id


class LineError(ApiError):
    """What is wrong with a line before there is a request, or after: OpenAI's results then have no response."""


def answered(line: BatchLine, body: Json) -> Json:
    """A line's answer: `body` is what the API returns."""
    return _result(line, 200, body) if line.enveloped else {**body, "id": line.id}


def failed(line: BatchLine, error: Exception) -> Json:
    """The answer to a line that failed, whatever it failed by."""
    fault = api_error_of(error)
    if not line.enveloped:
        return {**fault.body(), "id": line.id}
    if isinstance(fault, LineError):
        return _result(line, None, {"code": fault.code, "message": fault.detail})
    return _result(line, fault.status_code, fault.body())


def _result(line: BatchLine, status: int | None, body: Json) -> Json:
    """OpenAI's: what HTTP would have answered, or without a status why nothing was asked."""
    key = secrets.token_hex(12)
    response = None if status is None else {"status_code": status, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": line.id, "response": response, "error": body if status is None else None}


def id_of(entry: object) -> str | int | None:
    """The id of the line that an object answers; None if it is no answer."""
    if not isinstance(entry, dict):
        return None
    if "custom_id" in entry:
        named, known = entry["custom_id"], {"response", "error"} <= entry.keys()
    else:
        named, known = entry.get("id"), bool(entry.keys() & {"choices", "error"})
    return named if known and is_id(named) else None


def has_failed(entry: Mapping[str, Any]) -> bool:
    """Whether an answer is an error."""
    response = entry.get("response")
    return bool(entry.get("error")) or (response is not None and response["status_code"] != 200)


def choices_taken(entry: Mapping[str, Any]) -> list[Json]:
    """What each choice of an answer took; none of an error."""
    body = (entry.get("response") or {}).get("body", {}) if "custom_id" in entry else entry
    return list(body.get("usage", {}).get("choices", ()))
