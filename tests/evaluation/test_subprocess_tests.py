"""A completion and its tests in two processes: cheats that passed in one, and honest programs that must still pass.

Tests of: evaluation.subprocess_tests, evaluation.plain_values.
"""

from __future__ import annotations

import datetime
import json
import textwrap
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from collections.abc import Iterator, Set
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import box
from shoal.evaluation import execution, plain_values, subprocess_tests
from shoal.evaluation.execution import execute
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.plain_values import NotSerializable, decode, encode
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox, find_toolchain
from shoal.evaluation.subprocess_tests import JOB, SHARED

__all__ = ["box"]  # a fixture


def problem(tests: str, prompt: str = "def f(a):\n", canonical: str | None = None) -> Problem:
    return Problem("T/0", "python", prompt, f"_candidate = f\n{textwrap.dedent(tests)}\ncheck(_candidate)\n", "f", canonical)


SECRET = "0fdd8e1a5a6f4c7ab4b3a4d8a5d0c1ee"
ASKED = problem(f"def check(candidate):\n    'the tests: {SECRET}'\n    import colorsys\n    assert candidate(1) == 'never'")

FIND_THE_WORD = """
import gc, re, sys
def told(text):
    for word in set(re.findall(r"[0-9a-f]{32}", text)): print(word)
frame = sys._getframe()
while frame:
    told(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
for held in gc.get_objects():
    if isinstance(held, (str, dict, list)) and len(held) < 10000: told(repr(held))
"""
READ_THE_WORKDIR = """
import os, re
for folder, _, names in os.walk("."):
    for name in names:
        told = open(os.path.join(folder, name), errors="replace").read()
        for word in set(re.findall(r"[0-9a-f]{32}", told)): print(word)
"""
READ_PROCESSES = """
import os, re
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid(): continue
    for name in ("environ", "cmdline"):
        try: print(open(f"/proc/{pid}/{name}").read())
        except OSError: pass
    try:
        memory = open(f"/proc/{pid}/mem", "rb", 0)
        for line in open(f"/proc/{pid}/maps"):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" in line:
                memory.seek(begin)
                held = memory.read(end - begin)
                for word in set(re.findall(rb"[0-9a-f]{32}", held)): print(word.decode())
    except OSError: pass
"""
LEAVE_A_MODULE = """
import textwrap
with open("colorsys.py", "w") as file:
    file.write("import os, sys\\nframe = sys._getframe()\\nwhile frame:\\n    if 'job' in frame.f_locals: "
               "print(frame.f_locals['job']['word'], flush=True); os._exit(0)\\n    frame = frame.f_back\\n")
"""
CHANGE_THE_RESULT = """
import builtins, sys
builtins.AssertionError = type("Never", (Exception,), {})
sys.modules["__main__"].check = lambda candidate: None
check = lambda candidate: None
"""
CHEATS = {
    "equals everything": "    return type('Any', (), {'__eq__': lambda *_: True})()",
    "a text that equals everything": "    return type('Any', (str,), {'__eq__': lambda *_: True, '__hash__': None})()",
    "a number that equals everything": "    return type('Any', (int,), {'__eq__': lambda *_: True})()",
    "finds the word": f"    return 0\n{FIND_THE_WORD}",
    "finds the word when called": textwrap.indent(FIND_THE_WORD, "    "),
    "reads the workdir": f"    return 0\n{READ_THE_WORKDIR}",
    "reads other processes": textwrap.indent(READ_PROCESSES, "    "),
    "leaves a module": f"    return 0\n{LEAVE_A_MODULE}",
    "changes the result": f"    return 0\n{CHANGE_THE_RESULT}",
    "asks for a shared process": f"    print({SHARED!r}); raise type('NotSerializable', (TypeError,), {{}})({SHARED!r})",
    "a function that equals everything": "    return type('Any', (), {'__eq__': lambda *_: True, '__call__': print})",
    "a function that leaves": "    return lambda *_: __import__('os')._exit(0)",
    "exits": "    import os; os._exit(0)",
    "kills the tests": "    import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
}


