"""Calls of tools that are not written as one JSON object, typed by the tools' schemas.

The forms are XML of Qwen3-Coder, Qwen3.5, Nemotron and Seed-OSS (`<function=..><parameter=..>`),
of MiniMax (`<invoke name=..>`) and of GLM (`<arg_key>`), JSON behind a name of Mistral (`[ARGS]`)
and Llama (`<function=..>`), Gemma 4's own form, and lists of calls in Python (LFM2).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from shoal.serve.api_errors import no_constant

DECODER = json.JSONDecoder(parse_int=float, parse_constant=no_constant)
Written = Iterator[tuple[str, str]]
"""The names of calls, and the texts of their arguments, JSON objects."""
Reader = Callable[[str, Mapping[str, Any]], Written]
"""A reader of the text between two marks; it gets the schemas of the tools by name.

It raises ValueError, SyntaxError or RecursionError for a text that is no call.
"""
PYTHON_NAMES = {"true": True, "false": False, "null": None}
GEMMA_QUOTE = '<|"|>'
LISTED = re.compile(r"\s*\[\s*([\w$.@/-]+)\s*\(")
MAY_BE_LISTED = re.compile(r"\s*(?:\[\s*(?:[\w$.@/-]+\s*)?)?\Z")
"""The beginning of a list of calls in Python, and the texts that may become it."""
NAME_ENDS = {"args": "[ARGS]", "function": ">"}
"""The texts between a name and JSON, by the forms that have both."""
TWO_WORDS = re.compile(r"\s*[^\s\[{]+\s+[^\s\[{]")
"""The beginning of a text that is no name before JSON."""
BEHIND_JSON = re.compile(r"[\s,}\]]*")
"""The brackets too many, commas and blanks that models write between a call and its closing."""
NAMED = re.compile(
    r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\])*"'
    r"|'''(?:\\.|[^\\])*?'''|'(?:\\.|[^'\\])*'"
    r"|(?<![\w$.@/-])([\w$.@/-]+)\s*(?=\(|=(?!=))",
    re.DOTALL,
)
"""A text in quotes, or a name of a tool or an argument, which may be none in Python."""
BARE_TEXT = re.compile(r"(?<=[:\[,])\s*([^\s{}\[\],\"][^{}\[\],\"]*?)\s*(?=[,}\]])")
"""A value of Gemma's form without quotes."""


def _elements(call: str, argument: str, text: str, schemas: Mapping[str, Any]) -> Written:
    """Yields calls whose arguments are elements, by expressions of a call and of an argument."""
    matches = [*re.finditer(call, text, re.DOTALL)]
    if not matches:
        raise ValueError("no call")
    for one in matches:
        name, body = one.group(1).strip(), one.group(2)
        values = {
            key.strip(): typed(value, schemas.get(name), key.strip())
            for key, value in re.findall(argument, body, re.DOTALL)
        }
        yield name, _object(values)


def typed(text: str, schema: Any, key: str) -> str:
    """Returns the JSON text of an argument's text, by the schema of its tool.

    A text that reads as JSON is that value, if the schema has a value of its type there, or no
    string. Any other text is a string.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    own = properties.get(key) if isinstance(properties, dict) else None
    types = types_of(own, schema)
    written = text.strip()
    written = {"True": "true", "False": "false", "None": "null"}.get(written, written)
    if types and "string" not in types:  # a word or a literal of Python
        written = _as_json(written)
    try:
        value, end = DECODER.raw_decode(written)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _kind(value)
    whole = kind == "number" and value.is_integer()
    fits = not types or kind in types or (whole and "integer" in types)
    if end < len(written) or (not fits and "string" in types):
        return json.dumps(text, ensure_ascii=False)
    return written


def _as_json(text: str) -> str:
    """Returns the JSON of a word, a list or a dictionary as Python writes it, else the text."""
    if text.lower() in PYTHON_NAMES:
        return text.lower()
    try:
        DECODER.decode(text)
    except (ValueError, RecursionError):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            value = ast.literal_eval(_JsonNames().visit(ast.parse(text, mode="eval")))
            if isinstance(value, (list, dict, tuple)):
                return json.dumps(value, allow_nan=False)
    return text


def _kind(value: Any) -> str:
    """Returns the type of a value in JSON Schema's words, but for a text, which has quotes."""
    kinds = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return "quoted" if isinstance(value, str) else kinds.get(type(value), "null")


