"""Checks of JSON schemas: words that the grammar library would misread, or that cannot be met.

Numbers and depths: the library computes with doubles and 64-bit integers: 725653563933458431
becomes ...432, and the constant -2^63 ends the process. It reads documents of some 120 levels.

Alternatives: a value that fits a schema fits every keyword of it. So a keyword that is not read
here only makes the answer more careful: a proof from the keywords that are read holds for the whole
schemas.

By such proofs `uniqueItems` over a few values, which llguidance does not read, is rewritten as
alternatives, one per order of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import combinations, permutations
from math import perm
from typing import Any
from urllib.parse import unquote

from shoal.errors import RequestError

EXACT = 2**53
"""The largest number up to which all integers are doubles."""
LARGEST = 2**63 - 1024
"""The largest double that is a 64-bit integer."""
MOST_LEVELS = 120
"""The most levels of arrays and objects in a schema."""
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""The keywords that bound numbers, and the direction of the numbers that they leave."""


def require_levels(root: Any) -> None:
    """Raises RequestError: a document has more levels than can be read."""
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MOST_LEVELS + 1:
            raise too_deep()
        level = [one for whole in level for one in _parts(whole)]


def too_deep() -> RequestError:
    """Returns the error for a document of too many levels."""
    return RequestError(
        f"the json_schema grammar cannot be used: it is nested more than {MOST_LEVELS} levels "
        f"deep; "
        "define parts of it in $defs and refer to them by $ref"
    )


def require_exact(value: Any) -> None:
    """Raises RequestError: a constant holds an integer that would come out as another one."""
    parts = [value]
    while parts:
        one = parts.pop()
        parts += _parts(one)
        if isinstance(one, int) and _written(one) != one:
            raise RequestError(
                f"the json_schema grammar cannot be used: {one} in const or enum has more than "
                f"53 bits and "
                "would come out as another number; give it as a string, or leave it out"
            )


def _written(number: int) -> int | None:
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


def _parts(whole: Any) -> list[Any]:
    if isinstance(whole, dict):
        return list(whole.values())
    return whole if isinstance(whole, list) else []


Schema = Any
Part = dict[str, Any]
TYPES = ("null", "boolean", "number", "string", "array", "object")
WORK = 20_000
"""The number of schemas and listed values that the proofs of one document may look at; past it
nothing more is proved."""


class Proofs:
    """The proofs about the schemas of one document.

    Args:
        root: the document, to resolve `$ref`.
        siblings: True if keywords beside a `$ref` count (they do since draft 2019-09).
    """

    def __init__(self, root: Schema, siblings: bool = True) -> None:
        self._root, self._siblings, self._left = root, siblings, WORK

    def exclusive(self, context: Schema, alternatives: Sequence[Schema]) -> bool:
        """Returns True if each value that fits `context` provably fits one alternative at most."""
        return all(self.impossible([context, a, b]) for a, b in combinations(alternatives, 2))

    def impossible(self, schemas: Sequence[Schema]) -> bool:
        """Returns True if provably no value fits all the schemas."""
        parts = list(self._parts(schemas, set()))
        self._left -= 1 + sum(1 + len(_list(part.get("enum"))) for part in parts)
        if self._left < 0:
            return False
        types = _types(parts)
        return (
            not types
            or (types == {"number"} and _out_of_range(parts))
            or (types == {"object"} and self._impossible_object(parts))
            or self._impossible_choice(parts)
        )

    def _parts(self, schemas: Sequence[Schema], seen: set[str]) -> Iterator[Part]:
        """Yields the keywords that a value has to fit.

        They are the keywords of the schemas, of the schemas that they refer to, and of their
        `allOf`.
        """
        for schema in schemas:
            if not isinstance(schema, dict):
                yield from [{"enum": []}] if schema is False else []
                continue
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                yield from self._parts([resolved(self._root, reference)], seen)
            if self._siblings or not isinstance(reference, str):
                yield schema
                yield from self._parts(_list(schema.get("allOf")), seen)

    def _impossible_object(self, parts: Sequence[Part]) -> bool:
        required = {
            name for part in parts for name in _list(part.get("required")) if isinstance(name, str)
        }
        return any(
            any(_forbids(part, name) for part in parts)
            or self.impossible(
                [
                    _dict(part.get("properties"))[name]
                    for part in parts
                    if name in _dict(part.get("properties"))
                ]
            )
            for name in sorted(required)
        )

    def _impossible_choice(self, parts: Sequence[Part]) -> bool:
        """Returns True if no alternative of some `anyOf` or `oneOf` is possible beside the rest."""
        for i, part in enumerate(parts):
            for keyword in ("anyOf", "oneOf"):
                if alternatives := _list(part.get(keyword)):
                    flat = [
                        {k: v for k, v in p.items() if k not in ("$ref", "allOf")} for p in parts
                    ]
                    del flat[i][keyword]
                    if all(self.impossible([*flat, one]) for one in alternatives):
                        return True
        return False