@pytest.mark.slow(but=["a number that equals everything"])
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(box: Sandbox, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    run = box.run

    def watched(*arguments: Any) -> Any:
        ended = run(*arguments)
        written.append(ended.stdout)
        return ended

    monkeypatch.setattr(box, "run", watched)
    result = execute(ASKED, CHEATS[name], box)
    assert not result.passed
    assert result.in_subprocess, result.detail
    assert result.outcome in ("failed", "crash")
    assert not [text for text in written if SECRET in text]


def test_the_word_is_found_nowhere_but_in_the_end(box: Sandbox) -> None:
    """The cheats above find nothing because there is nothing, not because they cannot look."""
    planted = f"    return 0\nword = {'a' * 32!r}\n{FIND_THE_WORD}"
    job = {
        "program": "def f(a):\n" + planted,
        "prompt": "def f(a):\n",
        "tests": "f(1)",
        "entry_point": "f",
        "marker": "b" * 32,
    }
    modules = {"main.py": subprocess_tests, "plain_values.py": plain_values}
    texts = {name: Path(str(module.__file__)).read_text(encoding="utf-8") for name, module in modules.items()}
    files = {**texts, JOB: json.dumps(job)}
    found = box.run(files, *find_toolchain("python", box).steps(LANGUAGES["python"])).stdout.split()
    assert "a" * 32 in found
    assert found.count("b" * 32) == 1


HONEST = {
    "arguments that are changed": ("    a.append(2); a.sort(reverse=True)", "x = [1]; candidate(x); assert x == [2, 1]"),
    "a dictionary that is changed": ("    a['b'] = {1}", "x = {}; candidate(x); assert x == {'b': {1}}"),
    "an exception that is expected": (
        "    raise KeyError(a)",
        "try: candidate('x')\n    except KeyError: return\n    assert False",
    ),
    "an exception of its own": (
        "    raise type('Mine', (ValueError,), {})('why')",
        "try: candidate('x')\n    except ValueError as e: assert str(e) == 'why'",
    ),
    "arguments of an exception": (
        "    if a: raise KeyError(a, {1})\n    raise type('Mine', (OSError,), {'__str__': lambda self: 'why'})(2, 'x')",
        "try: candidate('x')\n    except KeyError as e: assert e.args == ('x', {1})\n"
        "    try: candidate(0)\n    except OSError as e: assert str(e) == 'why'",
    ),
    "an exception of several arguments": (
        "    a.decode('ascii')",
        "try: candidate(b'a\\xff')\n    except UnicodeDecodeError as e: assert (e.start, e.object) == (1, b'a\\xff')\n"
        "    else: assert False",
    ),
    "floats": ("    return a / 3", "assert candidate(1) == 1 / 3; assert abs(candidate(2.5) - 0.8333) < 1e-3"),
    "large numbers": ("    return a ** 50", "assert candidate(10**200) == 10 ** 10000"),
    "types": ("    return tuple(a), set(a)", "r = candidate([1, 2]); assert isinstance(r, tuple) and type(r[1]) is set"),
    "a generator": ("    yield a; yield a + 1", "r = candidate(1); assert next(r) == 1; assert list(r) == [2]"),
    "keys for a set": ("    return a.keys()", "assert candidate({1: 2}) == {1}"),
    "values": ("    return a.values()", "assert sorted(candidate({1: 3, 2: 2})) == [2, 3]"),
    "a list of the user's": ("    import collections; return collections.UserList(a)", "assert candidate([1]) == [1]"),
    "a text with a name": (
        "    import enum; return enum.Enum('E', {'A': 'a'}, type=str).A",
        "r = candidate(0); assert r == 'a' and r.upper() == 'A'",
    ),
    "a date": (
        "    import datetime as d; return a + d.timedelta(1)",
        "import datetime as d; assert candidate(d.date(2024, 2, 28)).day == 29",
    ),
    "a deep list": (
        "    r = []\n    for _ in range(a): r = [r]\n    return r",
        "r = candidate(5000)\n    for _ in range(5000): r = r[0]\n    assert r == []",
    ),
    "containers of other kinds that are changed": (
        "    a[0] = 9; b['x'] = 8; c.append(7)",
        "import array, collections\n    x = array.array('i', [1]); y = collections.Counter('xx'); z = collections.UserList()\n"
        "    candidate(x, b=y, c=z); assert (x[0], y['x'], type(y).__name__, z[0]) == (9, 8, 'Counter', 7)",
    ),
    "names": ("    return a", "assert candidate(a=(1, 'x', None)) == (1, 'x', None)"),
    "a state of its own": ("    f.n = getattr(f, 'n', 0) + 1; return f.n", "candidate(0); assert candidate(0) == 2"),
    "a function": ("    return lambda b: a + b", "g = candidate(2); assert g(3) == 5 and g.__name__ == '<lambda>'"),
    "a function that is given back": ("    return a() if b else (lambda: {3})", "assert candidate(candidate(0), 1) == {3}"),
    "functions in containers": (
        "    return {'twice': [lambda x: 2 * x], 'more': (str.upper, print)}",
        "r = candidate(0); assert r['twice'][0](4) == 8 and r['more'][0]('a') == 'A'",
    ),
    "a decorator": (
        "    import functools\n    @functools.wraps(a)\n    def g(*x): return b\n    return g if callable(a) else (lambda h: 4)",
        "assert candidate(0)(1) == 4",
    ),
    "a state in a function": (
        "    n = [a]\n    def g():\n        n[0] += 1\n        return n[0]\n    return g",
        "g, h = candidate(1), candidate(5); assert [g(), g(), h(), g()] == [2, 3, 6, 4]",
    ),
    "a class": (
        "    class P:\n        def __init__(self, x): self.x = x\n    return P",
        "P = candidate(0); assert P(3).x == 3 and P.__name__ == 'P'",
    ),
    "an exception of a function": (
        "    return lambda: 1 // a",
        "try: candidate(0)()\n    except ZeroDivisionError: return\n    assert False",
    ),
    "an endless generator": (
        "    while True:\n        yield a\n        a += 1",
        "import itertools, types\n    r = candidate(3)\n    assert isinstance(r, types.GeneratorType)\n"
        "    assert list(itertools.islice(r, 3)) == [3, 4, 5] and next(r) == 6",
    ),
    "a generator that is sent to": (
        "    while a < 9: a += (yield a) or 1\n    return 'end'",
        "r = candidate(1); assert (next(r), r.send(3), next(r)) == (1, 4, 5)\n    try: r.send(9)\n"
        "    except StopIteration as e: assert e.value == 'end'\n    else: assert False",
    ),
    "an endless iterator": (
        "    import itertools; return itertools.cycle(a)",
        "r = candidate('ab'); assert [next(r) for _ in range(3)] == ['a', 'b', 'a']",
    ),
    "a coroutine": (
        "    async def g(x):\n        import asyncio\n        await asyncio.sleep(0)\n        return x / b\n    return g(a)",
        "import asyncio\n    async def both(): return await asyncio.gather(candidate(1, 2), candidate(2, 2))\n"
        "    assert asyncio.run(both()) == [0.5, 1]\n    try: asyncio.run(candidate(1, 0))\n"
        "    except ZeroDivisionError: return\n    assert False",
    ),
    "a bound of a queue": (
        "    import collections; return collections.deque(a, maxlen=2), collections.deque(a)",
        "r, s = candidate([1, 2, 3]); assert (r.maxlen, list(r), s.maxlen, len(s)) == (2, [2, 3], None, 3); r.append(4)\n"
        "    assert list(r) == [3, 4]",
    ),
    "a match": (
        "    import re; return re.search(r'(?P<n>(?<=x)a+)(b)?', a), re.fullmatch('(a|ab)(c|bcd)?', 'abcd'), re.match('z', a)",
        "m, w, n = candidate('__xaab'); assert (m.group('n'), m.span(), m.groups()) == ('aa', (3, 6), ('aa', 'b'))\n"
        "    assert w.group() == 'abcd' and w.groups() == ('a', 'bcd') and n is None",
    ),
    "modules of its own": ("    import math; return math.pi", "import math; assert candidate(0) == math.pi"),
}


@pytest.mark.slow(but=["arguments that are changed"])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes_apart(box: Sandbox, name: str) -> None:
    body, tests = HONEST[name]
    prompt = "def f(a, b=None, c=None):\n"
    result = execute(problem(f"def check(candidate):\n    {tests}", prompt), body, box)
    assert (result.outcome, result.detail, result.in_subprocess) == ("passed", "", True)


def test_tests_may_use_what_the_prompt_defines(box: Sandbox) -> None:
    prompt = 'import math\n\ndef twice(a):\n    return 2 * a\n\ndef f(a):\n    """Twice."""\n'
    asked = problem("def check(candidate):\n    assert candidate(2) == twice(math.floor(2.5))", prompt)
    assert execute(asked, "    return twice(a)", box).in_subprocess
    assert execute(asked, "    return twice(a)", box).passed
    assert not execute(asked, "    return a", box).passed


OWN = """from dataclasses import dataclass
from enum import Enum
@dataclass(frozen=True)
class P:
    x: int
    more: object = None
class C(Enum):
    R = 1
class K:
    __slots__ = "value"
    def __init__(self, value): self.value = value
    def __eq__(self, other): return isinstance(other, K) and self.twice() == other.twice()
    def __hash__(self): return 1
    def twice(self): return 2 * self.value
def f(a):
"""
SAME = [
    "P(1)",
    "[P(1), P(2)]",
    "{'a': P(1)}",
    "C.R",
    "[C.R]",
    "{C.R: 1}",
    "K(1)",
    "[K(1)]",
    "{K(1), K(2)}",
    "P(1, P(2, (K(3), C.R)))",
]


def test_objects_of_classes_that_the_prompt_defines_reach_the_tests(box: Sandbox) -> None:
    """By their attributes, made of the prompt's own classes, with or without a canonical solution."""
    tests = "def check(candidate):\n" + "".join(f"    assert candidate({i}) == {one}\n" for i, one in enumerate(SAME))
    asked = problem(tests, OWN)
    for first, outcome in ((SAME[0], "passed"), ("P(3)", "failed"), ("K(1)", "failed")):
        result = execute(asked, f"    return [{', '.join([first, *SAME[1:]])}][a]", box)
        assert (result.outcome, result.in_subprocess) == (outcome, True), result.detail


@pytest.mark.slow
@pytest.mark.parametrize(("body", "said"), [
    ("    class Any:\n        def __eq__(self, other): return True\n    return Any()", "AssertionError"),
    ("    return Any()\nclass Any:\n    def __eq__(self, other): return True", "AssertionError"),
    ("    return Any()\nclass Any:\n    def __init__(self): self.__dict__['__eq__'] = 1", "'__eq__' of a 'Any' is no"),
    ("    return Any()\nclass Any:\n    __init__ = lambda self: setattr(self, 'equip', 1)\n    __eq__ = int", "AssertionError"),
    ("    return K(5)\nclass K:\n    def __init__(self, v): self.twice = bool\n", "'twice' of a 'K' is no"),
    ("    return K(5)\nclass K:\n    __init__ = lambda *_: None\n    v, __eq__ = 5, lambda *_: True", "AttributeError"),
    ("    return K(5)\nclass K:\n    def __init__(self, v): vars(self)['__dict__'] = {'twice': bool}", "'__dict__' of a 'K'"),
])  # fmt: skip
def test_a_class_of_the_completion_decides_nothing(box: Sandbox, body: str, said: str) -> None:
    asked = problem("def check(candidate):\n    assert candidate(1) == K(1)", OWN, "    return K(1)")
    assert execute(asked, "    return K(1)", box).in_subprocess
    result = execute(asked, body, box)
    assert (result.outcome, result.in_subprocess, said in result.detail) == ("failed", True, True), result.detail


BUILT = """    from dataclasses import dataclass
    from enum import Enum
    @dataclass
    class Point:
        x: int
        other: object = None
        unit = "cm"
        @property
        def double(self): return 2 * self.x
        def method(self): return 1
    class Bare:
        __slots__ = ("x", "never")
        def __init__(self, x): self.x = x
        def __str__(self): return f"<{self.x}>"
    class Colour(Enum):
        RED = 3
    class Node:
        def __init__(self): self.next, self.ring, self.call = self, (self,), print
    return [Point(1), Point(1, Point(2)), Bare(4), Colour.RED, Node()][a]
"""
READ = """def check(candidate):
    assert candidate(0).x == 1 and candidate(1).other.x == 2
    assert candidate(0).unit == "cm" and candidate(0).double == 2
    assert candidate(0) == candidate(0) != candidate(1) and candidate(1) == candidate(1)
    assert repr(candidate(0)).endswith("Point(x=1, other=None)")
    assert candidate(2).x == 4 and str(candidate(2)) == "<4>" and candidate(2) != candidate(2)
    assert candidate(3).name == "RED" and candidate(3).value == 3 and candidate(3) == candidate(3)
    node = candidate(4)
    assert node.next is node and node.ring == (node,)
    assert candidate(0) != {"x": 1} and type(candidate(0)).__name__ == "Point"
    for name in ("method", "nothing"):
        try:
            getattr(candidate(0), name)
        except AttributeError as error:
            assert "'Point', which the completion defines, is no data" in str(error)
        else:
            raise AssertionError(name)
"""


def test_attributes_of_the_completions_own_classes_reach_the_tests(box: Sandbox) -> None:
    """As in one process, where a problem has no published solution; what the class does stays with it."""
    for tests, outcome in ((READ, "passed"), (READ.replace("x == 4", "x == 5"), "failed")):
        result = execute(problem(tests), BUILT, box)
        assert (result.outcome, result.in_subprocess) == (outcome, True), result.detail


def test_arguments_get_objects_of_the_completions_own_classes(box: Sandbox) -> None:
    body = "    class P:\n        def __init__(self): self.x = 7\n    a.append(P())"
    asked = problem("def check(candidate):\n    given = []\n    candidate(given)\n    assert given[0].x == 7")
    assert execute(asked, body, box).passed


@pytest.mark.slow
def test_values_that_cannot_travel_share_a_process_for_the_problems_sake_only(box: Sandbox) -> None:
    within = "    class Pair:\n        def a(self): return 1\n    return Pair()"
    returned = problem("def check(candidate):\n    assert candidate(1).a() == 1", canonical=within)
    for body, outcome in ((within, "passed"), (within.replace("return 1", "return 2"), "failed")):
        result = execute(returned, body, box)
        assert (result.outcome, result.in_subprocess) == (outcome, False)
    given = problem("def check(candidate):\n    assert candidate(lambda: 3) == 3")
    result = execute(given, "    return a()", box)
    assert (result.outcome, result.in_subprocess) == ("passed", False)
    plain = problem("def check(candidate):\n    assert candidate(1) == 1", canonical="    return a")
    result = execute(plain, CHEATS["equals everything"], box)
    assert (result.outcome, result.in_subprocess) == ("failed", True)
    assert "AssertionError" in result.detail


def test_a_problem_is_asked_once_whether_its_values_travel(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[str, bool]] = []
    real = execution._execute

    def counting(asked: Problem, completion: str, sandbox: Sandbox, *, in_subprocess: bool) -> Any:
        executed.append((completion, in_subprocess))
        return real(asked, completion, sandbox, in_subprocess=in_subprocess)

    monkeypatch.setattr(execution, "_execute", counting)
    asked = problem("def check(candidate):\n    assert candidate(1) == 1 # once", canonical="    return a")
    for _ in range(2):
        execute(asked, "    return 2", box)
    assert executed == [("    return 2", True), ("    return a", True), ("    return 2", True)]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions() | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.lists(inner).map(deque) | st.dictionaries(st.text(), inner)
    | st.frozensets(st.integers()) | st.sets(st.text()),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN)
