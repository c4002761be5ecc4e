"""What `benchmarks/peers.py` measured: cells of a table, kept in a JSON file that grows run by run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from engines.rows import ROWS, Row
from engines.tasks import PLAIN
from provenance import write_results
from shoal.bench.report import Spread
from shoal.errors import RequestError

FORMAT = 1


@dataclass
class Cell:
    """One engine's method on one row.

    Attributes:
        absent: why there is none; "" where there is. identity: of shoal in float32, rows compared and rows equal to greedy ids
            of Transformers (8-bit weights: to its own plain decoding). leading: of `--check`, greedy ids equal to
            those of Transformers in float32, and how many there are.
        runs: seconds, tokens, busy (other processes; None: not known), acceptance_length by repeat.
    """

    row: str
    engine: str
    method: str
    absent: str = ""
    version: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    identity: dict[str, int] | None = None
    leading: tuple[int, int] | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.row}/{self.engine}/{self.method}"

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every repeat."""
        return [run["tokens"] / run["seconds"] for run in self.runs]

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def disturbed(self) -> bool:
        return any(run["busy"] for run in self.runs)


@dataclass
class Results:
    """All cells, by name. config: what was asked, the same in all of them. machine: as in other results."""

    config: dict[str, Any]
    machine: dict[str, Any]
    cells: dict[str, Cell] = field(default_factory=dict)

    def cell(self, row: Row, engine: str, method: str) -> Cell:
        """The cell, made where there is none yet."""
        found = Cell(row.name, engine, method)
        return self.cells.setdefault(found.name, found)

    def measured(self, row: str) -> dict[tuple[str, str], Cell]:
        """The cells of a row that have runs, by engine and method."""
        found = (cell for cell in self.cells.values() if cell.row == row and cell.runs)
        return {(cell.engine, cell.method): cell for cell in found}

    def rows(self) -> list[Row]:
        """Those with a measured cell, in the order of the table."""
        return [row for row in ROWS if self.measured(row.name)]

    def save(self, place: Path | None) -> None:
        if place is not None:
            cells = [asdict(cell) for cell in self.cells.values()]
            report = {"format": FORMAT, "config": self.config, "machine": self.machine, "cells": cells}
            write_results(place, report)

    @staticmethod
    def read(place: Path) -> Results:
        """Raises RequestError for another file."""
        try:
            data = json.loads(place.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            cells = [Cell(**cell) for cell in data["cells"]]
            return Results(data["config"], data["machine"], {cell.name: cell for cell in cells})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{place} holds no results of peers.py: {error}") from error

    @staticmethod
    def resume(place: Path | None, config: dict[str, Any], machine: dict[str, Any]) -> Results:
        """Those of the file, where there are any. Raises RequestError if they were measured otherwise than now."""
        if place is None or not place.exists():
            return Results(config, machine)
        found = Results.read(place)
        for name, now in {"commit": machine["commit"], "isa": "", **config}.items():
            before = found.machine["commit"] if name == "commit" else found.config.get(name, "")
            if before != now:
                raise RequestError(f"{place} was measured with {name} {before}, not {now}: name another file")
        return found


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of a cell over those of another, by repeats, as they were measured in turns."""

    spread: Spread
    against: str

    @staticmethod
    def of(cell: Cell | None, others: Sequence[Cell]) -> Ratio | None:
        """Against the fastest of the others; None where either is missing."""
        if cell is None or not others:
            return None
        best = max(others, key=lambda other: other.rate)
        return Ratio(Spread.of([a / b for a, b in zip(cell.rates, best.rates, strict=False)]), best.engine)


@dataclass(frozen=True)
class Comparison:
    """A row's ratios; None where a side of it is missing. `auto` is shoal's drafted."""

    row: Row
    plain: Ratio | None
    drafted: Ratio | None
    own: Ratio | None

    @staticmethod
    def of(row: Row, cells: dict[tuple[str, str], Cell]) -> Comparison:
        """Peers' plain and drafted: the fastest of them, Transformers included."""
        peers = [cell for (engine, _), cell in cells.items() if engine != "shoal"]
        plain, auto = cells.get(("shoal", PLAIN)), cells.get(("shoal", "auto"))
        return Comparison(
            row,
            Ratio.of(plain, [cell for cell in peers if cell.method == PLAIN]),
            Ratio.of(auto, [cell for cell in peers if cell.method != PLAIN]),
            Ratio.of(auto, [plain] if plain else []),
        )