def types_of(schema: Any, root: Any, depth: int = 8) -> set[str]:
    """Returns the types that a schema names, its alternatives and references included."""
    if not isinstance(schema, dict) or not depth:
        return set()
    types, names = schema.get("type"), set[str]()
    names |= {types} if isinstance(types, str) else set()
    names |= {one for one in types if isinstance(one, str)} if isinstance(types, list) else set()
    listed = schema.get("enum")
    values = [
        *(listed if isinstance(listed, list) else ()),
        *[schema[k] for k in ["const"] if k in schema],
    ]
    if not names:
        names |= {_kind(one).replace("quoted", "string") for one in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        place = root
        for part in reference[2:].split("/"):
            place = place.get(part) if isinstance(place, dict) else None
        names |= types_of(place, root, depth - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(name)
        for one in alternatives if isinstance(alternatives, list) else ():
            names |= types_of(one, root, depth - 1)
    return names


def _object(values: Mapping[str, str]) -> str:
    """Returns the text of an object, given the texts of its values."""
    members = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in values.items())
    return f"{{{', '.join(members)}}}"


def behind_name(form: str, text: str) -> int:
    """Returns the place of the JSON behind a name, with its mark or without; -1 for none."""
    first = re.match(r"\s*(?:(?=\[)|[^{\[>]*(?={))", text)
    at = text.find(NAME_ENDS[form])
    return first.end() if first else at if at < 0 else at + len(NAME_ENDS[form])


def _named(behind: str, text: str, schemas: Mapping[str, Any]) -> Written:
    """Yields the call of a name, a mark and a JSON object."""
    name, mark, arguments = text.partition(behind)
    if not mark or "{" in name:  # the mark was left out
        name, _, arguments = text.partition("{")
        arguments = f"{{{arguments}"
    if not isinstance(DECODER.decode(arguments.strip()), dict):
        raise ValueError("the arguments are no object")
    yield name.partition("[CALL_ID]")[0].strip(), arguments.strip()


def _gemma(text: str, schemas: Mapping[str, Any]) -> Written:
    """Yields the call `call:NAME{KEY:VALUE}`, whose strings stand between marks of their own."""
    match = re.fullmatch(r"\s*call:\s*([^\s{]+)(\{.*\})\s*", text, re.DOTALL)
    if match is None:
        raise ValueError("no call")
    parts = match.group(2).split(GEMMA_QUOTE)
    for i, part in enumerate(parts):
        parts[i] = (
            json.dumps(part, ensure_ascii=False)
            if i % 2
            else BARE_TEXT.sub(
                lambda one: typed(one[1], {}, ""),
                re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part),
            )
        )
    arguments = "".join(parts)
    DECODER.decode(arguments)
    yield match.group(1), arguments


def _python(text: str, schemas: Mapping[str, Any]) -> Written:
    """Yields the calls of a list in Python whose arguments are named literals.

    Names that Python cannot have (`get-weather`, `from`) are read by numbers in their places.
    """
    names = list[str]()

    def number(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        names.append(match[1])
        return f"_{len(names) - 1}"

    plain = NAMED.sub(number, text.strip())
    parsed = _JsonNames().visit(ast.parse(plain, mode="eval")).body
    for call in parsed.elts if isinstance(parsed, ast.List) else [parsed]:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("no call")
        values = {}
        for argument in call.keywords:
            if argument.arg is None:
                raise ValueError("an argument without a name")
            values[names[int(argument.arg[1:])]] = ast.literal_eval(argument.value)
        yield names[int(call.func.id[1:])], json.dumps(values, allow_nan=False)


class _JsonNames(ast.NodeTransformer):
    """A pass over a syntax tree that puts constants in the place of JSON's names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = node.id in PYTHON_NAMES
        return ast.copy_location(ast.Constant(PYTHON_NAMES[node.id]), node) if known else node


READERS: dict[str, Reader] = {
    "xml": partial(
        _elements,
        r"<function=([^>\n]+)>(.*?)(?:</function>)?\s*(?=<function=|\Z)",
        r"<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>)?\s*(?=<parameter=|\Z)",
    ),
    "invoke": partial(
        _elements,
        r'<invoke name="([^"\n]+)">(.*?)</invoke>',
        r'<parameter name="([^"\n]+)">(.*?)</parameter>\s*(?=<parameter name=|\Z)',
    ),
    "keys": partial(
        _elements, r"\A\s*([^\s<]+)(.*)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    ),
    "args": partial(_named, "[ARGS]"),
    "function": partial(_named, ">"),
    "gemma": _gemma,
    "python": _python,
}
"""The readers of the forms by name."""


def written_calls(form: str, text: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Returns the calls between two marks; None if there is none or one that names no tool."""
    try:
        calls = [*READERS[form](text, schemas)]
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return calls if calls and all(name in schemas for name, _ in calls) else None


BLANKS = re.compile(r"[ \t\r\n]*")


def json_elements(text: str) -> list[str]:
    """Returns the elements of the JSON list that a text begins with, as they are written."""
    return [*_items(text, "]").values()]


def json_members(text: str) -> dict[str, str]:
    """Returns the values of the JSON object that a text begins with, as they are written."""
    return _items(text, "}")


def _items(text: str, end: str) -> dict[str, str]:
    items, at = dict[str, str](), _past_blanks(text, 1)
    while text[at] != end:
        name = str(len(items))
        if end == "}":
            name, at = DECODER.raw_decode(text, at)
            at = _past_blanks(text, _past_blanks(text, at) + 1)
        _, stop = DECODER.raw_decode(text, at)
        items[name], at = text[at:stop], _past_blanks(text, stop)
        at = _past_blanks(text, at + 1) if text[at] == "," else at
    return items


def _past_blanks(text: str, at: int) -> int:
    match = BLANKS.match(text, at)
    assert match is not None
    return match.end()


def object_text(value: Any, written: str) -> str | None:
    """Returns the text of arguments that are an object, or a text of one, as in histories of calls.

    Args:
        value: the arguments.
        written: the arguments as the model wrote them.

    Returns:
        None for other arguments.
    """
    if not isinstance(value, str):
        return written if isinstance(value, dict) else None
    try:
        return value if isinstance(DECODER.decode(value), dict) else None
    except (ValueError, RecursionError):
        return None