def test_plain_data_travels_unchanged(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value
    assert type(found) is type(value)


def test_subclasses_become_what_they_extend() -> None:
    Point = namedtuple("Point", "x y")
    made = defaultdict(lambda: 3, a=1)
    for value, base in (([1, Point(1, 2)][1:], list), (ChainMap({1: 2}), dict), (made, dict), (Named("x"), str)):
        found = decode(encode(value))
        assert found == base(value)
        assert type(found) is base
    assert decode(encode([True, 1, 1.0, Decimal("0.1"), Fraction(1, 3), range(3)]))[-1] == range(3)


class Letter(str, Enum):
    """A text with a name."""

    A = "a"


class Number(float, Enum):
    """A number with a name."""

    HALF = 0.5


class Lying(int):
    """A number that says it is another."""

    def __int__(self) -> int:
        return 7

    __index__ = __abs__ = __trunc__ = __int__  # type: ignore[assignment]


def test_values_of_subclasses_arrive_whatever_they_print() -> None:
    for value, expected in ((Letter.A, "a"), (Number.HALF, 0.5), (Lying(3), 3), (Lying(2**60), 2**60), (True, True)):
        found = decode(json.loads(json.dumps(encode([value]))))[0]
        assert (found, type(found)) == (expected, type(expected))


ZONE = datetime.timezone(datetime.timedelta(hours=5, minutes=30))


class Even(Set):  # type: ignore[type-arg]
    """A set of one's own."""

    def __contains__(self, value: object) -> bool:
        return value in (0, 2)

    def __iter__(self) -> Iterator[int]:
        return iter((0, 2))

    def __len__(self) -> int:
        return 2


EQUAL = [
    Even(),
    {1: 2, "a": None}.keys(), {(1, 2): [3]}.items(), OrderedDict(a=1).keys(), UserDict(a=1).keys(), UserList([1, [2]]),
    UserDict(a=[1]), UserString("é"), ChainMap({"a": 1}, {"b": 2}), MappingProxyType({"a": [1]}), array("d", [1.5, -0.0]),
    array("u", "é"), memoryview(b"ab"), datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 1, 2, 3, 4, ZONE),
    datetime.time(23, 59, 59, 999), datetime.timedelta(-1, 5, 7), UUID(int=7), PurePosixPath("a/b"), range(3), complex(-0.0, 1),
    np.int64(3), np.uint64(2**64 - 1), np.bool_(True), np.float32(0.1), np.float64(0.1), np.datetime64("2024-02-29"), np.str_("a"),
    np.complex128(1j),
]  # fmt: skip


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: type(value).__name__)
def test_values_arrive_that_are_equal_to_what_was_sent(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode({"x": [value]}))))["x"][0]
    assert found == value
    assert value == found


