"""A batch's input: a request per line, in the API's own fields or as OpenAI's batch files have them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from shoal.errors import RequestError

Json = dict[str, Any]
ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
"""Fields of OpenAI's batch lines; the API's own have none of these names."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    Attributes:
        number: from 1. text: as it was read.
        id: what its "id" or "custom_id" says, or "line-NUMBER" where it says nothing that names it: a text or an integer.
        seeded: whether it asks for the same tokens again. enveloped: whether it is one of OpenAI's batch lines, and so answered.
    """

    number: int
    text: str
    id: str | int
    seeded: bool = False
    enveloped: bool = False

    @property
    def digest(self) -> str:
        """Of its text: an answer that has another one answers something else."""
        return digest(self.text.strip())


def digest(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The lines of an input, but for empty ones. What is wrong with one of them is for its answer to say.

    Raises:
        RequestError: for a file that cannot be read, and for an id that is there twice.
    """
    seen: dict[str | int, int] = {}
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = _line(number, text)
                if line.id in seen:
                    raise RequestError(f"{path}: lines {seen[line.id]} and {number} have the same id {line.id!r}")
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
    enveloped = is_enveloped(fields)
    named = fields.get("custom_id" if enveloped else "id")
    body = fields.get("body") if enveloped else fields
    seeded = isinstance(body, dict) and body.get("seed") is not None
    return BatchLine(number, text, named if is_id(named) else f"line-{number}", seeded, enveloped)


def is_enveloped(fields: Mapping[str, Any]) -> bool:
    """Whether an object is one of OpenAI's batch lines, be it a wrong one."""
    return not ENVELOPE.isdisjoint(fields)


def is_id(value: object) -> TypeGuard[str | int]:
    """Whether it can name a line."""
    return isinstance(value, (str, int)) and not isinstance(value, bool)
