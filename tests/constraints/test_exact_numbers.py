"""Schemas that the grammar library would read otherwise: numbers, depths, keys that come twice.

Tests of: constraints.schema_checks, constraints.json_schemas.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shoal
from shoal.config import Grammar
from shoal.constraints.json_schemas import prepare
from shoal.constraints.schema_checks import BOUNDS, EXACT, LARGEST, MOST_LEVELS, inward
from shoal.errors import RequestError


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},  # ends the process in llguidance
        {"enum": [1, -(2**63)]},
        {"const": 725653563933458431},
        {"properties": {"a": {"enum": ["x", {"deep": [EXACT + 1]}]}}},
        {"const": 2**63 - 1},
        {"const": -(2**63) - 1},
        {"const": -(2**64)},
        {"anyOf": [{"const": 10**400}]},
    ],
)
def test_constants_that_would_come_out_as_others_are_refused(schema: dict[str, Any], bundled: shoal.Shoal) -> None:
    with pytest.raises(RequestError, match=r"has more than 53 bits"):
        bundled.generate("x", 1, grammar=Grammar("json_schema", json.dumps(schema)), max_new_tokens=4)


@pytest.mark.parametrize("constant", [EXACT, -EXACT, 2**60, -LARGEST, 10**25, 0, 1.5, 1e22, "725653563933458431", True])
def test_other_constants_come_out_digit_for_digit(constant: Any, bundled: shoal.Shoal) -> None:
    grammar = Grammar("json_schema", json.dumps({"const": constant}))
    text = bundled.generate("x", 1, grammar=grammar, max_new_tokens=60, seed=1)[0].samples[0].text
    assert json.loads(text) == constant


@given(st.sampled_from(sorted(BOUNDS)), st.integers(-(2**70), 2**70), st.integers(-3, 3))
@example("maximum", EXACT + 1, 0)
@example("minimum", EXACT + 1, 0)
@example("minimum", -(2**63), 0)
def test_bounds_are_rounded_inwards(keyword: str, bound: int, near: int) -> None:
    """To a double that excludes all that the bound excludes, as far as 64-bit integers go."""
    made, way = inward(keyword, bound), BOUNDS[keyword]
    if abs(bound) > LARGEST:
        assert made in (bound, LARGEST, -LARGEST)
        assert (made - bound) * way >= 0
        return
    assert int(float(made)) == made
    assert (made - bound) * way >= 0
    assert abs(made - bound) <= 2048
    if abs(bound) <= EXACT:
        assert made == bound


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": -1e30},
        {"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 5},
    ],
)
def test_values_within_wide_bounds(schema: dict[str, Any], bundled: shoal.Shoal) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    for sample in bundled.generate("x", 4, grammar=grammar, max_new_tokens=60, seed=1, temperature=1.5)[0].samples:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        assert low <= json.loads(sample.text) <= schema.get("maximum", 10**20)


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, MOST_LEVELS + 30, 100_000])
def test_schemas_too_deep_are_refused_in_words(levels: int, bundled: shoal.Shoal) -> None:
    text = '{"items":' * levels + "{}" + "}" * levels
    with pytest.raises(RequestError, match=rf"nested more than {MOST_LEVELS} levels deep"):
        bundled.generate("x", 1, grammar=Grammar("json_schema", text), max_new_tokens=4)


@pytest.mark.parametrize("levels", [40, 59])
def test_conditions_that_become_too_deep_are_refused_in_words(levels: int, bundled: shoal.Shoal) -> None:
    text = '{"dependentSchemas":{"a":' * levels + "{}" + "}}" * levels
    with pytest.raises(
        RequestError, match=rf"nested more than {MOST_LEVELS} levels deep, once its conditions are rewritten"
    ):
        bundled.generate("x", 1, grammar=Grammar("json_schema", text), max_new_tokens=4)


def test_a_schema_as_deep_as_can_be_is_read(bundled: shoal.Shoal) -> None:
    levels = MOST_LEVELS - 1
    text = '{"type":"array","items":' * levels + "{}" + "}" * levels
    assert bundled.generate("x", 1, grammar=Grammar("json_schema", text), max_new_tokens=4).stats.committed


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (r'{"age":1,"\u0061ge":"x"}', False),
        (r'{"age":1,"\u0062":"x"}', False),
        ('{"age":1,"age":2}', False),
        (r'{"age":1,"b":"\n\"\\é"}', True),
        ('{"age":1,"b":"x","é":2}', True),
    ],
)
def test_no_key_spells_a_listed_one_by_escapes(text: str, taken: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    schema, options = prepare(json.dumps(AGE), "bounded")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=options))
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == taken


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"minProperties": 2}, True),
        ({"minProperties": 3, "properties": {"a": {}}, "required": ["a"]}, True),
        ({"minProperties": 2, "patternProperties": {"^x": {}}, "additionalProperties": False}, True),
        ({"minProperties": 1}, False),
        ({"minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}, False),
        ({"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False}, False),
        ({"maxProperties": 2}, False),
    ],
)
def test_a_least_number_of_keys_cannot_be_had_by_one_key_twice(fields: dict[str, Any], refused: bool) -> None:
    schema = json.dumps({"type": "object", **fields})
    if refused:
        with pytest.raises(RequestError, match="a key could come twice"):
            prepare(schema, "bounded")
    else:
        assert json.loads(prepare(schema, "bounded")[0])["type"] == "object"
