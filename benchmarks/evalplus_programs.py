"""Completions of HumanEval's problems that are right, wrong in a way that is known, or changed in one token."""

from __future__ import annotations

import io
import random
import tokenize
from collections.abc import Iterator, Mapping, Sequence

from shoal.evaluation.problems import Problem

WRONG: Mapping[str, str] = {
    "nothing returned": "    return None\n",
    "exception": "    raise ValueError('no')\n",
    "syntax error": "    return (\n",
    "exit": "    import os\n    os._exit(0)\n",
    "loop": "    while True:\n        pass\n",
    "equal to all": "    class Equal:\n        def __eq__(self, other):\n            return True\n    return Equal()\n",
}
SLOW, EVERY = "loop", 8
"""Completions that take their whole time are tried with each eighth problem."""
CHEAT = "equal to all"
"""It passes where an object of the completion is compared with what the tests expect; shoal compares plain data."""
OTHER_WORD = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "/", "%": "//", "+=": "-=", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "True": "False", "False": "True", "min": "max", "max": "min",
}  # fmt: skip


def completions(problems: Sequence[Problem], changes: int) -> Iterator[tuple[Problem, str, str]]:
    """(problem, kind, completion): the canonical solution, up to `changes` changed ones, and the wrong ones."""
    for number, problem in enumerate(problems):
        yield problem, "canonical", str(problem.canonical)
        for text in changed(problem, changes):
            yield problem, "one token changed", text
        for kind, text in WRONG.items():
            if kind != SLOW or number % EVERY == 0:
                yield problem, kind, text


def changed(problem: Problem, most: int) -> list[str]:
    """The canonical solution with another operator, number or word at one place; the task id chooses the places."""
    program = problem.prompt + str(problem.canonical)
    found = [place for place in _places(program) if place[0] >= len(problem.prompt)]
    chosen = random.Random(problem.task_id).sample(found, min(most, len(found)))
    start = len(problem.prompt)
    return [program[start:at] + new + program[at + length :] for at, length, new in sorted(chosen)]


def _places(program: str) -> Iterator[tuple[int, int, str]]:
    """(offset, length, what to write instead) of the tokens that can be changed."""
    lines = [0]
    for line in program.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(program).readline):
        if token.type == tokenize.NUMBER and token.string.isdigit():
            new = str(int(token.string) + 1)
        elif token.type in (tokenize.OP, tokenize.NAME):
            new = OTHER_WORD.get(token.string, "")
        else:
            continue
        if new:
            yield lines[token.start[0] - 1] + token.start[1], len(token.string), new
