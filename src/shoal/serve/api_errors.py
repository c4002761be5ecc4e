"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}.

Here are also the paths of the API, those that clients of other servers request, and the JSON of its
bodies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from shoal.config import PARAMETERS
from shoal.errors import OutOfMemory, RequestError, ShoalError
from shoal.values import is_int

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
INFILL = "/infill"
Json = dict[str, Any]
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""The ends of lines that some readers of events know beside the line feed, and halves of surrogate
pairs, which UTF-8 does not have."""


def read_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, or has a number that no double holds.
        RecursionError: the text is nested too deeply.
    """
    return json.loads(text, parse_float=_finite, parse_constant=no_constant)


def written(body: Json) -> bytes:
    """Returns the JSON of an answer, in UTF-8."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def no_constant(name: str) -> NoReturn:
    """Raises ValueError: NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:20]} is too large a number")
    return number


HAVE = (
    "this server generates text, by /v1/completions, /v1/chat/completions and /v1/responses; "
    "/openapi.json lists all its paths"
)
KEPT = "kept answers or conversations: send the whole conversation with each request"
FILES = "files or batches over HTTP: `shoal batch INPUT OUTPUT` answers a file of requests"
VECTORS = "embeddings, rankings or scores of texts"
ABSENT = {
    "/v1/embeddings": VECTORS,
    "/v1/rerank": VECTORS,
    "/v1/score": VECTORS,
    "/v1/classify": VECTORS,
    "/v1/pooling": VECTORS,
    "/embeddings": VECTORS,
    "/embed": VECTORS,
    "/rerank": VECTORS,
    "/score": VECTORS,
    "/classify": VECTORS,
    "/pooling": VECTORS,
    "/v1/moderations": "moderation of texts",
    "/v1/audio": "speech or transcriptions",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/realtime": "sessions of speech or WebSockets",
    "/v1/files": FILES,
    "/v1/batches": FILES,
    "/v1/uploads": FILES,
    "/v1/responses": KEPT,
    "/v1/conversations": KEPT,
    "/v1/chat/completions": KEPT,
    "/v1/assistants": "assistants",
    "/v1/threads": KEPT,
    "/v1/vector_stores": "stores of documents",
    "/v1/containers": "containers for code",
    "/v1/fine_tuning": "fine-tuning over HTTP: `shoal train` trains drafters",
    "/v1/evals": "evaluations over HTTP: see `shoal eval`",
    "/v1/messages": "API of Anthropic",
    "/api": "API of Ollama",
    "/v1beta": "API of Gemini",
    "/completion": "paths of llama.cpp's server but /infill",
    "/generate": "paths of text-generation-inference",
}
"""The features that are absent, by path; an entry also holds for all paths below its path."""
OWN = ("completions", "chat/completions", "responses", "models")


def reason(method: str, path: str, allowed: str | None) -> str:
    """Returns a sentence for a request that no route takes.

    Args:
        method: the request's method.
        path: the request's path.
        allowed: methods that the path takes, separated by commas; None = there is no such path.
    """
    message = next(
        (answer for start, answer in ABSENT.items() if f"{path}/".startswith(f"{start}/")), None
    )
    if allowed is not None:
        hint = "" if message is not KEPT else f"; this server has no {message}"
        return f"this path takes {allowed}, not {method}{hint}; /openapi.json lists all paths"
    if path.startswith("//"):
        return (
            f"the path begins with two slashes: end the client's base URL without one; "
            f"{HAVE.split('; ')[1]}"
        )
    if path.removeprefix("/v1").startswith("/v1/"):
        return (
            "the path has /v1 twice: leave it out of the client's base URL, or out of the "
            "path; /openapi.json lists all paths"
        )
    if any(f"{path}/".startswith(f"/{name}/") for name in OWN):
        return (
            f"paths of the API begin with /v1: {path} is /v1{path} here; /openapi.json lists "
            f"all paths"
        )
    if message is None:
        return f"this server has no such path; {HAVE.split('; ')[1]}"
    return f"this server has no {message}; {HAVE}"


