"""Checks of JSON schemas: numbers, depths and patterns that the grammar library would misread.

Numbers and depths: the library computes with doubles and 64-bit integers: 725653563933458431
becomes ...432, and the constant -2^63 ends the process. It reads documents of some 120 levels.

Patterns: its classes are those of another language, and one of all control characters, as `[^"]`,
takes `\\"`.

Orders: `uniqueItems` over a few values, which llguidance does not read, is rewritten as
alternatives, one per order of the values.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from itertools import permutations
from math import perm
from typing import Any

from shoal.constraints.schema_proofs import REMARKS, TYPES, comparable, is_number
from shoal.errors import RequestError

EXACT = 2**53
"""The largest number up to which all integers are doubles."""
LARGEST = 2**63 - 1024
"""The largest double that is a 64-bit integer."""
MOST_LEVELS = 120
"""The most levels of arrays and objects in a schema."""
NO_SCHEMA = "a schema must be an object, true or false"
MOST_READ = 123
"""The most levels that the grammar library reads, of a schema as it is rewritten for it."""
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""The keywords that bound numbers, and the direction of the numbers that they leave."""


def require_levels(root: Any, most: int = MOST_LEVELS) -> None:
    """Raises RequestError: a document has more levels than can be read."""
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > most + 1:
            raise too_deep("" if most == MOST_LEVELS else ", once its conditions are rewritten")
        level = [one for whole in level for one in _parts(whole)]


def too_deep(when: str = "") -> RequestError:
    """Returns the error for a document of too many levels."""
    return RequestError(
        f"the json_schema grammar cannot be used: it is nested more than {MOST_LEVELS} levels "
        f"deep{when}; define parts of it in $defs and refer to them by $ref"
    )


def require_exact(value: Any) -> None:
    """Raises RequestError: a constant holds an integer that would come out as another one."""
    parts = [value]
    while parts:
        one = parts.pop()
        parts += _parts(one)
        if isinstance(one, int) and _library_integer(one) != one:
            raise RequestError(
                f"the json_schema grammar cannot be used: {one} in const or enum has more than 53 "
                "bits and would come out as another number; give it as a string, or leave it out"
            )


UNWRITTEN = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""The characters that stand for nothing here: JSON, or the grammar library, has only \\u for them,
which no text uses."""


def require_writable(value: Any) -> None:
    """Raises RequestError: a constant holds a character that no text here can have."""
    parts = [value]
    while parts:
        one = parts.pop()
        parts += _parts(one)
        if isinstance(one, str) and (match := UNWRITTEN.search(one)):
            raise unwritable(match[0], "const or enum")


def unwritable(character: str, place: str) -> RequestError:
    """Returns the error for a character in a place of a schema."""
    return RequestError(
        f"the json_schema grammar cannot be used: {place} has the control character "
        f"U+{ord(character):04X}, which is not written in JSON here; leave it out"
    )


def _library_integer(number: int) -> int | None:
    """Returns the integer that the grammar library writes for this one; None beyond all doubles."""
    if abs(number) <= EXACT:
        return number
    try:
        double = float(number)
    except OverflowError:
        return None
    return int(double) if abs(number) <= LARGEST else int(Decimal(repr(double)))


def inward(keyword: str, bound: Any) -> Any:
    """Returns a bound of numbers, rounded so that it still excludes all numbers that it excluded.

    Args:
        keyword: one of `BOUNDS`.
    """
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or abs(bound) <= EXACT:
        return bound
    way = BOUNDS[keyword]
    if abs(bound) > LARGEST:
        clamped = LARGEST if bound > 0 else -LARGEST
        # -1e30 as a minimum excludes no number that the grammar writes.
        return clamped if clamped * way < 0 else bound
    if isinstance(bound, float):
        return bound
    rounded = float(bound)
    outside = (int(rounded) - bound) * way < 0
    return int(math.nextafter(rounded, way * math.inf) if outside else rounded)


def with_joined_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with the bounds of the schemas in its `allOf` among its own.

    The grammar library joins them without a look at exclusive ones next to others.
    """
    parts = schema.get("allOf")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return schema
    parts = [with_joined_bounds(part) for part in parts]
    whole = [schema, *parts]
    bounds_by_word = {word: [one[word] for one in whole if word in one] for word in BOUNDS}
    if not all(is_number(bound) for bounds in bounds_by_word.values() for bound in bounds):
        return schema  # "exclusiveMinimum": true of draft 4, or no bound at all
    joined = {
        word: max(bounds) if BOUNDS[word] > 0 else min(bounds)
        for word, bounds in bounds_by_word.items()
        if bounds
    }
    left = [{k: v for k, v in part.items() if k not in BOUNDS} for part in parts]
    return {**schema, **joined, "allOf": left}


