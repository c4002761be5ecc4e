"""A sandbox for untrusted programs, and the compilers and interpreters that it can run here.

Each program runs in a working directory of its own, within bounds, and all its processes are killed
at the end. There are three backends (isolation.py): bubblewrap; namespaces through `unshare`;
limits alone, which must be asked for by name. In each a program runs in its own session and
directory with a minimal environment, a supervisor watches its whole process tree (supervisor.py),
and sandbox_exec.py restricts the process before it executes the program. `Sandbox.isolation`
describes the limits that this machine enforces, and those it does not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from shoal.errors import InternalError, RequestError
from shoal.evaluation import isolation, processes, sandbox_exec, supervisor
from shoal.evaluation.language import COMPILING, Bounds, Language, Step, StepResult, name_of
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.problems import Problem

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
    refusal = next((f"there is no {name} on PATH" for name, path in paths.items() if not path), "")
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
    before, behind = language.around("", "", name_of(TRIAL))
    files = language.files(f"{before}{language.trial}{behind}", TRIAL)
    return sandbox.run(files, *steps)


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
    extra = [folder for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    return [path for path in dict.fromkeys([*extra, *map(str, customary)]) if os.path.isdir(path)]


LAST_SIGNAL = 64  # Perl and PHP exit with 255, which means no signal
PATH = "/usr/local/bin:/usr/bin:/bin"
OWN_NETWORK = "/proc/self/ns/net"  # a link that names the network namespace
SECRET = "a file of somebody else"
PROBE = f"""true > "$HOME/here" || exit 1; cat "$0"; true > "$0"; readlink {OWN_NETWORK}; exit 0"""
BOUND_OF_SIGNAL = {-signal.SIGXCPU: "time", -signal.SIGXFSZ: "files"}
STOPPED = StepResult(0, "stopped", None, "", "", 0.0)


class Sandbox:
    """A sandbox that runs programs.

    It runs any number at a time (from several threads), and stops them all when it is closed.

    Args:
        backend: one of `isolation.BACKENDS`, or "auto": the first of them with which a probe
            program reaches neither files of others nor the network.

    Raises:
        RequestError: that backend does not work here, with its message; or none isolates programs
            and none was named.
    """

    def __init__(self, backend: str = "auto") -> None:
        if backend not in ("auto", *isolation.BACKENDS):
            raise RequestError(
                f"unknown way to isolate programs {backend!r}: expected auto, "
                f"{', '.join(isolation.BACKENDS)}"
            )
        if not sys.platform.startswith("linux"):
            raise RequestError(
                "programs are only executed on Linux: elsewhere there is nothing to confine "
                "them with"
            )
        self._supervisors: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._groups = processes.delegated_folder()
        self.backend = self._first_that_isolates() if backend == "auto" else self._named(backend)
        self.isolation = isolation.describe(self.backend, cgroup=bool(self._groups))
        self.essentials = isolation.essentials(self.backend, cgroup=bool(self._groups))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, files: Mapping[str, str], *steps: Step) -> StepResult:
        """Writes `files` (name: text) into a new directory and runs the steps there.

        The steps run one after another while they succeed.
        """
        return self._run(self.backend, files, steps)

    def close(self) -> None:
        """Kills programs and removes their files; a waiting `run` returns with reason "stopped"."""
        with self._lock:
            self._closed = True
            for running in self._supervisors:
                _close_stdin(running)

    def _named(self, backend: str) -> str:
        ended, _ = self._probe(backend)
        if not ended.succeeded:
            raise RequestError(f"the sandbox {backend!r} does not work here: {_failure(ended)}")
        return backend

    def _first_that_isolates(self) -> str:
        refusals = []
        for backend in isolation.BACKENDS:
            ended, reached = self._probe(backend)
            if ended.succeeded and not reached:
                return backend
            reason = (
                f"programs reach {' and '.join(reached)}" if ended.succeeded else _failure(ended)
            )
            refusals.append(f"{backend}: {reason}")
        raise RequestError(
            f"no sandbox here keeps programs from files and network ({'; '.join(refusals)}): "
            "install bubblewrap (package bubblewrap), or accept a weaker one by its name: "
            "--sandbox limits"
        )

    def _probe(self, backend: str) -> tuple[StepResult, list[str]]:
        """Runs a probe program; returns its end, and the things that it reached but should not."""
        tool = isolation.TOOLS.get(backend)
        if tool and not shutil.which(tool):
            return StepResult(0, "setup", None, "", f"there is no {tool} on PATH", 0.0), []
        with tempfile.NamedTemporaryFile("w+", prefix="shoal-probe-", encoding="utf-8") as other:
            os.fchmod(other.fileno(), 0o666)
            other.write(SECRET)
            other.flush()
            ended = self._run(backend, {}, [Step(["/bin/sh", "-c", PROBE, other.name])])
            files = SECRET in ended.stdout or Path(other.name).read_text(encoding="utf-8") != SECRET
        network = os.readlink(OWN_NETWORK) in ended.stdout
        return ended, [
            name for name, reached in {"files": files, "the network": network}.items() if reached
        ]

    def _run(self, backend: str, files: Mapping[str, str], steps: Sequence[Step]) -> StepResult:
        workdir = os.path.join(tempfile.gettempdir(), f"shoal-{uuid.uuid4().hex}")
        programs = [step.command[0] for step in steps]
        more = [path for step in steps for path in step.readable]
        visible = isolation.visible(programs, more)
        job = {
            "workdir": workdir,
            "shared": isolation.shared_memory(workdir),
            "shared_memory": isolation.SHARED_MEMORY[backend],
            "cgroup": os.path.join(self._groups, os.path.basename(workdir)) if self._groups else "",
            "files": dict(files),
            "steps": [_as_job(step, workdir) for step in steps],
            "wrapper": isolation.wrapper_command(backend, workdir, visible),
            "visible": visible,
            "filter": isolation.refused_calls().hex(),
            "python": isolation.sandbox_python(),
            "sandbox_exec": Path(sandbox_exec.__file__).read_text(encoding="utf-8"),
        }
        return _result(self._run_supervisor(job), backend, workdir)

    def _run_supervisor(self, job: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                return asdict(STOPPED)
            running = _start_supervisor()
            self._supervisors.add(running)
        try:
            answer, errors = _exchange(running, json.dumps(job).encode() + b"\n")
        finally:
            with self._lock:
                self._supervisors.discard(running)
            _close_stdin(running)
            running.wait()
        if answer:
            return json.loads(answer)
        if self._closed:
            return asdict(STOPPED)
        processes.remove_group(job["cgroup"])
        for left in (job["workdir"], job["shared"]):
            shutil.rmtree(left, ignore_errors=True)
        raise InternalError(
            f"the supervisor of a program ended without an answer: "
            f"{errors.decode(errors='replace')}"
        )


def _failure(ended: StepResult) -> str:
    return ended.stderr.strip() or f"a first program ended by: {ended.reason}"


def _start_supervisor() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(supervisor.__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C must not reach it: it is stopped through its standard input
        start_new_session=True,
        env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
    )


def _exchange(running: subprocess.Popen[bytes], job: bytes) -> tuple[bytes, bytes]:
    """Sends the job, and returns the supervisor's standard output and standard error."""
    assert running.stdin is not None
    assert running.stdout is not None
    assert running.stderr is not None
    with suppress(
        BrokenPipeError, ValueError
    ):  # it was killed, or `close` came first: then there is no answer
        running.stdin.write(job)
        running.stdin.flush()
    with running.stdout, running.stderr:
        return running.stdout.read(), running.stderr.read()


def _close_stdin(running: subprocess.Popen[bytes]) -> None:
    """Tells a supervisor to stop by the end of its standard input."""
    assert running.stdin is not None
    with suppress(BrokenPipeError):
        running.stdin.close()


def _as_job(step: Step, workdir: str) -> dict[str, Any]:
    own = {"PATH": PATH, "HOME": workdir, "TMPDIR": workdir, "LANG": "C.UTF-8"}
    return {
        "command": [*step.command],
        "bounds": asdict(step.bounds),
        "environment": {**own, **step.environment},
    }


def _result(answer: dict[str, Any], backend: str, workdir: str) -> StepResult:
    code = answer["returncode"]
    if backend != "limits" and code is not None and 128 < code <= 128 + LAST_SIGNAL:
        code = 128 - code  # the first process of a namespace reports a signal like a shell
    reason = (
        BOUND_OF_SIGNAL.get(code, answer["reason"])
        if answer["reason"] == "exit"
        else answer["reason"]
    )
    texts = {
        name: answer[name].replace(f"{workdir}/", "")
        for name in ("stdout", "stderr", "earlier_stderr")
    }
    return StepResult(**{**answer, **texts, "returncode": code, "reason": reason})
