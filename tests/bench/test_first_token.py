"""The seconds to a first token are taken in turns, and the first run of each line does not count.

Tests of: benchmarks/first_token.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import first_token
from shoal.errors import RequestError


def test_checkouts_take_turns_and_first_runs_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def seconds(checkout: Path, python: Path, model: str) -> tuple[float, float]:
        asked.append((checkout.name, model))
        return float(len(asked)), len(asked) / 2

    monkeypatch.setattr(first_token, "seconds", seconds)
    first_token.main(["a", "b.gguf"], tmp_path, repeats=2, json_path=tmp_path / "found.json")
    here, turn = first_token.HERE.name, tmp_path.name
    assert asked == [(turn, "a"), (here, "a"), (turn, "b.gguf"), (here, "b.gguf")] * 3
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert [(line["model"], line["checkout"]) for line in lines] == [
        ("a", "before"), ("a", "this"), ("b.gguf", "before"), ("b.gguf", "this")
    ]  # fmt: skip
    assert lines[1]["runs"] == [[6.0, 3.0], [10.0, 5.0]]


def test_a_command_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere ended with 2: .*does not exist"):
        first_token.seconds(first_token.HERE, Path(sys.executable), str(tmp_path / "nowhere"))
