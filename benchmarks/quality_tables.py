"""The tables and plots of `quality_real.py` and `quality.sh`, of the runs that have come to their end.

    python benchmarks/quality_tables.py build/quality-real    # keeps their summaries in results/, draws, writes the tables
    python benchmarks/quality_tables.py --pair build/quality  # those of `quality.sh`, the bundled pair's
    python benchmarks/quality_tables.py                       # from the summaries in results/ alone

The tables stand in docs/measurements/quality.md between marks; the prose around them is by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from provenance import write_results
from shoal.durable import write_synced
from shoal.evaluation.figure import COLOURS, LABELS, metric_name, png
from shoal.evaluation.journal import GRADES, SAMPLES
from shoal.evaluation.summary import Results, summarize

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "quality.md"
BEGIN, END = "<!-- quality_tables.py writes from here -->\n", "<!-- to here -->\n"
PAIR_BEGIN, PAIR_END = "<!-- quality_tables.py writes the pair's from here -->\n", "<!-- the pair's to here -->\n"
PREFIX = "quality-smollm2-"
SEEDED, FRESH = ("seeded-0.2", "seeded-0.8"), ("fresh-0.2", "fresh-0.8")
COLUMNS = 7
"""Budgets in a table of the pair, at most."""
SUMMARIES = "summaries"
SETS = {
    "humaneval": "HumanEval",
    "humaneval-chat": "HumanEval by the chat template",
    "mbpp": "MBPP",
    "mbpp-chat": "MBPP by the chat template",
    SUMMARIES: "Summaries in one sentence of ACLSum's abstracts, by the chat template",
}
BUDGETS = (0.5, 1, 2, 4, None)
ENGINES = {"llamacpp": ("llama.cpp, all at once", "#009E73"), "openvino": ("OpenVINO GenAI, all at once", "#E69F00")}
"""The other engines: how the plot calls them, and their colours."""
OWN = tuple(LABELS)
ORDER = (*OWN, *ENGINES)
"""All methods, in the order of the tables."""
NUMBERS = (1, 4, 8, 16, 32)
"""The numbers of samples that the page has a table of once all runs have ended."""
SHARED = ("set", "fingerprint", "chat", "n", "max_new_tokens", "temperature", "top_p", "seed", "threads")
"""The settings that runs must have in common to stand in one table."""
Summary = Mapping[str, Any]


def keep(directory: Path, results: Path = RESULTS) -> None:
    """Writes one summary for each set and number of samples, of all methods whose runs have ended."""
    parts: dict[str, list[Path]] = {}
    for file in sorted(directory.glob("*/summary.json")):
        parts.setdefault(re.sub(r"(-\d+)-[a-z]+$", r"\1", file.parent.name), []).append(file.parent)
    for name, places in parts.items():
        write_results(results / f"{PREFIX}{name}.json", joined(places))


def joined(places: Sequence[Path]) -> dict[str, Any]:
    """Returns the summary of runs of the same problems by different methods, without the paths of the models.

    Raises:
        SystemExit: their settings differ in more than their methods and engines.
    """
    summaries = [json.loads((place / "summary.json").read_text("utf-8")) for place in places]
    first = summaries[0]
    parts = [
        {"methods": one["settings"]["methods"], "machine": one["machine"], "loaded": one.get("loaded", [])}
        for one in summaries
    ]
    settings = first["settings"] | {"model": Path(first["settings"]["model"]).name}
    if len(places) == 1:
        return {**first, "settings": settings, "parts": parts}
    for place, one in zip(places, summaries, strict=True):
        for name in SHARED:
            if one["settings"][name] != first["settings"][name]:
                raise SystemExit(f"{place} has {name} {one['settings'][name]}, and {places[0]} {first['settings'][name]}")
    methods = [method for one in summaries for method in one["settings"]["methods"]]
    ranked = sorted(methods, key=lambda method: ORDER.index(method))
    attempts, grades = (_entries(places, file, field) for file, field in ((SAMPLES, "attempts"), (GRADES, "grades")))
    found = Results(list(attempts), ranked, settings["n"], first["scores"], attempts, grades)
    budgets = list(dict.fromkeys(one["budget"] for one in first["lines"]))
    return {
        **first,
        "settings": settings | {"methods": ranked},
        "parts": parts,
        **summarize(found, [math.inf if budget is None else budget for budget in budgets]),
    }


def _entries(places: Sequence[Path], file: str, field: str) -> dict[str, dict[str, Any]]:
    """Returns the journals' entries by problem, the methods of all runs in one."""
    entries: dict[str, dict[str, Any]] = {}
    for place in places:
        for line in (place / file).read_text("utf-8").splitlines():
            one = json.loads(line)
            before = entries.setdefault(one["task_id"], {"error": None, field: {}})
            before["error"] = before["error"] or one.get("error")
            before[field] |= one[field]
    return entries


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
    if rest := "; ".join(missing(found)):
        yield f"Not measured yet: {rest}.\n"


