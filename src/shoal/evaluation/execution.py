"""The functional correctness of completions: each program runs with its tests in a sandbox."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Literal

from shoal.errors import InternalError, RequestError
from shoal.evaluation import plain_values, subprocess_tests
from shoal.evaluation.endings import LITERALS, block_end
from shoal.evaluation.language import Language, StepResult, name_of
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.problems import Problem, known_language, records, text_field
from shoal.evaluation.sandbox import Sandbox, find_toolchain, require
from shoal.evaluation.subprocess_tests import JOB, SHARED

Outcome = Literal["passed", "failed", "syntax", "time", "memory", "output", "crash"]
Solution = tuple[Problem, str]
"""A problem and a completion of it."""

ERROR_LINE = re.compile(r"(Error|Exception)\b|\berror\b|^(signal|ended by)")
FALSE_TESTS = {
    "python": "assert False",
    **dict.fromkeys(("javascript", "typescript"), "throw 1"),
    **dict.fromkeys(("java", "scala"), "if (true) throw new RuntimeException();"),
    "csharp": "if (true) throw new Exception();",
    "kotlin": "if (true) throw Exception()",
    "cpp": "{ assert(false); throw 1; }",
    "perl": "die 1;",
    "ruby": "raise 'false'",
    "php": "throw new Exception();",
    "lua": "error(1)",
    "bash": "exit 1",
    "r": "quit('no', 1)",
    "racket": "(check-equal? 1 2)",
    **dict.fromkeys(("go", "go_test"), "panic(0)"),
    "swift": "assert(false)",
    "rust": "panic!()",
    "d": "assert(false);",
}
"""The statements that end a program as a failed test does, by language."""
_MAIN = r"\b[mM]ain\s*\([^;{}]*\)[^;{}]*\{"
_BLOCKS = {
    **dict.fromkeys(("java", "cpp", "go", "kotlin", "scala", "csharp", "rust"), _MAIN),
    "go_test": r"\bfunc Test\w*\([^;{}]*\)\s*\{",
    "d": r"\bunittest\s*\{",
}
"""The texts up to the braces behind which tests run, where a program is more than statements."""
FALSE = "it passes tests that are false, too"
_LAST_RETURN = re.compile(r"(?:\breturn\b[^;{}]*;?)?\s*\Z")
_BRACKETS = re.compile(rf"{LITERALS}|[()]")
_NUMBER = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
DETAIL = 2000  # characters of a program's output that are kept
OUTCOMES: dict[str, Outcome] = {
    "time": "time",
    "memory": "memory",
    "output": "output",
}  # exceeding another bound is a crash


@dataclass(frozen=True)
class ExecutionResult:
    """The end of a completion's program.

    Attributes:
        outcome: "passed"; "failed": a test failed, or the program ended before its tests; "syntax":
            it does not compile or parse; "time", "memory", "output": it exceeded that bound;
            "crash": a signal, or too many processes or files.
        detail: the end of its standard error, or why it did not pass; "" if it passed.
        seconds: the wall time of its last step.
        in_subprocess: the completion ran in a process of its own and could neither read nor change
            its tests.
    """

    outcome: Outcome
    detail: str
    seconds: float
    in_subprocess: bool = False

    @property
    def passed(self) -> bool:
        """True if all tests passed."""
        return self.outcome == "passed"

    @property
    def headline(self) -> str:
        """The best line of `detail`: a compiler's first error, or a traceback's last line."""
        lines = [line.strip() for line in self.detail.splitlines() if line.strip()]
        telling = [line for line in lines if ERROR_LINE.search(line)] or lines[-1:] or [""]
        return telling[0] if self.outcome == "syntax" else telling[-1]


@dataclass(frozen=True)
class PassCounts:
    """The counts of one language.

    Attributes:
        passed: the number of completions that passed.
        total: the number of all completions.
        problems: the number of problems.
        without_solution: the number of problems without a completion.
    """

    passed: int
    total: int
    problems: int
    without_solution: int


def execute(problem: Problem, completion: str, sandbox: Sandbox) -> ExecutionResult:
    """Runs one completion's program.

    If language and problem allow it, it runs in a process without the tests. A problem allows it if
    its canonical solution passes that way. The completion under test has no influence on this
    choice.

    Raises:
        RequestError: the language cannot be run here; it names the packages to install.
        InternalError: the program was not run.
    """
    if problem.language == "python":
        result = _execute(problem, completion, sandbox, in_subprocess=True)
        if result.passed or _passes_in_subprocess(problem, sandbox, result.detail == SHARED):
            return result
    result = _execute(problem, completion, sandbox, in_subprocess=False)
    false = _false(problem, sandbox) if result.passed else None
    if false and _execute(false, completion, sandbox, in_subprocess=False).passed:
        return replace(result, outcome="failed", detail=FALSE)
    return result


@cache
def _false(problem: Problem, sandbox: Sandbox) -> Problem | None:
    """Returns the problem with tests that no right program passes.

    Two expected values are exchanged, or a test fails. What passes these tests, too, decides by
    itself whether it passes. It is None if the canonical solution passes them, or if the tests have
    no such place.
    """
    false = replace(problem, tests=exchanged(problem) or with_a_false_test(problem))
    passed_by_all = problem.canonical is not None and (
        _execute(false, problem.canonical, sandbox, in_subprocess=False).passed
    )
    return None if passed_by_all or false.tests == problem.tests else false


def with_a_false_test(problem: Problem) -> str:
    """Returns tests in which one more fails.

    It stands behind the others if a passing program is sure to reach their end, else before them.
    """
    language, tests, false = problem.language, problem.tests, FALSE_TESTS.get(problem.language, "")
    if language not in _BLOCKS:
        return f"{tests}\n{false}\n" if false else tests
    *_, begin = [-1, *(match.end() for match in re.finditer(_BLOCKS[language], tests))]
    end = block_end(language, tests, begin)
    if begin < 0 or end < 0:
        return tests
    block = _LAST_RETURN.sub("", tests[begin:end])
    place = begin if re.search(r"\breturn\b", block) else begin + len(block)
    return f"{tests[:place]}\n;{false}\n{tests[place:]}"


def exchanged(problem: Problem) -> str:
    """Returns tests in which two expected values are exchanged; "" without two that surely differ.

    A line of a test has a call, or the name of its result or of the value that is expected, and the
    lines of two tests differ before it, or behind it, by the values.
    """
    # Without stop strings or a solution the form of the tests is not known, but for MBXP's names.
    name = problem.entry_point if problem.stops or problem.canonical is not None else ""
    lines = problem.tests.split("\n")
    parts = [(place, split) for place, line in enumerate(lines) if (split := _parts(line, name))]
    for (i, one), (j, other) in combinations(parts, 2):
        ahead = one[2] == other[2] and _differ(one[0], other[0])
        if ahead or (one[0] == other[0] and _differ(one[2], other[2])):
            first, second = (one, other) if not ahead else (other, one)
            lines[i] = first[0] + one[1] + second[2]
            lines[j] = second[0] + other[1] + first[2]
            return "\n".join(lines)
    return ""


def _parts(line: str, entry_point: str) -> tuple[str, str, str] | None:
    """Splits a line at a call, or the name of a result or an expected value."""
    if match := re.search(r"\b(?:v|expected_)\d+(?=\s*=)|\bx\d+(?=,(?!\s*\$?v\d))", line):
        return line[: match.start()], match[0], line[match.end() :]
    name = rf"(?:candidate|{re.escape(entry_point)})"
    if not entry_point or re.search(rf"(?<![=!])=\s*[\w.]*{name}\W", line):  # a result with a name
        return None
    match = re.search(rf"\$?\({name}(?=\s)|[$\w.]*\b{name}(?:\.call|->)?\s*\(", line)
    depth = 0
    for sign in _BRACKETS.finditer(line, match.start()) if match else ():
        depth += {"(": 1, ")": -1}.get(sign[0], 0)
        if match and sign[0] == ")" and depth == 0:
            return line[: match.start()], line[match.start() : sign.end()], line[sign.end() :]
    return None


def _differ(one: str, other: str) -> bool:
    """Tells whether two texts have other letters, or numbers that are not nearly equal."""
    (letters, numbers), (further, others) = (
        (sorted(re.sub(rf"{_NUMBER}|\W", "", text)), sorted(map(float, re.findall(_NUMBER, text))))
        for text in (one, other)
    )
    same = len(numbers) == len(others) and all(
        abs(a - b) <= 0.01 * max(1.0, abs(a)) for a, b in zip(numbers, others, strict=True)
    )
    return letters != further or not same


@cache
def _passes_in_subprocess(problem: Problem, sandbox: Sandbox, unsendable: bool) -> bool:
    """Tells whether a problem's tests can call a completion in another process.

    Args:
        unsendable: an argument cannot be sent.
    """
    if unsendable or problem.canonical is None:
        return not unsendable
    return _execute(problem, problem.canonical, sandbox, in_subprocess=True).passed


def _execute(
    problem: Problem, completion: str, sandbox: Sandbox, *, in_subprocess: bool
) -> ExecutionResult:
    language, marker = LANGUAGES[problem.language], uuid.uuid4().hex
    toolchain = find_toolchain(problem.language, sandbox)
    files = (_files_for_subprocess if in_subprocess else _files)(problem, completion, marker)
    ended = sandbox.run(files, *toolchain.steps(language))
    if ended.reason in ("setup", "stopped"):
        raise InternalError(
            f"the program for {problem.task_id!r} was not run ({ended.reason}): {ended.stderr}"
        )
    ended = replace(ended, stderr=toolchain.without_noise(ended.stderr))
    compiled = ended.step > 0 or not language.compile
    outcome = _outcome(ended, language, compiled)
    if outcome == "passed" and marker not in ended.stdout:
        return ExecutionResult(
            "failed", "it ended before its tests did", ended.seconds, in_subprocess
        )
    detail = "" if outcome == "passed" else _detail(ended, outcome)
    return ExecutionResult(
        outcome,
        SHARED if f"{marker} {SHARED}" in ended.stdout else detail,
        ended.seconds,
        in_subprocess,
    )


def execute_all(
    pairs: Iterable[Solution], sandbox: Sandbox, workers: int | None = None
) -> Generator[ExecutionResult, None, None]:
    """Yields results in the order of `pairs`.

    `workers` programs run at a time (None: one per processor). When the iterator is closed or
    interrupted, waiting programs are cancelled, running ones killed, and the sandbox closed.

    Raises:
        RequestError: something is missing here; before the first program runs.
    """
    pairs = list(pairs)
    require((problem for problem, _ in pairs), sandbox)
    pool = ThreadPoolExecutor(workers or _processors(), thread_name_prefix="execute")
    try:
        yield from pool.map(lambda pair: execute(pair[0], pair[1], sandbox), pairs)
    except BaseException:
        sandbox.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def read_solutions(source: str | Path, problems: Sequence[Problem]) -> list[Solution]:
    """Returns the completions to execute.

    They are the problems' canonical ones, as far as there are any, or those of a file of JSON
    lines.

    Args:
        source: "canonical", or a path; a record has `task_id` and `completion`, and may name its
            `language` (mxeval's format).

    Raises:
        RequestError: the file is malformed, or a record belongs to no problem or another language,
            with file and line; or there are no completions.
    """
    if source == "canonical":
        pairs = [
            (problem, problem.canonical) for problem in problems if problem.canonical is not None
        ]
        if not pairs:
            raise RequestError("none of these problems has a canonical solution")
        return pairs
    known = {problem.task_id: problem for problem in problems}
    pairs = [_solution(record, known, where) for where, record in records(Path(source))]
    if not pairs:
        raise RequestError(f"{source} holds no completions")
    return pairs


def pass_counts(
    problems: Sequence[Problem], pairs: Sequence[Solution], results: Sequence[ExecutionResult]
) -> dict[str, PassCounts]:
    """Counts the results of each language, in the order of the problems.

    Args:
        results: the results of the first pairs; there are fewer of them if execution was
            interrupted.
    """
    given, counts = {problem.task_id for problem, _ in pairs}, {}
    for language in dict.fromkeys(problem.language for problem in problems):
        passed = [
            result.passed
            for (problem, _), result in zip(pairs, results, strict=False)
            if problem.language == language
        ]
        names = {problem.task_id for problem in problems if problem.language == language}
        counts[language] = PassCounts(sum(passed), len(passed), len(names), len(names - given))
    return counts


def _files(problem: Problem, completion: str, marker: str) -> dict[str, str]:
    language = LANGUAGES[problem.language]
    around = language.around(completion, problem.tests, name_of(marker))
    return language.files(problem.program(completion, language.separator, *around), marker)


def _files_for_subprocess(problem: Problem, completion: str, marker: str) -> dict[str, str]:
    job = {
        "program": f"{problem.prompt}{completion}{problem.suffix}\n",
        "prompt": problem.prompt,
        "tests": problem.tests,
        "entry_point": problem.entry_point,
        "marker": marker,
    }
    readable = {
        name: text.encode("utf-8", errors="replace").decode() for name, text in job.items()
    }  # no lone surrogates
    files = {
        LANGUAGES["python"].epilogue_file: subprocess_tests.__file__,
        "plain_values.py": plain_values.__file__,
    }
    texts = {name: Path(file).read_text(encoding="utf-8") for name, file in files.items()}
    return {**texts, JOB: json.dumps(readable)}


def _outcome(ended: StepResult, language: Language, compiled: bool) -> Outcome:
    if ended.succeeded:
        return "passed"
    if ended.reason != "exit":
        return OUTCOMES.get(ended.reason, "crash")
    if any(text in ended.stderr for text in language.memory):
        return "memory"
    if not compiled or any(text in f"\n{ended.stderr}" for text in language.syntax):
        return "syntax"
    return "crash" if ended.returncode is None or ended.returncode < 0 else "failed"


def _detail(ended: StepResult, outcome: Outcome) -> str:
    why = (
        f"signal {-ended.returncode}"
        if ended.returncode and ended.returncode < 0
        else f"ended by: {ended.reason}"
    )
    said = (ended.stderr.strip() or ended.stdout.strip())[-DETAIL:]
    if outcome in ("failed", "syntax"):
        return said or f"exit code {ended.returncode}"
    return f"{why}\n{said}".strip()


def _solution(record: dict[str, object], known: dict[str, Problem], where: str) -> Solution:
    problem = known.get(text_field(record, "task_id", where))
    if problem is None:
        raise RequestError(
            f"{where}: none of the {len(known)} problems has the task id {record['task_id']!r}"
        )
    if (
        "language" in record
        and known_language(text_field(record, "language", where), where) != problem.language
    ):
        raise RequestError(
            f"{where}: {problem.task_id!r} is a problem in {problem.language}, not in "
            f"{record['language']}"
        )
    return problem, text_field(record, "completion", where)


def _processors() -> int:
    return len(os.sched_getaffinity(0))
