"""Middles of programs: whether checks refuse what is possible, and what they bring and cost.

    python benchmarks/syntax.py library --files 300 --cuts 10  # prefixes of true middles of Python's standard library
    python benchmarks/syntax.py pair --problems 24 -n 8        # held-out functions, a middle of each; --json FILE
    python benchmarks/syntax.py mbxp --model DIR --file FILE   # a file of MBXP in a language that tree-sitter reads

Middles are pieces of a line of the body, cut anywhere; a line break stops a sample, and all are aligned. `free` is without checks;
`longest` is free with its middle cut at the longest prefix with which the whole parses ("checked unconstrained" of Melcer et al.);
`checked` is with `syntax=`. A model that cannot fill in sees the text before the cursor alone, the check both. An error is a middle
with which the whole does not parse; a pass is one with which the function passes its tests, in the sandbox. `share_of_time` is of
the rounds, without the cuts of finished samples, which are timed apart.
Exit code 1 if a middle that ended by itself under checks does not parse, or if a prefix of a true middle was refused.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shoal
from held_out import problems
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.constraints.fim import middle_tokens
from shoal.constraints.syntax import Syntax
from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.python import PythonMiddle
from shoal.constraints.syntax.tree_middles import TreeMiddle, tree_sitter_language
from shoal.constraints.syntax.viable import is_complete, is_viable
from shoal.engine import engine
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem, read_mbxp
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


class Case(NamedTuple):
    """A program with a piece of a line taken out.

    Attributes:
        problem: its tests. prompt: what the problem gives; the pieces follow it.
        left: before the piece. right: behind it.
    """

    problem: Problem
    prompt: str
    left: str
    right: str

    def passes(self, middle: str, sandbox: Sandbox) -> bool:
        return execute(self.problem, f"{self.left}{middle}{self.right}\n".removeprefix(self.prompt), sandbox).passed


def parses(language: str, source: str) -> bool:
    if language == "python":
        return is_complete(source)
    parser = import_module("tree_sitter").Parser(tree_sitter_language(language))
    return not parser.parse(source.encode()).root_node.has_error


def longest(language: str, left: str, middle: str, right: str) -> str:
    ends = range(len(middle), -1, -1)
    return next((middle[:end] for end in ends if parses(language, left + middle[:end] + right)), middle)


def taken_out(lots: random.Random, first: int, whole: str) -> tuple[str, str]:
    """The texts around a piece of one line, which begins at `first` or behind."""
    start = lots.randrange(first, len(whole) - 4)
    end = lots.randrange(start + 1, max(start + 1, whole.index("\n", start)) + 1)
    return whole[:start], whole[end:]


def held_out_cases(count: int, lots: random.Random, sandbox: Sandbox) -> Iterator[Case]:
    for problem in problems(count):
        asked = Problem("middle", "python", "", "\n".join(problem.tests) + "\n", problem.name)
        left, right = taken_out(lots, len(problem.prompt), problem.function)
        assert Case(asked, "", problem.function, "").passes("", sandbox), "a true middle fails its tests"
        yield Case(asked, "", left, right)


def mbxp_cases(path: Path, count: int, lots: random.Random, sandbox: Sandbox) -> Iterator[Case]:
    """Of those problems whose own solution parses and passes."""
    for problem in read_mbxp(path):
        solution = f"{(problem.canonical or '').rstrip()}\n"
        whole = problem.prompt + solution
        if count and len(solution) > 40 and parses(problem.language, whole) and execute(problem, solution, sandbox).passed:
            count -= 1
            yield Case(problem, problem.prompt, *taken_out(lots, len(problem.prompt), whole))


def compare(model: shoal.Shoal, cases: Iterable[Case], options: Json, sandbox: Sandbox) -> Json:
    rounds, cuts = Clock(), Clock()
    inner, ends = engine.apply_checks, {kind: kind.best_end for kind in (PythonMiddle, TreeMiddle)}
    tables: dict[str, Counter[str]] = {name: Counter() for name in ("free", "longest", "checked")}
    seconds = {"free": 0.0, "checked": 0.0}
    fills = middle_tokens(model.tokenizer) is not None
    model.generate("x = ", n=options["n"], max_new_tokens=8)  # the first call measures and builds
    engine.apply_checks = rounds.wrap(inner)
    for kind, best_end in ends.items():
        kind.best_end = cuts.wrap(best_end)  # type: ignore[method-assign]
    for case in cases:
        language, middles = case.problem.language, cache(lambda text, case=case: case.passes(text, sandbox))
        given = options | {"align": True} | ({"suffix": case.right} if fills else {})
        for name, syntax in (("free", None), ("checked", Syntax(language, case.left, case.right))):
            started = time.perf_counter()
            result = model.generate(case.left, syntax=syntax, **given)
            seconds[name] += time.perf_counter() - started
            for sample in result[0].samples:
                texts = {name: sample.text}
                if name == "free":
                    texts["longest"] = longest(language, case.left, sample.text, case.right)
                for way, text in texts.items():
                    good = parses(language, case.left + text + case.right)
                    ended = sample.finish_reason == "eos"
                    _count(tables[way], good, ended, good and middles(text), len(sample.token_ids))
    engine.apply_checks = inner
    for kind, best_end in ends.items():
        kind.best_end = best_end  # type: ignore[method-assign]
    if not seconds["checked"]:
        raise SystemExit("no problem's own solution passes here: `shoal eval mbxp --solutions` says why")
    tokens = tables["checked"]["tokens"]
    return {
        **{name: dict(table) for name, table in tables.items()},
        "seconds": seconds,
        "share_of_time": rounds.seconds / (seconds["checked"] - cuts.seconds),
        "us_per_token": 1e6 * rounds.seconds / max(1, tokens),
        "ms_per_cut": 1e3 * cuts.seconds / max(1, cuts.calls),
    }


def measured(args: argparse.Namespace) -> Json:
    """Of `pair` or `mbxp`."""
    lots, sandbox = random.Random(args.seed), Sandbox()
    model = shoal.load() if args.model is None else shoal.load(args.model)
    cases = (
        held_out_cases(args.problems, lots, sandbox)
        if args.what == "pair"
        else mbxp_cases(args.file, args.problems, lots, sandbox)
    )
    options = {"n": args.n, "max_new_tokens": 48, "temperature": args.temperature, "seed": args.seed, "stop": "\n"}
    return compare(model, cases, options, sandbox)


def table(found: Json) -> str:
    """As Markdown."""
    lines = ["| | syntax errors | ended by itself | passes |", "| --- | --- | --- | --- |"]
    for name in ("free", "longest", "checked"):
        own = Counter(found[name])
        share = {key: f"{100 * own[key] / own['samples']:.1f} %" for key in ("errors", "ended", "passes")}
        lines.append(f"| {name} | {share['errors']} | {share['ended']} | {share['passes']} |")
    return "\n".join(lines)


def _count(table: Counter[str], good: bool, ended: bool, passed: bool, tokens: int) -> None:
    table["samples"] += 1
    table["tokens"] += tokens
    table["errors"] += not good
    table["ended"] += ended
    table["errors_of_ended"] += ended and not good
    table["passes"] += passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("library", "pair", "mbxp"))
    parser.add_argument("--file", type=Path, help="mbxp: its problems")
    parser.add_argument("--model", metavar="DIR", help="the target, alone; without it the bundled pair")
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    found = library(args.files, args.cuts, args.seed) if args.what == "library" else measured(args)
    for name, value in found.items():
        if not isinstance(value, dict):
            print(f"{name}: {len(value) if isinstance(value, list) else value}")
    if args.what != "library":
        print(table(found))
    if args.json:
        names = {name: Path(value).name for name in ("file", "model", "json") if (value := getattr(args, name))}
        asked = vars(args) | names
        write_results(args.json, {"machine": machine(torch.device("cpu")), "arguments": asked, **found})
    return int(bool(found["refused"]) if args.what == "library" else found["checked"].get("errors_of_ended", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
