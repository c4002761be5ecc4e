"""The keyword options of `generate` and `stream`: their types, and the settings they belong to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, SupportsFloat, SupportsIndex, TypedDict

from shoal.config import Grammar, Limits, Sampling, Speculation
from shoal.errors import RequestError

Number = float | SupportsFloat
"""A number; NumPy numbers and tensors of one element are included."""
Integer = int | SupportsIndex

SETTINGS: dict[str, type[Sampling] | type[Limits] | type[Speculation]] = {
    "sampling": Sampling,
    "limits": Limits,
    "speculation": Speculation,
}


class Options(TypedDict, total=False):
    """The fields of `Sampling`, `Limits` and `Speculation` by name, or these objects as a whole.

    A field that is not given has its default. `tests/engine/test_library.py` checks that no field
    is missing here.
    """

    temperature: Number
    top_k: Integer
    top_p: Number
    min_p: Number
    typical_p: Number
    guidance: Number
    plausibility: Number
    posterior: Number
    repetition_penalty: Number
    presence_penalty: Number
    frequency_penalty: Number
    logit_bias: Mapping[int, float] | Mapping[Any, Number]
    bad_words: Sequence[Sequence[int]] | str | Iterable[str | Iterable[Integer]]
    negative_prompt: Sequence[int] | str | Iterable[Integer]
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
    sampling: Sampling | Iterable[Sampling | None] | None
    limits: Limits | Iterable[Limits | None] | None
    speculation: Speculation | None


def split_options(options: Mapping[str, Any]) -> tuple[Sampling, Limits, Speculation]:
    """Returns the three settings that the keyword options make.

    A setting given as a whole (`sampling=Sampling(...)`) is taken as it is.

    Raises:
        RequestError: for an unknown name (with the nearest known one), a value out of range, or a
            field of a setting that is given as a whole.
    """
    known = [*SETTINGS, *(f.name for cls in SETTINGS.values() for f in fields(cls))]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; known options: {', '.join(sorted(known))}"
            )
            raise RequestError(f"unknown option {name!r}{hint}")
    sampling, limits, speculation = (_setting(name, cls, options) for name, cls in SETTINGS.items())
    return sampling, limits, speculation


def split_for_each(
    options: Mapping[str, Any], prompts: int
) -> tuple[list[Sampling], list[Limits], Speculation]:
    """Returns the settings for several prompts.

    `sampling` and `limits` may be lists with one setting for each prompt; see `split_options`.

    Args:
        prompts: the number of prompts.

    Raises:
        RequestError: an error of `split_options`, or the number of settings is not the number of
            prompts. The error of an entry names its prompt.
    """
    listed = {
        name: list_of(name, options[name], prompts)
        for name in ("sampling", "limits")
        if _is_list(options.get(name))
    }
    common = {name: value for name, value in options.items() if name not in listed}
    settings = []
    for place in range(prompts if listed else 1):
        with of_prompt(place, prompts):
            settings.append(
                split_options(common | {name: entries[place] for name, entries in listed.items()})
            )
    settings *= 1 if listed else prompts
    return (
        [sampling for sampling, _, _ in settings],
        [limits for _, limits, _ in settings],
        settings[0][2],
    )


def list_of(name: str, values: Iterable[Any], prompts: int) -> list[Any]:
    """Returns the values as a list. Raises RequestError: there is not one value for each prompt."""
    found = list(values)
    if len(found) != prompts:
        raise RequestError(
            f"{name}= has {len(found)} entries for {prompts} prompts: give one for each, or one "
            f"for all"
        )
    return found


@contextmanager
def of_prompt(place: int, prompts: int) -> Iterator[None]:
    """Names the prompt in the errors of a request, if there are several prompts.

    Args:
        place: the place of the prompt among all, from 0.
        prompts: the number of prompts.
    """
    try:
        yield
    except RequestError as error:
        if prompts == 1:
            raise
        raise RequestError(f"prompt {place + 1} of {prompts}: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _setting(name: str, cls: Any, options: Mapping[str, Any]) -> Any:
    whole, own = (
        options.get(name),
        {f.name: options[f.name] for f in fields(cls) if f.name in options},
    )
    if whole is None:
        return cls(**own)
    if not isinstance(whole, cls):
        raise RequestError(f"{name} must be a shoal.{cls.__name__}, got {whole!r:.80}")
    if own:
        raise RequestError(
            f"{' and '.join(own)} given beside {name}=, which has that already: put it into "
            f"shoal.{cls.__name__}"
        )
    return whole