def missing(found: Mapping[str, Mapping[int, Summary]]) -> Iterator[str]:
    """Yields, for each set, the numbers of samples without a table, and the methods without a row at 8 samples."""
    for name, title in SETS.items():
        runs = found.get(name, {})
        if absent := [str(n) for n in NUMBERS if n not in runs]:
            yield f"{title}, n = {', '.join(absent)}" if runs else f"{title}"
        wanted = OWN if name == SUMMARIES else ORDER
        rows = [method for method in wanted if method not in runs[8]["settings"]["methods"]] if 8 in runs else []
        if rows:
            yield f"{title}, n = 8: {', '.join(rows)}"


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
            yield [str(n), method, *shares, *rest, same.get(method, "") if method in OWN else ""]


def percent(line: Summary, name: str) -> str:
    return f"{100 * line[name]['mean']:.1f}"


def line_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ── the bundled pair ────────────────────────────────────────────────────────────────────────────────────────────────


def keep_pair(directory: Path, results: Path = RESULTS) -> None:
    """Copies the summaries of `quality.sh`."""
    for name in (*SEEDED, *FRESH):
        summary = json.loads((directory / name / "summary.json").read_text("utf-8"))
        write_results(results / f"quality-{name}.json", summary)


def kept_pair(results: Path = RESULTS) -> dict[str, Summary]:
    return {name: json.loads((results / f"quality-{name}.json").read_text("utf-8")) for name in (*SEEDED, *FRESH)}


def pair_pages(found: Mapping[str, Summary]) -> Iterator[str]:
    """Yields the pair's part of the page: files, plot, and the tables of times and of laws."""
    yield f"Of the runs with a seed: {', '.join(origin(name, found[name]) for name in SEEDED)}.\n"
    yield "![Pass@First and Pass@All over the time budget, at temperatures 0.2 and 0.8](../../benchmarks/results/quality.png)\n"
    for name in SEEDED:
        yield f"**T = {name.partition('-')[2]}**: Pass@First / Pass@All in per cent\n"
        budgets = telling_budgets(found[name])
        heads = ["method", *(f"{budget:g} s" for budget in budgets), "no budget", "all there after, s"]
        yield "\n".join(map(line_of, [heads, ["---"] * len(heads), *budget_lines(found[name], budgets)])) + "\n"
    heads = ["T", "methods", "metric", "better at", "worse at", "most gained, points", "most lost, points", "same ids"]
    rows = [row for name in SEEDED for row in rivals(name, found[name])]
    yield f"Of {COUNTED} budgets, at how many the first method is better or worse than the second beyond chance, and where most:\n"
    yield "\n".join(map(line_of, [heads, ["---"] * len(heads), *rows])) + "\n"
    yield f"Of the runs without a seed: {', '.join(origin(name, found[name]) for name in FRESH)}.\n"
    heads = ["T", "metric", "plain", "batched", "difference, points", "p"]
    rows = [row for name in FRESH for row in laws(name, found[name])]
    yield "\n".join(map(line_of, [heads, ["---"] * len(heads), *rows])) + "\n"


COUNTED = 96
"""Budgets of a curve."""


def origin(name: str, summary: Summary) -> str:
    """Names a file, its commit and its date."""
    commit, _, dirty = summary["machine"]["commit"].partition("-")
    changed = " with changes" if dirty else ""
    return (
        f"[{name}](../../benchmarks/results/quality-{name}.json) (commit `{commit}`{changed}, {summary['machine']['date']})"
    )


