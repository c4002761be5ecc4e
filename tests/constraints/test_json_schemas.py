"""JSON that ends: bounds on white space, numbers and formats; `oneOf` with alternatives that are proved to exclude each other.

Tests of: constraints.json_schemas, schema_checks, grammar, compiler and masks.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal
from schemas import SCHEMAS
from shoal.config import Grammar, Sampling
from shoal.constraints import compiler, json_schemas, schema_proofs
from shoal.constraints import grammar as grammars
from shoal.constraints import masks as row_masks
from shoal.constraints.schema_proofs import Proofs
from shoal.errors import RequestError
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions

TOKENIZER = tiny_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def row_of(grammar: Grammar) -> Row:
    row = Row(Request((1,), 1, Sampling(grammar=grammar)), 0, 0, 0, [1], frozenset([END]), 999)
    row_masks.begin(row, [compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(grammar)])
    return row


def masks(grammar: Grammar, text: str) -> Tensor:
    """What may follow each beginning of a text, [characters + 1, vocabulary]."""
    made = row_masks.allowed_tokens(
        Positions([row_of(grammar)], [encode(text)]), torch.empty(1, len(encode(text)) + 1, VOCABULARY)
    )
    assert made is not None
    return made[0]


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a text is of the grammar, token by token."""
    return all(bool(mask[token]) for mask, token in zip(masks(grammar, text), [*encode(text), END], strict=True))


def takes(grammar: Grammar, text: str) -> bool:
    """The same of the grammar's matcher alone, for many texts."""
    matcher = compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(grammar).starts[0].deep_copy()
    ids = encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def of(schema: Any, **options: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), **options)


# ── white space ─────────────────────────────────────────────────────────────────────────────────────────────────────

