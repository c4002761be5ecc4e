"""The programming problems of MultiPL-E, read from its files.

MultiPL-E (Cassano et al. 2023, arXiv 2208.08227) has HumanEval and MBPP in 18 languages: JSON lines
with a `name`, a `language`, a `prompt`, `tests` and `stop_tokens`. A completion ends before the
first of the stop tokens, and the tests begin with what these have cut off, so that prompt,
completion and tests are a whole program. There are no published solutions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shoal.errors import RequestError
from shoal.evaluation.problems import Problem, read_all, text_field

LANGUAGES = {
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
    return read_all(Path(path), _problem)


def _problem(record: dict[str, Any], where: str) -> Problem:
    name, language = text_field(record, "name", where), _language(record, where)
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


def _language(record: dict[str, Any], where: str) -> str:
    name = text_field(record, "language", where)
    if name in REFUSED:
        raise RequestError(f"{where}: the language {name!r} does not run here: {REFUSED[name]}")
    if name not in LANGUAGES:
        raise RequestError(f"{where}: unknown language {name!r}; known are {', '.join(LANGUAGES)}")
    return LANGUAGES[name]
