"""`python benchmarks/checks.py`: how many tokens checks are asked about, against masks, which are about a whole vocabulary.

Samples of the bundled target under four checks, plain and weighted (`exact=True`), with the draft model. "asked" counts the tokens
that checks were asked about while rounds ran, per committed token; a token that passes is asked about once more when it is
committed, which counts. A mask asks about as many as the vocabulary has, at every drafted position too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.constraints.protocol import Check
from shoal.constraints.syntax.python import PythonMiddle
from shoal.constraints.token_bytes import token_bytes
from shoal.types.requests import Row

ARITHMETIC = re.compile(rb"[0-9+*() -]*")


@dataclass
class Asked:
    """How many tokens were asked about."""

    tokens: int = 0


class Texts(Check[bytes]):
    """Texts for which a function of their bytes holds."""

    def __init__(self, holds: Callable[[bytes], bool], spelled: list[bytes | None], asked: Asked) -> None:
        self._holds, self._spelled, self._asked = holds, spelled, asked

    def start(self, row: Row) -> bytes:
        return b""

    def after(self, state: bytes, token: int) -> bytes | None:
        self._asked.tokens += 1
        text = state + (self._spelled[token] or b"")
        return text if self._holds(text) else None

    def may_end(self, state: bytes) -> bool:
        self._asked.tokens += 1
        return True


def main(
    samples: Annotated[int, typer.Option(min=1)] = 32,
    to: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Prints a table."""
    require_place(to)
    pair, asked, figures = shoal.load(max_batch=16), Asked(), []
    spelled = token_bytes(pair.tokenizer)
    checks: dict[str, tuple[str, Callable[[bytes], bool]]] = {
        "no letter e": ("def area(", lambda text: b"e" not in text),
        "lines of at most 40 bytes": ("def area(", lambda text: all(len(line) <= 40 for line in text.split(b"\n"))),
        "arithmetic alone": ("n = ", lambda text: ARITHMETIC.fullmatch(text) is not None),
    }
    table = Table(
        "check",
        "vocabulary",
        "weights",
        "tokens",
        "asked per token",
        "accepted of drafts",
        "effective",
        title=f"n = {samples}",
    )
    for name, (prompt, holds) in checks.items():
        for exact in (False, True):
            options: dict[str, Any] = {"constraints": [Texts(holds, spelled, asked)], "exact": exact}
            figures.append(measured(pair, name, prompt, samples, options, asked))
    counted(PythonMiddle, asked)
    options = {"syntax": "python", "suffix": "\n    return total\n"}
    figures.append(measured(pair, 'syntax="python"', "def mean(xs):\n    total = ", samples, options, asked))
    for own in figures:
        worth = "" if own["effective"] is None else f"{own['effective']:.1f}"
        table.add_row(
            own["check"], str(pair.target.vocab_size), "yes" if own["exact"] else "", str(own["tokens"]), f"{own['asked']:.2f}",
            f"{100 * own['accepted']:.0f} %", worth,
        )  # fmt: skip
    Console(width=130).print(table)
    if to is not None:
        write_results(to, {"machine": machine(torch.device("cpu")), "samples": samples, "figures": figures})


def measured(
    pair: shoal.Shoal, name: str, prompt: str, samples: int, options: dict[str, Any], asked: Asked
) -> dict[str, Any]:  # fmt: skip
    """One call, seeded, with drafts of a fixed length."""
    asked.tokens = 0
    result = pair.generate(prompt, samples, seed=1, max_new_tokens=24, lookahead=3, **options)
    tokens = sum(len(sample.token_ids) for sample in result[0].samples)
    effective = result[0].effective_samples
    return {
        "check": name, "exact": bool(options.get("exact")), "tokens": tokens, "asked": asked.tokens / tokens,
        "accepted": result.stats.accepted / max(1, result.stats.drafted),
        "effective": None if effective is None or math.isnan(effective) else effective,
    }  # fmt: skip


def counted(kind: type[PythonMiddle], asked: Asked) -> None:
    """Counts what a check of the library is asked about."""
    after, may_end = kind.after, kind.may_end

    def counted_after(self: Any, state: Any, token: int) -> Any:
        asked.tokens += 1
        return after(self, state, token)

    def counted_end(self: Any, state: Any) -> bool:
        asked.tokens += 1
        return may_end(self, state)

    kind.after, kind.may_end = counted_after, counted_end  # type: ignore[method-assign]


if __name__ == "__main__":
    command.run(main)
