"""Proofs about the schemas of one document, and schemas of the values that do not fit another one.

A proof shows that no value fits several schemas at once. A value that fits a schema fits every
keyword of it. So a keyword that is not read here only makes the answer more careful: a proof from
the keywords that are read holds for the whole schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Schema = Any
Part = dict[str, Any]
TYPES = ("null", "boolean", "number", "string", "array", "object")
ABOUT = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"},
    "object": {
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    },
}
"""The keywords that say something about the values of one type, and nothing about others."""
REMARKS = ("title", "description", "examples", "default", "deprecated", "$comment")
"""The keywords that say nothing about values."""
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

    def any_of(
        self, context: Schema, alternatives: Sequence[Schema], made: Sequence[Schema]
    ) -> Sequence[Schema] | None:
        """Returns alternatives of an `anyOf` that take the same values as those of a `oneOf`.

        A `oneOf` refuses the values that two alternatives take: all alternatives lose them, as null
        in `[{"type": ["string", "null"]}, {"type": ["number", "null"]}]`. Returns None where there
        is no proof of the values that these are.

        Args:
            context: the schema beside the alternatives.
            alternatives: as the document has them.
            made: the same alternatives in the form to return.
        """
        if self.exclusive(context, alternatives):
            return made
        names = _required_names(alternatives)
        if len(names) > 1:
            return [
                {"type": "object", "required": [name], "properties": dict.fromkeys(rest, False)}
                for name in names
                if (rest := [one for one in names if one != name])
            ]
        kept = self._types_alone(context, alternatives)
        if kept is None or not any(kept):
            return None
        return [_of_types(one, types) for one, types in zip(made, kept, strict=True) if types]

    def _types_alone(
        self, context: Schema, alternatives: Sequence[Schema]
    ) -> list[list[str]] | None:
        """Returns for each alternative the types whose values it takes and no other one does.

        Returns None if two alternatives may share some values of a type, and not all of them.
        """
        kept: list[list[str]] = [[] for _ in alternatives]
        for kind in TYPES:
            here = [context, {"type": kind}]
            takers = [i for i, one in enumerate(alternatives) if not self.impossible([*here, one])]
            pairs = combinations(takers, 2)
            if all(self.impossible([*here, alternatives[a], alternatives[b]]) for a, b in pairs):
                for i in takers:
                    kept[i].append(kind)
            elif sum(self._takes_all(alternatives[i], kind) for i in takers) < 2:
                return None
        return kept

    def _takes_all(self, schema: Schema, kind: str) -> bool:
        """Returns True if all values of a type provably fit a schema."""
        others = {word for name, words in ABOUT.items() if name != kind for word in words}
        harmless = {"type", "$ref", "allOf", *REMARKS, *others}
        parts = list(self._parts([schema], set()))
        return bool(parts) and all(
            part.keys() <= harmless
            and ("type" not in part or kind in _list(part["type"]) or part["type"] == kind)
            and isinstance(resolve(self._root, str(part.get("$ref", "#"))), dict)
            for part in parts
        )

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
                yield from self._parts([resolve(self._root, reference)], seen)
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


def _required_names(alternatives: Sequence[Schema]) -> list[str]:
    """Returns the names that alternatives require, if each requires one and has no other keyword.

    The list is empty for other alternatives.
    """
    names = []
    for one in alternatives:
        keywords = {k: v for k, v in _dict(one).items() if k not in REMARKS}
        required = _list(keywords.pop("required", None))
        if keywords not in ({}, {"type": "object"}) or len(required) != 1:
            return []
        names += required
    return names if len(set(names)) == len(names) else []


def _of_types(schema: Schema, types: Sequence[str]) -> Schema:
    """Returns a schema that takes values of some types only."""
    named = _dict(schema).get("type")
    if isinstance(named, list) and "$ref" not in schema:
        return {**schema, "type": [t for t in named if {"integer": "number"}.get(t, t) in types]}
    return {"allOf": [schema], "type": list(types)}


DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
"""The keywords whose schemas hold where a property is present."""
_CONDITIONS = ("not", "if", "then", "else", *DEPENDENT)
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""The type that a bound is about, the bound of its other values, and the step between the two."""


