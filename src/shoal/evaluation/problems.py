"""The programming problems of HumanEval and MBXP, read from their files.

HumanEval (Chen et al. 2021, arXiv 2107.03374) and MBXP (Athiwaratkun et al. 2023, arXiv 2210.14868)
are JSON lines, plain or gzipped. A model sees `prompt` (and `suffix` in infilling problems); its
completion passes if the program made of both and the tests succeeds. Nothing is downloaded and
nothing is bundled.

MultiPL-E (Cassano et al. 2023, arXiv 2208.08227) has HumanEval and MBPP in 18 languages: JSON lines
with a `name`, a `language`, a `prompt`, `tests` and `stop_tokens`. A completion ends before the
first of the stop tokens, and the tests begin with the text that these have cut off, so that prompt,
completion and tests are a whole program. There are no published solutions.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.languages import LANGUAGES


@dataclass(frozen=True)
class Problem:
    """A program to complete, with its tests.

    `prompt` + completion + `suffix` + `tests` is a whole program.

    Attributes:
        canonical: the completion published with the problem, None if there is none.
        entry_point: the function that the tests call.
        stops: the strings before which a completion ends; (): those of its language.
    """

    task_id: str
    language: str
    prompt: str
    tests: str
    entry_point: str
    canonical: str | None = None
    suffix: str = ""
    stops: tuple[str, ...] = ()

    def program(
        self, completion: str, separator: str = "\n", before: str = "", behind: str = ""
    ) -> str:
        """Returns the source text that is run.

        It passes if it reaches its last statement and exits with code 0.

        Args:
            separator: the text before the tests.
            before: the text between the separator and the tests.
            behind: the text behind the tests.
        """
        tests = self.tests
        if (rest := tests.lstrip()).startswith("}"):  # which belongs to the completion
            separator, tests = "\n}", rest[1:]
        return f"{self.prompt}{completion}{self.suffix}{separator}{before}{tests}{behind}"


def read_humaneval(path: str | Path) -> list[Problem]:
    """Reads the problems of a file in HumanEval's format.

    The language is Python if a record names none.

    Raises:
        RequestError: not JSON, a field missing or of the wrong type, or a task id met before; the
            message names file and line.
    """
    return read_all(Path(path), partial(_problem, language="python"))


def read_mbxp(path: str | Path) -> list[Problem]:
    """Reads the problems of a file in MBXP's format, whose records name their language.

    Raises:
        RequestError: see `read_humaneval`; or the language is unknown.
    """
    return read_all(Path(path), partial(_problem, language=None))


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects in a file of JSON lines (`.gz`: gzipped), each with "file, line n".

    Empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, or a line holds no JSON object.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content.decode("utf-8").split("\n")  # not splitlines: U+2028 may stand in a string
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RequestError(f"cannot read {path}: {reason}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}, line {number}", _object(line, f"{path}, line {number}")


def text_field(record: Mapping[str, Any], name: str, where: str) -> str:
    """Returns a field that must exist and be text."""
    value = record.get(name)
    if not isinstance(value, str):
        has = (
            f"has {value!r:.60} there"
            if name in record
            else f"has only {', '.join(record) or 'nothing'}"
        )
        raise RequestError(f"{where}: expected text in the field {name!r}; the record {has}")
    return value


def known_language(name: str, where: str) -> str:
    """Returns `name` if it is a language that can be run."""
    if name not in LANGUAGES:
        raise RequestError(f"{where}: unknown language {name!r}; known are {', '.join(LANGUAGES)}")
    return name


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def read_all(path: Path, read: Callable[[dict[str, Any], str], Problem]) -> list[Problem]:
    """Reads the problems of a file.

    Args:
        read: (a record, "file, line n") -> its problem.

    Raises:
        RequestError: see `read_humaneval`; or the file holds no problems.
    """
    problems: dict[str, Problem] = {}
    for where, record in records(path):
        problem = read(record, where)
        if problem.task_id in problems:
            raise RequestError(f"{where}: the task id {problem.task_id!r} was used before")
        problems[problem.task_id] = problem
    if not problems:
        raise RequestError(f"{path} holds no problems")
    return list(problems.values())


def _problem(record: dict[str, Any], where: str, language: str | None) -> Problem:
    if language is None or "language" in record:
        language = known_language(text_field(record, "language", where), where)
    entry_point = text_field(record, "entry_point", where)
    tests = text_field(record, "test", where)
    if (
        language == "python"
        # its tests define `check`, which must be called; a tested function may have that name too
    ):
        tests = f"_candidate = {entry_point}\n{tests}\ncheck(_candidate)\n"
    return Problem(
        task_id=text_field(record, "task_id", where),
        language=language,
        prompt=text_field(record, "prompt", where),
        tests=tests,
        entry_point=entry_point,
        canonical=None
        if record.get("canonical_solution") is None
        else text_field(record, "canonical_solution", where),
        suffix="" if record.get("suffix") is None else text_field(record, "suffix", where),
    )


MULTIPL_E_LANGUAGES = {
    "sh": "bash",
    "cpp": "cpp",
    "cs": "csharp",
    "d": "d",
    "go": "go_test",
    "go_test.go": "go_test",
    "java": "java",
    "js": "javascript",
    "lua": "lua",
    "pl": "perl",
    "php": "php",
    "r": "r",
    "rkt": "racket",
    "rb": "ruby",
    "rs": "rust",
    "scala": "scala",
    "swift": "swift",
    "ts": "typescript",
}
"""The names of the languages in MultiPL-E, and here."""

REFUSED = {"jl": "no stable release of Debian since 11 has a package of Julia"}
"""The reasons why the other languages do not run."""

_LUA_END = re.compile(r"os\.exit\((.*)\)\s*\Z")
_FURTHER = {
    "java": """
