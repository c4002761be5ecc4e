"""The harness of grammar engines: schemas of a package stand alone, engines are judged alike, and one that takes too long is ended.

Tests of: evaluation.schemas, constraints.compiler.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import schema_engines
from schema_engines import bits, lay_kubernetes, lay_store, measured, present, spread, summary
from shoal.evaluation.schemas import Schema, read_schemas

ASKED: dict[str, Any] = {"model": None, "tokens": 24, "temperature": 0.8, "seed": 0, "timeout": 120, "threads": 1}
SCHEMAS = [
    Schema("chosen", "own", {"enum": ["a", "b"]}),
    Schema("odd", "own", {"type": "no such type"}),
    Schema("flag", "own", {"type": "boolean"}),
]


def test_a_laid_schema_has_the_definitions_that_it_needs_and_no_others(tmp_path: Path) -> None:
    package, place = tmp_path / "package", tmp_path / "laid"
    package.mkdir()
    ref = {"$ref": "/api/_definitions.json#/$defs/a.First"}
    definitions = {
        "a.First": {"properties": {"second": {"items": {"$ref": "#/$defs/a.Second"}}}},
        "a.Second": {"properties": {"first": {"$ref": "#/$defs/a.First"}}},
        "a.Third": {"type": "string"},
    }
    (package / "_definitions.json").write_text(json.dumps({"$defs": definitions}))
    (package / "all.json").write_text("{}")
    (package / "user.json").write_text(json.dumps({"properties": {"one": ref}}))
    (package / "alone.json").write_text(json.dumps({"type": "string"}))
    assert lay_kubernetes(package, place) == 2
    found = {one.name: one.schema for one in read_schemas(place)}
    assert found["alone"] == {"type": "string"}
    assert found["user"]["properties"]["one"] == {"$ref": "#/$defs/a.First"}
    assert set(found["user"]["$defs"]) == {"a.First", "a.Second"}


def test_files_that_are_no_schemas_are_left_out(tmp_path: Path) -> None:
    for name, text in (("page", "<html>"), ("list", "[1]"), ("latin", "\xff"), ("schema", '{"type": "null"}')):
        (tmp_path / f"{name}.json").write_text(text, encoding="latin-1")
    assert lay_store(tmp_path, tmp_path / "laid") == 1
    assert [one.schema for one in read_schemas(tmp_path / "laid")] == [{"type": "null"}]


@pytest.mark.parametrize("limit", [1, 3, 5, 6, 9, 10])
def test_a_limited_number_of_schemas_is_spread_over_all(limit: int) -> None:
    schemas = [Schema(str(i), "own", {}) for i in range(10)]
    places = [int(one.name) for one in spread(schemas, limit)]
    gaps = {after - before for before, after in pairwise([*places, 10])}
    assert (len(places), places[0]) == (limit, 0)
    assert gaps <= {10 // limit, -(-10 // limit)}


def test_without_a_limit_or_below_it_all_schemas_are_taken() -> None:
    schemas = [Schema(str(i), "own", {}) for i in range(3)]
    assert spread(schemas, 0) == spread(schemas, 4) == schemas
    assert spread([], 4) == []


def test_bits_are_read_from_the_lowest() -> None:
    words = torch.tensor([-(2**31) | 0b101, 0b10], dtype=torch.int32)
    assert bits(words, 40).nonzero().flatten().tolist() == [0, 2, 31, 33]


def test_figures_by_hand() -> None:
    common = {"first": 0.1, "seconds": 0.5, "tokens": 5, "ended": True}
    found = [
        {"verdict": "valid", **common},
        {"verdict": "invalid", **common},
        {"verdict": None, "refused": "took too long"},
        {"verdict": None, "refused": "ValueError: no"},
    ]
    figures = summary(found)
    assert (figures["declared"], figures["empirical"], figures["too long"]) == (0.5, 0.25, 1)
    assert (figures["ms to first token"], figures["ms per token"]) == (100, pytest.approx(100))


@pytest.mark.slow(but=["shoal"])
@pytest.mark.skipif(not present("llguidance"), reason="needs llguidance")
@pytest.mark.parametrize("name", ["shoal", "llguidance"])
def test_samples_of_a_process_are_judged(name: str) -> None:
    lines = list(measured(name, SCHEMAS, ASKED))
    assert [one["verdict"] for one in lines] == ["valid", None, "valid"]
    assert lines[1]["refused"]
    assert all(0 < one["first"] <= one["seconds"] for one in lines[::2])
    assert all(1 < one["tokens"] < 24 for one in lines[::2])


@pytest.mark.slow
@pytest.mark.skipif(not present("llguidance"), reason="needs llguidance")
def test_an_engine_that_takes_too_long_is_ended_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = schema_engines.Worker.start

    def counted(self: schema_engines.Worker) -> None:
        start(self)
        started.append(self.process.pid)
        self.asked["timeout"] = 0.0 if len(started) == 1 else 120

    monkeypatch.setattr(schema_engines.Worker, "start", counted)
    lines = list(measured("llguidance", SCHEMAS[::2], dict(ASKED)))
    assert [one.get("refused") for one in lines] == ["took too long", None]
    assert len(set(started)) == 2
