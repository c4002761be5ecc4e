"""Proofs that no JSON value fits several JSON schemas at once, from some of their keywords.

A value that fits a schema fits every keyword of it. So a keyword that is not read here only makes
the answer more careful: a proof from the keywords that are read holds for the whole schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

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
