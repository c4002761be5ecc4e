"""The values of arguments in Lark's syntax, as the forms of `written_calls` write them, by schemas.

A value inside of a list or an object is written in JSON, in Python or in Gemma's form, without the
marks that end an argument or a call. `Unwritable` refuses a schema that a form cannot express.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from shoal.constraints.grammar_sources import quote
from shoal.constraints.json_schemas import prepare
from shoal.constraints.schema_proofs import REMARKS
from shoal.serve.call_texts import (
    LONGEST_COUNT,
    STRING_WORDS,
    Rules,
    Unwritable,
    escaped,
    lengths,
    require_free,
    string,
    string_bounds,
    texts_with,
    whole_texts,
)
from shoal.serve.written_calls import GEMMA_QUOTE

NAME = re.compile(r"[\w$.@/-]+")
"""The names of tools and arguments that every form can hold."""
OWN_REMARKS = (*REMARKS, "$schema", "strict", "readOnly", "writeOnly")
OBJECT_WORDS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
DEPTH = 8
"""The most references behind one another, and levels of values in each other."""
INTEGER = "-?(0|[1-9][0-9]{0,19})"
NUMBER = rf"{INTEGER}(\.[0-9]{{1,20}})?([eE][+-]?[0-9]{{1,2}})?"
QUOTE = r"\x{22}"
ESCAPED = r"\\[nrbtf\\\x{22}]"
"""The escapes of JSON that Python reads alike; see `shoal.constraints.json_schemas.ESCAPES`."""
SAFE = re.compile(r"\^(?:[\w \-:,;=@%&~.()|?*+{}\[\]]|\\[wd.+*?()\[\]{}|-])*\$", re.ASCII)
"""The patterns of texts that need no escapes and hold no marks, if a point in them has a class or
a backslash."""


class ValueStyle(NamedTuple):
    """The way in which values inside of lists and objects are written.

    Attributes:
        true: the word for true.
        false: the word for false.
        null: the word for null.
        gemma: True if keys are bare, and texts stand between marks of their own.
        single: True if texts may stand between single quotes too.
    """

    true: str = "true"
    false: str = "false"
    null: str = "null"
    gemma: bool = False
    single: bool = False


STYLES = {
    "python": ValueStyle("True", "False", "None", single=True),
    "gemma": ValueStyle(gemma=True),
}
"""The styles of the forms; the others write JSON."""


class Values:
    """A writer of values inside of lists and objects.

    Args:
        rules: the rules of the grammar.
        style: the way of writing.
        banned: the texts that no text of a value holds.
    """

    def __init__(self, rules: Rules, style: ValueStyle, banned: tuple[str, ...]) -> None:
        self._rules, self._style, self._banned = rules, style, banned
        self._blank = "" if style.gemma else rules.terminal(r"/[ ]|\n[ \t]{0,20}/") + "?"

    def any_of(self, schema: Any, root: Any, depth: int = 0) -> str:
        """Returns the name of a rule of a schema's values. Raises Unwritable."""
        if depth > DEPTH:
            raise Unwritable
        rules = [self.one(one, root, depth) for one in alternatives(schema, root)]
        return self._rules.rule(" | ".join(rules))

    def one(self, one: dict[str, Any], root: Any, depth: int = 0) -> str:
        """Returns the values of one alternative. Raises Unwritable."""
        kind = one.get("type")
        if "enum" in one:
            return " | ".join(self._rules.text(self.written(value)) for value in one["enum"])
        if kind == "string":
            return self._string(one)
        if kind in ("integer", "number"):
            return self._number(one)
        if kind in ("boolean", "null"):
            own = self._style
            return quote(own.null) if kind == "null" else f"{quote(own.true)} | {quote(own.false)}"
        if kind == "array":
            return self._array(one, root, depth)
        if kind == "object":
            return self._object(one, root, depth)
        if one:
            raise Unwritable
        return self._anything(root, depth)

    def written(self, value: Any) -> str:
        """Returns a value that has no parts as it is written. Raises Unwritable."""
        if isinstance(value, (dict, list)):
            raise Unwritable
        if isinstance(value, str):
            require_free(value, self._banned)
            if self._style.gemma:
                return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
            text = json.dumps(value, ensure_ascii=False)
            if "\\u" in re.sub(r"\\\\", "", text):
                raise Unwritable
            return text
        own = {True: self._style.true, False: self._style.false}
        if isinstance(value, bool):
            return own[value]
        return self._style.null if value is None else json.dumps(value, allow_nan=False)

    def members(
        self, schema: Any, root: Any, depth: int, heads: Callable[[str, Any], str]
    ) -> list[tuple[str, bool]]:
        """Returns the members of an object in their order, and whether they are required.

        Args:
            schema: the schema of the object.
            root: the schema that references lead into.
            depth: the number of values around it.
            heads: makes the text of a member, given its name and its schema.

        Raises:
            Unwritable: the schema has a keyword that a grammar cannot express.
        """
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if {*schema} - {*OBJECT_WORDS, *OWN_REMARKS} or not isinstance(properties, dict):
            raise Unwritable
        if not isinstance(required, list) or not {*map(str, required)} <= {*properties}:
            raise Unwritable
        if depth > DEPTH:
            raise Unwritable
        return [(heads(name, own), name in required) for name, own in properties.items()]

    def separated(self, members: list[tuple[str, bool]], comma: str) -> str:
        """Returns members with commas between them; those not required may be left out."""
        first, behind = "", ""  # the members from here on: as the first ones, and behind others
        for one, needed in reversed(members):
            name = self._rules.rule(one)
            begun, left_out = f"{name} {behind}", f" | {first})" if first else ")?"
            first = begun if needed else f"({begun}{left_out}"
            behind = self._rules.rule(
                f"{comma} {begun}" if needed else f"({comma} {name})? {behind}"
            )
        return first

    def _comma(self) -> str:
        return f'{self._blank} "," {self._blank}'

    def _string(self, one: dict[str, Any]) -> str:
        bounds, rules = string_bounds(one), self._rules
        if self._style.gemma:
            return f"{rules.text(GEMMA_QUOTE)} {string(rules, bounds, self._banned, GEMMA_QUOTE)}"
        if "pattern" in bounds:
            pattern = bounds["pattern"]
            if not SAFE.fullmatch(pattern) or re.search(r"(?<!\\)\.|\[\^", pattern):
                raise Unwritable
            return rules.terminal(f"/{QUOTE}({whole_texts(pattern)}){QUOTE}/")
        choices = [self._quoted('"', bounds)]
        if self._style.single:
            choices.append(self._quoted("'", bounds))
        return " | ".join(rules.terminal(one) for one in choices)

    def _quoted(self, quote: str, bounds: Mapping[str, Any]) -> str:
        mark, (least, most) = escaped(quote), lengths(bounds)
        counted = self._banned and (most != "" or least > LONGEST_COUNT)
        escape = ESCAPED if quote == '"' else r"\\[nrbtf\\']"
        unit = rf"(?:[^{mark}\\{'<' if counted else ''}\x00-\x1f]|{escape})"
        body = f"/{mark}{unit}{{{least},{most}}}{mark}/"
        return body if counted or not self._banned else f"{body} & ~/{texts_with(self._banned)}/"

    def _number(self, one: dict[str, Any]) -> str:
        words = {*one} - {"type"}
        if not words:
            return self._rules.terminal(f"/{INTEGER if one['type'] == 'integer' else NUMBER}/")
        text, options = prepare(json.dumps(one), "bounded")
        return self._rules.rule(f"%json {json.dumps({**json.loads(text), 'x-guidance': options})}")

    def _array(self, one: dict[str, Any], root: Any, depth: int) -> str:
        if {*one} - {"type", "items", "minItems", "maxItems"}:
            raise Unwritable
        least, most = one.get("minItems", 0), one.get("maxItems")
        if not isinstance(least, int) or not (most is None or isinstance(most, int)):
            raise Unwritable
        if most == 0:
            return f'"[" {self._blank} "]"'
        item = self.any_of(one.get("items", True), root, depth + 1)
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._comma()} {item}){more}"
        inner = f"{items} {self._blank}"
        return f'"[" {self._blank} {inner if least else f"({inner})?"} "]"'

    def _object(self, one: dict[str, Any], root: Any, depth: int) -> str:
        blank, values = self._blank, one.get("additionalProperties", True)
        if not one.get("properties") and values is not False:
            if {*one} - {*OBJECT_WORDS} or one.get("required"):
                raise Unwritable
            value = self.any_of(values, root, depth + 1)
            member = f'{self._key()} {blank} ":" {blank} {value}'
            inner = f"({member} ({self._comma()} {member})* {blank})?"
            return f'"{{" {blank} {inner} "}}"'

        def head(name: str, own: Any) -> str:
            if self._style.gemma and not NAME.fullmatch(name):
                raise Unwritable
            require_free(name, self._banned)
            key = name if self._style.gemma else self.written(name)
            value = self.any_of(own, root, depth + 1)
            return f'{quote(key)} {blank} ":" {blank} {value}'

        members = self.separated(self.members(one, root, depth, head), self._comma())
        return f'"{{" {blank} {members} {blank} "}}"'

    def _key(self) -> str:
        if self._style.gemma:
            return self._rules.terminal("/[A-Za-z_][A-Za-z0-9_]*/")
        return self._rules.terminal(self._quoted('"', {}))

    def _anything(self, root: Any, depth: int) -> str:
        """Returns any value, up to a depth."""
        own = self._style
        words = [quote(word) for word in (own.true, own.false, own.null)]
        rules = [self._string({}), self._number({"type": "number"}), *words]
        if depth < DEPTH:
            rules += [self._array({}, root, depth), self._object({}, root, depth)]
        return " | ".join(rules)


