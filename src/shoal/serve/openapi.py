"""The OpenAPI description of the routes whose bodies FastAPI does not parse itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shoal.serve.response_models import ErrorAnswer

TEXT = {"type": "string"}
HEADERS: dict[str, dict[str, Any]] = {
    "x-shoal-ignored": {"description": "Fields that were sent and have no effect.", "schema": TEXT},
    "x-shoal-told": {
        "description": "Fields that a system message tells: the chat template does not know them.",
        "schema": TEXT,
    },
    "x-request-id": {"description": "The request's own, or one made for it.", "schema": TEXT},
    "x-shoal-clamped": {
        "description": "Values that were lowered to this server's limit.",
        "schema": TEXT,
    },
}
"""The headers that say how an answer differs from the request."""
ERRORS = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, "content": ERRORS}
    for status, what in {
        400: "The request cannot be served; the message says why.",
        401: "The API key is missing or wrong.",
        403: "The server is not asked under this name.",
        404: "There is no such model.",
        408: "The body took too long to arrive.",
        413: "The body is too large.",
        429: "Too much is waiting; Retry-After says when to come again.",
        500: "The model failed.",
        503: "The engine has stopped or lost this request.",
    }.items()
}


def described(
    request: type[BaseModel], answer: type[BaseModel], *, stream: bool = True
) -> dict[str, Any]:
    """Returns a route's description: its body and its answer.

    The answer is one object, or, with `stream`, events that each hold a part of one.
    """
    events: dict[str, Any] = {"content": {"text/event-stream": {}}} if stream else {}
    schema = {"$ref": f"#/components/schemas/{request.__name__}"}
    return {
        "responses": REFUSALS | {200: {"model": answer, "headers": HEADERS, **events}},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
    }


def install(app: FastAPI, requests: Sequence[type[BaseModel]]) -> None:
    """Adds the models of requests and of errors, and removes FastAPI's status 422.

    Invalid bodies are answered with 400.
    """
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        _, models = models_json_schema(
            [*((each, "validation") for each in requests), (ErrorAnswer, "serialization")],
            ref_template="#/components/schemas/{model}",
        )
        description = generated()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        description["components"]["schemas"] |= models["$defs"]
        return description

    app.openapi = openapi  # type: ignore[method-assign]
