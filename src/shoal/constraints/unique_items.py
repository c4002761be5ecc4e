"""Rewrites `uniqueItems` over a few values, which llguidance does not read, as alternatives, one
per order of the values."""

from __future__ import annotations

from itertools import permutations
from math import perm
from typing import Any

from shoal.constraints.disjoint import TYPES, comparable

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
