"""The compilers and interpreters that a sandbox can run on this machine, and the missing ones."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from shoal.errors import RequestError
from shoal.evaluation.languages import COMPILING, LANGUAGES, Language
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import PATH, Sandbox
from shoal.evaluation.steps import Bounds, Step

Programs = Mapping[str, str]
"""Names of programs and their paths."""


def steps(language: str, sandbox: Sandbox) -> list[Step]:
    """The steps that compile (if the language needs it) and run a source file in the working directory.

    Raises: RequestError naming what to install.
    """
    known, programs = LANGUAGES[language], _programs(language, sandbox)
    compiling = [_step(known, known.compile, programs, COMPILING)] if known.compile else []
    return [*compiling, _step(known, known.run, programs, known.bounds)]


def require(problems: Iterable[Problem], sandbox: Sandbox) -> None:
    """Checks that all programs and libraries that these problems need are installed.

    Raises: RequestError naming everything that is missing.
    """
    tests: dict[str, list[str]] = {}
    for problem in problems:
        tests.setdefault(problem.language, []).append(problem.tests)
    missing = [said for language, texts in tests.items() for said in _missing(language, texts, sandbox)]
    if missing:
        raise RequestError("these problems cannot be run here: " + "; ".join(missing))


def _missing(language: str, tests: list[str], sandbox: Sandbox) -> Iterator[str]:
    known = LANGUAGES[language]
    try:
        programs = _programs(language, sandbox)
    except RequestError as error:
        yield str(error)
        return
    for library in known.libraries:
        loaded = any(library.loaded_by in text for text in tests)
        if loaded and not _works(_step(known, library.probe, programs, COMPILING), sandbox):
            yield f"{known.title} tests load {library.loaded_by}: install {library.install}"


@lru_cache
def _programs(language: str, sandbox: Sandbox) -> Programs:
    """The first path of each program that works in the sandbox, whose users may not enter every directory."""
    known = LANGUAGES[language]
    found: dict[str, str] = {}
    for name in known.programs:
        paths = _candidates(name)
        for path in paths:
            if _works(_step(known, (name, *known.probe), {name: path}, COMPILING), sandbox):
                found[name] = path
                break
        else:
            why = f"the sandbox cannot run {', '.join(paths)}" if paths else f"there is no {name} on PATH"
            raise RequestError(f"{known.title} cannot be run, {why}: install {known.install}")
    return found


def _candidates(name: str) -> list[str]:
    """Paths of a program: on PATH, in the system's directories, and for Python the running interpreter."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *PATH.split(":")]
    paths = [path for folder in folders if folder and (path := shutil.which(name, path=folder))]
    return list(dict.fromkeys([*paths, sys.executable] if name == "python3" else paths))


def _step(language: Language, command: tuple[str, ...], programs: Programs, bounds: Bounds) -> Step:
    folders = dict.fromkeys(str(Path(path).parent) for path in programs.values())  # tsc, for example, is a script for node
    modules = _node_modules(programs.get("node"))
    environment = {**language.environment, "PATH": ":".join([*folders, PATH])}
    if modules:
        environment["NODE_PATH"] = ":".join(modules)
    return Step([programs.get(command[0], command[0]), *command[1:]], bounds, environment, modules)


def _node_modules(node: str | None) -> list[str]:
    """Directories of globally installed Node.js modules: those of NODE_PATH and the usual ones."""
    if node is None:
        return []
    customary = [Path(node).resolve().parents[1] / "lib" / "node_modules", Path("/usr/local/lib/node_modules")]
    asked = [folder for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    return [path for path in dict.fromkeys([*asked, *map(str, customary)]) if os.path.isdir(path)]


def _works(step: Step, sandbox: Sandbox) -> bool:
    return sandbox.run({}, step).succeeded
