"""MultiPL-E's format: what is read, where completions end, and that the tests of each language have run when one passes.

Tests of: evaluation.multipl_e
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes import strongest
from shoal.errors import RequestError
from shoal.evaluation.execution import execute
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.multipl_e import LANGUAGES as NAMES
from shoal.evaluation.multipl_e import read_multipl_e
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox
from shoal.evaluation.tasks import code_tasks
from shoal.evaluation.toolchains import require
from shoal.testing import tiny_tokenizer

RETURN = "    return a + b"
RECORDS = {  # language: prompt, the beginning of a right completion, tests, a stop token
    "sh": (
        "#!/bin/bash\nadd() {\n",
        "    echo $(($1 + $2))",
        '}\n\ncandidate() {\n    add "$@"\n}\n\nset -e\nrun_test() {\n    [[ $(candidate "1" "2") = "3" ]]\n}\n\nrun_test',
        "\n}",
    ),
    "cpp": (
        "#include<assert.h>\n#include<bits/stdc++.h>\nlong add(long a, long b) {\n",
        f"{RETURN};",
        "}\nint main() {\n    auto candidate = add;\n    assert(candidate((1), (2)) == (3));\n}\n",
        "\n}",
    ),
    "cs": (
        "using System;\nusing System.Numerics;\nusing System.Diagnostics;\nclass Problem {\n"
        "    public static long Add(long a, long b) {\n",
        f"    {RETURN};",
        "    }\n    public static void Main(string[] args) {\n    Debug.Assert(Add((1L), (2L)) == (3L));\n    }\n\n}\n",
        "\n    }\n",
    ),
    "d": (
        "import std.math;\nlong add(long a, long b) \n",
        f"{{\n{RETURN};\n}}",
        "unittest\n{\n    alias candidate = add;\n\n    assert(candidate(1L, 2L) == 3L);\n}\nvoid main(){}",
        "\n\n",
    ),
    "go_test.go": (
        'package add_test\n\nimport (\n    "testing"\n    "fmt"\n)\n\nfunc add(a int, b int) int {\n',
        f"{RETURN}\n}}",
        'func TestAdd(t *testing.T) {\n  if fmt.Sprintf("%v", add(1, 2)) != "3" {\n    t.Errorf("wrong")\n  }\n}\n',
        "\nfunc",
    ),
    "java": (
        "import java.util.*;\nimport org.javatuples.*;\nclass Problem {\n    public static long add(long a, long b) {\n",
        f"    {RETURN};",
        "    }\n    public static void main(String[] args) {\n"
        "    assert(Pair.with(1L, add((1L), (2L))).equals(Pair.with(1L, 3L)));\n    }\n\n}\n",
        "\n    }\n",
    ),
    "js": (
        "function add(a, b){\n",
        f"{RETURN};\n}}",
        "const assert = require('node:assert');\n\nfunction test() {\n  assert.deepEqual(add(1, 2),3);\n}\n\ntest();",
        "\nfunction ",
    ),
    "lua": (
        "local function add(a, b)\n",
        f"{RETURN}\nend",
        "lu = require('luaunit')\n\nfunction test_humaneval()\n    lu.assertEquals(add(1, 2), 3)\nend\n\nos.exit(lu.LuaUnit.run())",
        "\nlocal",
    ),
    "pl": (
        "sub add {\n    my($a, $b) = @_;\n",
        "    return $a + $b;\n}",
        "use Test::Deep;\n\n\nsub testhumaneval {\n    if(eq_deeply(add(1, 2),3)) {\n        print \"ok!\" }else{\n"
        "        exit 1;\n        }\n}\n\ntesthumaneval();",
        "\nsub",
    ),
    "php": (
        "<?php\nfunction add($a, $b) {\n",
        "    return $a + $b;\n}",
        'function test(): void {\n    if (add(1, 2) !== 3) { throw new Exception("Test failed!"); }\n}\n\ntest();',
        "\nfunction",
    ),
    "r": (
        "add <- function(a, b) {\n",
        "    return(a + b)\n}",
        "test_humaneval <- function() {\n    if(!identical(add(1, 2), 3)){quit('no', 1)}\n}\ntest_humaneval()",
        "\n#",
    ),
    "rkt": (
        "#lang racket\n\n(define (add a b)\n",
        "    (+ a b))",
        "(require rackunit)\n\n(define (test-humaneval) \n\n    (check-within (add 1 2) 3 0.001)\n)\n\n(test-humaneval)",
        "\n(define ",
    ),
    "rb": (
        "def add(a, b)\n",
        f"{RETURN}\nend",
        "require 'test/unit'\nclass TestHumanEval < Test::Unit::TestCase\n"
        "  def test_add\n    assert_equal(3, add(1, 2))\n  end\nend\n",
        "\nclass",
    ),
    "rs": (
        "fn add(a: isize, b: isize) -> isize {\n",
        f"{RETURN};",
        "}\n\nfn main() {\n    let candidate = add;\n    assert_eq!(candidate(1, 2), 3);\n}\n",
        "\n}",
    ),
    "scala": (
        "import scala.math._\nimport scala.collection.mutable._\nobject Problem {\n    def add(a : Long, b : Long) : Long = {\n",
        f"    {RETURN}",
        "    }\n    def main(args: Array[String]) = {\n    assert(add((1l), (2l)) == (3l));\n    }\n\n}\n",
        "\n    }\n",
    ),
    "swift": (
        "\nfunc add(a: Int, b: Int) -> Int {\n",
        "    a + b",  # whose value counts as the last expression of the function
        "}\n\n\nassert(add(a: 1, b: 2) == 3)",
        "\n}",
    ),
    "ts": (
        "function add(a: number, b: number): number {\n",
        f"{RETURN};\n}}",
        "declare var require: any;\nconst assert = require('node:assert');\n\n\nfunction test() {\n"
        "  assert.deepEqual(add(1, 2),3);\n}\n\ntest();",
        "\nfunction ",
    ),
}  # fmt: skip


def record(language: str) -> dict[str, Any]:
    prompt, _, tests, stop = RECORDS[language]
    return {
        "name": "HumanEval_53_add", "language": language, "prompt": prompt, "doctests": "transform", "tests": tests,
        "stop_tokens": [stop, "\nnever"],
    }  # fmt: skip


def read(path: Path, *records: object) -> list[Problem]:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return read_multipl_e(path)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox(strongest()) as made:
        yield made


def test_every_language_has_an_example_and_runs() -> None:
    assert RECORDS.keys() | {"go"} == NAMES.keys()
    assert set(NAMES.values()) <= LANGUAGES.keys()
    assert len(set(NAMES.values())) == 17  # of 18: Julia is refused


@pytest.mark.parametrize("language", RECORDS)
def test_a_program_passes_when_its_tests_have_passed(box: Sandbox, tmp_path: Path, language: str) -> None:
    (asked,) = read(tmp_path / "set.jsonl", record(language))
    assert (asked.task_id, asked.entry_point) == ("HumanEval_53_add", "add")
    try:
        require([asked], box)
    except RequestError as error:
        pytest.skip(str(error))
    (task,) = code_tasks([asked])
    _, right, _, stop = RECORDS[language]
    assert task.stops == (stop, "\nnever")
    complete = task.complete(f"{right}{stop} and more", False)
    assert complete == right
    assert execute(asked, complete, box).passed
    wrong = execute(asked, complete.replace("+", "-"), box)
    assert wrong.outcome == ("crash" if language in ("cpp", "swift") else "failed")
    assert execute(asked, complete.replace("+", "+ ) +"), box).outcome == "syntax"


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
    early = execute(asked, RECORDS[language][1].replace("return", f"{quits}; return"), box)
    assert early.outcome == "failed"  # LuaUnit tells such an end itself


def test_a_suite_without_tests_has_not_passed(box: Sandbox, tmp_path: Path) -> None:
    """Racket counts the checks that ran, and D that the tests of the program ran."""
    for language, tests in (("rkt", "(require rackunit)"), ("d", "void main(){}")):
        (asked,) = read(tmp_path / "set.jsonl", {**record(language), "tests": tests})
        try:
            require([asked], box)
        except RequestError:
            continue
        assert execute(asked, RECORDS[language][1], box).outcome == "failed"


def test_an_answer_in_a_chat_ends_at_a_stop_token(tmp_path: Path) -> None:
    (asked,) = read(tmp_path / "set.jsonl", record("go_test.go"))
    (task,) = code_tasks([asked], chat=True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.decode(task.read(tokenizer)).endswith(f"```go\n{asked.prompt}")
    assert task.complete("x\n}\nfunc main() {\n}", False) == "x\n}"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"language": "jl"}, "line 1: the language 'jl' does not run here: no stable release of Debian"),
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