class Main {
    public static void main(String[] arguments) throws Throwable {
        ClassLoader.getSystemClassLoader().setDefaultAssertionStatus(true);
        Problem.main(arguments);
    }
}
""",
    "scala": """
object Main {
    def main(arguments: Array[String]): Unit = Problem.main(arguments)
}
""",
    "ruby": """
Test::Unit::AutoRunner.need_auto_run = false
exit 1 unless Test::Unit::AutoRunner.run
""",
}
"""Statements behind the tests that run them where MultiPL-E's command or a library would.

They must have run, and have passed, before a program tells that it has come to its end.
"""


def read_multipl_e(path: str | Path) -> list[Problem]:
    """Reads the problems of a file in MultiPL-E's format.

    Raises:
        RequestError: not JSON, a field missing or of the wrong type, a name met before, or a
            language that does not run; the message names file and line.
    """
    return read_all(Path(path), _multipl_e_problem)


def _multipl_e_problem(record: dict[str, Any], where: str) -> Problem:
    name, language = text_field(record, "name", where), _multipl_e_language(record, where)
    stops = record.get("stop_tokens")
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"{where}: expected a list of texts in the field 'stop_tokens'")
    tests = text_field(record, "tests", where) + _FURTHER.get(language, "")
    if language == "lua":  # which would end the program before it tells that it has come to its end
        tests = _LUA_END.sub(r"if \1 ~= 0 then os.exit(1) end", tests)
    return Problem(
        task_id=name,
        language=language,
        prompt=text_field(record, "prompt", where),
        tests=tests,
        entry_point=re.sub(r"^[A-Za-z]+_\d+_", "", name),
        stops=tuple(stops),
    )


def _multipl_e_language(record: dict[str, Any], where: str) -> str:
    name = text_field(record, "language", where)
    if name in REFUSED:
        raise RequestError(
            f"{where}: the language {name!r} does not run here, {REFUSED[name]}: leave its "
            "problems out"
        )
    if name not in MULTIPL_E_LANGUAGES:
        raise RequestError(
            f"{where}: unknown language {name!r}; known are {', '.join(MULTIPL_E_LANGUAGES)}"
        )
    return MULTIPL_E_LANGUAGES[name]
