"""The compilers and interpreters that a sandbox can run on this machine, and the missing ones."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from shoal.errors import RequestError
from shoal.evaluation.language import COMPILING, Bounds, Language, Step, StepResult
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import PATH, Sandbox

Programs = Mapping[str, str]
"""The names of programs and their paths."""

TRIAL = "the smallest program has run"
REASON = 300  # characters of the error of a compiler or an interpreter that does not run

NUMBER = re.compile(r"\b(?:0x)?[0-9A-Fa-f]*[0-9][0-9A-Fa-f]*\b")
"""A process id, an address or another number, which differs from run to run."""


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the interpreter of a language that run in a sandbox.

    Attributes:
        programs: their names and paths.
        noise: the lines that they write to standard error beside any program, without numbers.
    """

    programs: Programs
    noise: frozenset[str] = frozenset()

    def steps(self, language: Language) -> list[Step]:
        """Returns the steps that compile (if the language needs it) and run a source file.

        They run in the working directory.
        """
        compiling = (
            [_step(language, language.compile, self.programs, COMPILING)]
            if language.compile
            else []
        )
        return [*compiling, _step(language, language.run, self.programs, language.bounds)]

    def without_noise(self, text: str) -> str:
        """Returns the text that the program itself wrote to standard error."""
        if not self.noise:
            return text
        return "".join(
            line
            for line in text.splitlines(keepends=True)
            if _without_numbers(line) not in self.noise
        )


def require(problems: Iterable[Problem], sandbox: Sandbox) -> None:
    """Checks that all programs and libraries that these problems need are installed.

    Raises:
        RequestError: something is missing; the message names everything that is.
    """
    tests: dict[str, list[str]] = {}
    for problem in problems:
        tests.setdefault(problem.language, []).append(problem.prompt + problem.tests)
    missing = [
        said for language, texts in tests.items() for said in _missing(language, texts, sandbox)
    ]
    if missing:
        raise RequestError("these problems cannot be run here: " + "; ".join(missing))


def _missing(language: str, tests: list[str], sandbox: Sandbox) -> Iterator[str]:
    known = LANGUAGES[language]
    try:
        programs = find_toolchain(language, sandbox).programs
    except RequestError as error:
        yield str(error)
        return
    for library in known.libraries:
        loaded = any(library.loaded_by in text for text in tests)
        if (
            loaded
            and not sandbox.run({}, _step(known, library.probe, programs, COMPILING)).succeeded
        ):
            yield f"{known.title} tests load {library.loaded_by}: install {library.install}"


@lru_cache
def find_toolchain(language: str, sandbox: Sandbox) -> Toolchain:
    """Finds the first programs of a language with which its smallest program runs in the sandbox.

    The sandbox's users may not enter every directory, so programs later on PATH are tried too.

    Raises:
        RequestError: there are none; the message names the packages to install.
    """
    known = LANGUAGES[language]
    paths = {name: _candidates(name) for name in known.programs}
    refusal = next(
        (f"there is no {name} on PATH" for name, found in paths.items() if not found), ""
    )
    if not refusal:
        for chosen in product(*paths.values()):
            toolchain = Toolchain(dict(zip(paths, chosen, strict=True)))
            ended = _trial(known, toolchain, sandbox)
            if ended.succeeded and TRIAL in ended.stdout:
                lines = f"{ended.earlier_stderr}\n{ended.stderr}".splitlines()
                return replace(
                    toolchain,
                    noise=frozenset(_without_numbers(line) for line in lines if line.strip()),
                )
            why = " ".join(ended.stderr.split())[:REASON] or f"ended by: {ended.reason}"
            refusal = f"the sandbox cannot run {', '.join(chosen)} ({why})"
    raise RequestError(f"{known.title} cannot be run, {refusal}: install {known.install}")


def _trial(language: Language, toolchain: Toolchain, sandbox: Sandbox) -> StepResult:
    """Runs the language's smallest program; a busy machine has time to start its runtime."""
    steps = [replace(step, bounds=COMPILING) for step in toolchain.steps(language)]
    return sandbox.run(language.files(language.trial, TRIAL), *steps)


def _without_numbers(line: str) -> str:
    return NUMBER.sub("#", line.strip())


def _candidates(name: str) -> list[str]:
    """Returns the paths of a program on PATH and in the system's directories.

    Python's also include the running interpreter.
    """
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *PATH.split(":")]
    real = dict.fromkeys(
        os.path.realpath(folder) for folder in folders if folder
    )  # /bin is often /usr/bin
    paths = [path for folder in real if (path := shutil.which(name, path=folder))]
    return list(dict.fromkeys([*paths, sys.executable] if name == "python3" else paths))


def _step(language: Language, command: tuple[str, ...], programs: Programs, bounds: Bounds) -> Step:
    folders = dict.fromkeys(
        str(Path(path).parent) for path in programs.values()
    )  # tsc, for example, is a script for node
    modules = _node_modules(programs.get("node"))
    environment = {**language.environment, "PATH": ":".join([*folders, PATH])}
    if modules:
        environment["NODE_PATH"] = ":".join(modules)
    return Step([programs.get(command[0], command[0]), *command[1:]], bounds, environment, modules)


def _node_modules(node: str | None) -> list[str]:
    """Returns the directories of globally installed Node.js modules: NODE_PATH, usual ones."""
    if node is None:
        return []
    customary = [
        Path(node).resolve().parents[1] / "lib" / "node_modules",
        Path("/usr/local/lib/node_modules"),
    ]
    asked = [folder for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    return [path for path in dict.fromkeys([*asked, *map(str, customary)]) if os.path.isdir(path)]
