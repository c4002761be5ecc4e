"""Samples of the bundled target that go round in circles, free and with `shoal.sampling.processors`.

    python benchmarks/repetition.py [-n 4] [--tokens 200] [--problems 24] [--json FILE]

The prompts are beginnings that small models repeat themselves after. A sample loops if its last tokens are the same tokens
three times over or more, and these are 12 tokens at least; its lines loop if its last lines have the token types of the lines
before them three times over or more. `passes` is of held-out functions that are completed in the same way, in the sandbox: what
the penalty costs where nothing goes wrong.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import shoal
from held_out import problems
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox
from shoal.sampling.processors import GrammarRepetitionPenalty, repeated, types_of

PROMPTS = (
    "x = [", "NAMES = (", "CODES = {", "WORDS = [\n    'one',\n    'two',\n", "matrix = [[0, 0, 0],", "table = {\n    1: 'a',\n",
    "class Color:\n    RED = 1\n    GREEN = 2\n", "import os\nimport re\nimport sys\n", "print(1)\nprint(2)\n",
    "def test_one():\n    assert f(1) == 1\n    assert f(2) == 2\n", "a = 1\nb = 2\nc = 3\n", "# -----\n", "'''", "lines = '''\n",
    "def f(x):\n    if x == 1:\n        return 1\n    if x == 2:\n        return 2\n",
    "try:\n    pass\nexcept ValueError:\n    pass\n",
)  # fmt: skip
DECAYS = (1.0, 0.9, 0.7, 0.5)


def loops(ids: list[int]) -> bool:
    length, times = repeated(ids)
    return times >= 2 and length * (times + 1) >= 12


def lines_loop(text: str) -> bool:
    lines = [types_of(line.encode()) for line in text.split("\n")[:-1] if line.strip()]
    return repeated(lines)[1] >= 2


def passes(problem: Any, text: str, sandbox: Sandbox) -> bool:
    body = text.split("\n\n\n")[0]
    asked = Problem("function", "python", "", "\n".join(problem.tests) + "\n", problem.name)
    return execute(asked, problem.prompt + body + "\n", sandbox).passed


def measured(model: shoal.Shoal, decay: float, temperature: float, given: argparse.Namespace) -> dict[str, Any]:
    """What samples of one strength of the penalty do."""
    processors = [] if decay == 1 else [GrammarRepetitionPenalty(model.tokenizer, decay=decay, ending=0.8)]
    options: dict[str, Any] = {
        "n": given.n if temperature else 1, "temperature": temperature, "seed": given.seed, "processors": processors
    }  # fmt: skip
    samples = [s for o in model.generate(PROMPTS, max_new_tokens=given.tokens, **options) for s in o.samples]
    sandbox, asked = Sandbox(), problems(given.problems)
    completed = model.generate([problem.prompt for problem in asked], max_new_tokens=100, **options)
    own = [passes(problem, s.text, sandbox) for problem, o in zip(asked, completed, strict=True) for s in o.samples]
    return {
        "decay": decay, "temperature": temperature, "samples": len(samples), "loop": sum(loops(s.token_ids) for s in samples),
        "lines_loop": sum(lines_loop(s.text) for s in samples), "ended": sum(s.finish_reason == "eos" for s in samples),
        "passes": sum(own), "completions": len(own),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="samples of a prompt, where they are not greedy")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    given = parser.parse_args()
    model = shoal.load()
    rows = []
    print("| temperature | decay | tokens loop | lines loop | ended | passes |\n|---:|---:|---:|---:|---:|---:|")
    for temperature in (0.0, 0.6):
        for decay in DECAYS:
            row = measured(model, decay, temperature, given)
            rows.append(row)
            of, done = row["samples"], row["completions"]
            print(
                f"| {temperature} | {'off' if decay == 1 else decay} | {row['loop']} of {of} | {row['lines_loop']} of {of} | "
                f"{row['ended']} of {of} | {row['passes']} of {done} |",
                flush=True,
            )
    if given.json:
        asked = {name: value for name, value in vars(given).items() if name != "json"}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "arguments": asked, "rows": rows})


if __name__ == "__main__":
    main()
