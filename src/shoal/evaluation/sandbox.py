"""Programs that nobody has read are executed here: in a room of their own, within bounds, and killed whole.

Three ways: bubblewrap; namespaces through `unshare`; limits alone (isolation.py), which must be asked for by name. In each a
program runs in its own session and directory with an environment of ours, a warden watches the whole tree of its processes
(warden.py), and a last step confines it (confine.py). `Sandbox.isolation` says what is enforced here and what is not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import InternalError, RequestError
from shoal.evaluation import cgroup, confine, isolation, seccomp, warden

LAST_SIGNAL = 64  # Perl and PHP end with 255, which is none
MIB = 2**20
PATH = "/usr/local/bin:/usr/bin:/bin"
OWN_NETWORK = "/proc/self/ns/net"  # a link that names the network namespace
SECRET = "a file of somebody else"
PROBE = f"""true > "$HOME/here" || exit 1; cat "$0"; true > "$0"; readlink {OWN_NETWORK}; exit 0"""
PASSED_BY_SIGNAL = {-signal.SIGXCPU: "time", -signal.SIGXFSZ: "files"}


@dataclass(frozen=True)
class Bounds:
    """What a program may use. Processor time and file size hold for each process, the rest for all of them together.

    Attributes:
        cpu_seconds: processor time of one process.
        wall_seconds: from start to end.
        memory_bytes: private memory, of one process and of all.
        file_bytes: of one file.
        room_bytes, room_files: of all files in its directory, and how many.
        processes: processes and threads at a time.
        output_bytes: standard output and standard error together.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 120.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 64 * MIB
    room_bytes: int = 256 * MIB
    room_files: int = 10_000
    processes: int = 128
    output_bytes: int = MIB


@dataclass(frozen=True)
class Step:
    """A command to run in the room, its program by absolute path or as "./name" in the room.

    Attributes:
        environment: variables besides PATH, HOME, TMPDIR and LANG.
        readable: paths that it may read besides the system's and those where its program is installed.
    """

    command: Sequence[str]
    bounds: Bounds = field(default_factory=Bounds)
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[str] = ()


