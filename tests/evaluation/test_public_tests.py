"""Public tests: from prompts or sets, executed as a share, and never the hidden ones; `shoal eval --methods planned`.

Tests of: evaluation/public_tests.py, cli/eval_planned.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import Command, Models, shoal, tiny
from sandboxes import sandbox_of, strongest
from shoal.errors import RequestError
from shoal.evaluation import public_tests
from shoal.evaluation.execution import ExecutionResult
from shoal.evaluation.problems import Problem
from shoal.evaluation.public_tests import PublicTests, Rewards, examples, published
from shoal.evaluation.sandbox import Sandbox

__all__ = ["shoal", "tiny"]  # fixtures

PROMPT = '''def add(a, b):
    """Add two numbers.

    >>> add(1, 2)
    3
    >>> add(-1, 1)
    0
    """
'''
HIDDEN = """SECRET = 1234567


def check(candidate):
    assert candidate(SECRET, 0) == SECRET
    assert candidate(5, 5) == 10
    assert candidate(2, 2) == 4
"""
CANONICAL = "    return a + b  # published\n"
PROBLEM = Problem("add", "python", PROMPT, f"_candidate = add\n{HIDDEN}\ncheck(_candidate)\n", "add", CANONICAL)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with sandbox_of(strongest()) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (">>> f(1)\n2", "f(1) == 2"),
        (">>> f([1, 2],\n  3)\n'a b'", "f([1, 2],   3) == 'a b'"),
        ("f('x') == True", "f('x') == True"),
        ("f(3) => 4.5.", "f(3) == 4.5"),
        ("f(1) ==> [1]", "f(1) == [1]"),
        ("f(1, k=2) ➞ (1, 2)  # so", "f(1, k=2) == (1, 2)"),
        ("f({'a': 1}) should return None.", "f({'a': 1}) == None"),
        ("f(2) returns 3", "f(2) == 3"),
        ("f(x) == 3", None),  # no literal
        ("f(1) == true", None),
        ("f(1) = f(0) + 1", None),
        ("of(1) == 2", None),
        (">>> f(1)\n>>> f(2)", None),
        (">>> f(1", None),
    ],
)
def test_examples_are_calls_with_what_they_return(text: str, found: str | None) -> None:
    prompt = f'def f(x):\n    """Text.\n    {text}\n    """\n'
    assert examples(prompt, "f") == ([] if found is None else [f"assert {found}"])


def test_first_tests_of_a_set_no_longer_judge() -> None:
    independent = replace(PROBLEM, tests=HIDDEN.replace("candidate(SECRET, 0) == SECRET", "candidate(7, 0) == 7"))
    public, hidden = published(independent, "first:2") or (None, None)
    assert public is not None
    assert hidden is not None
    assert public.count == 2
    assert "assert add(7, 0) == 7" in public.problem.tests
    assert "candidate(2, 2)" in hidden.tests
    assert "(7, 0)" not in hidden.tests
    assert "(5, 5)" not in hidden.tests
    lines = replace(PROBLEM, tests="assert add(1, 1) == 2\nassert add(2, 1) == 3\n")
    public, hidden = published(lines, "first:1") or (None, None)
    assert hidden is not None
    assert hidden.tests == "assert add(2, 1) == 3\n"
    assert published(lines, "first:2") is None  # nothing would judge
    assert published(PROBLEM, "first:1") is None  # it needs a name of the hidden tests


def test_other_public_tests_and_languages_are_refused() -> None:
    for which in ("first:0", "first", "all", "first:x"):
        with pytest.raises(RequestError, match="docstring"):
            published(PROBLEM, which)
    with pytest.raises(RequestError, match="in java"):
        published(replace(PROBLEM, language="java"), "docstring")
    assert published(replace(PROBLEM, prompt="def add(a, b):\n"), "docstring") is None


# ── no leak ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def leaks(tests: PublicTests, problem: Problem) -> list[str]:
    """What a search could learn from public tests that it must not: published solution, hidden tests, line by line."""
    hidden = [problem.canonical or "", *problem.tests.splitlines()]
    said = repr(tests)
    return [text for text in hidden if text.strip() and repr(text)[1:-1] in said]


def test_public_tests_hold_nothing_of_the_hidden_ones() -> None:
    public, judged = published(PROBLEM, "docstring") or (None, None)
    assert public is not None
    assert judged == PROBLEM
    assert leaks(public, PROBLEM) == []
    assert leaks(replace(public, problem=PROBLEM), PROBLEM)  # the control
    assert leaks(replace(public, problem=replace(public.problem, canonical=CANONICAL)), PROBLEM)
    other = published(replace(PROBLEM, tests="assert False\n", canonical=None), "docstring")
    assert other is not None
    assert other[0].problem.tests.replace(other[0].mark, public.mark) == public.problem.tests


def test_rewards_are_shares_of_the_public_tests(sandbox: Sandbox) -> None:
    public, _ = published(PROBLEM, "docstring") or (None, None)
    assert public is not None
    rewards = Rewards(public, sandbox, workers=2)
    texts = {
        "    return a + b\n": 1.0,
        "    return 3\n": 0.5,
        "    raise ValueError(a)\n": 0.0,
        "    return (\n": 0.0,
        "    import os\n    os._exit(0)\n": 0.0,
    }
    assert rewards.of(list(texts)) == list(texts.values())
    assert len(rewards.known) == rewards.asked == 5
    assert rewards.of(["    return 3\n"] * 2) == [0.5, 0.5]
    assert (len(rewards.known), rewards.asked) == (5, 7)


def test_a_program_cannot_write_its_own_reward() -> None:
    public, _ = published(PROBLEM, "docstring") or (None, None)
    assert public is not None
    result = lambda detail: ExecutionResult("failed", detail, 0.1)  # noqa: E731
    assert public.share(result(f"AssertionError: {public.mark} 1")) == 0.5
    assert public.share(result("AssertionError: public tests 1")) == 0.0
    assert public.share(result("")) == 0.0


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def data(tmp_path: Path) -> Path:
    record = {"task_id": "add", "prompt": PROMPT, "test": HIDDEN, "entry_point": "add", "canonical_solution": CANONICAL}
    silent = {**record, "task_id": "silent", "prompt": "def add(a, b):\n"}
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (record, silent)), encoding="utf-8")
    return file


def arguments(data: Path, tiny: Models, *more: object) -> list[object]:
    models: list[object] = ["-m", tiny.target, "--sandbox", strongest()]
    options = ["-n", 2, "--plan-tokens", 16, "--max-new-tokens", 8, "--seed", 3, "--temperature", 1]
    return ["eval", "humaneval", "--data", data, "--methods", "planned", *models, *options, *more]


@pytest.mark.slow
def test_the_command_plans_filters_judges_and_goes_on(
    shoal: Command, data: Path, tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Problem] = []
    original = public_tests.execute_all

    def spy(pairs: Sequence[tuple[Problem, str]], *given: Any) -> Any:
        searched.extend(problem for problem, _ in pairs)
        return original(pairs, *given)

    monkeypatch.setattr(public_tests, "execute_all", spy)
    command = arguments(data, tiny, "--output", tmp_path / "out", "--json")
    first = shoal(*command)
    assert first.code == 0, first.err
    summary = first.json
    assert (summary["problems"], summary["left_out"], summary["lossless"]) == (1, 1, False)
    assert {"commit", "date"} <= summary["machine"].keys()
    assert summary["methods"]["planned"]["tokens"] <= 16
    assert summary["methods"]["planned"]["drafted"] >= 0
    assert searched
    assert not any("SECRET" in problem.tests or problem.canonical for problem in searched)
    (entry,) = map(json.loads, (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    assert entry["task_id"] == "add"
    executed = len(searched)
    again = shoal(*command)
    assert again.json == summary
    assert len(searched) == executed
    shown = shoal(*command[:-1]).out
    assert "not lossless" in shown
    assert "no public tests: 1" in shown
    other = shoal(*command, "--plan-width", 2)
    assert other.code == 2
    assert "plan_width = 3" in other.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--time-budget", "1"), "leave out --time-budget"),
        (("--methods", "planned,plain"), "give --methods planned alone"),
        (("--chat",), "leave out --time-budget, --export and --chat"),
        (("--methods", "plain", "--plan-width", "2"), "options of --methods planned"),
        (("--temperature", "0"), "--temperature above 0"),
        (("--public-tests", "hidden"), "public tests are 'docstring' or 'first:K'"),
        (("--public-tests", "first:9"), "has public tests of kind 'first:9'"),
    ],
)
def test_what_does_not_go_with_planning_is_refused(
    shoal: Command, data: Path, tiny: Models, more: tuple[str, ...], said: str
) -> None:
    answer = shoal(*arguments(data, tiny, *more))
    assert answer.code == 2
    assert said in " ".join(answer.err.split())
