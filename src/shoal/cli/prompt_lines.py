"""The prompts of a command line, some with sampling parameters from a line of a file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal.cli import grammars
from shoal.cli.files import listed_prompts, read_text
from shoal.config import Limits, Sampling, require_text
from shoal.errors import RequestError
from shoal.types.options import split_options

OWN = ("prompt", "n", "id")
OPTIONS = tuple(
    f.name
    for cls in (Sampling, Limits)
    for f in fields(cls)
    if f.name not in ("processors", "grammar")
)
"""The fields of the two settings that a line may set, beside `grammars.FIELDS`.

They are the fields that JSON can write.
"""


@dataclass(frozen=True)
class PromptLine:
    """A prompt of a command line.

    Attributes:
        n: the number of samples; None = the same number as the other prompts.
        options: the options of `Shoal.generate` for this prompt alone.
        where: file and line, for messages.
        id: the line's name for the prompt; it comes back in the JSON output.
    """

    text: str
    n: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    id: Any = None


def lines_of(files: Sequence[Path]) -> list[PromptLine]:
    """Returns the prompts of files.

    Those of a .jsonl file have their own parameters; `shoal.cli.files.listed_prompts` reads others.

    Raises:
        RequestError: with file and line.
    """
    found: list[PromptLine] = []
    for file in files:
        if file.suffix != ".jsonl":
            found += [PromptLine(text) for text in listed_prompts([file])]
            continue
        rows = [
            (number, row)
            for number, row in enumerate(read_text(file).split("\n"), 1)
            if row.strip()
        ]
        if not rows:
            raise RequestError(f"{str(file)!r} holds no prompt")
        found += [_of_line(row, f"{file}:{number}") for number, row in rows]
    return found


def _of_line(row: str, where: str) -> PromptLine:
    try:
        value = json.loads(row)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON: {error}") from error
    line = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
        raise RequestError(f'{where} must be a text or an object with a text "prompt"')
    known = (*OWN, *OPTIONS, *grammars.FIELDS)
    for name in line:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise RequestError(f"{where}: unknown field {name!r}; {hint}")
    n = line.get("n")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise RequestError(f"{where}: n must be an integer >= 1, got {n!r}")
    require_text(line["prompt"], f"the prompt of {where}")
    options = {name: value for name, value in line.items() if name in OPTIONS and value is not None}
    try:
        grammar = grammars.grammar_of(line)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    options |= {} if grammar is None else {"grammar": grammar}
    if isinstance(options.get("logit_bias"), dict):
        options["logit_bias"] = _by_ids(options["logit_bias"], where)
    return PromptLine(line["prompt"], n, options, where, line.get("id"))


def _by_ids(biases: Mapping[str, Any], where: str) -> dict[int, Any]:
    """Converts the keys to token ids, as keys of JSON objects are texts."""
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError as error:
        raise RequestError(f"{where}: the keys of logit_bias must be token ids: {error}") from error


def merged(
    asked: Sequence[PromptLine],
    n: int,
    options: Mapping[str, Any],
    ends: Sequence[str] = (),
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Returns `n` and the other options of `Shoal.generate`.

    They are the command line's, and each prompt's line overrides them for its prompt.

    Args:
        ends: stop strings beside those of the options and of lines, see `with_ends`.
        tokenizer: for `bad_words` that are texts; without it they are left out, for a check before
            a model is loaded.

    Raises:
        RequestError: with file and line, for options out of range.
    """
    if not any(one.options or one.n is not None for one in asked):
        split_options(options)
        return {"n": n, **with_ends(options, ends)}
    _, _, speculation = split_options(options)
    each = [_settings(one, options, ends, tokenizer) for one in asked]
    return {
        "n": [n if one.n is None else one.n for one in asked],
        "sampling": [sampling for sampling, _ in each],
        "limits": [limits for _, limits in each],
        "speculation": speculation,
    }


def with_ends(options: Mapping[str, Any], ends: Sequence[str]) -> dict[str, Any]:
    """Adds stop strings to options of `Shoal.generate`, unless no token ends samples (`eos=()`)."""
    given = options.get("stop") or ()
    own = (given,) if isinstance(given, str) else given
    ignored = options.get("eos") is not None and not options["eos"]
    if (
        not ends or ignored or not isinstance(own, Sequence)
    ):  # other types are refused where the options are checked
        return dict(options)
    return {**options, "stop": [*own, *ends]}


def _settings(
    one: PromptLine, options: Mapping[str, Any], ends: Sequence[str], tokenizer: Any
) -> tuple[Sampling, Limits]:
    values = {**options, **one.options}
    try:
        if tokenizer is None:
            values.pop("bad_words", None)
        else:
            from shoal.types.inputs import with_bad_words

            values = with_bad_words(values, tokenizer)
        sampling, limits, _ = split_options(with_ends(values, ends))
    except RequestError as error:
        raise RequestError(f"{one.where}: {error}" if one.where else str(error)) from error
    return sampling, limits