def with_open_units(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema without exclusive whole bounds whose other bound is less than 1 away.

    The grammar library takes 2 for a number above 2 and at most 2.5. A number next to the bound
    takes its place: 1e-20 for 0, which has the most digits that are written, else one of 15 digits.
    """
    made = dict(schema)
    sides = (("exclusiveMinimum", "minimum", "aximum"), ("exclusiveMaximum", "maximum", "inimum"))
    for keyword, own, other in sides:
        way = BOUNDS[keyword]
        bound: Any = schema.get(own) if schema.get(keyword) is True else schema.get(keyword)
        ends: list[Any] = [schema.get(f"m{other}"), schema.get(f"exclusiveM{other}")]
        near = is_number(bound) and any(
            is_number(end) and 0 < (end - bound) * way < 1 for end in ends
        )
        if near and bound == int(bound) and bound * way >= 0:
            del made[keyword]
            made[own] = way * (abs(bound) + 10.0 ** (len(str(int(bound))) - 15) if bound else 1e-20)
    return made


def _parts(whole: Any) -> list[Any]:
    if isinstance(whole, dict):
        return list(whole.values())
    return whole if isinstance(whole, list) else []


_WORDS = r"\[(?:[a-z]-[a-z]|[A-Z]-[A-Z]|\d-\d|[A-Za-z0-9_])+\]"
_WORD = rf"(?:(?<!\\)[A-Za-z0-9_]|\\[wd]|(?<!\\){_WORDS})"
EDGES = (
    (re.compile(rf"^\^\\b(?={_WORD}(?![*?{{]))"), "^"),
    (re.compile(rf"({_WORD}(?:\+|\{{[1-9]\d*(?:,\d*)?\}})?)\\b\$$"), r"\1$"),
)
"""The ends of a text where `\\b` says nothing: a word's character stands beside it anyway."""


def _without_edges(pattern: str) -> str:
    """Returns a pattern without `\\b` where it says nothing; the grammar library has none."""
    if re.search(r"\||\\[xupPck]", pattern):
        return pattern
    for edge, rest in EDGES:
        pattern = edge.sub(rest, pattern)
    return pattern


ATOM = re.compile(
    r"(?s:(?P<set>\\[pP](?:\{[^}]*\}|.))|(?P<nul>\\x00|\\u0000|\0)"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[a-zA-Z])|\\."
    r"|(?P<begin>\[\^?)(?P<first>\]?)|(?P<end>\])|(?P<pair>&&|~~|--)|.)"
)
"""The parts of a pattern: sets by a property, NUL, escapes, and the marks of classes."""


def _control(atom: str) -> str:
    """Returns the control character that a part of a pattern stands for; "" if it is another."""
    code = atom[2:] if atom.startswith("\\") else ""
    if len(code) > 1:
        text = chr(int(code, 16))
    elif code:
        text = chr(ord(code) % 32)
    else:
        text = {"\\v": "\v", "\\0": "\0"}.get(atom, atom)
    return text if UNWRITTEN.fullmatch(text) else ""


def readable_pattern(pattern: Any) -> Any:
    """Returns a pattern as llguidance has to read it for the meaning that JSON Schema gives it.

    Its classes know nested ones (`[`, `[:alpha:]`) and operators (`&&`). And a class of all control
    characters, as `[^"]` is, takes all escapes, `\\"` among them; without NUL, which no text has,
    it takes its own.
    """
    if not isinstance(pattern, str):
        return pattern
    made, inside = "", False
    for atom in ATOM.finditer(_without_edges(pattern)):
        text = atom[0]
        if not (inside or atom["set"]) and (control := _control(text)):
            raise unwritable(control, f"the pattern {pattern[:200]}")
        if atom["set"]:
            text = rf"[{text}--\x00]"
        elif atom["nul"]:
            text = r"\x01"
        elif text.startswith(r"\c") and text[2:]:
            text = rf"\x{ord(text[2]) % 32:02x}"
        elif atom["begin"] and inside:
            text, inside = rf"\{text}", not atom["first"]
        elif atom["begin"]:
            behind = r"\x00" if atom["begin"] == "[^" else ""
            text = atom["begin"] + behind + (r"\]" if atom["first"] else "")
            inside = True
        elif inside and atom["pair"]:
            text = rf"{text[0]}\{text[1]}"
        elif atom["end"]:
            inside = False
        made += text
    return made


