"""`shoal eval jsonschema`: what is read, what is validated, and the measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import cli
from shoal.config import Grammar
from shoal.constraints.compiler import grammars_of
from shoal.constraints.grammar_sources import require_readable
from shoal.errors import RequestError
from shoal.evaluation.schemas import (
    Schema,
    TriedSchema,
    mask_seconds,
    prompt_of,
    read_schemas,
    summary,
    tried,
    verdict,
    wrong_tests,
)

FLAG = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
DAY = {"type": "string", "format": "date-time"}
UNKNOWN = {"type": "object", "properties": {"x": {"type": "number", "not": {"multipleOf": 3}}}, "required": ["x"]}
OPEN = {"type": "array", "items": {"type": "string"}, "minItems": 90}


def test_the_layouts_of_the_benchmark_are_read(tmp_path: Path) -> None:
    (tmp_path / "easy").mkdir()
    (tmp_path / "easy" / "a.json").write_text(json.dumps(FLAG))
    (tmp_path / "easy" / "b.json").write_text(json.dumps({"schema": DAY, "tests": [{"valid": True, "data": "x"}]}))
    (tmp_path / "c.json").write_text(json.dumps({"properties": {"schema": {}}, "schema": 1, "x": 2}))  # a schema itself
    lines = [
        {"json_schema": json.dumps(FLAG), "unique_id": "o1", "tests": [{"data": {"ok": 1}, "valid": False}]},
        {"json_schema": DAY},
    ]
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {(one.group, one.name): one.schema for one in read_schemas(tmp_path)}
    assert found["easy", "easy/a"] == FLAG
    assert found["easy", "easy/b"] == DAY
    assert found[tmp_path.name, "c"]["x"] == 2
    assert found["hard", "o1"] == FLAG
    assert list(found.values()).count(DAY) == 2
    assert len(found) == 5
    tests = {one.name: one.tests for one in read_schemas(tmp_path) if one.tests}
    assert tests == {"easy/b": (("x", True),), "o1": (({"ok": 1}, False),)}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "is no JSON"),
        ("a.jsonl", '{"schema": 1}\n', "expected the field 'json_schema'"),
        ("a.txt", "", "no .json"),
        ("a.jsonl", '{"json_schema": {}, "tests": [{"valid": true}]}\n', "a test needs 'data' and 'valid'"),
    ],
)
def test_what_is_no_set_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=said):
        read_schemas(tmp_path)
    with pytest.raises(RequestError, match="is no directory"):
        read_schemas(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "ended", "schema", "expected"),
    [
        ('{"ok": true}', True, FLAG, "valid"),
        ('{"ok": true}', False, FLAG, "cut"),
        ('{"ok": 1}', True, FLAG, "invalid"),
        ('{"ok": tru', True, FLAG, "invalid"),
        ('"2026-11-23T20:31:00Z"', True, DAY, "valid"),
        ('"2026-13-23T20:31:00Z"', True, DAY, "invalid"),
        ('"2026-11-23"', True, DAY, "invalid"),
        ('"2026-11-23T20:31:00"', True, DAY, "invalid"),
        ("1", True, {"type": "no type"}, "invalid"),
    ],
)
def test_texts_are_validated(text: str, ended: bool, schema: Any, expected: str) -> None:
    assert verdict(text, ended, schema) == expected


def test_a_verdict_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of an evaluation set may name any address."""
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("an address was asked for"))
    elsewhere = {"properties": {"a": {"$ref": "https://example.org/a"}}}
    assert verdict('{"a": 1}', True, elsewhere) == "invalid"
    assert verdict('{"b": 1}', True, elsewhere) == "valid"
    assert verdict('{"type": 5}', True, {"$ref": "http://json-schema.org/draft-07/schema#"}) == "invalid"
    assert verdict('{"type": "null"}', True, {"$ref": "http://json-schema.org/draft-07/schema#"}) == "valid"


def test_the_measures_are_those_of_the_benchmark() -> None:
    found = [
        TriedSchema("a", "x", "", ("valid", "valid"), 10, 0.002, 0.01),
        TriedSchema("b", "x", "", ("valid", "cut"), 10, 0.004, 0.03),
        TriedSchema("c", "x", "cannot be used"),
        TriedSchema("d", "y", "cannot be used", tests=5),
        TriedSchema("e", "y", "", ("valid",), 10, 0.002, 0.01, (1,), (2, 3), tests=7),
    ]
    told = summary(found)
    assert told["groups"]["x"]["declared"] == pytest.approx(2 / 3)
    assert told["groups"]["x"]["empirical"] == pytest.approx(1 / 3)
    assert told["groups"]["x"]["compliance"] == 0.5
    assert told["groups"]["x"]["samples"] == {"valid": 3, "invalid": 0, "cut": 1}
    assert told["groups"]["x"]["compile_ms"] == pytest.approx(3)
    assert told["groups"]["x"]["mask_ms_per_token"] == pytest.approx(2)
    assert (told["all"]["declared"], told["all"]["empirical"]) == (0.6, 0.4)
    assert told["groups"]["y"]["tests"] == told["all"]["tests"] == {"right": 4, "strict": 1, "lax": 2}
    none = summary([found[3]])["all"]
    assert none["compliance"] is none["mask_ms_per_token"] is None


