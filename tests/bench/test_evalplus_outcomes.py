"""The parts of `benchmarks/evalplus_outcomes.py` that need no evaluator of others: programs, the data set, and what is counted.

Tests of: benchmarks/evalplus_outcomes.py, evalplus_programs.py and evalplus_checks.py.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

import evalplus_checks
import evalplus_outcomes
import evalplus_programs
from evalplus_outcomes import Outcomes, Programs
from shoal.evaluation.problems import Problem, read_humaneval

RECORD = {
    "task_id": "HumanEval/0",
    "prompt": "def down(n, seen):\n    '''Counts to 0; 1 + 1 < 3.'''\n",
    "entry_point": "down",
    "test": "def check(candidate):\n    given = []\n    assert candidate(2, given) == 0 and candidate(0, given) == 0\n",
    "canonical_solution": "    seen.append(n)\n    if n <= 0 or n == 9:\n        return n\n    return down(n - 1, seen)\n",
}


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    (tmp_path / "set.jsonl").write_text(json.dumps(RECORD), "utf-8")
    return read_humaneval(tmp_path / "set.jsonl")[0]


def test_changed_programs_differ_in_one_token_of_the_solution(problem: Problem) -> None:
    canonical = str(problem.canonical)
    texts = evalplus_programs.changed(problem, 100)
    assert len(set(texts)) == len(texts) == 7  # <=, 0, or, ==, 9, -, 1; the numbers of the docstring are left alone
    assert canonical not in texts
    for text in texts:
        ast.parse(problem.prompt + text)
        before, after = canonical.split(), text.split()
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    few = evalplus_programs.changed(problem, 2)
    assert len(few) == 2
    assert few == evalplus_programs.changed(problem, 2)
    assert set(few) < set(texts)


def test_slow_programs_are_tried_with_few_problems(problem: Problem) -> None:
    kinds = Counter(kind for _, kind, _ in evalplus_programs.completions([problem] * 17, 2))
    assert kinds == {
        **dict.fromkeys(evalplus_programs.WRONG, 17), "canonical": 17, "one token changed": 34, evalplus_programs.SLOW: 3,
    }  # fmt: skip


def test_the_data_set_has_the_arguments_of_the_tests() -> None:
    [line] = [json.loads(line) for line in evalplus_checks.data_set([RECORD]).splitlines()]
    assert line["base_input"] == [[2, []], [0, [2, 1, 0]]]  # neither calls inside the solution, nor what it does to a list
    assert (line["plus_input"], line["atol"], line["contract"]) == ([], 0, "")
    with pytest.raises(AssertionError):  # the canonical solution does not pass
        evalplus_checks.data_set([{**RECORD, "canonical_solution": "    return 1\n"}])


def test_outcomes_are_counted_by_kind() -> None:
    outcomes = [
        Outcomes("HumanEval/0", "canonical", "passed", "pass", "passed"),
        Outcomes("HumanEval/0", "changed", "failed", "pass", "failed: x"),
        Outcomes("HumanEval/1", "changed", "passed", "timeout", "timed out"),
        Outcomes("HumanEval/1", "changed", "time", "fail", "timed out"),
    ]
    assert evalplus_outcomes.table_of(outcomes) == [
        ["canonical", "1", "1", "1", "1", "0", "0"],
        ["changed", "3", "1", "1", "0", "2", "1"],
    ]


def test_programs_of_two_sources_keep_their_order() -> None:
    one = Programs({"a": ["x"], "b": []}, {"a": ["passed"], "b": []}, "a1\n", [["a1"], []])
    two = Programs({"a": ["y"], "b": ["z"]}, {"a": ["time"], "b": ["failed"]}, "a2\nb1\n", [["a2"], ["b1"]])
    assert one + two == Programs(
        {"a": ["x", "y"], "b": ["z"]}, {"a": ["passed", "time"], "b": ["failed"]}, "a1\na2\nb1\n", [["a1", "a2"], ["b1"]]
    )
