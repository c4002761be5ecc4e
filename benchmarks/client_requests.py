"""What the checks of clients ask for, and what an answer must be like. Imports nothing of shoal's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

PROMPT, MODEL, KEY = "def add(a, b):\n    return", "bundled", "none"
CHAT = [{"role": "user", "content": "Write a function that adds."}]
AGE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": AGE}, "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "person", "description": "Notes a person.", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "person"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
Checks = dict[str, Callable[[], None] | None]
"""By feature; None: the client has no such thing."""


def is_person(value: Any) -> None:
    assert set(value) == {"name", "age"}, value
    assert isinstance(value["name"], str), value
    assert len(value["name"]) <= 8, value
    assert 0 <= value["age"] <= 99, value


def same(answers: Sequence[Any]) -> None:
    """A seed's answers."""
    assert answers[0], answers
    assert answers[0] == answers[1], answers


def refused(call: Callable[[], Any]) -> None:
    """By an error that says what is missing, not by a crash of the client's parser."""
    try:
        call()
    except Exception as error:
        said = str(error)
    else:
        raise AssertionError("embeddings were answered")
    assert "404" in said or "embeddings" in said.lower(), said
