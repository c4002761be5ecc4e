"""Where a chat model's answer ends, and which part of it is run.

Tests of: evaluation.endings.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import box
from shoal.errors import RequestError
from shoal.evaluation.endings import cut_answer
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox, require
from shoal.evaluation.tasks import code_tasks

__all__ = ["box"]  # a fixture

PYTHON = 'import math\n\ndef f(x):\n    """Says {."""\n'
BODY = "    return _twice(x)\n\n\n"
HELPER = "def _twice(x):\n    return 2 * x\n"


def problem(language: str, prompt: str, tests: str = "") -> Problem:
    return Problem("T/0", language, prompt, tests, "f")


def test_only_its_fence_ends_an_answer() -> None:
    for language in ("python", "javascript", "ruby", "php"):
        assert code_tasks([problem(language, PYTHON)], chat=True)[0].stops == ("\n```",)
        assert len(code_tasks([problem(language, PYTHON)])[0].stops) >= 1


KEPT = {
    "a helper": BODY + HELPER,
    "a comment and a helper": f"{BODY}# A helper.\n{HELPER}",
    "a decorated helper": f"{BODY}import functools\n\n@functools.cache\n{HELPER}",
    "a class": "    return Twice()(x)\n\nclass Twice:\n    def __call__(self, x):\n        return 2 * x\n",
    "a table": "    return FACTOR[0] * x\n\nFACTOR = [2]\n",
    "a table of several steps": "    return FACTOR[0] * x\n\nFACTOR = []\nfor _ in range(1):\n    FACTOR.append(2)\n",
    "a table that a call fills": "    return FACTOR * x\n\ndef _fill():\n    global FACTOR\n    FACTOR = 2\n\n_fill()\n",
    "a name in two branches": "    return TWO * x\n\nif True:\n    TWO = 2\nelse:\n    TWO = 3\n",
    "a wrapped function": "    return x\n\ndef twice(g):\n    return lambda x: 2 * g(x)\n\nf = twice(f)\n",
    "a table that a function fills": "    return T[x]\n\nT = {}\n\n"
    "def _fill():\n    for i in range(9):\n        T[i] = 2 * i\n\n_fill()\n",
    "an import for a table": "    return T[-1] * x\n\nT = []\nimport operator\nfor i in (1, 2):\n    T.append(operator.index(i))\n",
    "an import that may fail": "    return two * x\n\ntry:\n    from nowhere import two\nexcept ImportError:\n    two = 2\n",
    "all names of a module": "    return int(floor(2.5)) * x\n\nfrom math import *\n",
    "a decorated class": "    return C(x).y\n\ndef twice(c):\n    c.y = property(lambda s: 2 * s.x)\n    return c\n\n"
    "@twice\nclass C:\n    def __init__(self, x):\n        self.x = x\n",
    "a method set from outside": "    return C().go(x)\n\nclass C:\n    pass\n\nC.go = lambda self, x: 2 * x\n",
    "a function in a register": "    return R['two'](x)\n\nR = {}\n\ndef enter(g):\n    R[g.__name__] = g\n    return g\n\n"
    "@enter\ndef two(x):\n    return 2 * x\n",
    "classes that enter themselves": "    return A.all[0].two(x)\n\nclass A:\n    all = []\n    def __init_subclass__(cls):\n"
    "        A.all.append(cls)\n\nclass B(A):\n    @staticmethod\n    def two(x):\n        return 2 * x\n",
    "a setting of a module": "    return int(Decimal(2) * x)\n\nfrom decimal import Decimal, getcontext\ngetcontext().prec = 50\n",
    "a deep recursion": "    return 2 * x + deep(3000)\n\ndef deep(n):\n    return n and deep(n - 1)\n\n"
    "import sys\nsys.setrecursionlimit(9999)\n",
    "a name in a text": "    return eval('_two(x)')\n\ndef _two(x):\n    return 2 * x\n",
    "a line break of another kind": '    s = "\x0c"\n    return len(s) * 2 * x\n',
}
LEFT_OUT = {
    "an example": "print(f(int(input())))\n",
    "a test": "assert f(1) == 3\n",
    "an input of the same name": "x = int(input())\nprint(f(x))\n",
    "a loop of examples": "for case in (1, 2):\n    assert f(case) == 0\n",
    "a test in a function": "def test():\n    assert f(1) == 3\n\ntest()\n",
    "a test in a class": "import unittest\nclass TestF(unittest.TestCase):\n    def test(self):\n        f(1)\nunittest.main()\n",
    "half a function": "def main():\n    print((\n",
    "prose": "This is all.\n",
    "a main program that another name begins": "def start():\n    import sys\n    sys.exit(f(1))\n\nstart()\n",
    "a main program behind else": "if __name__ != '__main__':\n    pass\nelse:\n    raise SystemExit(f(1))\n",
    "a test of a helper": "assert _twice(1) == 3\n",
    "a loop of tests of a helper": "for x, y in [(1, 3)]:\n    assert _twice(x) == y\n    print(y)\n",
    "a printed example of a helper": "print(_twice(1) / 0)\n",
    "a value of a helper": "y = _twice('a') / 2\n",
    "an input that the function's own names read": "import math\nx = math.floor(int(input()))\n",
    "the end of the program": "import sys\nsys.exit(0)\n",
    "a test in the body of a class": "class Test:\n    value = f(1) / 0\n",
    "a default that is read": "def main(n=int(input())):\n    print(f(n))\n",
    "a decorator that calls": "@print\ndef main():\n    f(1)\n\nmain.x\n",
    "a module that is not here": "import pytest_nowhere\n\ndef test():\n    assert f(1) == 2\n",
    "a future": "from __future__ import annotations\n",
    "arguments": "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\nx = parser.parse_args()\n",
    "a main program": 'if __name__ == "__main__":\n    raise SystemExit(f(1))\n',
}


@pytest.mark.slow(but=["a comment and a helper"])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_function_needs_stays(box: Sandbox, name: str) -> None:
    asked = problem("python", PYTHON, "_candidate = f\nassert _candidate(4) == 8\n")
    assert cut_answer(asked, KEPT[name]) == KEPT[name]
    assert cut_answer(asked, f"{KEPT[name]}```\nIt doubles.\n\ndef f(") == KEPT[name]
    assert execute(asked, KEPT[name], box).passed


@pytest.mark.slow(but=["an example"])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_uses_a_function_goes(box: Sandbox, name: str) -> None:
    asked = problem("python", PYTHON, "_candidate = f\nassert _candidate(4) == 8\n")
    for kept in (BODY + HELPER, KEPT["a table of several steps"]):
        cut = cut_answer(asked, kept + "\n" + LEFT_OUT[name])
        assert cut.startswith(kept)
        result = execute(asked, cut, box)
        assert result.passed, result.detail


def test_a_function_that_does_not_parse_stays_wrong() -> None:
    assert cut_answer(problem("python", PYTHON), "    return (x\n\nprint(1)\n") == "    return (x\n\n"


PLACE = Path(__file__).parents[1] / "data/programs.json"
ELSEWHERE = {one.pop("language"): one for one in json.loads(PLACE.read_text("utf-8"))["chat answers"]}
"""Of each language: the prompt, the part of an answer that is kept, the part that is left out, tests."""
PROGRAMS = {"javascript": "node", "cpp": "g++"}


@pytest.mark.slow(but=["javascript"])
@pytest.mark.parametrize("language", ELSEWHERE)
def test_helpers_stay_in_other_languages(language: str, box: Sandbox) -> None:
    prompt, kept, left_out, tests = ELSEWHERE[language].values()
    asked = problem(language, prompt, tests)
    cut = cut_answer(asked, kept + left_out + "```\n")
    assert cut.split() == kept.split() or cut.split() == [*kept.split(), "#include", "<iostream>"]
    if shutil.which(PROGRAMS.get(language, language)):
        result = execute(asked, cut, box)
        assert result.passed, result.detail


def test_a_function_without_an_end_stays_as_it_is() -> None:
    assert cut_answer(problem("javascript", "function f(x) {\n"), "  if (x) {\n") == "  if (x) {\n"
    assert cut_answer(problem("cobol", "F.\n"), "MOVE.\n```\nIt moves.") == "MOVE.\n"


RUST = """    let parts: Vec<Pair<'_>> = vec![Pair { text: r#"}"# }].clone();
    twice(x) + parts.len() as i64 - 1
}

