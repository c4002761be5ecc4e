"""The grammar that samples must match, from command-line options or fields of a line of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from shoal.cli.files import read_text
from shoal.cli.option_groups import sampling_option
from shoal.config import Grammar
from shoal.constraints.library import as_lark, llguidance_or_refuse
from shoal.constraints.sources import require_readable
from shoal.errors import RequestError

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
    found = [name for name in FIELDS if given.get(name) is not None]
    if not found:
        return None
    said = [prefix + (name.replace("_", "-") if prefix else name) for name in found]
    if len(found) > 1:
        raise RequestError(
            f"{said[1]} does not go with {said[0]}: a sample has one grammar at most"
        )
    llguidance_or_refuse()
    [name], value = found, given[found[0]]
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
