"""Requests with the options of a call beside sampling and constraints: alignment, syntax, weights.

The library, the server and the route of editors dress their requests here, in this order: the bytes
that an aligned request writes again belong to the text before the cursor, and weights count every
limit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from shoal.constraints.alignment import aligned, bound_from_start
from shoal.constraints.fim import middle_ends
from shoal.constraints.syntax.requests import Syntax, with_syntax
from shoal.constraints.weights import read_exact, weighed
from shoal.types.requests import Request

Naming = Callable[[str], AbstractContextManager[None]]
"""A function that returns a context for a field's name; the errors raised in it name the field."""


def unnamed(field: str) -> AbstractContextManager[None]:
    """Returns a context that leaves errors as they are."""
    return nullcontext()


@dataclass(frozen=True)
class Dressing:
    """The values of `align`, `exact` and `syntax` of a call.

    Attributes:
        align: True if the prompt may end inside a token; None = True if a suffix follows the new
            text, unless a grammar or filter constrains the text from the end of the prompt on.
        exact: see `shoal.constraints.weights`.
        syntax: a language, a grammar or its path, see `shoal.constraints.syntax.requests`; None =
            any text.
    """

    align: bool | None = None
    exact: bool | str = False
    syntax: str | Syntax | None = None

    def applied(
        self,
        request: Request,
        tokenizer: Any,
        suffix: str | None = None,
        end: int | None = None,
        naming: Naming = unnamed,
    ) -> Request:
        """Returns the request, dressed.

        Args:
            request: a request whose constraints are complete.
            tokenizer: Transformers' of the target; None = there is none.
            suffix: the text behind the new one; None = none.
            end: the place in the prompt behind which the new text stands; None = its end.
            naming: returns a context that names the field in errors.

        Raises:
            RequestError: there is no tokenizer, an unknown value, or settings that do not go
                together.
        """
        if suffix is not None and (request.limits.eos is None or request.limits.eos):
            request = replace(request, ends=request.ends | middle_ends(tokenizer))
        align = self.align
        if align is None:
            align = suffix is not None and not bound_from_start(
                request.sampling, request.constraints
            )
        if align:
            with naming("align"):
                request = aligned(request, tokenizer, at=end)
        if self.syntax is not None:
            parses = not isinstance(self.syntax, Syntax) or self.syntax.parses
            with naming("syntax" if parses else "members"):
                request = with_syntax(request, tokenizer, self.syntax, suffix)
        with naming("exact"):
            exact = read_exact(self.exact)
            return weighed(request, exact, aligned=align) if exact else request