def without_conditions(schema: Part) -> Part:
    """Returns a schema with alternatives in the place of `not`, `if` and `dependent...`.

    Returns the schema itself, which is then refused, where no schema expresses an opposite.
    """
    if not schema.keys() & {*_CONDITIONS}:
        return schema
    try:
        parts = [*schema.get("allOf", ()), *map(_any_of, _choices(schema))]
    except (AttributeError, TypeError, ValueError):  # a part is no schema: its reader says so
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword not in _CONDITIONS}
    return schema if None in parts else rest | ({"allOf": parts} if parts else {})


def _choices(schema: Part) -> Iterator[list[Schema]]:
    """Yields the alternatives of each condition; None for one that no schema expresses."""
    if "not" in schema:
        yield [_negate(schema["not"], schema)]
    if "if" in schema and schema.keys() & {"then", "else"}:
        then, rest = schema.get("then", True), schema.get("else", True)
        other = _negate(schema["if"], schema)
        yield [{"allOf": [schema["if"], then]}, other and {"allOf": [other, rest]}]
    for keyword in DEPENDENT:
        for name, then in dict(schema.get(keyword, {})).items():
            needed = {"required": then} if isinstance(then, list) else then
            yield [{"properties": {name: False}}, needed]


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Returns a schema of the values that fit one of several; None if one of them is None."""
    if None in schemas or len(schemas) < 2:
        return schemas[0] if len(schemas) == 1 else None if schemas else False
    return {"anyOf": schemas}


def _negate(schema: Schema, beside: Schema) -> Schema:
    """Returns a schema of the values that do not fit another one; None if no schema does.

    Args:
        schema: the other schema.
        beside: a schema that the values fit as well.
    """
    if not isinstance(schema, dict):
        return not schema if isinstance(schema, bool) else None
    beside, keywords = _dict(beside), {k: v for k, v in schema.items() if k not in REMARKS}
    return _any_of(
        [_negated_keyword(keyword, value, beside) for keyword, value in keywords.items()]
    )


def _negated_keyword(keyword: str, value: Any, beside: Part) -> Schema:
    if keyword == "not":
        return value
    if keyword in _OPPOSITES and is_number(value):
        kind, bound, step = _OPPOSITES[keyword]
        return {"type": kind, bound: value + step} if value + step >= 0 or not step else False
    if keyword == "type":
        kinds = value if isinstance(value, list) else [value]
        left = [kind for kind in TYPES if kind not in kinds]
        if {*kinds} <= {*TYPES} or "number" in kinds:
            return {"type": left} if left else False
    listed = beside.get("enum", [False, True] if beside.get("type") == "boolean" else None)
    if keyword in ("const", "enum") and listed:
        taken = [comparable(one) for one in ([value] if keyword == "const" else value)]
        left = [one for one in listed if comparable(one) not in taken]
        return {"enum": left} if left else False
    if keyword == "required" and isinstance(value, list):
        return _any_of([{"type": "object", "properties": {name: False}} for name in value])
    if keyword == "properties":
        beside = _dict(beside.get("properties"))
        own = {name: _negate(one, beside.get(name)) for name, one in value.items()}
        return _any_of(
            [
                one and {"type": "object", "required": [name], "properties": {name: one}}
                for name, one in own.items()
            ]
        )
    others = [_negate(one, beside) for one in value] if keyword in ("allOf", "anyOf") else [None]
    return _any_of(others) if keyword != "anyOf" or None in others else {"allOf": others}


def resolve(root: Schema, reference: str) -> Schema:
    """Returns the schema that a pointer into the document points at; True for other references."""
    target = root
    steps = unquote(reference).split("/")
    for step in steps[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name, True) if isinstance(target, dict) else True
    return target if steps[0] == "#" else True


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
    """Returns a value's type and a key, equal for equal JSON values (1 and 1.0, not 1 and true)."""
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
    return [(_double(part[keyword]), exclusive) for part in parts if is_number(part.get(keyword))]


def _forbids(part: Part, name: str) -> bool:
    return (
        part.get("additionalProperties") is False
        and "patternProperties" not in part
        and name not in _dict(part.get("properties"))
    )


def is_number(value: object) -> bool:
    """Returns True for numbers of JSON, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
