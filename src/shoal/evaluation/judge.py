"""Completions -> verdicts: the program of each is executed in a sandbox."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from shoal.errors import InternalError, RequestError
from shoal.evaluation import apart as separate
from shoal.evaluation.apart import JOB, SHARED
from shoal.evaluation.languages import LANGUAGES, Language
from shoal.evaluation.problems import Problem, known_language, records, text_field
from shoal.evaluation.sandbox import Ended, Sandbox
from shoal.evaluation.toolchains import require, steps

Outcome = Literal["passed", "failed", "syntax", "time", "memory", "output", "crash"]
Pair = tuple[Problem, str]
"""A problem and a completion."""

TELLING = re.compile(r"(Error|Exception)\b|\berror\b|^(signal|ended by)")
DETAIL = 2000  # characters of what a program wrote that are kept
OUTCOMES: dict[str, Outcome] = {"time": "time", "memory": "memory", "output": "output"}  # of bounds; the rest are crashes


@dataclass(frozen=True)
class Verdict:
    """What became of a completion.

    Attributes:
        outcome: "passed"; "failed": a test, or it ended before them; "syntax": it does not compile or parse; "time", "memory",
            "output": it passed that bound; "crash": ended by a signal, or with too many processes or files.
        detail: the end of what it wrote to standard error, or why it did not pass; "" if it passed.
        seconds: wall time of its last step.
        apart: the completion ran in another process than its tests, which it could neither read nor change.
    """

    outcome: Outcome
    detail: str
    seconds: float
    apart: bool = False

    @property
    def passed(self) -> bool:
        """True if the program ended well with its tests behind it."""
        return self.outcome == "passed"

    @property
    def headline(self) -> str:
        """The line of `detail` that says most: of a compiler's complaints the first, of a traceback the last."""
        lines = [line.strip() for line in self.detail.splitlines() if line.strip()]
        telling = [line for line in lines if TELLING.search(line)] or lines[-1:] or [""]
        return telling[0] if self.outcome == "syntax" else telling[-1]


@dataclass(frozen=True)
class Tally:
    """How many completions of a language passed, of how many; how many problems there are, and how many have no completion."""

    passed: int
    total: int
    problems: int
    without_solution: int


def judge(problem: Problem, completion: str, sandbox: Sandbox) -> Verdict:
    """Runs one completion's program: in a process without its tests where language and problem allow it.

    A problem allows it if its canonical solution passes so; what the completion does decides nothing.

    Raises: RequestError if the language cannot be run here, naming what to install; InternalError if the program was not run.
    """
    if problem.language != "python":
        return _judge(problem, completion, sandbox, apart=False)
    verdict = _judge(problem, completion, sandbox, apart=True)
    if verdict.passed or _separable(problem, sandbox, verdict.detail == SHARED):
        return verdict
    return _judge(problem, completion, sandbox, apart=False)


@cache
def _separable(problem: Problem, sandbox: Sandbox, unsendable: bool) -> bool:
    """Whether a problem's tests can be run in a process of their own; `unsendable`: one of their calls cannot be sent."""
    if unsendable or problem.canonical is None:
        return not unsendable
    return _judge(problem, problem.canonical, sandbox, apart=True).passed


def _judge(problem: Problem, completion: str, sandbox: Sandbox, *, apart: bool) -> Verdict:
    language, word = LANGUAGES[problem.language], uuid.uuid4().hex
    run = steps(problem.language, sandbox)
    files = _files_apart(problem, completion, word) if apart else _files(language, problem.program(completion), word)
    ended = sandbox.run(files, *run)
    if ended.reason in ("setup", "stopped"):
        raise InternalError(f"the program for {problem.task_id!r} was not run ({ended.reason}): {ended.stderr}")
    compiled = ended.step == len(run) - 1
    outcome = _outcome(ended, language, compiled)
    if outcome == "passed" and word not in ended.stdout:
        return Verdict("failed", "it ended before its tests did", ended.seconds, apart)
    detail = "" if outcome == "passed" else _detail(ended, outcome)
    return Verdict(outcome, SHARED if f"{word} {SHARED}" in ended.stdout else detail, ended.seconds, apart)


