"""The tables of `benchmarks/peers.py` as Markdown, for docs/measurements/performance.md and README.md, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from engines.results import Cell, Comparison, Ratio, Results
from engines.rows import DRAFTED, OWN, PEERS, Row
from engines.tasks import PLAIN
from shoal.bench.machine import LIMIT
from shoal.bench.report_views import COLOURS, DPI, require_matplotlib

NAMES = {
    "shoal": "shoal", "openvino": "OpenVINO GenAI", "ctranslate2": "CTranslate2", "llamacpp": "llama.cpp",
    "transformers": "Transformers",
}  # fmt: skip
METHODS = {PLAIN: "plain", "auto": "drafted (`auto`)", f"fixed:{DRAFTED}": f"drafted ({DRAFTED})"}


def pages(results: Results) -> str:
    """Everything for the page of measurements, then, after a heading, the short table for README.md."""
    parts = [speeds(results), ratios(results), *footer(results), "## For README.md", short(results)]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(cell: Cell | None, best: float = 0.0) -> str:
    """Tokens/s; bold for the best of a row, with a star where it was disturbed."""
    if cell is None:
        return "-"
    text = f"{cell.rate:,.0f}" if cell.rate >= 100 else f"{cell.rate:.1f}"
    return (f"**{text}**" if cell.rate == best else text) + ("*" if cell.disturbed else "")


def speeds(results: Results) -> str:
    """Medians of tokens/s: a line per row, a column per engine and method."""
    columns = OWN + PEERS
    head = ["tokens/s", *(f"{NAMES[engine]}, {METHODS[method]}" for engine, method in columns)]
    lines = []
    for row in results.rows():
        cells = results.measured(row.name)
        best = max(cell.rate for cell in cells.values())
        lines.append([row.title, *(_speed(cells.get(column), best) for column in columns)])
    return _table(head, lines)


def _ratio(one: Ratio | None, *, named: bool = True) -> str:
    """The median and its range; bold where shoal is slower."""
    if one is None:
        return "-"
    middle, low, high = one.spread
    text = f"{middle:.2f}x ({low:.2f}..{high:.2f})"
    text = f"**{text}**" if middle < 1 else text
    return f"{text} {NAMES[one.against]}" if named else text


def comparisons(results: Results) -> list[Comparison]:
    return [Comparison.of(row, results.measured(row.name)) for row in results.rows()]


def ratios(results: Results) -> str:
    """shoal against the fastest peer of each row, and against its own plain decoding."""
    head = [
        "shoal against",
        "plain: the fastest peer's plain",
        "`auto`: the fastest peer's drafted",
        "`auto`: shoal's own plain",
    ]
    found = comparisons(results)
    lines = [[one.row.title, _ratio(one.plain), _ratio(one.drafted), _ratio(one.own, named=False)] for one in found]
    return _table(head, lines)


def lost(results: Results) -> Iterator[str]:
    """Where a peer, or plain decoding, is faster."""
    for one in comparisons(results):
        for ratio, what in ((one.plain, "plain"), (one.drafted, "drafted"), (one.own, "`auto` against shoal's own plain")):
            if ratio is not None and ratio.spread.median < 1:
                other = "" if ratio is one.own else f" against {NAMES[ratio.against]}"
                yield f"{one.row.title}: {what}{other} {ratio.spread.median:.2f}x"


def footer(results: Results) -> Iterator[str]:
    """What lost, what is missing, checks, versions, the machine."""
    yield "What lost: " + ("; ".join(lost(results)) or "nothing in this table") + "."
    if missing := _absent(results):
        yield "Not in the table: " + "; ".join(missing) + "."
    checked = [cell for cell in results.cells.values() if cell.identity]
    same, count = (sum(cell.identity[what] for cell in checked if cell.identity) for what in ("same", "rows"))
    yield f"Greedy ids of shoal in float32 equal to those of Transformers: {same} of {count} rows in {len(checked)} cells."
    if leading := [f"{cell.name} {cell.leading[0]} of {cell.leading[1]}" for cell in results.cells.values() if cell.leading]:
        yield "Leading greedy ids of the peers equal to Transformers' in float32: " + ", ".join(leading) + "."
    if any(cell.disturbed for cell in results.cells.values()):
        yield f"*: another process used more than {LIMIT:.0%} of a core during a repeat."
    versions = {cell.engine: f"{NAMES[cell.engine]} {cell.version}" for cell in results.cells.values() if cell.version}
    machine, config = results.machine, results.config
    held = f"engines held to {config['isa']}, " if config.get("isa") else ""
    repeats = sorted({len(cell.runs) for cell in results.cells.values() if cell.runs})
    yield (
        f"{machine['device']}, {held}{config['threads']} threads, {machine['date']}, shoal at {machine['commit']}; "
        f"{', '.join(versions.values())}; torch {machine['torch']}; medians of {' to '.join(map(str, repeats))} repeats."
    )


def _absent(results: Results) -> list[str]:
    """Reasons, each with the cells that it concerns."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for cell in results.cells.values():
        if cell.absent:
            name = f"{NAMES[cell.engine]} {METHODS[cell.method]}"
            reasons.setdefault(cell.absent, {}).setdefault(name, []).append(cell.row)
    listed = {reason: [f"{name} ({', '.join(rows)})" for name, rows in names.items()] for reason, names in reasons.items()}
    return [f"{', '.join(names)}: {reason}" for reason, names in listed.items()]