def alternatives(schema: Any, root: Any, depth: int = DEPTH) -> Iterator[dict[str, Any]]:
    """Yields the alternatives of a schema: no references, no `anyOf`, one type each.

    Raises:
        Unwritable: the schema cannot be split into such alternatives.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or not depth:
        raise Unwritable
    words = {k: v for k, v in schema.items() if k not in OWN_REMARKS}
    (word,) = words if len(words) == 1 else ("",)
    parts = words.get(word)
    if word == "$ref":
        yield from alternatives(_referred(str(parts), root), root, depth - 1)
    elif word in ("anyOf", "oneOf", "allOf") and isinstance(parts, list) and parts:
        combined = [[*alternatives(one, root, depth - 1)] for one in parts]
        if (word == "allOf" and len(parts) > 1) or (word == "oneOf" and not _apart(combined)):
            raise Unwritable
        yield from (one for each in combined for one in each)
    elif isinstance(words.get("type"), list) and not {"enum", "const"} & {*words}:
        for kind in words["type"]:
            own = {k: v for k, v in words.items() if kind == "string" or k not in STRING_WORDS}
            bare = kind in ("string", "null", "boolean")
            own = {k: v for k, v in own.items() if not bare or k in STRING_WORDS}
            yield {**own, "type": kind}
    elif {"enum", "const"} & {*words}:
        yield {"enum": listed(words)}
    else:
        yield words


def _referred(reference: str, root: Any) -> Any:
    place = root
    for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else [""]:
        place = place.get(part) if isinstance(place, dict) else None
    return place


def _apart(alternatives: list[list[dict[str, Any]]]) -> bool:
    """Returns True if no value is of two of the alternatives, by their types."""
    kinds = [{str(one.get("type", "any")) for one in each} for each in alternatives]
    kinds = [{"number" if kind == "integer" else kind for kind in each} for each in kinds]
    named = all("any" not in each for each in kinds)
    return named and sum(map(len, kinds)) == len(set().union(*kinds))


KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def listed(one: Mapping[str, Any]) -> list[Any]:
    """Returns the values that a schema lists. Raises Unwritable."""
    values = one.get("enum", [one["const"]] if "const" in one else [])
    given = one.get("type")
    kinds = {given} if isinstance(given, str) else {*given} if isinstance(given, list) else None
    if {*one} - {"enum", "const", "type"} or not isinstance(values, list) or not values:
        raise Unwritable
    for value in values:
        kind = KINDS.get(type(value))
        fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
        same = "const" not in one or (type(value) is type(one["const"]) and value == one["const"])
        if kind is None or not (fits and same):
            raise Unwritable
    return values
