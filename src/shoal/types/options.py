"""The keyword options of `generate` and `stream`: their types, and which setting each belongs to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, SupportsFloat, SupportsIndex, TypedDict

from shoal.config import Grammar, Limits, Sampling, Speculation
from shoal.errors import RequestError

Number = float | SupportsFloat
"""Includes NumPy numbers and tensors of one element."""
Integer = int | SupportsIndex

SETTINGS: dict[str, type[Sampling] | type[Limits] | type[Speculation]] = {
    "sampling": Sampling,
    "limits": Limits,
    "speculation": Speculation,
}


class Options(TypedDict, total=False):
    """The fields of `Sampling`, `Limits` and `Speculation` by name, or these objects as a whole. A field that is not given has its
    default. `tests/test_library.py` checks that no field is missing here."""

    temperature: Number
    top_k: Integer
    top_p: Number
    min_p: Number
    typical_p: Number
    repetition_penalty: Number
    presence_penalty: Number
    frequency_penalty: Number
    logit_bias: Mapping[int, float] | Mapping[Any, Number]
    bad_words: Sequence[Sequence[int]] | str | Iterable[str | Iterable[Integer]]
    min_new_tokens: Integer
    no_repeat_ngram: Integer
    processors: Sequence[Any] | Iterable[Any]
    grammar: Grammar | None
    seed: Integer | None
    max_new_tokens: Integer
    stop: Sequence[str] | str | Iterable[str]
    eos: Sequence[int] | Integer | Iterable[Integer] | None
    time_budget: Number | None
    lookahead: Any
    rule: str
    sampling: Sampling | None
    limits: Limits | None
    speculation: Speculation | None


def split_options(options: Mapping[str, Any]) -> tuple[Sampling, Limits, Speculation]:
    """The three settings that keyword options make. A setting given as a whole (`sampling=Sampling(...)`) is taken as it is.

    Raises:
        RequestError: for an unknown name (with the nearest known one), a value out of range, or a field of a setting that is
            given as a whole.
    """
    known = [*SETTINGS, *(f.name for cls in SETTINGS.values() for f in fields(cls))]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(sorted(known))}"
            raise RequestError(f"unknown option {name!r}{hint}")
    sampling, limits, speculation = (_setting(name, cls, options) for name, cls in SETTINGS.items())
    return sampling, limits, speculation


def _setting(name: str, cls: Any, options: Mapping[str, Any]) -> Any:
    whole, own = options.get(name), {f.name: options[f.name] for f in fields(cls) if f.name in options}
    if whole is None:
        return cls(**own)
    if not isinstance(whole, cls):
        raise RequestError(f"{name} must be a shoal.{cls.__name__}, got {whole!r:.80}")
    if own:
        raise RequestError(
            f"{' and '.join(own)} given beside {name}=, which has that already: put it into shoal.{cls.__name__}"
        )
    return whole
