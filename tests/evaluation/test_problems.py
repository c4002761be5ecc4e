"""Files of problems: what is read, and what a broken one is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import RequestError
from shoal.evaluation.execution import read_solutions
from shoal.evaluation.problems import Problem, read_humaneval, read_mbxp

RECORD = {
    "task_id": "T/0",
    "prompt": "def add(a, b):\n",
    "canonical_solution": "    return a + b\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "language": "python",
}
DATA = Path(__file__).parents[3] / "shared" / "data"
SETS = {  # file: language, problems, problems with a canonical solution
    "human-eval/HumanEval.jsonl.gz": ("python", 164, 164),
    "mbxp/mbpp_release_v1.jsonl.gz": ("python", 974, 974),
    "mbxp/mbjsp_release_v1.2.jsonl.gz": ("javascript", 966, 938),
    "mbxp/mbjp_release_v1.2.jsonl.gz": ("java", 966, 874),
    "mbxp/mbcpp_release_v1.2.jsonl.gz": ("cpp", 848, 773),
    "mbxp/mbplp_release_v1.jsonl.gz": ("perl", 966, 0),
    "mbxp/mbtsp_release_v1.2.jsonl.gz": ("typescript", 968, 967),
}


def write(path: Path, *records: object) -> Path:
    """A file of JSON lines; text goes in as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def without(name: str) -> dict[str, Any]:
    """The record with a field less."""
    return {key: value for key, value in RECORD.items() if key != name}


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz"])
def test_records_become_problems(tmp_path: Path, name: str) -> None:
    no_canonical = {**RECORD, "task_id": "T/1", "canonical_solution": None, "language": "cpp", "test": "int main() {}"}
    middle = {**without("canonical_solution"), "task_id": "T/2", "suffix": "\nprint(add)"}
    path = write(tmp_path / name, RECORD, "", no_canonical, middle)
    python, cpp, infilling = read_mbxp(path)
    assert (python.task_id, python.language, python.entry_point) == ("T/0", "python", "add")
    assert python.canonical == RECORD["canonical_solution"]
    assert (cpp.language, cpp.canonical, cpp.suffix) == ("cpp", None, "")
    assert cpp.program("x") == "def add(a, b):\nx\nint main() {}"
    assert infilling.program("    pass").startswith("def add(a, b):\n    pass\nprint(add)\n")


def test_humaneval_is_python_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", without("language"), {**RECORD, "task_id": "T/1", "language": "ruby"})
    assert [problem.language for problem in read_humaneval(path)] == ["python", "ruby"]
    with pytest.raises(
        RequestError, match="line 1: expected text in the field 'language'; the record has only task_id, prompt"
    ):
        read_mbxp(path)


def run(problem: Problem, completion: str) -> None:
    """Executes a program of ours right here."""
    exec(problem.program(completion), {})


def test_python_tests_are_called_with_the_function(tmp_path: Path) -> None:
    (problem,) = read_mbxp(write(tmp_path / "set.jsonl", RECORD))
    run(problem, "    return a + b")
    with pytest.raises(AssertionError):
        run(problem, "    return a - b")


def test_a_function_to_test_may_be_called_check(tmp_path: Path) -> None:
    renamed = {**RECORD, "prompt": "def check(a, b):\n", "entry_point": "check"}
    (problem,) = read_mbxp(write(tmp_path / "set.jsonl", renamed))
    run(problem, "    return a + b")
    with pytest.raises(AssertionError):
        run(problem, "    return a - b")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([RECORD, '{"task_id": '], r"set.jsonl, line 2: not JSON"),
        ([RECORD, "", [1]], r"set.jsonl, line 3: expected a JSON object, got list"),
        ([without("test")], r"line 1: expected text in the field 'test'; the record has only task_id, prompt, canon"),
        ([{**RECORD, "prompt": 3}], r"line 1: expected text in the field 'prompt'; the record has 3 there"),
        ([{**RECORD, "canonical_solution": []}], r"line 1: expected text in the field 'canonical_solution'"),
        (
            [{**RECORD, "language": "cobol"}],
            r"line 1: unknown language 'cobol'; known are python, javascript, typescript, perl",
        ),
        ([RECORD, RECORD], r"line 2: the task id 'T/0' was used before"),
        ([], r"holds no problems"),
    ],
)
def test_a_broken_file_is_told_where(tmp_path: Path, records: list[object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_mbxp(write(tmp_path / "set.jsonl", *records))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot read .*missing.jsonl: .*No such file"):
        read_mbxp(tmp_path / "missing.jsonl")
    (tmp_path / "plain.gz").write_bytes(b"not gzipped")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"{}" * 99)[:-10])
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    for name in ("plain.gz", "cut.gz", "latin.jsonl"):
        with pytest.raises(RequestError, match=f"cannot read .*{name}"):
            read_mbxp(tmp_path / name)


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({**RECORD, "prompt": "# \u2028 here"}, ensure_ascii=False), encoding="utf-8")
    assert read_mbxp(path)[0].prompt == "# \u2028 here"


def test_solutions_belong_to_problems(tmp_path: Path) -> None:
    records = [RECORD, {**RECORD, "task_id": "T/1", "canonical_solution": None}]
    problems = read_mbxp(write(tmp_path / "set.jsonl", *records))
    assert read_solutions("canonical", problems) == [(problems[0], RECORD["canonical_solution"])]
    path = write(
        tmp_path / "samples.jsonl",
        {"task_id": "T/1", "completion": "x", "language": "python"},
        {"task_id": "T/1", "completion": "y"},
        {"task_id": "T/0", "completion": ""},
    )
    assert read_solutions(path, problems) == [(problems[1], "x"), (problems[1], "y"), (problems[0], "")]
    with pytest.raises(RequestError, match="none of these problems has a canonical solution"):
        read_solutions("canonical", problems[1:])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("", "samples.jsonl holds no completions"),
        ({"task_id": "T/9", "completion": ""}, "line 1: none of the 1 problems has the task id 'T/9'"),
        ({"task_id": "T/0"}, "line 1: expected text in the field 'completion'"),
        ({"task_id": "T/0", "completion": "", "language": "cobol"}, "line 1: unknown language 'cobol'"),
        ({"task_id": "T/0", "completion": "", "language": "java"}, "line 1: 'T/0' is a problem in python, not in java"),
    ],
)
def test_a_solution_that_fits_no_problem_is_told(tmp_path: Path, record: object, message: str) -> None:
    problems = read_mbxp(write(tmp_path / "set.jsonl", RECORD))
    with pytest.raises(RequestError, match=message):
        read_solutions(write(tmp_path / "samples.jsonl", record), problems)


@pytest.mark.skipif(not DATA.exists(), reason="the published sets are not here")
@pytest.mark.parametrize("name", SETS)
def test_the_published_sets_are_read(name: str) -> None:
    problems = (read_humaneval if name.startswith("human") else read_mbxp)(DATA / name)
    language, count, canonical = SETS[name]
    assert {problem.language for problem in problems} == {language}
    assert len(problems) == count
    assert sum(problem.canonical is not None for problem in problems) == canonical
