"""The paths of the API, and the JSON of its bodies."""

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