PAIR = {
    "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "null"}}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
WRITTEN = {
    "compact": json.dumps({"a": True, "b": [None]}, separators=(",", ":")),
    "as json.dumps writes it": json.dumps({"a": True, "b": [None]}),
    "indented": json.dumps({"a": True, "b": [None, None]}, indent=4),
    "indented by tabs": json.dumps({"a": True, "b": [None, None]}, indent="\t"),
    "two spaces": '{  "a":true,"b":[]}',
    "two line breaks": '{\n\n"a":true,"b":[]}',
    "an indent of 21": "{\n" + 21 * " " + '"a":true,"b":[]}',
    "a line break behind spaces": '{ \n"a":true,"b":[]}',
    "any other blank": '{\r"a":true,"b":[]}',
}


@pytest.mark.parametrize(
    ("options", "own", "taken"),
    [
        ({}, {}, 4),
        ({"whitespace": "bounded"}, {}, 4),
        ({"whitespace": "compact"}, {}, 1),
        ({"whitespace": "any"}, {}, 9),
        ({}, {"whitespace_flexible": False}, 1),
        ({}, {"whitespace_flexible": True}, 9),
        ({"whitespace": "compact"}, {"whitespace_pattern": r"[ ]{2}"}, 1 + 1),
        ({"whitespace": "compact"}, {"lenient": True}, 1),
    ],
)
def test_white_space_is_bounded(options: dict[str, str], own: dict[str, Any], taken: int) -> None:
    schema = {**PAIR, **({"x-guidance": own} if own else {})}
    found = [name for name, text in WRITTEN.items() if fits(of(schema, **options), text)]
    assert found == ["compact", "two spaces"] if "whitespace_pattern" in own else found == list(WRITTEN)[:taken]


@pytest.mark.parametrize(
    "grammar", [Grammar("json_object"), of(True), of({}), of({"$ref": "#/$defs/x", "$defs": {"x": {}}})]
)
def test_white_space_is_bounded_where_nothing_is_said_of_the_json(grammar: Grammar) -> None:
    assert fits(grammar, '{\n  "a": [1, {}]\n}')
    assert not fits(grammar, '{  "a": [1, {}]}')
    assert not fits(grammar, '{"a": [1,\n\n{}]}')


def test_what_white_space_may_be() -> None:
    with pytest.raises(RequestError, match="whitespace of a grammar must be one of bounded, compact, any, got 'none'"):
        Grammar("json_object", whitespace="none")
    with pytest.raises(RequestError, match="whitespace of a regex grammar must be left as it is, got 'any'"):
        Grammar("regex", "a", "any")


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

LONG = "9" * 20
NUMBERS = {
    "an integer": ({"type": "integer"}, [LONG, f"-{LONG}", "0", str(-(2**63)), str(2**64 - 1)], [f"1{LONG}", f"-1{LONG}"]),
    "a number": (
        {"type": "number"},
        [LONG, f"{LONG}.{LONG}", f"-{LONG}.{LONG}e-308", "1e5", "1E+300", "5e-324", str(2**-20), repr(1e-5)],
        [f"1{LONG}", f"1.1{LONG}", "1e1000", "1e309", "1E+1000", "1e-1000", f"{LONG}.1{LONG}"],
    ),
    "with a minimum": ({"type": "integer", "minimum": 5}, ["5", LONG], ["4", f"1{LONG}"]),
    "with bounds": ({"type": "number", "minimum": 0, "maximum": 1}, [f"0.{LONG}", "1"], [f"0.1{LONG}", "1.1"]),
    "a multiple": ({"type": "number", "multipleOf": 0.01}, ["0.25", f"{LONG}.25"], ["0.255", f"1{LONG}.25"]),
    "anything": ({}, [LONG, f"[{LONG}]", f'{{"a":{LONG}}}', f'"1{LONG}"', f'["\\"",{LONG}]'], [f"1{LONG}", f'{{"a":1{LONG}}}']),
    "in arrays": ({"type": "array"}, [f"[{LONG},{LONG},true,false,null]"], [f"[1,true,1{LONG}]", f"[false,1{LONG}]"]),
    "a text of digits": ({"type": "string"}, [f'"1{LONG}"', f'"\\\\{LONG}1"', f'"\\"1{LONG}"'], []),
    "words": ({"type": ["boolean", "null"]}, ["true", "false", "null"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_digits_are_bounded(name: str) -> None:
    schema, taken, left = NUMBERS[name]
    assert [text for text in taken if not fits(of(schema), text)] == []
    assert [text for text in left if fits(of(schema), text)] == []


@pytest.mark.parametrize("schema", [{"const": 10**25}, {"type": "integer", "minimum": 10**15, "multipleOf": 10**9}])
def test_a_number_that_needs_them_has_more_digits(schema: dict[str, Any]) -> None:
    """Nobody may be left with nothing to say."""
    allowed = masks(of(schema), "1" + 25 * "0")
    assert bool(allowed[:-1].any(-1).all())
    assert fits(of({"const": 10**25}), "1" + 25 * "0")


def test_masks_of_drafted_positions_are_those_of_plain_decoding() -> None:
    """Past the bound on digits too, and past a place where it was given up."""
    text = f'{{"a":{LONG},"b":[1.{LONG}, 1{25 * "0"}],"c":-{LONG}}}'
    schema = {
        "type": "object",
        "properties": {"b": {"type": "array", "items": {"anyOf": [{"const": 10**25}, {"type": "number"}]}}},
    }
    for grammar in (of(schema), Grammar("json_object")):
        whole, tokens = masks(grammar, text), encode(text)
        row = row_of(grammar)
        for j, expected in enumerate(whole):
            one = row_masks.allowed_tokens(Positions([row], [tokens[j:]]), torch.empty(1, 1, VOCABULARY))
            assert one is not None
            assert torch.equal(one[0, 0], expected)
            for token in tokens[j : j + 1]:
                row.tokens.append(token)
                row_masks.advance(row, token)


class Counting:
    """llguidance's functions that fill masks, with the number of masks that they were asked for."""

    def __init__(self) -> None:
        self.masks, self._real = 0, grammars._filling()

    def __getattr__(self, name: str) -> Any:
        def counted(*arguments: Any) -> None:
            if name.endswith("draft_tokens"):
                self.masks += sum(1 + len(ahead) for _, _, ahead in arguments[1])
            else:
                self.masks += len(arguments[1]) if name.endswith("par") else 1
            getattr(self._real, name)(*arguments)

        return counted


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize(
    ("grammar", "matchers"),
    [(Grammar("regex", "[0-9]*"), 1), (of({"type": "array", "items": {"type": "string"}, "minItems": 9}), 2)],
)
def test_the_bound_on_digits_costs_one_mask_more_per_position(
    grammar: Grammar, matchers: int, lookahead: int, monkeypatch: pytest.MonkeyPatch, saved_pair: tuple[Path, Path]
) -> None:
    counting, by_matcher = Counting(), [0, 0]
    filled = grammars._pack_masks

    def count(states: Any, which: int, *arguments: Any) -> Any:
        before = counting.masks
        found = filled(states, which, *arguments)
        by_matcher[which] += counting.masks - before
        return found

    monkeypatch.setattr(grammars, "_clock", lambda: 0.0)  # on a busy machine masks that were late are filled again
    monkeypatch.setattr(grammars, "_filling", lambda: counting)
    monkeypatch.setattr(grammars, "_pack_masks", count)
    model = shoal.load(*saved_pair, dtype="float32", device="cpu")
    options: dict[str, Any] = {"lookahead": lookahead, "seed": 0, "max_new_tokens": 20, "temperature": 0.8}
    stats = model.generate("ab", n=2, grammar=grammar, **options).stats
    assert by_matcher == [by_matcher[0]] * matchers + [0] * (2 - matchers)
    assert sum(by_matcher) == counting.masks
    # A mask for each position at most; with drafts also for each step of the drafter, and for the position after them.
    assert stats.row_rounds <= by_matcher[0] <= stats.row_rounds * (2 * lookahead + 1)


# ── formats ─────────────────────────────────────────────────────────────────────────────────────────────────────────

STAMP, STRAY = "2024-02-29T23:59:59", (".1234567890Z", ".Z", "z", "+24:00", "-01:60")
FORMATS = {
    "date-time": (
        [f"{STAMP}Z", f"{STAMP}.5Z", f"{STAMP}.123456789+13:45", "0001-01-01T00:00:00-00:00"],
        [STAMP, *(STAMP + end for end in STRAY), "2024-02-29t00:00:00Z", "2023-02-29T00:00:00Z"],
    ),
    "time": (
        ["23:59:59Z", "00:00:00.123456789+01:00"],
        ["23:59:60Z", "24:00:00Z", "10:00:00+24:00", "10:00:00.1234567890Z", "10:00Z"],
    ),
    "date": (["2024-02-29", "9999-12-31"], ["2023-02-29", "0000-01-01", "1900-02-29", "2024-04-31"]),
    "duration": (["P1Y2M3DT4H5M6S", "P3W"], ["P" + 40 * "1" + "Y", "P", "P1234567D"]),
    "email": (["a.b+c@example.org", "x" * 64 + "@" + ".".join(["y" * 46] * 4)], ["x" * 65 + "@y", "x@" + "y." * 127 + "y"]),
    "hostname": ([".".join(["y" * 50] * 4)], ["y." * 127 + "y"]),
    "uri": (["https://example.org/a?b=c#d"], ["https://" + "y" * 2048]),
    "byte": (["", "YQ==", "YWI=", "YWJj+/09"], ["Y", "YQ=", "YR==", "YWJ=", "YQ==YQ==", "YW J", "-_-_"]),
    "semver": (
        ["0.0.0", "1.20.3", "1.0.0-alpha.1", "1.0.0-0a.-b", "1.0.0--", "2.0.0-rc.1+build.05"],
        ["1", "1.2", "01.2.3", "1.2.3-", "1.2.3-01", "1.2.3+", "v1.2.3", "1.2.3-a..b", "1.0.0-" + "a" * 251],
    ),
    "json-pointer": (["", "/", "/a~1b/0/~0", "/a b"], ["a", "/~", "/~2", "#/a"]),
    "relative-json-pointer": (["0", "12#", "1/a~0"], ["", "01", "/a", "1#/a", "1~"]),
    "binary": (["", "any text!"], []),
    "password": (["", "any text!"], []),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_bounded(name: str) -> None:
    taken, left = FORMATS[name]
    grammar = of({"type": "string", "format": name})
    assert [text for text in taken if not fits(grammar, json.dumps(text))] == []
    assert [text for text in left if fits(grammar, json.dumps(text))] == []


def test_a_date_is_a_day_of_the_calendar() -> None:
    pattern = json_schemas.FORMATS["date"]["pattern"]
    for year in (0, 1, 4, 10, 96, 100, 200, 400, 1000, 1900, 1996, 2000, 2023, 2024, 2100, 4000, 9000, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date(year, month, day)
                    real = True
                except ValueError:
                    real = False
                assert bool(re.search(pattern, text)) == real, text


@given(st.datetimes(timezones=st.sampled_from([datetime.UTC, datetime.timezone(datetime.timedelta(hours=-9, minutes=-30))])))
@settings(max_examples=30, deadline=None)
def test_every_moment_can_be_said(moment: datetime.datetime) -> None:
    assert fits(of({"type": "string", "format": "date-time"}), json.dumps(moment.isoformat()))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "date-time", "pattern": "^1999"}, "1999-01-01T00:00:00.12345678901234567890Z"),
        ({"type": "string", "format": "email", "maxLength": 300}, "a@" + "y." * 140 + "y"),
        ({"format": "date", "enum": ["0000-01-01", "2000-01-01"]}, "0000-01-01"),
        ({"format": "email", "enum": ["a", "b"]}, "a"),
        ({"type": "string", "pattern": r"^\b[a-z]+\d\b$"}, "ab1"),
        ({"type": "string", "pattern": r"^\bfo{2}\w{1,3}\b$"}, "foobar"),
    ],
)
def test_what_else_a_schema_says_of_a_text_goes_first(schema: dict[str, Any], text: str) -> None:
    assert fits(of(schema), json.dumps(text))


@pytest.mark.parametrize(
    ("schema", "taken", "left"),
    [
        ({"format": "date", "pattern": "^2"}, ["2024-01-31"], ["1024-01-31", "2abc"]),
        ({"format": "date-time", "minLength": 1}, [f"{STAMP}.123456789Z"], [f"{STAMP}.1234567890Z"]),
        ({"format": "date-time", "maxLength": 99}, [f"{STAMP}.123456789Z"], [f"{STAMP}.1234567890Z"]),
    ],
)
def test_a_format_holds_beside_a_pattern_or_a_length(schema: dict[str, Any], taken: list[str], left: list[str]) -> None:
    grammar = of({"type": "string", **schema})
    assert [text for text in taken + left if fits(grammar, json.dumps(text))] == taken


def test_names_and_values_that_look_like_keywords_are_left_alone() -> None:
    """A property named `format`, a value that holds a schema."""
    schema = {
        "type": "object", "required": ["format", "oneOf", "default"], "additionalProperties": False,
        "properties": {
            "format": {"const": "date"}, "oneOf": {"const": {"oneOf": [{"const": 1}, {"const": 2}], "format": "date"}},
            "default": {"type": "string", "format": "date"},
        },
    }  # fmt: skip
    text = '{"format":"date","oneOf":{"oneOf":[{"const":1},{"const":2}],"format":"date"},"default":"%s"}'
    assert fits(of(schema), text % "2024-01-31")
    assert not fits(of(schema), text % "0000-01-31")


@pytest.mark.parametrize("name", ["regex", "iri", "uri-template", "idn-email"])
def test_formats_of_the_standard_that_cannot_be_kept_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f'"format": "{name}" cannot be kept: leave it out'):
        row_of(of({"type": "string", "format": name}))
    assert fits(of({"format": name, "enum": ["a", "b"]}), '"a"')  # which is one, is the schema's word


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        *((one, r"looks around .* cannot be kept: leave it out of ") for one in
          (r"^\ba*$", r"a?\b$", r"^\ba|b\b$", r"\x20\b$", r"^[ -z]\b$", r"^\ba{0,1}$", r"^b(?!a)", r"a\bb")),
        ("[", r"the pattern \[ cannot be used: unclosed character class"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_kept_is_named(pattern: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as error:
        row_of(of({"type": "string", "pattern": pattern}))
    assert "parse error" not in str(error.value)


MEANT = [
    ({"type": "string", "pattern": '^[^"]*$'}, ["", "a", "\\"], ['"', 'a"']),
    ({"type": "string", "pattern": r"^[^\\]$"}, ["a", '"', "\n"], ["\\"]),
    ({"type": "string", "pattern": r"^[\x00-\x1f]$"}, ["\n", "\t"], ["\\", '"', " "]),
    ({"type": "string", "pattern": r"^[\u0000-\u0020]\p{Cc}$"}, [" \n"], ['"\n', '\n"', "\n\\"]),
    ({"patternProperties": {'^[^"]$': {"type": "null"}}, "additionalProperties": False}, [{"a": None}, 1], [{'"': None}]),
    ({"type": "string", "pattern": "^[[a]$"}, ["[", "a"], ["b"]),
    ({"type": "string", "pattern": "^[[:alpha:]]$"}, ["a]", ":]", "[]"], ["a", "x]", "b"]),
    ({"type": "string", "pattern": "^[a&&b]$"}, ["a", "b", "&"], ["c"]),
    ({"type": "string", "pattern": "^[ab~~bc]$"}, ["b", "~"], ["d"]),
    ({"type": "string", "pattern": "^[^]a[]$"}, ["b"], ["]", "a", "["]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.1, 0.5, 1e-4], [0, 0.0, 0.6]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.1, 0.999], [0, 1]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, [0.1], [0]),
    ({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, [2.1], [2, 2.5]),
    ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, [-0.1], [0, -0.0, -0.5]),
    ({"type": "number", "minimum": -2.5, "exclusiveMaximum": -2}, [-2.1, -2.5], [-2, -2.0]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "😀😀"], ["", "abc"]),
    ({"properties": {"a": {"type": "null"}}, "unevaluatedProperties": False, "type": "object"}, [{}, {"a": None}], [{"b": 1}]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False}, [[None], []], [[None, None]]),
    ({"type": "array", "items": {"type": "null"}, "unevaluatedItems": True}, [[None]], [[1]]),
    ({"$schema": "https://json-schema.org/draft-07/schema#", "type": "null"}, [None], [1]),
    ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "null"}, [None], [1]),
    ({"propertyNames": {"const": "a"}, "additionalProperties": {"type": "null"}}, [{"a": None}, {}, 1], [{"b": None}]),
]  # fmt: skip
"""Schemas that the grammar library reads otherwise, or not at all, with values that fit and others."""