def resolved(root: Schema, reference: str) -> Schema:
    """Returns the schema that a pointer into the document points at.

    For any other reference it returns True, which every value fits.
    """
    found = root
    steps = unquote(reference).split("/")
    for step in steps[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name, True) if isinstance(found, dict) else True
    return found if steps[0] == "#" else True


def _types(parts: Sequence[Part]) -> set[str]:
    """Returns the possible types by `type`, `const` and `enum`; empty if no value is possible."""
    types = set(TYPES)
    for part in parts:
        named = part.get("type")
        names = [named] if isinstance(named, str) else named
        if isinstance(names, list) and all(name in (*TYPES, "integer") for name in names):
            types &= {"number" if name == "integer" else name for name in names}
    listed = [[part["const"]] for part in parts if "const" in part]
    listed += [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
    if listed:
        values = set.intersection(*({comparable(value) for value in values} for values in listed))
        types &= {kind for kind, _ in values}
    return types


def comparable(value: Any) -> tuple[str, Any]:
    """Returns a value's type and a key that is equal for equal JSON values.

    1 and 1.0 are equal, 1 and true are not.
    """
    if value is None or isinstance(value, bool | str):
        return {type(None): "null", bool: "boolean", str: "string"}[type(value)], value
    if isinstance(value, int | float):
        return "number", _double(value)
    if isinstance(value, list):
        return "array", tuple(map(comparable, value))
    return "object", frozenset((name, comparable(member)) for name, member in value.items())


def _double(value: float) -> float:
    """Returns the number as llguidance reads it: it compares numbers as doubles."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _out_of_range(parts: Sequence[Part]) -> bool:
    lower = [*_bounds(parts, "minimum", False), *_bounds(parts, "exclusiveMinimum", True)]
    upper = [*_bounds(parts, "maximum", False), *_bounds(parts, "exclusiveMaximum", True)]
    return any(
        low > high or (low == high and (open_low or open_high))
        for low, open_low in lower
        for high, open_high in upper
    )


def _bounds(parts: Sequence[Part], keyword: str, exclusive: bool) -> list[tuple[float, bool]]:
    return [(_double(part[keyword]), exclusive) for part in parts if _is_number(part.get(keyword))]


def _forbids(part: Part, name: str) -> bool:
    return (
        part.get("additionalProperties") is False
        and "patternProperties" not in part
        and name not in _dict(part.get("properties"))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


MOST_ORDERS, MOST_ITEMS = 120, 5
"""The most alternatives of one array, and the most items: five values in any order. llguidance does
not follow the 720 alternatives of six values at once."""
_NOTES = ("title", "description", "default", "examples", "deprecated", "$comment")
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
    if not isinstance(schema, dict) or not set(schema) <= {"enum", "const", "type", *_NOTES}:
        return None
    kind = schema.get("type")
    given = [schema["const"]] if "const" in schema else schema.get("enum", _KINDS.get(str(kind)))
    if (
        not isinstance(given, list)
        or ("const" in schema and "enum" in schema)
        or (kind is not None and kind not in TYPES)
    ):
        return None
    found = {comparable(value): value for value in reversed(given)}
    return [value for (own, _), value in reversed(found.items()) if kind in (None, own)]
