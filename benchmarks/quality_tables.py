"""The tables and plots of `quality_real.sh`, of the runs that have come to their end.

    python benchmarks/quality_tables.py build/quality-real    # keeps their summaries in results/, draws, writes the tables
    python benchmarks/quality_tables.py                       # from the summaries in results/ alone

The tables stand in docs/measurements/quality.md between two marks; the prose around them is by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from provenance import write_results
from shoal.durable import write_synced
from shoal.evaluation.figure import metric_name, png

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "quality.md"
BEGIN, END = "<!-- quality_tables.py writes from here -->\n", "<!-- to here -->\n"
PREFIX = "quality-smollm2-"
SUMMARIES = "summaries"
SETS = {
    "humaneval": "HumanEval",
    "humaneval-chat": "HumanEval by the chat template",
    "mbpp": "MBPP",
    "mbpp-chat": "MBPP by the chat template",
    SUMMARIES: "Summaries in one sentence of ACLSum's abstracts, by the chat template",
}
BUDGETS = (0.5, 1, 2, 4, None)
Summary = Mapping[str, Any]


def keep(directory: Path, results: Path = RESULTS) -> None:
    """Copies the summaries of a directory of runs, without the path of the model."""
    for file in sorted(directory.glob("*/summary.json")):
        summary = json.loads(file.read_text("utf-8"))
        summary["settings"]["model"] = Path(summary["settings"]["model"]).name
        write_results(results / f"{PREFIX}{file.parent.name}.json", summary)


def kept(results: Path = RESULTS) -> dict[str, dict[int, Summary]]:
    """Returns the kept summaries, by set and number of samples."""
    found: dict[str, dict[int, Summary]] = {name: {} for name in SETS}
    for file in results.glob(f"{PREFIX}*.json"):
        name, _, n = file.stem.removeprefix(PREFIX).rpartition("-")
        found[name][int(n)] = json.loads(file.read_text("utf-8"))
    return {name: dict(sorted(runs.items())) for name, runs in found.items() if runs}


def passes(runs: Mapping[int, Summary]) -> bool:
    """Whether some sample of some run passes: otherwise its curves are flat."""
    return any(line[f"{score(summary)}_all"]["mean"] for summary in runs.values() for line in summary["lines"])


def score(summary: Summary) -> str:
    """Returns the score of a run's tables and plots: whether programs pass, or ROUGE-2 as in BASS."""
    name: str = summary["scores"][0]
    return name


def pages(found: Mapping[str, Mapping[int, Summary]]) -> Iterator[str]:
    """The parts of the page: for each set its files, its plot and its table."""
    for name, runs in found.items():
        files = "; ".join(
            f"[n = {n}](../../benchmarks/results/{PREFIX}{name}-{n}.json), commit "
            f"`{one['machine']['commit']}`, {one['machine']['date']}"
            for n, one in runs.items()
        )
        problems = next(iter(runs.values()))["problems"]
        text = f"**{SETS[name]}**, {problems} problems ({files}):\n\n"
        if passes(runs):
            first, every = (metric_name(score(next(iter(runs.values()))), which) for which in ("first", "all"))
            text += f"![{first} and {every} over the time budget](../../benchmarks/results/{PREFIX}{name}.png)\n\n"
        heads = ["n", "method", *(f"{budget:g} s" if budget else "no budget" for budget in BUDGETS)]
        heads += ["pass@1"] * (name != SUMMARIES) + ["finished by 1 s, %", "all there after, s", "ids of plain"]
        yield text + "\n".join(map(line_of, [heads, ["---"] * len(heads), *lines(runs)])) + "\n"


def lines(runs: Mapping[int, Summary]) -> Iterator[list[str]]:
    """The rows of a table; shares by budget are Pass@First / Pass@All in per cent, of summaries ROUGE-2 of the same samples."""
    for n, summary in runs.items():
        same = {
            one["method"]: f"{one['same_ids']} of {one['samples']}" for one in summary["against"] if one["other"] == "plain"
        }
        first, every = f"{score(summary)}_first", f"{score(summary)}_all"
        for method in summary["settings"]["methods"]:
            by = {one["budget"]: one for one in summary["lines"] if one["method"] == method}
            shares = [f"{percent(by[one], first)} / {percent(by[one], every)}" for one in BUDGETS]
            whole, second = by[None], by[1]
            rest = [percent(second, "finished"), f"{whole['seconds']['mean']:.2f}"]
            if "pass@1" in whole:
                rest.insert(0, percent(whole, "pass@1"))
            yield [str(n), method, *shares, *rest, same.get(method, "")]


def percent(line: Summary, name: str) -> str:
    return f"{100 * line[name]['mean']:.1f}"


def line_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(page: str, found: Mapping[str, Mapping[int, Summary]]) -> str:
    """Returns the page with these tables between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page has no marks: {BEGIN}{END}")
    return before + begin + "\n" + "\n".join(pages(found)) + "\n" + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="that of quality_real.sh")
    asked = parser.parse_args()
    if asked.directory is not None:
        keep(asked.directory)
    found = kept()
    for name, runs in found.items():
        if passes(runs):
            (RESULTS / f"{PREFIX}{name}.png").write_bytes(png(list(runs.values())))
    write_synced(PAGE, written(PAGE.read_text("utf-8"), found))


if __name__ == "__main__":
    main()
