"""The how-to page on constraints runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from readme import blocks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "constraints.md"


def test_its_python_runs() -> None:
    python = blocks(PAGE.read_text(encoding="utf-8"), "python")
    assert len(python) >= 4
    names: dict[str, Any] = {"__name__": "page"}
    for line, source in python:
        exec(compile("\n" * (line - 1) + source, str(PAGE), "exec", dont_inherit=True), names)
    # What is banned there is seldom written. Of a letter that is often written nothing is left, in tokens of any kind.
    pair, prompt = names["pair"], "def is_even(x):\n    "
    free, banned = (
        pair.generate(prompt, n=4, seed=0, max_new_tokens=12, constraints=constraints)[0].samples
        for constraints in ((), (names["Ban"](pair.tokenizer, rb"e"),))
    )
    assert sum("e" in sample.text for sample in free) > 1
    assert not any("e" in sample.text for sample in banned)
    assert all(sample.text for sample in banned)
