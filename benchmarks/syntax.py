"""Middles of Python programs: whether checks refuse what is possible, and what they bring and cost on the bundled pair.

    python benchmarks/syntax.py library --files 300 --cuts 10     # prefixes of true middles of the standard library
    python benchmarks/syntax.py pair --problems 24 -n 8           # held-out functions, a middle of each; --json FILE

Middles are pieces of a line of the body, cut anywhere; a line break stops a sample, and all are aligned. `free` is without checks;
`longest` is free with its middle cut at the longest prefix with which the whole parses ("checked unconstrained" of Melcer et al.);
`checked` is with `syntax="python"`. An error is a middle with which the whole does not parse; a pass is one with which the function
passes its tests, in the sandbox. `share_of_time` is of the rounds, without the cuts of finished samples, which are timed apart.
Exit code 1 if a middle that ended by itself under checks does not parse, or if a prefix of a true middle was refused.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import shoal
from held_out import problems
from problems.generator import FunctionProblem
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.python import PythonMiddle
from shoal.constraints.syntax.viable import is_complete, is_viable
from shoal.engine import engine
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox

Json = dict[str, Any]
LONGEST = 40
"""Characters of a true middle."""


def library(files: int, cuts: int, seed: int) -> Json:
    lots = random.Random(seed)
    paths = sorted(Path(os.__file__).parent.rglob("*.py"))
    lots.shuffle(paths)
    counts: Counter[str] = Counter()
    refused, seconds = [], 0.0
    for path in paths:
        if counts["files"] == files:
            break
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(source) < 2 * LONGEST or not is_complete(source):
            continue
        counts["files"] += 1
        for _ in range(cuts):
            first = lots.randrange(len(source) - LONGEST)
            layout, fits = SourceLayout(), True
            for character in source[:first]:
                fits = fits and layout.feed(character)
            started = time.perf_counter()
            for place in range(first, first + LONGEST):
                fits = fits and (not layout.due or is_viable(layout)) and layout.feed(source[place]) and is_viable(layout)
                counts["prefixes"] += 1
                if not fits:
                    refused.append([path.name, place, source[max(0, place - 40) : place + 1]])
                    break
            seconds += time.perf_counter() - started
            counts["cuts"] += 1
    return {**counts, "refused": refused, "microseconds_per_character": 1e6 * seconds / max(1, counts["prefixes"])}


class Clock:
    """Time within functions that are wrapped, whichever calls which."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def wrap(self, function: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                self.calls += 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return timed


def longest(left: str, middle: str, right: str) -> str:
    ends = range(len(middle), -1, -1)
    return next((middle[:end] for end in ends if is_complete(left + middle[:end] + right)), middle)


def passes(source: str, problem: FunctionProblem, sandbox: Sandbox) -> bool:
    asked = Problem("middle", "python", "", "\n".join(problem.tests) + "\n", problem.name)
    return execute(asked, source + "\n", sandbox).passed


def pair(count: int, n: int, temperature: float, seed: int) -> Json:
    model, lots, sandbox = shoal.load(), random.Random(seed), Sandbox()
    rounds, cuts = Clock(), Clock()
    inner, best_end = engine.checked, PythonMiddle.best_end
    tables: dict[str, Counter[str]] = {name: Counter() for name in ("free", "longest", "checked")}
    seconds = {"free": 0.0, "checked": 0.0}
    model.generate("x = ", suffix="\n", n=n, max_new_tokens=8)  # the first call measures and builds
    engine.checked = rounds.wrap(inner)
    PythonMiddle.best_end = cuts.wrap(best_end)  # type: ignore[method-assign]
    for problem in problems(count):
        whole = problem.function
        assert passes(whole, problem, sandbox), "a true middle fails its tests"
        first = lots.randrange(len(problem.prompt), len(whole) - 4)
        last = lots.randrange(first + 1, max(first + 1, whole.index("\n", first)) + 1)
        left, right = whole[:first], whole[last:]
        options: Json = {
            "suffix": right,
            "n": n,
            "max_new_tokens": 48,
            "temperature": temperature,
            "seed": seed,
            "stop": "\n",
        }
        for name, syntax in (("free", None), ("checked", "python")):
            started = time.perf_counter()
            result = model.generate(left, syntax=syntax, **options)
            seconds[name] += time.perf_counter() - started
            for sample in result[0].samples:
                texts = {name: sample.text}
                if name == "free":
                    texts["longest"] = longest(left, sample.text, right)
                ended = sample.finish_reason == "eos"
                for kind, text in texts.items():
                    _count(tables[kind], left + text + right, problem, ended, len(sample.token_ids), sandbox)
    engine.checked, PythonMiddle.best_end = inner, best_end  # type: ignore[method-assign]
    tokens = tables["checked"]["tokens"]
    return {
        **{name: dict(table) for name, table in tables.items()},
        "seconds": seconds,
        "share_of_time": rounds.seconds / (seconds["checked"] - cuts.seconds),
        "us_per_token": 1e6 * rounds.seconds / tokens,
        "ms_per_cut": 1e3 * cuts.seconds / max(1, cuts.calls),
    }


def table(found: Json) -> str:
    """As Markdown."""
    lines = ["| | syntax errors | ended by itself | passes |", "| --- | --- | --- | --- |"]
    for name in ("free", "longest", "checked"):
        own = Counter(found[name])
        share = {key: f"{100 * own[key] / own['samples']:.1f} %" for key in ("errors", "ended", "passes")}
        lines.append(f"| {name} | {share['errors']} | {share['ended']} | {share['passes']} |")
    return "\n".join(lines)


def _count(table: Counter[str], source: str, problem: FunctionProblem, ended: bool, tokens: int, sandbox: Sandbox) -> None:
    good = is_complete(source)
    table["samples"] += 1
    table["tokens"] += tokens
    table["errors"] += not good
    table["ended"] += ended
    table["errors_of_ended"] += ended and not good
    table["passes"] += good and passes(source, problem, sandbox)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("library", "pair"))
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    found = (
        library(args.files, args.cuts, args.seed)
        if args.what == "library"
        else pair(args.problems, args.n, args.temperature, args.seed)
    )
    for name, value in found.items():
        if not isinstance(value, dict):
            print(f"{name}: {len(value) if isinstance(value, list) else value}")
    if args.what == "pair":
        print(table(found))
    if args.json:
        asked = vars(args) | {"json": str(args.json)}
        write_results(args.json, {"machine": machine(torch.device("cpu")), "arguments": asked, **found})
    return int(bool(found["refused"]) if args.what == "library" else found["checked"].get("errors_of_ended", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