def test_documents_are_judged_by_the_grammar() -> None:
    narrow, wide = ({"type": "string", "maxLength": most} for most in (1, 3))
    tests = tuple((text, len(text) <= 2) for text in ("", "ä", "ab", "abc", "abcd"))
    assert wrong_tests(Grammar("json_schema", narrow), tests) == (("ab",), ())
    assert wrong_tests(Grammar("json_schema", wide), tests) == ((), ("abc",))
    teens = {"type": "integer", "minimum": 10, "maximum": 19}
    assert wrong_tests(Grammar("json_schema", teens), ((1, False), (12, True))) == ((), ())  # 1 begins 12
    assert wrong_tests(Grammar("json_schema", FLAG), (({"ok": True}, True), ({"ok": 1}, False), ({}, False))) == ((), ())


FEATURES = Path(__file__).parents[2] / "benchmarks" / "json_features"


def test_the_committed_schemas_are_kept_or_refused() -> None:
    """Each document of each feature is judged as jsonschema judges it, wherever the schema is taken at all."""
    asked, refused, documents = read_schemas(FEATURES), set(), 0
    for one in asked:
        assert {fits for _, fits in one.tests} == {True, False}, one.name
        for data, fits in one.tests:
            assert (verdict(json.dumps(data), True, one.schema) == "valid") == fits, (one.name, data)
        grammar = Grammar("json_schema", one.schema)
        try:
            require_readable(grammar)
        except RequestError:
            refused.add(one.name)
            continue
        assert wrong_tests(grammar, one.tests) == ((), ()), one.name
        documents += len(one.tests)
    assert refused == {
        "contains/has-root", "contains/one-big", "not/no-admin", "one-of/not-both", "unique-items/numbers",
    }  # fmt: skip
    assert (len(asked), len({one.group for one in asked}), documents) == (77, 24, 203)


@pytest.fixture(scope="module")
def pair() -> shoal.Shoal:
    return shoal.load(compile="off")


def test_schemas_are_tried(pair: shoal.Shoal) -> None:
    schemas = [Schema("flag", "g", FLAG), Schema("other", "g", UNKNOWN), Schema("open", "g", OPEN)]
    flag, other, long = tried(pair, schemas, 3, {"temperature": 0.8, "max_new_tokens": 40, "seed": 1})
    assert flag.verdicts == ("valid",) * 3
    assert flag.covered
    assert flag.tokens > 6
    assert min(flag.compile_seconds, flag.mask_seconds) > 0
    assert other.refused
    assert not other.covered
    assert set(long.verdicts) == {"cut"}
    assert prompt_of(schemas[0]).count(json.dumps(FLAG)) == 1


def test_masks_are_asked_for_once_a_token(pair: shoal.Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("json_schema", FLAG)
    constraint = grammars_of(pair.tokenizer, pair.target.vocab_size).constraint(grammar)
    (sample,) = pair.generate("x = ", grammar=grammar, seed=1, max_new_tokens=40)[0].samples
    asked, right = [], type(constraint).mask

    def mask(self: Any, states: Any, *rest: Any) -> Any:
        asked.extend(states)
        found = right(self, states, *rest)
        assert bool(found.ends.any()) or bool(found.tokens.any())  # the walk is in the grammar
        return found

    monkeypatch.setattr(type(constraint), "mask", mask)
    assert mask_seconds(constraint, sample.token_ids, pair) > 0
    assert [len(state.tokens) for state in asked] == list(range(len(sample.token_ids)))


def test_the_command_prints_coverage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, schema in (("flag", FLAG), ("other", UNKNOWN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    ask = ["eval", "jsonschema", "--data", str(tmp_path), "-n", "2", "--max-new-tokens", "40", "--seed", "1"]
    assert cli.run([*ask, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["all"]["declared"], told["all"]["empirical"], told["all"]["compliance"]) == (0.5, 0.5, 1.0)
    assert {one["name"] for one in told["schemas"] if one["refused"]} == {"other"}
    assert cli.run(ask) == 0
    shown = capsys.readouterr().out
    assert "declared" in shown
    assert "other: " in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--data DIR"),
        (["--data", "nowhere"], "is no directory"),
        (["--data", ".", "--chat"], "leave out --cut and --chat"),
        (["--data", ".", "--time-budget", "1"], "each schema is tried once: leave out"),
    ],
)
def test_what_does_not_go_with_schemas(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", "jsonschema", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
