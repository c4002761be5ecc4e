"""Requests whose new text has to parse between two others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.constraints.syntax.python import PythonMiddle
from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Request

LANGUAGES = ("python",)


@dataclass(frozen=True)
class Syntax:
    """What the new text has to parse in.

    Attributes:
        language: one of `LANGUAGES`. left, right: the text before and behind the new one; None = the prompt and the suffix of the
            request. They are to be given where a model sees only the nearest parts of a file.
    """

    language: str
    left: str | None = None
    right: str | None = None


def read_syntax(syntax: str | Syntax) -> Syntax:
    """Raises RequestError: an unknown language."""
    found = syntax if isinstance(syntax, Syntax) else Syntax(syntax)
    if found.language not in LANGUAGES:
        raise RequestError(f"syntax must be one of {', '.join(LANGUAGES)}, got {found.language!r}")
    return found


def with_syntax(request: Request, tokenizer: Any, syntax: str | Syntax, suffix: str | None = None) -> Request:
    """The request with the check that its text, between the prompt's and the suffix's, can be completed to what parses.

    A request that is aligned has to be so before: the bytes that its samples write again belong to the text before the cursor.

    Raises:
        RequestError: an unknown language; no tokenizer, or a prompt of token ids and no text in `Syntax`; or no
            program begins with the text before.
    """
    found = read_syntax(syntax)
    left = request.prompt if found.left is None else found.left
    right = (suffix or "") if found.right is None else found.right
    if tokenizer is None:
        raise RequestError("syntax needs a tokenizer, and this model was given none")
    if left is None:
        raise RequestError("syntax needs prompts that are texts, or Syntax(left=...)")
    healing = sum(len(own or b"") for own in map(token_bytes(tokenizer).__getitem__, request.removed))
    return replace(request, constraints=(*request.constraints, PythonMiddle(tokenizer, left, right, healing)))


def with_syntaxes(
    requests: Sequence[Request], tokenizer: Any, syntax: str | Syntax | None, suffix: str | Sequence[str] | None
) -> list[Request]:
    """Each of the requests, with the one suffix or its own; as they are without a syntax."""
    if syntax is None:
        return list(requests)
    behind = [suffix] * len(requests) if suffix is None or isinstance(suffix, str) else suffix
    return [with_syntax(request, tokenizer, syntax, own) for request, own in zip(requests, behind, strict=True)]
