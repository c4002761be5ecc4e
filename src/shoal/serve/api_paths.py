"""The paths of the API, those that clients of other servers request, and the JSON of its bodies."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

COMPLETIONS, CHAT, RESPONSES, INFILL = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/infill",
)
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
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


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
    found = next(
        (what for start, what in ABSENT.items() if f"{path}/".startswith(f"{start}/")), None
    )
    if allowed is not None:
        hint = "" if found is not KEPT else f"; this server has no {found}"
        return f"this path takes {allowed}, not {method}{hint}; /openapi.json lists all paths"
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
    return (
        f"this server has no such path; {HAVE.split('; ')[1]}"
        if found is None
        else f"this server has no {found}; {HAVE}"
    )
