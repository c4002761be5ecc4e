"""MultiPL-E's format: what is read, where completions end, and that the tests of each language have run when one passes.

Tests of: evaluation.problems
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandboxes import box
from shoal.errors import RequestError
from shoal.evaluation.execution import execute
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.problems import MULTIPL_E_LANGUAGES as NAMES
from shoal.evaluation.problems import Problem, read_multipl_e
from shoal.evaluation.sandbox import Sandbox, require
from shoal.evaluation.tasks import code_tasks
from shoal.testing import tiny_tokenizer

__all__ = ["box"]  # a fixture

PLACE = Path(__file__).parents[1] / "data/programs.json"
RECORDS = {one.pop("language"): one for one in json.loads(PLACE.read_text("utf-8"))["multipl-e"]}
"""Of each language: prompt, the beginning of a right completion, tests, a stop token."""


def record(language: str) -> dict[str, Any]:
    asked = RECORDS[language]
    return {
        "name": "HumanEval_53_add", "language": language, "prompt": asked["prompt"], "doctests": "transform",
        "tests": asked["tests"], "stop_tokens": [asked["stop"], "\nnever"],
    }  # fmt: skip


def read(path: Path, *records: object) -> list[Problem]:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return read_multipl_e(path)


def test_every_language_has_an_example_and_runs() -> None:
    assert RECORDS.keys() | {"go"} == NAMES.keys()
    assert set(NAMES.values()) <= LANGUAGES.keys()
    assert len(set(NAMES.values())) == 17  # of 18: Julia is refused


@pytest.mark.slow(but=["js", "cpp", "sh"])
@pytest.mark.parametrize("language", RECORDS)
def test_a_program_passes_when_its_tests_have_passed(box: Sandbox, tmp_path: Path, language: str) -> None:
    (asked,) = read(tmp_path / "set.jsonl", record(language))
    assert (asked.task_id, asked.entry_point) == ("HumanEval_53_add", "add")
    try:
        require([asked], box)
    except RequestError as error:
        pytest.skip(str(error))
    (task,) = code_tasks([asked])
    right, stop = RECORDS[language]["right"], RECORDS[language]["stop"]
    assert task.stops == (stop, "\nnever")
    complete = task.complete(f"{right}{stop} and more", False)
    assert complete == right
    assert execute(asked, complete, box).passed
    wrong = execute(asked, complete.replace("+", "-"), box)
    assert wrong.outcome == ("crash" if language in ("cpp", "swift") else "failed")


@pytest.mark.parametrize(("language", "quits"), [("rb", "exit! 0"), ("lua", "os.exit(0)"), ("java", "System.exit(0)")])
def test_a_program_that_ends_within_its_tests_has_not_passed(
    box: Sandbox, tmp_path: Path, language: str, quits: str
) -> None:
    """Ruby's test-unit runs the tests when a program has come to its end, unless it was asked before."""
    (asked,) = read(tmp_path / "set.jsonl", record(language))
    try:
        require([asked], box)
    except RequestError as error:
        pytest.skip(str(error))
    early = execute(asked, RECORDS[language]["right"].replace("return", f"{quits}; return"), box)
    assert early.outcome == "failed"  # LuaUnit tells such an end itself


def test_a_suite_without_tests_has_not_passed(box: Sandbox, tmp_path: Path) -> None:
    """Racket counts the checks that ran, and D that the tests of the program ran."""
    for language, tests in (("rkt", "(require rackunit)"), ("d", "void main(){}")):
        (asked,) = read(tmp_path / "set.jsonl", {**record(language), "tests": tests})
        try:
            require([asked], box)
        except RequestError:
            continue
        assert execute(asked, RECORDS[language]["right"], box).outcome == "failed"


def test_an_answer_in_a_chat_ends_behind_its_definitions(tmp_path: Path) -> None:
    (asked,) = read(tmp_path / "set.jsonl", record("go_test.go"))
    (task,) = code_tasks([asked], chat=True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.decode(task.read(tokenizer)).endswith(f"```go\n{asked.prompt}")
    assert task.complete("x\n}\nfunc main() {\n}", False) == "x\n}\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"language": "jl"}, "line 1: the language 'jl' does not run here, no stable release of Debian .*: leave"),
        ({"language": "hs"}, "line 1: unknown language 'hs'; known are sh, cpp, cs, d, go"),
        ({"stop_tokens": "\n}"}, "line 1: expected a list of texts in the field 'stop_tokens'"),
        ({"stop_tokens": [""]}, "line 1: expected a list of texts in the field 'stop_tokens'"),
        ({"tests": None}, "line 1: expected text in the field 'tests'"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read(tmp_path / "set.jsonl", {**record("lua"), **changed})
    with pytest.raises(RequestError, match="line 2: the task id 'HumanEval_53_add' was used before"):
        read(tmp_path / "set.jsonl", record("lua"), record("lua"))