def telling_budgets(summary: Summary) -> list[float]:
    """Returns the budgets at which the methods have finished most differently, in order."""
    finished: dict[float, list[float]] = {}
    for one in summary["lines"]:
        if one["budget"]:
            finished.setdefault(one["budget"], []).append(one["finished"]["mean"])
    ranked = sorted(finished, key=lambda budget: max(finished[budget]) - min(finished[budget]), reverse=True)
    return sorted(ranked[:COLUMNS])


def budget_lines(summary: Summary, budgets: list[float]) -> Iterator[list[str]]:
    """Yields two rows of a table for each method: what passes, and what is finished."""
    for method in summary["settings"]["methods"]:
        by = {one["budget"]: one for one in summary["lines"] if one["method"] == method}
        shares = [f"{percent(by[one], 'passed_first')} / {percent(by[one], 'passed_all')}" for one in (*budgets, None)]
        yield [method, *shares, f"{by[None]['seconds']['mean']:.3f}"]
        yield [f"{method}: finished, %", *(percent(by[one], "finished") for one in (*budgets, None)), ""]


def rivals(name: str, summary: Summary) -> Iterator[list[str]]:
    """Yields how batched decoding compares with the others over all budgets, and the others with plain decoding."""
    for one in (pair for pair in summary["against"] if pair["method"] == "batched" or pair["other"] == "plain"):
        for metric, key in (("Pass@First", "first"), ("Pass@All", "all")):
            told = one[key]
            most = [
                f"{100 * told[side]['difference']:+.1f} ({told[side]['budget']:.2g} s)" if told[side]["difference"] else "0"
                for side in ("gain", "loss")
            ]
            same = f"{one['same_ids']} of {one['samples']}"
            counts = [str(told["better"]), str(told["worse"])]
            yield [name.partition("-")[2], f"{one['method']}, {one['other']}", metric, *counts, *most, same]


def laws(name: str, summary: Summary) -> Iterator[list[str]]:
    """Yields pass@k of plain and of batched decoding, with the interval of their difference."""
    plain, batched = (
        next(one for one in summary["lines"] if one["method"] == method and one["budget"] is None)
        for method in ("plain", "batched")
    )
    compared = next(one for one in summary["against"] if one["method"] == "batched" and one["other"] == "plain")
    for metric in (key for key in plain if key.startswith("pass@")):
        told = compared[metric]
        mean, low, high = (f"{100 * told[key]:+.2f}" for key in ("mean", "low", "high"))
        shares = [f"{100 * one[metric]['mean']:.2f}" for one in (plain, batched)]
        yield [name.partition("-")[2], metric, *shares, f"{mean} [{low}, {high}]", f"{told['p']:.2f}"]


def between(page: str, begin: str, end: str, parts: Iterator[str]) -> str:
    """Returns the page with these parts between two marks."""
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise SystemExit(f"the page has no marks: {begin}{end}")
    return before + begin + "\n" + "\n".join(parts) + "\n" + end + after


def written(page: str, found: Mapping[str, Mapping[int, Summary]]) -> str:
    """Returns the page with these tables between its marks."""
    return between(page, BEGIN, END, pages(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="that of quality_real.sh")
    parser.add_argument("--pair", type=Path, metavar="DIRECTORY", help="that of quality.sh")
    asked = parser.parse_args()
    if asked.directory is not None:
        keep(asked.directory)
    if asked.pair is not None:
        keep_pair(asked.pair)
    found = kept()
    COLOURS.update({name: colour for name, (_, colour) in ENGINES.items()})
    LABELS.update({name: label for name, (label, _) in ENGINES.items()})
    for name, runs in found.items():
        if passes(runs):
            (RESULTS / f"{PREFIX}{name}.png").write_bytes(png(list(runs.values())))
    pair = kept_pair()
    (RESULTS / "quality.png").write_bytes(png([pair[name] for name in SEEDED]))
    page = between(PAGE.read_text("utf-8"), PAIR_BEGIN, PAIR_END, pair_pages(pair))
    write_synced(PAGE, written(page, found))


if __name__ == "__main__":
    main()