def judge_all(pairs: Iterable[Pair], sandbox: Sandbox, workers: int | None = None) -> Generator[Verdict, None, None]:
    """Verdicts in the order of `pairs`, `workers` programs at a time (None: one per processor).

    What is left is cancelled, and what runs is killed, when the iterator is closed or interrupted; the sandbox is then closed.

    Raises: RequestError before the first program if anything is missing here.
    """
    pairs = list(pairs)
    require((problem for problem, _ in pairs), sandbox)
    pool = ThreadPoolExecutor(workers or _processors(), thread_name_prefix="judge")
    try:
        yield from pool.map(lambda pair: judge(pair[0], pair[1], sandbox), pairs)
    except BaseException:
        sandbox.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def read_solutions(source: str | Path, problems: Sequence[Problem]) -> list[Pair]:
    """The problems' canonical completions, of those that have one, or completions from a file of JSON lines.

    Args:
        source: "canonical", or a path; a record has `task_id` and `completion`, and may name its `language` (mxeval's format).

    Raises:
        RequestError: the file is malformed, or a record is of no problem or another language; with file and line. There is no
            completion at all.
    """
    if source == "canonical":
        pairs = [(problem, problem.canonical) for problem in problems if problem.canonical is not None]
        if not pairs:
            raise RequestError("none of these problems has a canonical solution")
        return pairs
    known = {problem.task_id: problem for problem in problems}
    pairs = [_solution(record, known, where) for where, record in records(Path(source))]
    if not pairs:
        raise RequestError(f"{source} holds no completions")
    return pairs


def tallies(problems: Sequence[Problem], pairs: Sequence[Pair], verdicts: Sequence[Verdict]) -> dict[str, Tally]:
    """What became of the completions of each language, in the order in which the languages come.

    `verdicts` are those of the first pairs, fewer than there are pairs if judging was interrupted.
    """
    given, found = {problem.task_id for problem, _ in pairs}, {}
    for language in dict.fromkeys(problem.language for problem in problems):
        passed = [
            verdict.passed for (problem, _), verdict in zip(pairs, verdicts, strict=False) if problem.language == language
        ]
        names = {problem.task_id for problem in problems if problem.language == language}
        found[language] = Tally(sum(passed), len(passed), len(names), len(names - given))
    return found


def _files(language: Language, program: str, word: str) -> dict[str, str]:
    last_words = language.last_words.format(word)
    if language.last_file:
        return {language.file: program, language.last_file: last_words}
    return {language.file: f"{program}\n{last_words}\n"}


def _files_apart(problem: Problem, completion: str, word: str) -> dict[str, str]:
    job = {
        "program": f"{problem.prompt}{completion}{problem.suffix}\n", "prompt": problem.prompt, "tests": problem.tests,
        "entry_point": problem.entry_point, "word": word,
    }  # fmt: skip
    readable = {name: text.encode("utf-8", errors="replace").decode() for name, text in job.items()}  # no lone surrogates
    return {LANGUAGES["python"].file: Path(separate.__file__).read_text(encoding="utf-8"), JOB: json.dumps(readable)}


def _outcome(ended: Ended, language: Language, compiled: bool) -> Outcome:
    if ended.well:
        return "passed"
    if ended.reason != "exit":
        return OUTCOMES.get(ended.reason, "crash")
    if any(word in ended.stderr for word in language.memory):
        return "memory"
    if not compiled or any(word in f"\n{ended.stderr}" for word in language.syntax):
        return "syntax"
    return "crash" if ended.returncode is None or ended.returncode < 0 else "failed"


def _detail(ended: Ended, outcome: Outcome) -> str:
    why = f"signal {-ended.returncode}" if ended.returncode and ended.returncode < 0 else f"ended by: {ended.reason}"
    said = (ended.stderr.strip() or ended.stdout.strip())[-DETAIL:]
    return said if outcome in ("failed", "syntax") else f"{why}\n{said}".strip()


def _solution(record: dict[str, object], known: dict[str, Problem], where: str) -> Pair:
    problem = known.get(text_field(record, "task_id", where))
    if problem is None:
        raise RequestError(f"{where}: none of the {len(known)} problems has the task id {record['task_id']!r}")
    if "language" in record and known_language(text_field(record, "language", where), where) != problem.language:
        raise RequestError(f"{where}: {problem.task_id!r} is a problem in {problem.language}, not in {record['language']}")
    return problem, text_field(record, "completion", where)


def _processors() -> int:
    return len(os.sched_getaffinity(0))