MAX_REPORTED_ERRORS = 10
"""The number of validation errors of one body that an answer contains."""
MAX_MESSAGE_CHARACTERS, MAX_PARAM_CHARACTERS = 800, 100
"""The lengths to which message and param are cut, because both may quote the request."""
PATH = re.compile(
    r"(?<![\w:/.~])(?:[A-Za-z]:|~|\.{1,2})?(?:[/\\][^\s/\\:'\",;]+)*[/\\]([^\s/\\:'\",;]+)"
)
PLACE = re.compile(r"^row \d+ of request \d+, draft position \d+: ")
NAME = re.compile(rf"\b({'|'.join(name for name, one in PARAMETERS.items() if one.api)})=")
QUOTE = "'"
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""The types of fields by the kind of Pydantic's error."""
MAX_VALUE = 60
"""The length to which a value in a message is cut."""
ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""The error's `type` by status; other statuses have "invalid_request_error", or "server_error" from
500 on."""


class ApiError(HTTPException):
    """An error of a request, with its HTTP status.

    Attributes:
        param: the invalid field.
        code: a short name for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = spoken(message)
        super().__init__(
            status,
            cut(public(message) if status >= 500 else message, MAX_MESSAGE_CHARACTERS),
            headers,
        )
        self.param, self.code = None if param is None else cut(param, MAX_PARAM_CHARACTERS), code

    def body(self) -> dict[str, Any]:
        """Returns the JSON object of the answer."""
        kind = ERROR_TYPES.get(
            self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error"
        )
        return {
            "error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        """Returns the answer, in ASCII: a message may quote halves of surrogate pairs."""
        return Response(
            json.dumps(self.body()), self.status_code, self.headers, media_type="application/json"
        )


def public(message: str) -> str:
    """Returns a message with each path cut to its last part, to hide the server's directories."""
    return PATH.sub(r"\1", message)


def spoken(message: str) -> str:
    """Returns a message of the engine in the names of requests, without the place of a row."""
    return NAME.sub(lambda match: f"{PARAMETERS[match[1]].api}=", PLACE.sub("", message))


def cut(text: str, most: int) -> str:
    """Returns at most `most` characters of a text."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Turns RequestErrors of the block into ApiErrors that name a field."""
    try:
        yield
    except RequestError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error


def api_error_of(error: Exception) -> ApiError:
    """Returns the error of the API for any exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), error.body)
    if isinstance(error, HTTPException):
        # FastAPI raises 400 only for JSON that it cannot parse.
        code = "invalid_json" if error.status_code == 400 else None
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    if isinstance(error, ShoalError):
        return ApiError(500, str(error), code="internal_error")
    return ApiError(
        500,
        f"an internal error ({type(error).__name__}); the server's log has more",
        code="internal_error",
    )


def _invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Returns the error of the API for Pydantic's errors of the first invalid field.

    An unknown field goes first: it may be the reason why another field is missing.
    """
    first = min(errors, key=lambda error: error["type"] != "unknown_field")
    kind, param = first["type"], _path(first, body)
    if kind == "unknown_field":
        return ApiError(
            400, f"unknown or unsupported field {param!r}", param=param, code="unknown_field"
        )
    if not param:
        return ApiError(
            400, "the body must be a JSON object, sent as application/json", code="invalid_json"
        )
    places = [(_path(error, body), error) for error in errors[:MAX_REPORTED_ERRORS]]
    reasons = dict.fromkeys(
        sentence(cut(path, MAX_PARAM_CHARACTERS), error)
        for path, error in places
        if f"{path}.".startswith(f"{param}.")
    )
    return ApiError(400, " Or: ".join(reasons), param=param, code="invalid_value")


def sentence(path: str, error: Mapping[str, Any]) -> str:
    """Returns Pydantic's error of a field in the words of OpenAI's API."""
    kind, given, context = error["type"], error.get("input"), error.get("ctx", {})
    if isinstance(given, dict) and context.get("at") in given:
        given = given[context["at"]]
    bound = next((name for name in BOUNDS if name in context), None)
    if bound is not None:
        return out_of_range(path, given, bound, context[bound])
    if kind == "missing":
        return f"Missing required parameter: '{path}'."
    if kind == "union_tag_not_found":
        return f"Missing required parameter: '{path}.{context['discriminator'].strip(QUOTE)}'."
    if kind in ("literal_error", "union_tag_invalid"):
        allowed = context.get("expected", context.get("expected_tags"))
        value = cut(repr(context.get("tag", given)), MAX_VALUE)
        return f"Invalid value for '{path}': {value}. Supported values are: {allowed}."
    if kind.endswith(("too_long", "too_short")):
        return _length(path, kind, given, context)
    if kind in TYPES:
        return (
            f"Invalid type for '{path}': expected {TYPES[kind]}, but got {_type_of(given)} instead."
        )
    why = error["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
    return f"Invalid '{path}': {why}"


def out_of_range(path: str, given: Any, bound: str, limit: Any, where: str = "") -> str:
    """Returns the sentence about a number beyond a bound, `ge`, `gt`, `le` or `lt`."""
    beyond = "below minimum" if bound in ("ge", "gt") else "above maximum"
    kind = "integer" if is_int(given) else "decimal"
    shown = f"{limit:g}" if isinstance(limit, float) else limit
    return (
        f"Invalid '{path}': {kind} {beyond} value. Expected a value {BOUNDS[bound]} "
        f"{shown}{where}, but got {cut(str(given), MAX_VALUE)} instead."
    )


def _length(path: str, kind: str, given: Any, context: Mapping[str, Any]) -> str:
    noun = "string" if isinstance(given, str) else "array"
    side, most = ("long", "maximum") if kind.endswith("long") else ("short", "minimum")
    return (
        f"Invalid '{path}': {noun} too {side}. Expected {_article(noun)} with {most} length "
        f"{context[f'{most[:3]}_length']}, but got one with length {len(given)} instead."
    )


def _type_of(value: Any) -> str:
    """Returns the word of JSON for a value's type."""
    names = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "decimal"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    )
    type_name = next((name for kind, name in names if isinstance(value, kind)), None)
    return "null" if type_name is None else _article(type_name)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def _path(error: Mapping[str, Any], body: Any) -> str:
    """Returns the path of an error in the body, without Pydantic's tags of union members."""
    path, here, loc = [], body, error["loc"]
    inner = error.get("ctx", {}).get("at")
    for part in loc[1:]:
        inside = (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int)
        )
        # A tag has the whole object as its input, a field that is missing has none of its own.
        field = error["type"] == "missing" or error.get("input") != here
        missing = part == loc[-1] and inner is None and isinstance(here, dict) and field
        if inside or missing:
            path.append(str(part))
            here = here[part] if inside else None
    return ".".join(path if inner is None else [*path, inner])


def install(app: FastAPI) -> None:
    """Adds handlers that answer the exceptions of requests as errors of the API.

    `shoal.serve.logs` answers all other exceptions in the same form.
    """

    async def answer(request: Request, error: Exception) -> Response:
        if (
            isinstance(error, HTTPException)
            and not isinstance(error, ApiError)
            and error.status_code in (404, 405)
        ):
            allowed = (error.headers or {}).get("Allow") if error.status_code == 405 else None
            message = reason(request.method, request.url.path, allowed)
            error = ApiError(
                error.status_code, message, code="unknown_route", headers=error.headers
            )
        return api_error_of(error).response()

    for kind in (HTTPException, RequestError, RequestValidationError):
        app.add_exception_handler(kind, answer)
