"""The default of `align`, and the field that an error of a dressed request names.

Tests of: constraints.dressing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.config import Grammar, Limits, Sampling
from shoal.constraints.dressing import Dressing
from shoal.constraints.filters import Filter
from shoal.constraints.syntax import Syntax
from shoal.errors import RequestError
from shoal.testing import tiny_tokenizer
from shoal.types.requests import Request

TOKENIZER = tiny_tokenizer()
PROMPT = "x = value"
GRAMMAR = Grammar("regex", "a+")


def request(grammar: Grammar | None = None, constraints: tuple[Any, ...] = (), **sampling: Any) -> Request:
    ids = tuple(TOKENIZER.encode(PROMPT))
    return Request(ids, 2, Sampling(grammar=grammar, **sampling), Limits(), prompt=PROMPT, constraints=constraints)


@pytest.mark.parametrize(
    ("suffix", "own", "aligns"),
    [
        (None, request(), False),
        ("", request(), True),
        ("y", request(), True),
        ("y", request(GRAMMAR), False),
        ("y", request(constraints=(Filter("A", "a"),)), False),
        ("y", request(constraints=(GRAMMAR,)), False),
    ],
    ids=["no suffix", "an empty one", "suffix", "grammar", "filter", "another grammar"],
)
def test_the_default_of_align(suffix: str | None, own: Request, aligns: bool) -> None:
    dressed = Dressing().apply(own, TOKENIZER, suffix)
    assert bool(dressed.removed) is aligns
    assert (dressed.prompt_ids == own.prompt_ids) is not aligns
    assert not Dressing(align=False).apply(own, TOKENIZER, suffix).removed
    if own.sampling.grammar is None and not own.constraints:
        assert Dressing(align=True).apply(own, TOKENIZER, suffix).removed


class Named(Exception):
    """Raised for an error that names its field."""


@contextmanager
def naming(field: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise Named(field) from error


@pytest.mark.parametrize(
    ("dressing", "own", "field"),
    [
        (Dressing(align=True), request(GRAMMAR), "align"),
        (Dressing(exact=True), request(), "exact"),
        (Dressing(exact="all"), request(GRAMMAR), "exact"),
        (Dressing(align=True, exact=True), request(temperature=0.0), "exact"),
        (Dressing(syntax="cobol"), request(), "syntax"),
        (Dressing(syntax=Syntax("json", parses=False, members=True)), request(), "members"),
    ],
    ids=["align", "nothing to weigh", "kind", "greedy", "language", "members"],
)
def test_errors_name_their_field(dressing: Dressing, own: Request, field: str) -> None:
    with pytest.raises(Named, match=f"^{field}$"):
        dressing.apply(own, TOKENIZER, naming=naming)
    with pytest.raises(RequestError):
        dressing.apply(own, TOKENIZER)


def test_weights_know_of_the_alignment() -> None:
    """Alignment alone limits tokens, so that there is something to weigh."""
    assert Dressing(exact="smc").apply(request(), TOKENIZER, "y").resampled
    with pytest.raises(RequestError, match="needs align=True"):
        Dressing(align=False, exact="smc").apply(request(), TOKENIZER, "y")