def short(results: Results) -> str:
    """For README.md: shoal, the fastest peer of each row plain and drafted, and Transformers."""
    head = [
        "tokens/s",
        "shoal `auto`",
        "shoal plain",
        "fastest peer, drafted",
        "fastest peer, plain",
        "Transformers `generate`",
    ]
    lines = []
    for row in results.rows():
        cells = results.measured(row.name)
        peers = [cell for (engine, _), cell in cells.items() if engine not in ("shoal", "transformers")]
        fastest = (_named([c for c in peers if c.method != PLAIN]), _named([c for c in peers if c.method == PLAIN]))
        own = (_speed(cells.get(("shoal", "auto"))), _speed(cells.get(("shoal", PLAIN))))
        lines.append([row.title, *own, *fastest, _speed(cells.get(("transformers", PLAIN)))])
    return _table(head, lines)


def _named(cells: Sequence[Cell]) -> str:
    if not cells:
        return "-"
    best = max(cells, key=lambda cell: cell.rate)
    return f"{_speed(best)} ({NAMES[best.engine]})"


def plot(results: Results, place: Path) -> None:
    """Bars of tokens/s with their range, a panel per row; drafted is hatched. Raises RequestError without matplotlib."""
    pyplot = require_matplotlib()
    rows = results.rows()
    figure, grid = pyplot.subplots(
        -(-len(rows) // 2), 2, figsize=(12, 2.9 * -(-len(rows) // 2)), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    for axes, row in zip(grid.flat, rows, strict=False):
        _panel(axes, row, results.measured(row.name))
    figure.savefig(place, dpi=DPI)
    pyplot.close(figure)


def _panel(axes: Any, row: Row, cells: dict[tuple[str, str], Cell]) -> None:
    shown = [column for column in OWN + PEERS if column in cells][::-1]
    for y, (engine, method) in enumerate(shown):
        cell = cells[engine, method]
        around = [[cell.rate - min(cell.rates)], [max(cell.rates) - cell.rate]]
        style = {"hatch": "" if method == PLAIN else "///", "edgecolor": "white", "alpha": 0.5 if cell.disturbed else 1.0}
        axes.barh(y, cell.rate, color=COLOURS[list(NAMES).index(engine)], xerr=around, **style)
    axes.set_yticks(
        range(len(shown)), [f"{NAMES[engine]}, {METHODS[method].replace('`', '')}" for engine, method in shown], fontsize=8
    )
    pale = "; pale: disturbed" if any(cell.disturbed for cell in cells.values()) else ""
    axes.set_title(fill(f"{row.title}{pale}", 64), loc="left", fontsize=9)
    axes.set_xlabel("tokens/s", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
