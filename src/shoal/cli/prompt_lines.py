"""The prompts of a command line, and the grammar that their samples must match.

A line of a file may bring sampling parameters and a grammar of its own.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from shoal.cli.files import listed_prompts, read_text
from shoal.cli.option_groups import sampling_option
from shoal.config import GUIDES_PROMPTS, Grammar, Limits, Sampling
from shoal.constraints.grammar_sources import as_lark, llguidance_or_refuse, require_readable
from shoal.errors import RequestError
from shoal.types.arguments import split_options
from shoal.values import require_samples, require_text

OWN = ("prompt", "n", "id")
OPTIONS = tuple(
    f.name
    for cls in (Sampling, Limits)
    for f in fields(cls)
    if f.name not in ("processors", "grammar")
)
"""The fields of the two settings that a line may set, beside `FIELDS`.

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
    lines: list[PromptLine] = []
    for file in files:
        if file.suffix != ".jsonl":
            lines += [PromptLine(text) for text in listed_prompts([file])]
            continue
        rows = [
            (number, row)
            for number, row in enumerate(read_text(file).split("\n"), 1)
            if row.strip()
        ]
        if not rows:
            raise RequestError(f"{str(file)!r} holds no prompt")
        lines += [_of_line(row, f"{file}:{number}") for number, row in rows]
    return lines


def _of_line(row: str, where: str) -> PromptLine:
    try:
        value = json.loads(row)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON: {error}") from error
    line = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
        raise RequestError(f'{where} must be a text or an object with a text "prompt"')
    known = (*OWN, *OPTIONS, *FIELDS)
    for name in line:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise RequestError(f"{where}: unknown field {name!r}; {hint}")
    n = line.get("n")
    if n is not None:
        require_samples(n, f"{where}: n")
    require_text(line["prompt"], f"the prompt of {where}")
    options = {name: value for name, value in line.items() if name in OPTIONS and value is not None}
    try:
        grammar = grammar_of(line)
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
    lines: Sequence[PromptLine],
    n: int,
    options: Mapping[str, Any],
    ends: Sequence[str] = (),
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Returns `n` and the other options of `Shoal.generate`.

    They are the command line's, and each prompt's line overrides them for its prompt.

    Args:
        ends: stop strings beside those of the options and of lines, see `with_ends`.
        tokenizer: for `bad_words` and guides' prompts that are texts; without it they are left out,
            for a check before a model is loaded.

    Raises:
        RequestError: with file and line, for options out of range.
    """
    require_samples(n)
    if not any(one.options or one.n is not None for one in lines):
        split_options(_without_texts(options))
        return {"n": n, **with_ends(options, ends)}
    _, _, speculation = split_options(_without_texts(options))
    each = [_settings(one, options, ends, tokenizer) for one in lines]
    return {
        "n": [n if one.n is None else one.n for one in lines],
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
            values = _without_texts(values)
        else:
            from shoal.types.arguments import with_token_ids

            values = with_token_ids(values, tokenizer)
        sampling, limits, _ = split_options(with_ends(values, ends))
    except RequestError as error:
        raise RequestError(f"{one.where}: {error}" if one.where else str(error)) from error
    return sampling, limits


def _without_texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without those whose texts need a tokenizer."""
    texts = ("bad_words", *GUIDES_PROMPTS.values())
    return {name: value for name, value in options.items() if name not in texts}


FIELDS = ("json_schema", "regex", "grammar")
"""The fields of `GrammarOptions`, and of a line of prompts."""


@dataclass(frozen=True)
class GrammarOptions:
    """The options for the grammar that each sample must match."""

    json_schema: Annotated[
        str | None,
        sampling_option(
            "--json-schema",
            metavar="FILE-OR-JSON",
            help="Samples are JSON that this schema allows.",
        ),
    ] = None
    regex: Annotated[
        str | None,
        sampling_option(
            "--regex", metavar="PATTERN", help="Samples match this as a whole (Rust's syntax)."
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        sampling_option(
            "--grammar",
            metavar="FILE",
            help="Samples are of this grammar, in Lark's syntax or GBNF.",
        ),
    ] = None

    def given(self) -> Grammar | None:
        """Returns the grammar of the options.

        Raises:
            RequestError: two are given, a file cannot be read, or it holds no such grammar; see
                `grammar_of`.
        """
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = read_text(Path(schema), "the schema")
        text = None if self.grammar is None else read_text(self.grammar, "the grammar")
        return grammar_of({"json_schema": schema, "regex": self.regex, "grammar": text}, "--")


def grammar_of(given: Mapping[str, Any], prefix: str = "") -> Grammar | None:
    """Returns the grammar that one of `FIELDS` gives; None if none does.

    It is compiled when the model's tokenizer is known.

    Args:
        given: a schema as an object or a text, an expression, or a grammar in Lark's syntax or
            GBNF.
        prefix: the prefix of the fields' names in messages.

    Raises:
        RequestError: several are given, one is not of its form, llguidance cannot read it, or is
            not installed.
    """
    fields = [name for name in FIELDS if given.get(name) is not None]
    if not fields:
        return None
    said = [prefix + (name.replace("_", "-") if prefix else name) for name in fields]
    if len(fields) > 1:
        raise RequestError(
            f"{said[1]} does not go with {said[0]}: a sample has one grammar at most"
        )
    llguidance_or_refuse()
    [name], value = fields, given[fields[0]]
    try:
        if name == "json_schema":
            grammar = Grammar("json_schema", _schema(value))
        elif not isinstance(value, str):
            raise RequestError(f"expected a text, got {value!r:.80}")
        else:
            grammar = (
                Grammar("regex", value) if name == "regex" else Grammar("lark", as_lark(value))
            )
        require_readable(grammar)
        return grammar
    except RequestError as error:
        raise RequestError(f"{said[0]}: {error}") from error


def _schema(value: Any) -> str:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RequestError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(f"a schema is a JSON object, got {json.dumps(schema):.80}")
    return json.dumps(schema)
