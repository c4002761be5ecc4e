"""The examples of DESIGN.md run: how to write a drafter, a controller, a constraint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from readme import blocks

DESIGN = Path(__file__).parents[2] / "DESIGN.md"
EXAMPLES = blocks(DESIGN.read_text(encoding="utf-8"), "python")


def test_there_is_an_example_of_each_seam() -> None:
    assert [source.partition("class ")[2].partition("(")[0].partition(":")[0] for _, source in EXAMPLES] == [
        "Repeats",
        "Stepwise",
        "AtMostDigits",
    ]
    assert all(len(source.splitlines()) <= 40 for _, source in EXAMPLES)


@pytest.mark.parametrize(("line", "source"), EXAMPLES, ids=["drafter", "controller", "constraint"][: len(EXAMPLES)])
def test_an_example_runs(line: int, source: str) -> None:
    exec(compile("\n" * (line - 1) + source, os.fspath(DESIGN), "exec", dont_inherit=True), {"__name__": "example"})