def test_values_and_arrays_arrive_in_their_order() -> None:
    assert list(decode(encode({1: [2], 2: 3}.values()))) == [[2], 3]
    for whole in (np.arange(6, dtype=">i2").reshape(2, 3).T, np.zeros((0, 2)), np.array(1.5)):
        found = decode(json.loads(json.dumps(encode(whole))))
        assert (found.dtype, found.shape, found.tolist()) == (whole.dtype, whole.shape, whole.tolist())
        found[...] = 0
    for refused in (np.array([object()]), np.zeros(1, dtype="i4,f4")):
        with pytest.raises(NotSerializable):
            encode(refused)


@pytest.mark.slow
def test_depth_is_no_matter_and_what_is_shared_stays_shared() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    found = decode(json.loads(json.dumps(encode(deep))))
    depth = 0
    while found:
        (found,), depth = found, depth + 1
    assert depth == 100_000
    chain: Any = ()
    doubled: Any = [0]
    for number in range(5_000):
        chain, doubled = (number, chain), [doubled, doubled]
    assert decode(encode(chain))[1][0] == 4_998
    left, right = decode(encode(doubled))
    assert left is right
    itself: list[Any] = [1]
    itself += [{"again": (itself,)}]
    found = decode(json.loads(json.dumps(encode(itself))))
    assert found[1]["again"][0] is found