_COUNTS = tuple(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)


_BESIDE = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("dependentSchemas", "contains"),
)


def without_unevaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with `additionalProperties` and `items` for `unevaluated...`.

    The two mean the same where no keyword beside them applies a schema to the same value.
    """
    made = dict(schema)
    pairs = (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items"))
    for keyword, other in pairs:
        if keyword in schema and (schema[keyword] is True or not schema.keys() & {*_BESIDE}):
            left = made.pop(keyword)
            made.setdefault(other, left)
    return made


def with_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with counts as integers: 2.0 is one."""
    return {
        k: int(v) if k in _COUNTS and isinstance(v, float) and v.is_integer() else v
        for k, v in schema.items()
    }


MOST_ORDERS, MOST_ITEMS = 120, 5
"""The most alternatives of one array, and the most items: five values in any order. llguidance does
not follow the 720 alternatives of six values at once."""
_REPLACED = ("type", "items", "uniqueItems", "minItems", "maxItems")
_OTHERS = ("anyOf", "prefixItems", "additionalItems", "contains", "unevaluatedItems")
_KINDS = {"null": [None], "boolean": [False, True]}


def with_orders(schema: dict[str, Any], items: Any) -> dict[str, Any]:
    """Returns a schema without its `uniqueItems`, if alternatives can replace it; else unchanged.

    Every alternative begins with some of the values in one order, and its last item is one of the
    rest; shorter arrays are the beginnings of an alternative.

    Args:
        schema: the schema of the array.
        items: the schema of its items, behind references.
    """
    if schema.get("uniqueItems") is False or _has_one_item(schema):
        return {keyword: value for keyword, value in schema.items() if keyword != "uniqueItems"}
    values = _values(items)
    if schema.get("uniqueItems") is not True or schema.get("type") != "array" or values is None:
        return schema
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if (
        any(keyword in schema for keyword in _OTHERS)
        or type(least) is not int
        or type(most) is not int
    ):
        return schema
    most = min(most, len(values))
    if not 0 <= least <= most <= MOST_ITEMS:
        return schema
    if most < 2:
        return {
            **{keyword: value for keyword, value in schema.items() if keyword != "uniqueItems"},
            "maxItems": most,
        }
    if perm(len(values), most - 1) > MOST_ORDERS:
        return schema
    orders = [
        {
            "type": "array",
            "items": False,
            "minItems": least,
            "maxItems": most,
            "prefixItems": [*({"const": values[i]} for i in order), {"enum": _rest(values, order)}],
        }
        for order in permutations(range(len(values)), most - 1)
    ]
    return {
        **{keyword: value for keyword, value in schema.items() if keyword not in _REPLACED},
        "anyOf": orders,
    }


def _has_one_item(schema: dict[str, Any]) -> bool:
    return schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1)


def _rest(values: list[Any], order: tuple[int, ...]) -> list[Any]:
    return [value for i, value in enumerate(values) if i not in order]


def _values(schema: Any) -> list[Any] | None:
    """Returns all values that fit a schema, all different; None if it is more than a list."""
    if not isinstance(schema, dict) or not set(schema) <= {"enum", "const", "type", *REMARKS}:
        return None
    kind = schema.get("type")
    given = [schema["const"]] if "const" in schema else schema.get("enum", _KINDS.get(str(kind)))
    if (
        not isinstance(given, list)
        or ("const" in schema and "enum" in schema)
        or (kind is not None and kind not in TYPES)
    ):
        return None
    by_value = {comparable(value): value for value in reversed(given)}
    return [value for (own, _), value in reversed(by_value.items()) if kind in (None, own)]
