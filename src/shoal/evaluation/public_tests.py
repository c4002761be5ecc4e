"""The public tests of Python problems, and the share of them that a program passes.

A search may run public tests while it writes; the hidden tests, by which its program is judged, it
may not. Public are the examples in a problem's prompt, which are read from the prompt alone, or the
first tests of its set, which are then no longer among those that judge. A `PublicTests` holds
neither the hidden tests nor the published solution.
"""

from __future__ import annotations

import ast
import builtins
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from shoal.errors import RequestError
from shoal.evaluation.execution import ExecutionResult, execute_all
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox

SEPARATOR = re.compile(r"\s*(?:==>|==|=>|->|➞|→|should return|returns?)\s*")
NEXT_LINE = re.compile(r"[ \t]*\n[ \t]*(?!>>>)")
COUNTER = "_passed_public_tests"


@dataclass(frozen=True)
class PublicTests:
    """The public tests of a problem.

    Attributes:
        problem: the problem with these tests alone: without the hidden ones, and without its
            published solution.
        count: the number of the tests.
        mark: a text that a completion cannot know, before the number of passed tests.
    """

    problem: Problem
    count: int
    mark: str

    @classmethod
    def of(cls, problem: Problem, asserts: Sequence[str]) -> PublicTests:
        """Makes the tests from statements, each of which raises if it fails."""
        mark = f"public tests {uuid.uuid4().hex}"
        lines = [f"{COUNTER} = 0"]
        for statement in asserts:
            lines += ["try:", f"    {statement}", f"    {COUNTER} += 1"]
            lines += ["except Exception:", "    pass"]
        lines.append(f'assert {COUNTER} == {len(asserts)}, f"{mark} {{{COUNTER}}}"')
        public = replace(problem, tests="\n".join(lines) + "\n", canonical=None)
        return cls(public, len(asserts), mark)

    def share(self, result: ExecutionResult) -> float:
        """Returns the share of the tests that passed.

        It is 0 for a program that does not parse, or that a bound or a signal ended in a test.
        """
        if result.passed:
            return 1.0
        match = re.search(rf"{self.mark} (\d+)", result.detail)
        return int(match[1]) / self.count if match else 0.0


def published(problem: Problem, which: str) -> tuple[PublicTests, Problem] | None:
    """Returns a problem's public tests, and the problem with the tests that judge.

    Args:
        which: "docstring": the examples in the prompt; "first:K": the first K tests of the set.

    Returns:
        None if it has no public tests, or if no test would be left to judge by.

    Raises:
        RequestError: `which` is neither, or the problem is not one of Python.
    """
    if problem.language != "python":
        raise RequestError(
            f"{problem.task_id!r} is a problem in {problem.language}, and public tests are read "
            f"from problems in Python: take another file"
        )
    kind, _, number = which.partition(":")
    if which == "docstring":
        asserts = examples(problem.prompt, problem.entry_point)
        return (PublicTests.of(problem, asserts), problem) if asserts else None
    if kind != "first" or not number.isdecimal() or not int(number):
        raise RequestError(f"public tests are 'docstring' or 'first:K' with K >= 1, got {which!r}")
    return _first(problem, int(number))


def examples(prompt: str, entry_point: str) -> list[str]:
    """Returns the examples in a prompt, as statements that raise unless they hold.

    An example is a call of the function with literals, and the literal that it returns: behind it
    (`==`, `=>`, `->`, `➞`, `returns`, ...), or in the next line of an example of doctest. Others
    are left out.
    """
    texts: dict[str, None] = {}
    for match in re.finditer(rf"\b{re.escape(entry_point)}\(", prompt):
        call = _call(prompt, match.start())
        if call is None:
            continue
        end = match.start() + len(call)
        doctest = prompt[: match.start()].endswith((">>> ", ">>>"))
        between = (NEXT_LINE if doctest else SEPARATOR).match(prompt, end)
        value = None if between is None else _literal(prompt[between.end() :].partition("\n")[0])
        if value is not None:
            call = " ".join(call.split("\n"))
            texts[f"assert {call} == {value}"] = None
    return list(texts)


def _call(text: str, start: int) -> str | None:
    """Returns the source of the call at a place; None unless all its arguments are literals."""
    for closing in re.finditer(r"\)", text[start:]):
        source = text[start : start + closing.end()]
        with suppress(SyntaxError, ValueError):
            call = ast.parse(source, mode="eval").body
            if not isinstance(call, ast.Call):
                return None
            try:
                for argument in (*call.args, *(named.value for named in call.keywords)):
                    ast.literal_eval(argument)
            except (ValueError, TypeError, SyntaxError):
                return None
            return source
    return None


def _literal(line: str) -> str | None:
    """Returns the literal that a line begins with, without its explanation; None without one."""
    line = line.strip()
    for text in (line, line.split(" #")[0], line.rstrip(".,;"), re.split(r"\s{2,}|, ", line)[0]):
        with suppress(ValueError, TypeError, SyntaxError):
            return repr(ast.literal_eval(text.strip()))
    return None


def _first(problem: Problem, count: int) -> tuple[PublicTests, Problem] | None:
    """Makes the first tests public, and takes them from those that judge."""
    tree = ast.parse(problem.tests)
    body, name = tree.body, problem.entry_point
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args:
            body, name = node.body, node.args.args[0].arg
    tests = [node for node in body if isinstance(node, ast.Assert) and name in _names(node)]
    chosen = tests[:count]
    known = {name, problem.entry_point, *vars(builtins)}
    if len(chosen) == len(tests) or any(_names(test) - known for test in chosen):
        return None
    body[:] = [node for node in body if node not in chosen]
    hidden = replace(problem, tests=ast.unparse(tree) + "\n")
    for inner in (each for test in chosen for each in ast.walk(test)):
        if isinstance(inner, ast.Name) and inner.id == name:
            inner.id = problem.entry_point
    return PublicTests.of(problem, [ast.unparse(test) for test in chosen]), hidden


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


@dataclass
class Rewards:
    """The rewards of the completions of a problem: the share of its public tests that each passes.

    Attributes:
        tests: the tests.
        sandbox: the sandbox that executes them.
        workers: the number of programs executed at a time; None = one per processor.
        known: the rewards by completion: a text is executed once.
        asked: the number of rewards asked for.
    """

    tests: PublicTests
    sandbox: Sandbox
    workers: int | None = None
    known: dict[str, float] = field(default_factory=dict)
    asked: int = 0

    def of(self, completions: Sequence[str]) -> list[float]:
        """Returns the reward of each completion; unknown ones are executed at the same time."""
        self.asked += len(completions)
        new = [text for text in dict.fromkeys(completions) if text not in self.known]
        self.known |= dict(zip(new, self._executed(new), strict=True))
        return [self.known[text] for text in completions]

    def _executed(self, completions: Sequence[str]) -> Iterator[float]:
        pairs = [(self.tests.problem, text) for text in completions]
        for result in execute_all(pairs, self.sandbox, self.workers):
            yield self.tests.share(result)