@dataclass(frozen=True)
class Ended:
    """How the last step ended.

    Attributes:
        step: its number, from 0; a step is started only if the one before ended with exit code 0.
        reason: "exit", or the bound that was passed: "time", "memory", "output", "processes", "files"; "setup": the
            command could not be started; "stopped": the sandbox was closed.
        returncode: exit code, or minus the signal that ended it; None if it was killed.
        stdout, stderr: what it wrote, within the bound; the room's own path is left out.
        seconds: wall time.
    """

    step: int
    reason: str
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def well(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.reason == "exit" and self.returncode == 0


STOPPED = Ended(0, "stopped", None, "", "", 0.0)


class Sandbox:
    """Runs programs, any number at a time (from several threads), and stops them all when it is closed.

    Args:
        way: one of `isolation.WAYS`, or "auto": the first of them that keeps programs from files and network here, as a
            first program finds out.

    Raises:
        RequestError: that way does not work here, with what it said; no way isolates and none was named.
    """

    def __init__(self, way: str = "auto") -> None:
        if way not in ("auto", *isolation.WAYS):
            raise RequestError(f"unknown way to isolate programs {way!r}: expected auto, {', '.join(isolation.WAYS)}")
        if not sys.platform.startswith("linux"):
            raise RequestError("programs are only executed on Linux: elsewhere there is nothing to confine them with")
        self._wardens: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._groups = cgroup.delegated()
        self.way = self._first_that_isolates() if way == "auto" else self._named(way)
        self.isolation = isolation.describe(self.way, cgroup=bool(self._groups))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, files: Mapping[str, str], *steps: Step) -> Ended:
        """Writes `files` (name: text) into a new room and runs the steps there, one after another while they end well."""
        return self._run(self.way, files, steps)

    def close(self) -> None:
        """Kills what runs and clears it away; a call of `run` that waits returns with the reason "stopped"."""
        with self._lock:
            self._closed = True
            for running in self._wardens:
                _let_go(running)

    def _named(self, way: str) -> str:
        ended, _ = self._probe(way)
        if not ended.well:
            raise RequestError(f"the sandbox {way!r} does not work here: {_why(ended)}")
        return way

    def _first_that_isolates(self) -> str:
        refusals = []
        for way in isolation.WAYS:
            ended, reached = self._probe(way)
            if ended.well and not reached:
                return way
            refusals.append(f"{way}: {'programs reach ' + ' and '.join(reached) if ended.well else _why(ended)}")
        raise RequestError(
            f"no sandbox here keeps programs from files and network ({'; '.join(refusals)}): install bubblewrap (package "
            "bubblewrap), or accept a weaker one by its name: --sandbox limits"
        )

    def _probe(self, way: str) -> tuple[Ended, list[str]]:
        """How a first program ended, and what it reached that it should not."""
        tool = isolation.TOOLS.get(way)
        if tool and not shutil.which(tool):
            return Ended(0, "setup", None, "", f"there is no {tool} on PATH", 0.0), []
        with tempfile.NamedTemporaryFile("w+", prefix="shoal-probe-") as other:
            os.fchmod(other.fileno(), 0o666)
            other.write(SECRET)
            other.flush()
            ended = self._run(way, {}, [Step(["/bin/sh", "-c", PROBE, other.name])])
            files = SECRET in ended.stdout or Path(other.name).read_text(encoding="utf-8") != SECRET
        network = os.readlink(OWN_NETWORK) in ended.stdout
        return ended, [name for name, reached in {"files": files, "the network": network}.items() if reached]

    def _run(self, way: str, files: Mapping[str, str], steps: Sequence[Step]) -> Ended:
        room = os.path.join(tempfile.gettempdir(), f"shoal-{uuid.uuid4().hex}")
        programs, more = [step.command[0] for step in steps], [path for step in steps for path in step.readable]
        visible = isolation.visible(programs, more)
        job = {
            "room": room,
            "cgroup": os.path.join(self._groups, os.path.basename(room)) if self._groups else "",
            "files": dict(files),
            "steps": [_as_job(step, room) for step in steps],
            "around": isolation.around(way, room, visible),
            "visible": visible,
            "filter": seccomp.program().hex(),
            "python": isolation.confine_python(),
            "confine": Path(confine.__file__).read_text(encoding="utf-8"),
        }
        return _ended(self._ask_warden(job), way, room)

    def _ask_warden(self, job: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                return asdict(STOPPED)
            running = _new_warden()
            self._wardens.add(running)
        try:
            answer, complaint = _converse(running, json.dumps(job).encode() + b"\n")
        finally:
            with self._lock:
                self._wardens.discard(running)
            _let_go(running)
            running.wait()
        if answer:
            return json.loads(answer)
        if self._closed:
            return asdict(STOPPED)
        cgroup.remove(job["cgroup"])
        shutil.rmtree(job["room"], ignore_errors=True)
        raise InternalError(f"the warden of a program ended without an answer: {complaint.decode(errors='replace')}")


def _why(ended: Ended) -> str:
    return ended.stderr.strip() or f"a first program ended by: {ended.reason}"


def _new_warden() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(warden.__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us, who then tell it
        env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
    )


def _converse(running: subprocess.Popen[bytes], job: bytes) -> tuple[bytes, bytes]:
    """What a warden writes to standard output and standard error once it has done its job."""
    assert running.stdin is not None
    assert running.stdout is not None
    assert running.stderr is not None
    with suppress(BrokenPipeError, ValueError):  # it died, or `close` came first: then there is no answer
        running.stdin.write(job)
        running.stdin.flush()
    with running.stdout, running.stderr:
        return running.stdout.read(), running.stderr.read()


def _let_go(running: subprocess.Popen[bytes]) -> None:
    """Tells a warden to stop: its standard input ends."""
    assert running.stdin is not None
    with suppress(BrokenPipeError):
        running.stdin.close()


def _as_job(step: Step, room: str) -> dict[str, Any]:
    own = {"PATH": PATH, "HOME": room, "TMPDIR": room, "LANG": "C.UTF-8"}
    return {"command": [*step.command], "bounds": asdict(step.bounds), "environment": {**own, **step.environment}}


def _ended(answer: dict[str, Any], way: str, room: str) -> Ended:
    code = answer["returncode"]
    if way != "limits" and code is not None and 128 < code <= 128 + LAST_SIGNAL:
        code = 128 - code  # what is first in a namespace tells of a signal like a shell
    reason = PASSED_BY_SIGNAL.get(code, answer["reason"]) if answer["reason"] == "exit" else answer["reason"]
    texts = {name: answer[name].replace(f"{room}/", "") for name in ("stdout", "stderr")}
    return Ended(**{**answer, **texts, "returncode": code, "reason": reason})