@pytest.mark.parametrize(("schema", "taken", "left"), MEANT, ids=lambda value: json.dumps(value)[:60])
def test_what_a_schema_means_decides(schema: dict[str, Any], taken: list[Any], left: list[Any]) -> None:
    texts = [json.dumps(value, ensure_ascii=False) for value in taken + left]
    assert [text for text in texts if fits(of(schema), text)] == texts[: len(taken)]


PLACE = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {"a": {"enum": ["x", "y", "z"]}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
}  # fmt: skip
FREE = {**PLACE, "required": []}
CONDITIONS = [
    PLACE | {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
    PLACE | {"if": {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}, "then": {"required": ["b"]}, "else": False},
    FREE | {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
    FREE | {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
    FREE | {"if": {"required": ["b"], "properties": {"b": {"minimum": 2}}}, "then": {"required": ["c"]}},
    FREE | {"if": {"properties": {"c": {"const": True}}, "required": ["c"]}, "else": {"required": ["b"]}},
    FREE | {"not": {"required": ["b", "c"]}},
    FREE | {"not": {"anyOf": [{"required": ["b"]}, {"properties": {"a": {"const": "x"}}, "required": ["a"]}]}},
    PLACE | {"not": {"properties": {"a": {"not": {"enum": ["x", "y"]}}}}},
    FREE | {"dependentRequired": {"b": ["c"], "c": ["b"]}},
    FREE | {"dependentSchemas": {"b": {"properties": {"b": {"exclusiveMaximum": 2}}, "required": ["a"]}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", **FREE, "dependencies": {"b": ["c"], "c": {"required": ["a"]}}},
    {"type": ["integer", "null", "string"], "not": {"allOf": [{"type": "string"}, {"minLength": 2}]}},
    {"type": ["integer", "null"], "if": {"type": "null"}, "else": {"not": {"exclusiveMinimum": 1}}},
    {"type": ["integer", "string"], "not": {"type": ["string", "null"]}},
    {"type": "array", "items": {"type": "null"}, "not": {"minItems": 2}},
    {"type": ["array", "string"], "items": {"not": {}}},
]  # fmt: skip
SOME = [
    {name: value for name, value in zip("abc", values, strict=True) if value is not ...}
    for values in itertools.product(("x", "y", "z", ...), (1, 2, ...), (True, False, ...))
]
SOME = [*SOME, None, 0, 1, 2, "", "u", "uv", [], [None], [None, None]]


@pytest.mark.parametrize("schema", CONDITIONS, ids=lambda schema: json.dumps(schema)[-60:])
def test_conditions_hold(schema: dict[str, Any]) -> None:
    valid = jsonschema.validators.validator_for(schema)(schema).is_valid
    taken = [value for value in SOME if takes(of(schema), json.dumps(value, separators=(",", ":")))]
    assert taken == [value for value in SOME if valid(value)]
    assert 0 < len(taken) < len(SOME)


@pytest.mark.parametrize("schema", [
    {"not": {"const": "a"}}, {"not": {"pattern": "a"}}, {"not": {"type": "integer"}}, {"if": {"$ref": "#"}, "then": {}},
    {"not": 5}, {"not": {"enum": 5}}, {"not": {"required": "a"}}, {"dependentRequired": 5}, {"not": {}, "allOf": 5},
])  # fmt: skip
def test_other_conditions_are_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r'"(not|if|dependentRequired)".* cannot be kept'):
        row_of(of(schema))


@pytest.mark.parametrize("name", ["int64", "path", "json-string", "no such format", "jsonpath"])
def test_other_formats_are_remarks(name: str) -> None:
    """As the standard has it."""
    for schema, text in (({"type": "string"}, '"x"'), ({}, "12"), ({"enum": ["x"]}, '"x"')):
        assert fits(of({**schema, "format": name}), text)
    assert json_schemas.remarks(json.dumps({"properties": {"format": {"format": name}}, "const": {"format": "y"}})) == [name]


def test_names_of_properties_that_others_can_say() -> None:
    """pydantic's dictionaries have keys of an enum or a pattern."""
    whole = {"type": "integer"}
    for names in (True, {}, {"type": "string"}, {"title": "Key"}):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": whole}
        assert [fits(of(schema), text) for text in ('{"x":1}', '{"x":"y"}')] == [True, False]
    enum = {"type": "string", "enum": ["a", "b"], "title": "Key"}
    for names, root in ((enum, {}), ({"$ref": "#/$defs/k"}, {"$defs": {"k": enum}}), ({"pattern": "^[ab]$"}, {})):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": whole, **root}
        assert [fits(of(schema), text) for text in ('{"b":1}', '{"c":1}', '{"a":"x"}', "{}")] == [True, False, False, True]
    for names in (False, {"maxLength": 3, "pattern": "a"}, {"enum": ["a", 1]}):
        with pytest.raises(RequestError, match='"propertyNames" cannot be kept'):
            row_of(of({"type": "object", "propertyNames": names}))


@pytest.mark.parametrize(("name", "key", "other"), [
    ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-42661417400"), ("date", "2024-02-29", "2023-02-29"),
    ("ipv4", "1.2.3.255", "1.2.3.256"), ("date-time", "2024-02-29T10:00:00Z", "2024-02-29"), ("int64", "x", None),
])  # fmt: skip
def test_names_of_a_format_are_kept(name: str, key: str, other: str | None) -> None:
    """As of pydantic's dict[UUID, int]; a format that says nothing says nothing of names."""
    schema = {
        "type": "object",
        "propertyNames": {"type": "string", "format": name},
        "additionalProperties": {"type": "integer"},
    }
    assert fits(of(schema), f'{{"{key}":1}}')
    assert not fits(of(schema), f'{{"{key}":"x"}}')
    assert other is None or not fits(of(schema), f'{{"{other}":1}}')


@pytest.mark.parametrize("schema", [
    {"type": "number", "exclusiveMinimum": 2, "allOf": [{"maximum": 2.5}]},
    {"type": "number", "allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]},
    {"allOf": [{"type": "number", "exclusiveMaximum": 3}, {"allOf": [{"minimum": 2.5}]}]},
    {"type": "integer", "maximum": 5, "allOf": [{"exclusiveMinimum": 1, "minimum": 0}, {"multipleOf": 2}, {"maximum": 7}]},
])  # fmt: skip
def test_bounds_of_several_schemas_are_one(schema: dict[str, Any]) -> None:
    for value in (0, 1, 2, 2.25, 2.5, 3, 4, 5, 6):
        assert takes(of(schema), json.dumps(value)) is jsonschema.Draft202012Validator(schema).is_valid(value), value


def test_both_hold_where_a_pattern_matches_a_listed_property() -> None:
    size = {"type": "integer", "multipleOf": 4}
    for pattern, key in (("^size$", "size"), ("^(size|x)$", "size"), ("^(?:x|size)$", "x")):
        schema = {
            "type": "object", "properties": {"size": size, "x": size}, "required": [key],
            "patternProperties": {pattern: {"maximum": 40}}, "additionalProperties": False,
        }  # fmt: skip
        found = [fits(of(schema), json.dumps({key: n}, separators=(",", ":"))) for n in (40, 44, 39)]
        assert found == [True, False, False]
        state = masks(of(schema | {"properties": {key: size}}), f'{{"{key}":8')
        assert bool(state[-1][encode(",")[0]]) == (pattern != "^size$"), "a key that nothing can be would follow"


def test_a_pattern_of_listed_and_other_names_binds_both() -> None:
    schema = {
        "type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^(a|b|c)$": {"enum": [7, "x"]}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    for text, fit in (
        ('{"a":7,"b":7}', True),
        ('{"a":7,"b":"x","c":7}', True),
        ('{"a":"x","b":7}', False),
        ('{"a":7,"b":8}', False),
    ):
        assert fits(of(schema), text) is fit


@pytest.mark.parametrize("character", ["\0", "\x01", "\x0b", "\x1f", "\x7f"])
@pytest.mark.parametrize("make", [
    lambda one: {"const": f"{one}a"}, lambda one: {"enum": ["b", {"x": [one]}]}, lambda one: {"items": {"const": one}},
    lambda one: {"type": "string", "pattern": f"^{one}a$"}, lambda one: {"type": "string", "pattern": f"^a|\\x{ord(one):02x}$"},
    lambda one: {"type": "string", "pattern": f"\\u{ord(one):04X}+"},
])  # fmt: skip
def test_control_characters_that_json_only_escapes_are_refused(make: Any, character: str) -> None:
    """The library leaves them out of the text, which then is another one."""
    with pytest.raises(RequestError, match=rf"the control character U\+{ord(character):04X}, which is not written in JSON"):
        row_of(of(make(character)))


def test_control_characters_that_json_writes_are_kept() -> None:
    told = "\b\f\n\r\t\x80\u2028"
    assert fits(of({"const": told}), json.dumps(told, ensure_ascii=False))
    assert fits(of({"type": "string", "pattern": r"^\cJ\x09[^\x00-\x1f\x7f]\\x01$"}), json.dumps("\n\tb\\x01"))
    key = {"type": "object", "properties": {"\x01k": {"const": 1}}, "required": ["\x01k"], "additionalProperties": False}
    assert fits(of(key), json.dumps({"\x01k": 1}, separators=(",", ":")))


# ── uniqueItems ─────────────────────────────────────────────────────────────────────────────────────────────────────


COLOURS = {"enum": ["red", "blue", "red", 1, 1.0], "title": "Colour"}
UNIQUE: list[tuple[dict[str, Any], list[Any]]] = [
    ({"items": {"enum": ["a", "b", None]}}, ["a", "b", None]),
    ({"items": {"enum": ["a", "b", "c", 4, [5]]}}, ["a", "b", "c", 4, [5]]),
    ({"items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2, "description": "x"}, ["a", "b", "c"]),
    ({"items": {"enum": ["a", "b", "c"]}, "minItems": 3}, ["a", "b", "c"]),
    ({"items": {"type": "boolean"}}, [False, True]),
    ({"items": {"const": "a"}}, ["a"]),
    ({"items": {"enum": []}}, []),
    ({"items": {"enum": ["a", 1], "type": "string"}}, ["a"]),
    ({"items": {"$ref": "#/$defs/Colour"}, "$defs": {"Colour": COLOURS}}, ["red", "blue", 1]),
]


@pytest.mark.parametrize(("fields", "values"), UNIQUE, ids=lambda value: str(value)[:40])
def test_arrays_of_a_few_values_are_unique(fields: dict[str, Any], values: list[Any]) -> None:
    """Every array of the values and of a foreign one, up to one more item than there may be."""
    grammar = of({"type": "array", "uniqueItems": True, **fields})
    least, most = fields.get("minItems", 0), min(fields.get("maxItems", len(values)), len(values))
    for size in range(min(most, 3) + 2):
        for items in itertools.product([*values, "z"], repeat=size):
            right = least <= size <= most and "z" not in items and len({json.dumps(one) for one in items}) == size
            assert takes(grammar, json.dumps(items)) == right, items
    refused = [one for one in fields["items"].get("enum", ()) if one not in values]
    assert not any(takes(grammar, json.dumps([one])) for one in refused)
    whole = values[:most]
    assert all(takes(grammar, json.dumps(items)) for items in itertools.permutations(whole))
    assert not values or not takes(grammar, json.dumps([*whole, whole[0]]))


def test_unique_items_hold_within_a_schema_and_where_nothing_can_be_twice() -> None:
    inner = {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True}
    grammar = of({"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False})
    assert fits(grammar, '{"a": ["y", "x"]}')
    assert not fits(grammar, '{"a": ["y", "y"]}')
    for free in ({"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}):
        assert fits(of({"type": "array", "items": {"type": "integer"}, **free}), "[7]")


@pytest.mark.parametrize("fields", [
    {}, {"items": {"type": "string"}}, {"items": {"enum": [*"abcdef"]}}, {"items": {"enum": [*range(99)]}, "maxItems": 3},
    {"items": {"enum": ["a"], "minLength": 2}}, {"items": {"enum": ["a", "b"]}, "minItems": 3},
    {"items": {"enum": ["a", "b"]}, "prefixItems": [{"const": "a"}]},
    {"items": {"enum": ["a", "b"]}, "maxItems": "2"}, {"items": {"enum": ["a", "b"]}, "type": ["array", "null"]},
], ids=str)  # fmt: skip
def test_other_unique_items_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="uniqueItems"):
        row_of(of({"type": "array", "uniqueItems": True, **fields}))


# ── oneOf ───────────────────────────────────────────────────────────────────────────────────────────────────────────


PLACE = Path(__file__).parents[1] / "data/schemas.json"
EXCLUSIVE, OVERLAPPING = (json.loads(PLACE.read_text("utf-8"))[part] for part in ("exclusive", "overlapping"))


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_alternatives_that_exclude_each_other_are_taken(name: str) -> None:
    begun = compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(of(EXCLUSIVE[name]))
    assert begun.starts
    if name == "a discriminator outside too":  # either alternative can be said
        texts = ('"cat", "lives": 9', '"dog", "good": true', '"dog", "good": 9', '"cow"')
        assert [fits(of(EXCLUSIVE[name]), f'{{"kind": {text}}}') for text in texts] == [True, True, False, False]


@pytest.mark.parametrize("name", OVERLAPPING)
def test_alternatives_that_may_overlap_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="the json_schema grammar cannot be used"):
        compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(of(OVERLAPPING[name]))


def test_beside_anyof_a_oneof_stays() -> None:
    text, _ = json_schemas.prepare(json.dumps({"anyOf": [{"minimum": 2}], "oneOf": EXCLUSIVE["ranges"]["oneOf"]}), "bounded")
    assert "oneOf" in json.loads(text)


def test_keywords_beside_a_reference_count_where_the_draft_says_so() -> None:
    named = {"$defs": {"any": {}}, "oneOf": [{"$ref": "#/$defs/any", "type": "null"}, {"type": "object"}]}
    for schema, left in ((named, 2), ({"$schema": "http://json-schema.org/draft-07/schema#", **named}, 1)):
        text, _ = json_schemas.prepare(json.dumps(schema), "bounded")
        assert len(json.loads(text)["anyOf"]) == left  # an object fits both where the type is not read


VALUES = (
    None, True, False, 0, 1, 1.0, 2.5, -3, "", "a", "b", [], [1], {}, {"a": 1}, {"a": "a"}, {"b": None}, {"a": 1, "b": "b"},
    {"a": {"a": 1}}, {"a": {"b": 2.5}}, {"a": None, "b": True},
)  # fmt: skip
leaves = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])}),
    st.fixed_dictionaries({"const": st.sampled_from(VALUES)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"minimum": st.sampled_from([0, 1, 2.5])}),
    st.fixed_dictionaries({"exclusiveMaximum": st.sampled_from([0, 1, 2.5])}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"])}),
    st.booleans(),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b"])
    some = st.lists(inner, min_size=1, max_size=3)
    parts = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", ["object", "null"]]), "properties": st.dictionaries(names, inner, max_size=2),
            "required": st.lists(names, max_size=2, unique=True), "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.just("^a"), inner, max_size=1),
            "allOf": some, "anyOf": some, "oneOf": some, "not": inner,
        },
    )  # fmt: skip
    return parts


@given(
    st.lists(st.recursive(leaves, larger, max_leaves=6), min_size=2, max_size=3),
    st.dictionaries(st.sampled_from("xy"), leaves),
)
@settings(max_examples=400, deadline=None)
def test_what_is_proved_is_true(schemas: list[Any], definitions: dict[str, Any]) -> None:
    """No value of the list fits schemas that no value is said to fit."""
    definitions = {
        name: {} if "$ref" in str(schema) else schema for name, schema in {"x": {}, "y": {}, **definitions}.items()
    }
    root = {"$defs": definitions, "allOf": schemas}
    if Proofs(root).impossible(schemas):
        assert not any(jsonschema.Draft202012Validator(root).is_valid(value) for value in VALUES)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"minimum": 1}, {"maximum": 1}]}, 'use "anyOf"'),
        ({"$ref": "https://a.test/b"}, 'https://a.test/b" is another document: copy it into $defs'),
        ({"items": {"$ref": "#/$defs/none"}}, '"#/$defs/none" leads nowhere'),
        ({"allOf": [{"required": ["a"]}], "unevaluatedProperties": False}, '"unevaluatedProperties" cannot be kept'),
        (
            {"patternProperties": {"^a$": True, "^a": {"maximum": 3}}},
            "two patterns of patternProperties, ^a$ and ^a: let each",
        ),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "cannot be used: no value fits the required property 'a'",
        ),
        ({"enum": []}, "no value fits an empty list of types, values or alternatives"),
        ({"not": {}}, "cannot be used: no value fits false"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no value fits it: minimum (5) is greater than maximum (4)"),
        ({"type": "integer", "minimum": 2**54 + 1, "maximum": 2**54 + 1}, "no whole number that a double holds lies within"),
        ({"minimum": "1"}, '"minimum" must be a number, got "1"'),
        ({"maxLength": 1.5}, '"maxLength" must be a whole number, 0 or more, got 1.5'),
        ({"required": "a"}, '"required" must be of the type array, got "a"'),
        ({"items": 5}, "a schema must be an object, true or false"),
        (None, "a schema must be an object, true or false"),
        ([], "a schema must be an object, true or false"),
        ({"multipleOf": 0}, '"multipleOf" must be a number above 0'),
        ({"type": "number", "minimum": 1e308}, "no number that is written here lies within minimum and maximum"),
        ({"$ref": "#foo"}, '"$ref": "#foo" leads nowhere: the schema has no such part'),
        ({"$ref": "foo"}, '"$ref": "foo" is another document'),
        ({"type": "intege"}, 'type "intege" is none of string, number'),
    ],
)
def test_a_refusal_speaks_of_the_schema(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(of(schema))


@pytest.mark.parametrize("text", ["{", '{"type": "string"}}', '{"minimum": 1e999}', "[1"])
def test_a_text_that_is_no_json_is_refused_as_such(text: str) -> None:
    with pytest.raises(RequestError, match="the json_schema grammar cannot be used: no JSON: "):
        compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(Grammar("json_schema", text))


SHARED = {
    "null in two": ({"oneOf": [{"type": ["string", "null"]}, {"type": ["number", "null"]}]}, ['"a"', "1.5"], ["null", "[]"]),
    "all objects in two": (
        {"oneOf": [{"type": "object"}, {"minimum": 1}, {"type": "null"}], "type": ["object", "null", "array"]},
        ["[]"], ["{}", "null"],
    ),
    "one key of two": (
        {
            "properties": {"a": {"const": 1}, "b": {"const": 2}}, "additionalProperties": False,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a":1}', '{"b":2}'], ["{}", '{"a":1,"b":2}', "3"],
    ),
    "draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "oneOf": [{"minimum": 2}, {"maximum": 1}]},
        ["2", "1"], ["1.5", '"a"'],
    ),
}  # fmt: skip
"""Alternatives that share values, with texts that fit one of them and texts that fit none or several."""


@pytest.mark.parametrize("name", SHARED)
def test_values_of_two_alternatives_are_left_out(name: str) -> None:
    schema, right, wrong = SHARED[name]
    assert [fits(of(schema), text) for text in right + wrong] == [True] * len(right) + [False] * len(wrong)


@given(
    st.lists(st.recursive(leaves, larger, max_leaves=4), min_size=2, max_size=4),
    leaves | larger(leaves),
    st.dictionaries(st.sampled_from("xy"), leaves),
)
@settings(max_examples=400, deadline=None)
def test_anyof_in_the_place_of_oneof_takes_the_same_values(
    alternatives: list[Any], context: Any, definitions: dict[str, Any]
) -> None:
    definitions = {
        name: {} if "$ref" in str(schema) else schema for name, schema in {"x": {}, "y": {}, **definitions}.items()
    }
    root = {"$defs": definitions}
    several = Proofs(root).any_of(context, alternatives, alternatives)
    if several is not None:
        one, some = (
            jsonschema.Draft202012Validator({**root, "allOf": [context], keyword: schemas})
            for keyword, schemas in (("oneOf", alternatives), ("anyOf", several))
        )
        assert [one.is_valid(value) for value in VALUES] == [some.is_valid(value) for value in VALUES]


def test_a_proof_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices within choices multiply."""
    choice: dict[str, Any] = {"anyOf": [{"properties": {f"p{i}": {"const": i}}} for i in range(12)]}
    many = {"allOf": [choice] * 12}
    proofs = Proofs(many)
    assert not proofs.exclusive({}, [many, many])
    assert -schema_proofs.WORK < proofs._left < 0
    cycle = {"$defs": {"x": {"$ref": "#/$defs/x"}, "y": {"allOf": [{"$ref": "#/$defs/y"}]}}}
    assert not Proofs(cycle).impossible([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}])


# ── together ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_benchmark_s_schemas_are_taken() -> None:
    assert len(SCHEMAS) == 40
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(of(schema))


def generated(model: shoal.Shoal, names: Sequence[str], **options: Any) -> list[tuple[str, bool]]:
    """Texts of the bundled pair, and whether they ended by themselves."""
    limits = {"temperature": 0.8, "seed": 0, "max_new_tokens": 200}
    results = [model.generate("data = ", n=2, grammar=of(SCHEMAS[name], **options), **limits)[0] for name in names]
    return [(sample.text, sample.finish_reason == "eos") for result in results for sample in result.samples]


@pytest.mark.slow
def test_the_bundled_pair_ends_what_it_begins(bundled: shoal.Shoal) -> None:
    """Without bounds it goes on with blanks: the control, on one of the schemas."""
    names = ("verdict", "birthday", "order")
    for (text, ended), name in zip(generated(bundled, names), [name for name in names for _ in range(2)], strict=True):
        assert ended, text
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    assert not all(ended for _, ended in generated(bundled, names[:1], whitespace="any"))


# ── looks ahead ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pattern", [
    "^(?=.*[0-9])(?=.*[ab])[ab0-9]{2,4}$", r"^(?=.{3,5}$)\w+(?:-\w+)*$", "^(?=[a(]+$).*$", r"^(?=\(a\))...", "^(?=a)ab?",
    "^(?!a)", "^(?!ab).", "^(?!a1|11)[a1]+$", "^(?!(?:a|ab)$)[ab]+$", r"^(?!\s*$).+", "^(?!a+$)[ab]+$", r"^(?!.*\d)",
    "^(?!.*ab).*$", "^(?!.*aa).*$", "^(?!.*abc)", r"^(?!.*\(a)", "^(?!-)[a-z0-9-]{1,63}(?<!-)$", "^[ab1]+(?<![0-9])$",
    r"^(?![^a])(?!.*-)", r"^(?!.*\--)", "^(?=a)(?!ab)a.$", r"^(?!\W)", r"^(?!\D+$).*$", "^(?!a-b$)[a-]*b?$",
])  # fmt: skip
def test_looks_ahead_at_the_beginning_are_kept(pattern: str) -> None:
    """As passwords are described: all of them hold, and what follows."""
    listed = (
        ",a,ab,a1,1a,11,a-b,b1a1,aaaaaa,abcd1,a(,(a)b,(a),xa),A,-a,a-,-, , a,b,aab,ba,aabc,ababc,bab,((a,aaab,a-bb,a b,a--"
    )
    texts, given = listed.split(","), {"type": "string", "pattern": pattern}
    assert [text for text in texts if fits(of(given), json.dumps(text))] == [
        text for text in texts if re.search(pattern, text, re.ASCII)
    ]
    short = of({**given, "maxLength": 4})
    assert [text for text in texts if fits(short, json.dumps(text))] == [
        text for text in texts if re.search(pattern, text, re.ASCII) and len(text) <= 4
    ]


@pytest.mark.parametrize("pattern", [
    "^(?=a|b).*$", "^(?=a)b|c$", "a(?=b)", "^(?=(?:a))a", "^(?!a)b|c", "^a(?!b)", "(?!a)b", "^(?!.*aba)", r"^(?!.*-\-a)",
    "^(?!.*[ab]c)", "^(?!a{2})", "^(?!a+)b", "^(?!.*a$)", r"^(?!\bab)",
])  # fmt: skip
def test_other_looks_are_refused_by_their_pattern(pattern: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"leave it out of {pattern}")):
        row_of(of({"type": "string", "pattern": pattern}))


NAMES = [
    ({"enum": ["a", "bc"]}, True), ({"enum": ["bc", "x"]}, {"type": "boolean"}), ({"const": "a"}, False), ({"maxLength": 1}, True),
    ({"minLength": 2}, False), ({"pattern": "^b"}, True), ({"pattern": "c$"}, False), ({"pattern": "^(?:x|y)+$"}, {"type": "null"}),
    ({"format": "date"}, True), ({"format": "date"}, False), ({"pattern": "^[a-y]{1,2}$"}, True), ({"enum": []}, {}),
    ({"$ref": "#/$defs/n"}, True),
]  # fmt: skip


@pytest.mark.parametrize(("names", "others"), NAMES)
def test_names_beside_listed_properties(names: dict[str, Any], others: Any) -> None:
    """A listed name that `propertyNames` refuses is none, and other names are as they say."""
    listed = {"a": {"type": "integer"}, "bc": {"type": "null"}, "2024-02-29": {}}
    schema = {"type": "object", "properties": listed, "propertyNames": names, "additionalProperties": others}
    schema["$defs"] = {"n": {"enum": ["a", "b"]}}
    values = [{name: value} for name in ("a", "bc", "b", "x", "xy", "2024-02-29", "2024-02-28") for value in (1, None, True)]
    checker = jsonschema.FormatChecker(["date"])
    valid = jsonschema.validators.validator_for(schema)(schema, format_checker=checker).is_valid
    fitting = [value for value in [{}, *values] if fits(of(schema), json.dumps(value))]
    assert fitting == [value for value in [{}, *values] if valid(value)]
    assert len(fitting) < len(values)


@pytest.mark.parametrize(("more", "said"), [
    ({"properties": {"a": {}}, "propertyNames": {"pattern": "a"}, "additionalProperties": {"type": "null"}}, "propertyNames"),
    ({"properties": {"a": {}}, "propertyNames": {"pattern": r"\w"}}, "propertyNames"),
    ({"properties": {"a\u2028": {}}, "propertyNames": {"pattern": "a.$"}}, "propertyNames"),
    ({"patternProperties": {"a": {}}, "propertyNames": {"enum": ["a"]}}, "propertyNames"),
    ({"properties": {"a": {}}, "required": ["a"], "propertyNames": {"enum": ["b"]}}, "required"),
])  # fmt: skip
def test_other_names_beside_listed_properties_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        row_of(of({"type": "object", **more}))


@pytest.mark.parametrize(("names", "taken"), [
    ({"minLength": 2}, ["ab", "abcd"]), ({"maxLength": 2}, ["", "a", "ab"]), ({"minLength": 1, "maxLength": 2}, ["a", "ab"]),
])  # fmt: skip
def test_lengths_of_names_are_kept(names: dict[str, Any], taken: list[str]) -> None:
    schema = of({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}})
    assert [name for name in ("", "a", "ab", "abcd") if fits(schema, f'{{"{name}": 1}}')] == taken
    assert not fits(schema, f'{{"{taken[-1]}": "x"}}')
