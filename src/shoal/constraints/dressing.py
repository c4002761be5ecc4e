"""Requests with the options of a call beside sampling and constraints: alignment, syntax, weights.

The library, the server and the route of editors dress their requests here, in this order: the bytes
that an aligned request writes again belong to the text before the cursor, and weights count every
limit.

With `exact=True` weights make samples under constraints samples of p given that the whole text is
allowed. Each token is drawn from p given that the token is allowed, so a text's probability is p's
divided by the product of the probabilities that p gives to the allowed tokens at each place.
Multiplied by that product (`Sample.log_weight`) it is p's. The product is computed if constraints
mask the vocabulary, and estimated without bias if checks judge single tokens
(`shoal.sampling.drawing`). `exact="smc"` resamples the rows of a request by these weights while
they run (`shoal.engine.joint_rows`); `exact="asap"` learns from each row the value of its
beginnings, so that later tokens are drawn more nearly by p given that the text is allowed, and
weights become equal (`shoal.constraints.estimates`). `exact="distinct"` draws whole texts without
replacement (`shoal.engine.joint_rows`), also where nothing limits them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from shoal.constraints.alignment import align_request, bound_from_start
from shoal.constraints.fim import asks_for_middle, middle_ends
from shoal.constraints.protocol import Check, Cutting
from shoal.constraints.syntax import Syntax, with_syntax
from shoal.errors import RequestError
from shoal.types.requests import Request

Naming = Callable[[str], AbstractContextManager[None]]
"""A function that returns a context for a field's name; the errors raised in it name the field."""


def leave_errors(field: str) -> AbstractContextManager[None]:
    """Returns a context that leaves errors as they are."""
    return nullcontext()


@dataclass(frozen=True)
class Dressing:
    """The values of `align`, `exact` and `syntax` of a call.

    Attributes:
        align: True if the prompt may end inside a token; None = True if a suffix follows the new
            text, unless a grammar or filter constrains the text from the end of the prompt on.
        exact: see `shoal.constraints.dressing`.
        syntax: a language, a grammar or its path, see `shoal.constraints.syntax`; None =
            any text.
    """

    align: bool | None = None
    exact: bool | str = False
    syntax: str | Syntax | None = None

    def apply(
        self,
        request: Request,
        tokenizer: Any,
        suffix: str | None = None,
        end: int | None = None,
        naming: Naming = leave_errors,
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
        ends = request.limits.eos is None or request.limits.eos
        if ends and (suffix is not None or asks_for_middle(tokenizer, request.prompt_ids)):
            request = replace(request, ends=request.ends | middle_ends(tokenizer))
        align = self.align
        if align is None:
            align = suffix is not None and not bound_from_start(
                request.sampling, request.constraints
            )
        if align:
            with naming("align"):
                request = align_request(request, tokenizer, at=end)
        if self.syntax is not None:
            parses = not isinstance(self.syntax, Syntax) or self.syntax.parses
            with naming("syntax" if parses else "members"):
                request = with_syntax(request, tokenizer, self.syntax, suffix)
        with naming("exact"):
            exact = read_exact(self.exact)
            return add_weights(request, exact, aligned=align) if exact else request


EXACT = ("weights", "smc", "asap", "asap+smc", "distinct")
"""The values of `exact`: weighted samples; samples of rows that are resampled while they run;
samples of rows that draw by estimates; both; samples that differ."""


def read_exact(exact: bool | str) -> str:
    """Returns "" for False, "weights" for True, or one of `EXACT`; else raises RequestError."""
    if isinstance(exact, bool):
        return EXACT[0] if exact else ""
    if exact not in EXACT:
        raise RequestError(f"exact must be True, False or one of {', '.join(EXACT)}, got {exact!r}")
    return exact


def add_weights(request: Request, exact: str = EXACT[0], *, aligned: bool = False) -> Request:
    """Returns the request with weights.

    Args:
        exact: one of `EXACT`.
        aligned: True if it was aligned; alignment limits nothing if the prompt ends with a token
            that cannot go on.

    Raises:
        RequestError: nothing limits its tokens; it is greedy; its tokens are truncated after they
            were masked; its text may be cut.
    """
    sampling = request.sampling
    if any(isinstance(each, Cutting) for each in request.constraints):
        raise RequestError(
            "exact=True does not go with syntax: the weight of a text that is cut is not known"
        )
    masked = sampling.grammar is not None or any(
        not isinstance(each, Check) for each in request.constraints
    )
    resampled, estimated, distinct = "smc" in exact, "asap" in exact, exact == "distinct"
    if not masked and not request.constraints and not aligned and not distinct:
        raise RequestError(
            "exact=True weighs samples by what limits them: it needs align=True, a grammar or "
            "other constraints"
        )
    if sampling.greedy or ((masked or aligned or distinct) and sampling.truncates):
        raise RequestError(
            "exact=True weighs samples of the whole distribution: leave out top_k, top_p, "
            "min_p, typical_p, temperature=0"
        )
    if resampled and request.n < 2:
        raise RequestError(f"exact={exact!r} draws among the rows of a request: it needs n >= 2")
    if (estimated or distinct) and any(isinstance(each, Check) for each in request.constraints):
        advice = "use 'smc'" if estimated else "leave them out"
        raise RequestError(
            f"exact={exact!r} learns what masks leave, and checks of single tokens have none: "
            f"{advice}"
        )
    return replace(
        request, weighted=True, resampled=resampled, estimated=estimated, distinct=distinct
    )
