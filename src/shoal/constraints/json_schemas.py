"""JSON schemas in the form that llguidance is to read: values that could run on without end are
bounded, and a `oneOf` that llguidance cannot prove is proved here.

Small models, and large ones at times, fill JSON with blanks or digits up to the limit of tokens.
llama.cpp bounds them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from shoal.constraints.filters import without_looks
from shoal.constraints.schema_checks import (
    BOUNDS,
    MOST_READ,
    NO_SCHEMA,
    inward,
    readable_pattern,
    require_exact,
    require_levels,
    require_writable,
    too_deep,
    with_counts,
    with_joined_bounds,
    with_open_units,
    with_orders,
    without_unevaluated,
)
from shoal.constraints.schema_proofs import REMARKS, Proofs, resolve, without_conditions
from shoal.errors import RequestError

WHITESPACE: dict[str, dict[str, Any]] = {
    "bounded": {"whitespace_pattern": r"[ ]|\n[ \t]{0,20}"},
    "compact": {"whitespace_flexible": False},
    "any": {},
}
"""The options of llguidance by the name of `config.Grammar.whitespace`."""
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
"""The escapes of JSON that are allowed. \\u is not: a key that the schema does not list could spell
a listed one by it."""
DIGITS, EXPONENT, FRACTION, COUNT = 20, 3, 9, 6
"""The most digits of a number before the point, and behind it (64-bit integers and all digits of a
double fit); of its exponent; of a fraction of a second; of a number in a duration (Python's has 9
for days, and 999,999 years fit)."""
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_MONTH_DAY = f"(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:[.][0-9]{{1,{FRACTION}}})?(?:Z|[+-]{_HOUR})"
_SIXTY_FOUR = "[A-Za-z0-9+/]"
_LAST_BYTES = f"(?:{_SIXTY_FOUR}[AQgw]==|{_SIXTY_FOUR}{{2}}[AEIMQUYcgkosw048]=)?"
_INTEGER, _BUILD = "(?:0|[1-9][0-9]*)", "[0-9A-Za-z-]+"
_LABEL = f"(?:{_INTEGER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_LABELS, _BUILDS = f"{_LABEL}(?:[.]{_LABEL})*", f"{_BUILD}(?:[.]{_BUILD})*"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
FORMATS: dict[str, dict[str, Any]] = {
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "duration": {
        "format": "duration",
        "pattern": f"^(?:[^0-9]+[0-9]{{1,{COUNT}}})+[^0-9]$",
        "maxLength": 32,
    },
    "email": {"format": "email", "pattern": "^[^@]{1,64}@", "maxLength": 254},
    "hostname": {"format": "hostname", "maxLength": 253},
    "uri": {"format": "uri", "maxLength": 2048},
    "byte": {"pattern": f"^(?:{_SIXTY_FOUR}{{4}})*{_LAST_BYTES}$"},
    "semver": {
        "pattern": f"^{_INTEGER}(?:[.]{_INTEGER}){{2}}(?:-{_LABELS})?(?:[+]{_BUILDS})?$",
        "maxLength": 256,
    },
    "json-pointer": {"pattern": f"^{_POINTER}$", "maxLength": 2048},
    "relative-json-pointer": {"pattern": f"^{_INTEGER}(?:#|{_POINTER})$", "maxLength": 2048},
}
"""The formats without an end of their own, or with texts that common parsers refuse: a year 0, a
30th of February, a 60th second, T and Z in lower case (RFC 3339 5.6 asks for upper case). The
lengths are from RFC 5321 4.5.3.1 and RFC 1035 2.3.4, and for a URI the longest that browsers take.
llguidance does not know the last four: base64 (RFC 4648; the bits that pad are 0), versions
(semver.org 2.0.0; as long as npm takes them), JSON pointers (RFC 6901) and relative ones without
`+` and `-`."""
_HEX, _BYTE = "[0-9a-fA-F]", "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
NAMES_BY_FORMAT = {
    "uuid": f"^{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$",
    "ipv4": f"^{_BYTE}(?:[.]{_BYTE}){{3}}$",
} | {name: said["pattern"] for name, said in FORMATS.items() if [*said] == ["pattern"]}
"""The formats that names of properties may have, as of pydantic's dict[UUID, ...], and their
patterns."""
KEPT = {*FORMATS, "ipv4", "ipv6", "uuid", "unknown"}
LOST = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    "regex",
)
"""The formats of JSON Schema that cannot be kept, and are refused. All others are remarks, as the
standard has it: those of OpenAPI, of pydantic, of nobody."""
NAMED = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w |-]+)\))\$", re.ASCII)
"""The patterns of one key, or of several."""
_CLASS, _REPEATED = r"\[\^?[\w .:-]+\]", r"(?:[*+?]|\{[0-9]*,?[0-9]*\})?"
SIMPLE = re.compile(rf"\^?(?:(?:[\w .:/@-]|{_CLASS}|\((?:\?:)?|\)|[|]){_REPEATED})*\$?", re.ASCII)
"""The patterns that mean the same to Python as to JSON Schema."""
DIALECTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
"""The versions of JSON Schema whose alternatives are looked at. The first has `id` for `$id`."""
_VALUES = ("const", "enum", "default", "examples")
_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def numbers() -> str:
    """Returns a regular expression of texts whose numbers, outside of strings, have bounded digits.

    All these numbers are doubles below infinity, which readers of JSON make of 1e999. The
    expression knows nothing else of JSON.
    """
    text = r'"(?:[^"\\]|\\(?s:.))*"'
    rest, behind = rf'(?:[^"0-9]|{text})', rf'(?:[^"0-9eE.]|{text})'
    fraction = f"(?:[.][0-9]{{1,{DIGITS}}})?"
    least = f"-[0-9]{{1,{EXPONENT}}}"
    most = "[+]?(?:[0-9]{1,2}|[01][0-9]{2}|2[0-7][0-9]|28[0-8])"  # of twenty digits
    number = f"[0-9]{{1,{DIGITS}}}{fraction}(?:[eE](?:{least}|{most}))?"
    large = f"[0-9]{fraction}[eE][+]?(?:289|29[0-9]|30[0-7])"
    return f"(?:{rest}|(?:{number}|{large}){behind})*(?:{number}|{large})?"


def prepare(text: str, whitespace: str) -> tuple[str, dict[str, Any]]:
    """Returns a schema for llguidance, and the options to read it with if it sets none itself.

    Args:
        text: the schema.
        whitespace: a name of `WHITESPACE`.

    Raises:
        RequestError: see `shoal.constraints.schema_checks`.
    """
    try:
        root = json.loads(text)
        require_levels(root)
        if not isinstance(root, (dict, bool)):
            raise RequestError(f"the json_schema grammar cannot be used: {NO_SCHEMA}")
        root = {} if root is True else _of_known_version(root)  # True has no room for options
        own = root.get("x-guidance") if isinstance(root, dict) else None
        made = _DocumentReader(root).bound(root)
        require_levels(made, MOST_READ)
        text = json.dumps(made, allow_nan=False, ensure_ascii=False)
        text.encode()
    except RequestError:
        raise
    except UnicodeEncodeError as error:
        raise RequestError(
            "the json_schema grammar cannot be used: it holds half of a surrogate pair, which no "
            "text has"
        ) from error
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        raise RequestError(f"the json_schema grammar cannot be used: no JSON: {error}") from error
    if not isinstance(root, dict):
        return text, {}
    blanks = isinstance(own, dict) and ("whitespace_flexible" in own or "whitespace_pattern" in own)
    return text, ESCAPES | ({} if blanks else WHITESPACE[whitespace])


def _of_known_version(root: Any) -> Any:
    """Returns a document with a `$schema` that llguidance knows, or without one.

    It would take another for a document to load.
    """
    if not isinstance(root, dict) or not isinstance(root.get("$schema"), str):
        return root
    draft = re.fullmatch(r"https?://json-schema[.]org/(draft[-/][\w-]+)/schema#?", root["$schema"])
    rest = {keyword: value for keyword, value in root.items() if keyword != "$schema"}
    if draft is None:
        return rest
    secure = "s" if "/" in draft[1] else ""  # since 2019-09
    return {"$schema": f"http{secure}://json-schema.org/{draft[1]}/schema#", **rest}


class _DocumentReader:
    """A reader of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        dialect = root.get("$schema", "2020-12") if isinstance(root, dict) else ""
        known = isinstance(dialect, str) and any(name in dialect for name in DIALECTS)
        if known and "draft-04" in dialect and '"const"' in json.dumps(root):
            known = False  # there it is no keyword, and llguidance reads it
        self._proofs = (
            Proofs(root, siblings="draft-0" not in str(dialect))
            if known and not _embeds(root)
            else None
        )

    def bound(self, schema: Any, names: bool = False) -> Any:
        """Returns a schema, or a list or mapping of schemas, with bounds.

        Args:
            names: True if the keys are names of properties or definitions.
        """
        if isinstance(schema, list):
            return [self.bound(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        if names:
            return {name: self.bound(one) for name, one in schema.items()}
        for keyword in ("const", "enum"):
            require_exact(schema.get(keyword))
            require_writable(schema.get(keyword))
        schema = {k: inward(k, v) if k in BOUNDS else v for k, v in schema.items()}
        schema = without_conditions(without_unevaluated(schema))
        schema = with_open_units(with_joined_bounds(with_counts(schema)))
        schema = _without_listed_patterns(self._with_named_keys(schema))
        _require_countable(schema)
        made = {k: v if k in _VALUES else self.bound(v, k in _NAMES) for k, v in schema.items()}
        made = _bounded_format(made)
        if "pattern" in schema:
            made = without_looks(made | {"pattern": readable_pattern(schema["pattern"])})
        if isinstance(by_pattern := made.get("patternProperties"), dict):
            made["patternProperties"] = {
                readable_pattern(one): by_pattern[one] for one in by_pattern
            }
        if "uniqueItems" in schema:
            made = with_orders(made, self._items(schema))
        return self._any_of(schema, made)

    def _with_named_keys(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns the schema without `propertyNames`, if it says nothing or others say the same."""
        if "propertyNames" not in schema:
            return schema
        names, values = schema["propertyNames"], schema.get("additionalProperties", True)
        rest = {k: v for k, v in schema.items() if k != "propertyNames"}
        if isinstance(names, dict) and [*names] == ["$ref"] and not _embeds(self._root):
            names = resolve(self._root, str(names["$ref"]))
        if not isinstance(names, dict):
            return rest if schema["propertyNames"] is True else schema
        said = {k: v for k, v in names.items() if k not in REMARKS and (k, v) != ("type", "string")}
        if not said:
            return rest
        names = said["enum"] if [*said] == ["enum"] else [*said.values()]
        pattern = _pattern_of_names(said)
        if [*said] in (["enum"], ["const"]) and all(isinstance(one, str) for one in names):
            keys = {"properties": dict.fromkeys(names, values)}
        elif pattern is not None:
            keys = {} if values is False else {"patternProperties": {pattern: values}}
        else:
            return rest if is_remark(said) and [*said] == ["format"] else schema
        if "patternProperties" in schema:
            return schema
        listed = schema.get("properties", {})
        if not isinstance(listed, dict) or (
            listed and pattern and not _read_alike(pattern, listed)
        ):
            return schema
        own = {
            name: one if (re.search(pattern, name) if pattern else name in names) else False
            for name, one in listed.items()
        }
        if (
            pattern
            and values not in (True, False)
            and any(one is not False for one in own.values())
        ):
            return schema  # llguidance would have `values` hold for listed names as well
        keys["properties"] = keys.get("properties", {}) | own
        return rest | keys | {"additionalProperties": False}

    def _items(self, schema: dict[str, Any]) -> Any:
        """Returns the schema of an array's items.

        It is True, which lists no values, where a reference leads nowhere, stands beside other
        keywords, or may lead to an embedded document.
        """
        items = schema.get("items")
        if isinstance(items, dict) and isinstance(items.get("$ref"), str):
            if len(items) == 1 and not _embeds(self._root):
                return resolve(self._root, items["$ref"])
            return True
        return items

    def _any_of(self, schema: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        """Returns `anyOf` in the place of `oneOf`, if it can take the same values."""
        alternatives = schema.get("oneOf")
        if self._proofs is None or not isinstance(alternatives, list) or "anyOf" in schema:
            return made
        rest = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        several = self._proofs.any_of(rest, alternatives, made["oneOf"])
        if several is None:
            return made
        return {k: v for k, v in made.items() if k != "oneOf"} | {"anyOf": several}


def _pattern_of_names(said: dict[str, Any]) -> str | None:
    """Returns the one pattern that says as much of a name as a schema does; None if none does."""
    if said.keys() <= {"minLength", "maxLength"}:
        return f"^.{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
    if [*said] == ["pattern"] and isinstance(said["pattern"], str):
        return said["pattern"]
    if [*said] == ["format"]:
        return NAMES_BY_FORMAT.get(said["format"]) if isinstance(said["format"], str) else None
    return None


def _read_alike(pattern: str, names: Iterable[str]) -> bool:
    """Returns True if Python's `re` provably finds a pattern in names where JSON Schema does."""
    return bool(SIMPLE.fullmatch(pattern)) and all(name.isprintable() for name in names)


def _without_listed_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema without patterns of listed properties' names, which fit both.

    llguidance takes the listed names out of a pattern's keys. If that leaves no key, a text could
    go on to a place where none is possible.
    """
    patterns, listed = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, dict) or not isinstance(listed, dict):
        return schema
    left, own = {}, dict(listed)
    for pattern, one in patterns.items():
        match = NAMED.fullmatch(pattern)
        names = (match[1] or match[2]).split("|") if match else []
        if not own.keys() & set(names):
            left[pattern] = one
            continue
        own |= {name: {"allOf": [own[name], one]} for name in names if name in own}
        if others := [name for name in names if name not in own]:
            left[f"^({'|'.join(others)})$"] = one
    rest = {k: v for k, v in schema.items() if k != "patternProperties"}
    return rest | {"properties": own} | ({"patternProperties": left} if left else {})


def _require_countable(schema: dict[str, Any]) -> None:
    """Raises RequestError: one key that comes twice could satisfy `minProperties`."""
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    others = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if isinstance(least, (int, float)) and least > max(named, 1) and others:
        raise RequestError(
            f"the json_schema grammar cannot be used: minProperties {least} with keys that are not "
            "listed, as a key could come twice; list keys in required, or leave minProperties out"
        )


def _embeds(schema: Any, top: bool = True) -> bool:
    """Returns True if the document holds documents with an address of their own.

    References inside of them would be relative to that address.
    """
    if isinstance(schema, dict):
        named = not top and any(
            isinstance(schema.get(keyword), str) for keyword in ("$id", "id", "$schema")
        )
        return named or any(_embeds(value, False) for value in schema.values())
    return isinstance(schema, list) and any(_embeds(value, False) for value in schema)


def is_remark(schema: dict[str, Any]) -> bool:
    """Returns True if `format` says nothing of the texts, or the texts are listed."""
    name, listed = schema.get("format"), "enum" in schema or "const" in schema
    return isinstance(name, str) and (listed or name not in (*KEPT, *LOST))


def remarks(text: str) -> list[str]:
    """Returns the names of the formats in a schema that are passed over."""
    texts = dict[str, None]()

    def look(schema: Any, names: bool = False) -> None:
        if isinstance(schema, list):
            for one in schema:
                look(one)
        if isinstance(schema, dict):
            if not names and is_remark(schema):
                texts[schema["format"]] = None
            for k, v in schema.items():
                if names or k not in _VALUES:
                    look(v, not names and k in _NAMES)

    try:
        look(json.loads(text))
    except (ValueError, RecursionError):
        return []  # reading it says why it cannot be used
    return [*texts]


def _bounded_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with its format's bounds; other keywords about texts take precedence."""
    name = schema.get("format")
    if is_remark(schema):
        return {keyword: value for keyword, value in schema.items() if keyword != "format"}
    bounds = FORMATS.get(name) if isinstance(name, str) else None
    if bounds is None or any(
        keyword in schema for keyword in ("const", "enum", "pattern", "allOf")
    ):
        return schema
    return {
        **bounds,
        **{keyword: value for keyword, value in schema.items() if keyword != "format"},
    }