fn twice(x: i64) -> i64 {
    2 * x
}

#[derive(Clone)]
struct Pair<'a> {
    text: &'a str,
}

impl<'a> Drop for Pair<'a> {
    fn drop(&mut self) {}
}

struct Unused;

impl Unused {
    fn new() -> Self { Unused }
}

fn main() {
    println!("{}", f(1));
}
"""
CONTINUED = {
    "rust": ("fn f(x: i64) -> i64 {\n", ("\n}",), RUST, "}\n\nfn main() {\n    assert_eq!(f(4), 8);\n}\n"),
    "cpp": (
        "#include <assert.h>\nlong f(long x) {\n",
        ("\n}",),
        "  auto two = [](long y) { return 2 * y; };\n  return two(x);\n}\n\nint main() {\n  return 1;\n}\n",
        "}\nint main() {\n  assert(f(4) == 8);\n}\n",
    ),
    "javascript": (
        "function f(x) {\n",
        ("\nfunction ", "\nconst ", "\n//"),
        "  return twice(x)\n}\n\n// doubles\nfunction twice(x) {\n  return 2 * x\n}\n\nprocess.exit(f(1))\n",
        "require('assert').strictEqual(f(4), 8)\n",
    ),
    "ruby": (
        "def f(x)\n",
        ("\nclass", "\ndef", "\n#", "\n\n"),
        "  y = x\n\n  twice(y)\nend\n\ndef twice(x)\n  2 * x\nend\n\nexit f(1) if __FILE__ == $0\n",
        "raise 'wrong' unless f(4) == 8\n",
    ),
    "java": (
        "class Problem {\n    static long f(long x) {\n",
        ("\n    }\n",),
        "        return 2 * x;\n    }\n    public static void main(String[] args) {\n    }\n}\n",
        "    }\n    public static void main(String[] args) {\n    if (f(4) != 8) throw new RuntimeException();\n    }\n}\n"
        "class Main {\n    public static void main(String[] args) {\n    Problem.main(args);\n    }\n}\n",
    ),
}
"""Of each language: a prompt, the stop strings of a function that is continued alone, a chat answer, tests."""


@pytest.mark.parametrize("language", CONTINUED)
def test_the_stop_strings_of_continued_functions_cut_no_helpers(language: str, box: Sandbox) -> None:
    prompt, stops, answer, tests = CONTINUED[language]
    asked = replace(problem(language, prompt, tests), stops=stops)
    cut = cut_answer(asked, f"{answer}```\nIt doubles.\n")
    assert "Unused" not in cut
    assert ("main" in cut, "exit" in cut, "doubles." in cut) == (False, False, False)
    assert ("twice" in cut) == ("twice" in answer)
    try:
        require([asked], box)
    except RequestError as error:
        pytest.skip(str(error))
    result = execute(asked, cut, box)
    assert result.passed, result.detail
