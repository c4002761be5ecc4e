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
from pathlib import Path
from typing import Literal

from shoal.errors import InternalError, RequestError
from shoal.evaluation import plain_values, subprocess_tests
from shoal.evaluation.language import Language, StepResult, name_of
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.problems import Problem, known_language, records, text_field
from shoal.evaluation.sandbox import Sandbox, find_toolchain, require
from shoal.evaluation.subprocess_tests import JOB, SHARED

Outcome = Literal["passed", "failed", "syntax", "time", "memory", "output", "crash"]
Solution = tuple[Problem, str]
"""A problem and a completion of it."""

ERROR_LINE = re.compile(r"(Error|Exception)\b|\berror\b|^(signal|ended by)")
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
        """The most informative line of `detail`: the first error or a traceback's last line."""
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
    if problem.language != "python":
        return _execute(problem, completion, sandbox, in_subprocess=False)
    result = _execute(problem, completion, sandbox, in_subprocess=True)
    if result.passed or _passes_in_subprocess(problem, sandbox, result.detail == SHARED):
        return result
    return _execute(problem, completion, sandbox, in_subprocess=False)


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