class Named(str):
    """A text that claims to equal everything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return other is not self


def test_what_tests_ask_of_an_answer_travels_along(box: Sandbox) -> None:
    """Names, counts, orders, defaults and types of Python, without a canonical solution that would choose one process."""
    head = (
        "import collections as c, datetime as d, ipaddress, re, time, types\n\nP = c.namedtuple('P', 'x y')\n\ndef f(a):\n"
    )
    answer = (
        "[P(1, 2), c.Counter('aab'), c.OrderedDict(b=1, a=2), c.defaultdict(list, k=[1]), types.SimpleNamespace(v=[1]),"
        " slice(1, 3), ..., NotImplemented, d.timezone(d.timedelta(hours=2)), ipaddress.ip_interface('1.2.3.4/24'),"
        " re.compile('a+', re.I), time.gmtime(0), ValueError('no', 3), int, KeyError, c.defaultdict(None, {None: 1})]"
    )
    lines = (
        "r[0].x == 1 and r[0] == (1, 2)", "r[1].most_common(1) == [('a', 2)] and r[1]['z'] == 0", "list(r[2]) == ['b', 'a']",
        "r[2] != type(r[2])(a=2, b=1)", "r[3]['z'] == [] and r[3]['k'] == [1]", "r[4].v == [1]", "'abcd'[r[5]] == 'bc'",
        "r[6] is ... and r[7] is NotImplemented", "r[8].utcoffset(None).seconds == 7200", "str(r[9].network) == '1.2.3.0/24'",
        "r[10].match('AA')", "r[11].tm_year == 1970", "type(r[12]) is ValueError and r[12].args == ('no', 3)",
        "r[13] is int and issubclass(r[14], LookupError)", "r[15] == {None: 1}", "candidate(str) is str",
    )  # fmt: skip
    checks = "".join(f"    assert {line}, {line!r}\n" for line in lines)
    asked = problem(f"def check(candidate):\n    r = candidate(0)\n{checks}", head)
    result = execute(asked, f"    return a or {answer}", box)
    assert (result.outcome, result.in_subprocess) == ("passed", True), result.detail


@pytest.mark.parametrize("value", [len, object(), print, [1, {2: len}], Even, type("int", (), {}), NotSerializable("x")])
def test_what_is_no_plain_data_does_not_travel(value: Any) -> None:
    with pytest.raises(NotSerializable):
        encode(value)


@pytest.mark.parametrize(
    "nodes",
    [
        [["eval", "1"]],
        [["object"]],
        [[]],
        [["int", "z"]],
        [["list", [[]]]],
        [["__import__", "os"]],
        [["tuple", [0]]],
        [["numpy", "O", True, ""]],
        [["type", "eval"]],
        [["exception", "SystemExit", 0]],
        [["namedtuple", "x", [0], [0]]],
        [["own", "object", True, None, None]],
    ],
)
def test_nothing_else_is_made_of_what_arrives(nodes: Any) -> None:
    for message in ([], [[0], *nodes], [[len(nodes)], *nodes]):
        with pytest.raises((KeyError, TypeError, ValueError)):
            decode(message)
