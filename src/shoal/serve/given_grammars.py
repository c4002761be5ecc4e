"""The one grammar of a request, from any of the fields that can give it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shoal.config import Grammar
from shoal.constraints.grammar_sources import as_lark, quoted
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.request_models import BaseRequest, JsonFormat, TextFormat


def given_grammar(request: BaseRequest) -> tuple[str, Grammar] | None:
    """Returns the field that gives a grammar, and the grammar, which is not compiled yet.

    Raises:
        ApiError: two fields give a grammar, or a field's value cannot be one.
    """
    found = list(_given(request))
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise ApiError(
            400,
            f"{second} does not go with {first}: a request has one grammar at most",
            param=second,
        )
    return found[0] if found else None


def _given(request: BaseRequest) -> Iterator[tuple[str, Grammar]]:
    wanted = request.response_format
    if wanted is not None and not isinstance(wanted, TextFormat):
        schema = (
            "" if isinstance(wanted, JsonFormat) else json.dumps(wanted.json_schema.json_schema)
        )
        yield "response_format", Grammar(wanted.type, schema, wanted.whitespace or "bounded")
    if request.grammar is not None:
        yield "grammar", Grammar(request.grammar.type, request.grammar.text)
    yield from _structured(request)
    for kind, value in (
        ("json", request.guided_json),
        ("regex", request.guided_regex),
        ("choice", request.guided_choice),
        ("grammar", request.guided_grammar),
    ):
        if value is not None:
            yield f"guided_{kind}", _of(kind, value, f"guided_{kind}")


def _structured(request: BaseRequest) -> Iterator[tuple[str, Grammar]]:
    asked = request.structured_outputs
    if asked is None:
        return
    values = {
        "json": asked.json_schema,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": asked.json_object,
    }
    given = {kind: value for kind, value in values.items() if value is not None}
    if not given:
        message = f"structured_outputs says nothing: it needs one of {', '.join(values)}"
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    compact = asked.disable_any_whitespace is True
    for kind, value in given.items():
        yield f"structured_outputs.{kind}", _of(kind, value, f"structured_outputs.{kind}", compact)


def _of(kind: str, value: Any, field: str, compact: bool = False) -> Grammar:
    """Returns the grammar of one of vLLM's fields. Raises ApiError: the value is no grammar."""
    with naming(field):
        if kind == "regex":
            return Grammar("regex", value)
        if kind == "choice":
            return Grammar("lark", "start: " + " | ".join(map(quoted, value)))
        if kind == "grammar":
            return Grammar("lark", as_lark(value))
        whitespace = "compact" if compact else "bounded"
        return (
            Grammar("json_object", "", whitespace)
            if kind == "json_object"
            else _schema(value, whitespace)
        )


def _schema(value: Any, whitespace: str) -> Grammar:
    return Grammar(
        "json_schema", value if isinstance(value, str) else json.dumps(value), whitespace
    )
