"""The outer of the sandbox's two programs: runs commands in a room of their own, watches them, and leaves nothing behind.

    python -I -S warden.py < job     one line of JSON; the end of standard input means: stop

One warden serves one program to be judged. It is a process of its own because only then does all that was started hang
below it: the kernel hands it every orphan (PR_SET_CHILD_SUBREAPER), so daemons too are found and killed, and it still
cleans up when whoever asked for it is killed. It writes one line of JSON: how the last command ended, and why.

Run by path without the package around it, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

GLANCE, PAUSE = 0.02, 1.0  # seconds between two looks at what runs, at least and at most
OWN = 4  # processes of the sandbox itself that a look may count: confine, bubblewrap or unshare and their child
REPORT = 3  # the descriptor on which confine.py reports
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _CAP_SYS_PTRACE = 1, 36, 19
_libc = ctypes.CDLL(None, use_errno=True)
_spec = importlib.util.spec_from_file_location(
    "cgroup", os.path.join(os.path.dirname(os.path.abspath(__file__)), "cgroup.py")
)
assert _spec is not None
assert _spec.loader is not None
cgroup = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cgroup)


def main() -> None:
    """Runs the job on standard input, step after step as long as they end with exit code 0."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    uid = spare_uid()
    ended: dict[str, Any] = {}
    try:
        _furnish(job["room"], job["files"], uid)
        for number, step in enumerate(job["steps"]):
            ended = {"step": number, **_Step(job, step, uid).run()}
            if ended["reason"] != "exit" or ended["returncode"] != 0:
                break
    finally:
        _kill_all()
        cgroup.remove(job["cgroup"])
        _clear(job["room"])
    print(json.dumps(ended), flush=True)


def spare_uid() -> int | None:
    """A user id that nobody has, for root to give to what it runs; None if that is not possible, as for ordinary users.

    With it the kernel counts processes, guards files and checks signals for this program alone.
    """
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        first, _, count = max((tuple(map(int, line.split())) for line in lines), key=lambda part: part[2])
    if count < 2**16:
        return None
    spare = min(2**30, first + count - 5_000)
    return spare + os.getpid() % min(4_000_000, first + count - spare - 1)


def _furnish(room: str, files: dict[str, str], uid: int | None) -> None:
    os.mkdir(room, 0o700)
    for name, text in files.items():
        with open(os.path.join(room, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    for path in (room, *(os.path.join(room, name) for name in files)):
        if uid is not None:
            os.chown(path, uid, uid)


def _clear(room: str) -> None:
    """Removes the room, however deep and however protected by its user."""
    opening = (
        [] if os.path.islink(room) else [["chmod", "-R", "u+rwX", room]]
    )  # it would follow a link put in the room's place
    for command in (*opening, ["rm", "-rf", room]):
        pid = os.fork()
        if pid == 0:
            os.close(2)
            os.execvp(command[0], command)
        os.waitpid(pid, 0)


class _Step:
    """One command from its start until all that it started is gone."""

    def __init__(self, job: dict[str, Any], step: dict[str, Any], uid: int | None) -> None:
        inner = {**step, "uid": uid, **{name: job[name] for name in ("room", "visible", "filter")}}
        command = [*job["around"], job["python"], "-I", "-S", "-c", job["confine"], json.dumps(inner)]
        self.bounds: dict[str, Any] = step["bounds"]
        self.room: str = job["room"]
        self.cgroup: str = job["cgroup"]
        self.eyes = -1 if uid is None or _sees_everybody() else uid
        self.said = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
        self.status: int | None = None
        self.began = time.monotonic()
        if self.cgroup:
            cgroup.limit(self.cgroup, self.bounds)
        self.pid, self.pipes = _start(command, self.cgroup)

    def run(self) -> dict[str, Any]:
        """Watches the command until it ends or may not go on."""
        reason = self._watch()
        seconds = time.monotonic() - self.began
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):  # it has not begun
                os.killpg(self.pid, signal.SIGKILL)  # a whole group, and a whole namespace with it, at one blow
        _kill_all()
        while self.pipes and not self._talkative():  # nobody writes any more, so each soon comes to its end
            self._listen(0.0)
        for pipe in self.pipes:
            os.close(pipe)
        if reason == "exit" and self.status != 0 and cgroup.out_of_memory(self.cgroup):
            reason = "memory"
        elif reason == "exit" and self.said["report"] != b"go":
            reason = "setup"  # bubblewrap, unshare or confine.py gave up before the command began
        return {
            "reason": reason,
            "returncode": self.status,
            "seconds": seconds,
            "stdout": self._text("stdout"),
            "stderr": self._text("stderr") + self._text("report").removeprefix("go"),
        }

    def _watch(self) -> str:
        """Why it is over: "exit", or the bound that was passed."""
        pause = GLANCE
        while True:
            stopped = not self._listen(pause)
            if self._over():
                return "exit"
            if stopped:
                return "stopped"
            if self._talkative():
                return "output"
            began = time.monotonic()
            if began - self.began > self.bounds["wall_seconds"]:
                return "time"
            if excess := self._excess():
                return excess
            pause = min(max(GLANCE, 10 * (time.monotonic() - began)), PAUSE)  # looking takes a tenth of a core

    def _listen(self, seconds: float) -> bool:
        """Reads what was written, waiting for it so long; False if standard input has ended, so nobody waits for an answer."""
        ready, _, _ = select.select([0, *self.pipes], [], [], seconds)
        for pipe in set(ready) - {0}:
            piece = os.read(pipe, 2**16)
            self.said[self.pipes[pipe]] += piece
            if not piece:
                os.close(pipe)
                del self.pipes[pipe]
        return 0 not in ready

    def _talkative(self) -> bool:
        return sum(map(len, self.said.values())) > self.bounds["output_bytes"]

    def _over(self) -> bool:
        """Buries whoever has died; True once the command itself has."""
        for pid, status in _dead():
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def _excess(self) -> str:
        """The bound that all processes together, or the room, are past: "processes", "memory", "files", or ""."""
        running = _descendants()
        if len(running) > self.bounds["processes"] + OWN:
            return "processes"
        with _eyes_of(self.eyes):
            if all(sum(map(size, running)) > self.bounds["memory_bytes"] for size in (_memory, _share)):
                return "memory"
            nameless = _nameless(running)
        return "files" if _overfull(self.room, self.bounds, nameless) else ""

    def _text(self, name: str) -> str:
        return self.said[name][: self.bounds["output_bytes"]].decode("utf-8", errors="replace")


def _start(command: list[str], group: str) -> tuple[int, dict[int, str]]:
    """The process id of the command, in its cgroup if it has one, and the pipes it writes to by their descriptors."""
    pipes = {name: os.pipe() for name in ("report", "stdout", "stderr")}  # the ends to write to are 4 or more
    pid = os.fork()
    if pid == 0:
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            _offer_first()
            if group:
                cgroup.enter(group)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for name, descriptor in (("stdout", 1), ("stderr", 2), ("report", REPORT)):
                os.dup2(pipes[name][1], descriptor)
            os.execv(command[0], command)
        finally:
            os._exit(127)
    for _, writing in pipes.values():
        os.close(writing)
    return pid, {reading: name for name, (reading, _) in pipes.items()}


def _offer_first() -> None:
    """Where the machine runs out of memory, the kernel ends this process and those below it before any other."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


# ---------------------------------------------------------------------------------------------------------------------
# What runs below the warden


def _descendants() -> list[int]:
    """Every process below this one, in whatever session or namespace."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = children.get(os.getpid(), [])
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, []))
    return found


def _sees_everybody() -> bool:
    """Whether this process may look into those of other users: root in a container often may not."""
    rights = next(line for line in _read("/proc/self/status").splitlines() if line.startswith("CapEff:"))
    return bool(int(rights.split()[1], 16) >> _CAP_SYS_PTRACE & 1)


@contextlib.contextmanager
def _eyes_of(uid: int) -> Iterator[None]:
    """As a user, who may look into processes of their own but cannot signal this one; -1: as before."""
    os.setresgid(-1, uid, -1)
    os.setresuid(-1, uid, -1)
    try:
        yield
    finally:
        os.setresuid(-1, os.getuid(), -1)
        os.setresgid(-1, os.getgid(), -1)


def _memory(pid: int) -> int:
    """Bytes of memory a process holds, those shared with others included."""
    return _bytes(f"/proc/{pid}/status", "RssAnon:", "RssShmem:") or 0


def _share(pid: int) -> int:
    """The same with shared pages divided among their holders; slower to ask. Who hides them counts as their only holder."""
    share = _bytes(f"/proc/{pid}/smaps_rollup", "Pss:")
    return _memory(pid) if share is None else share


def _bytes(path: str, *names: str) -> int | None:
    """The sum of these fields; None from a process that has ended, or may not be looked into."""
    with contextlib.suppress(OSError):
        return sum(1024 * int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(names))
    return None


def _nameless(pids: list[int]) -> int:
    """Bytes in open files that no directory shows: removed ones, and those that live in memory (memfd_create)."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        sizes[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _overfull(room: str, bounds: dict[str, Any], taken: int) -> bool:
    """True if the files in a room, with those `taken` bytes elsewhere, take more, or are more, than allowed."""
    count = 0
    folders = [room]
    while folders:
        with contextlib.suppress(OSError):  # removed meanwhile
            for entry in os.scandir(folders.pop()):
                status = entry.stat(follow_symlinks=False)
                taken, count = taken + 512 * status.st_blocks, count + 1
                if taken > bounds["room_bytes"] or count > bounds["room_files"]:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return taken > bounds["room_bytes"]


def _dead() -> Iterator[tuple[int, int]]:
    """(process id, wait status) of every child that has ended, buried."""
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        while (died := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield died


def _kill_all() -> None:
    """Kills what is left below the warden: first nobody may go on, so nobody starts another; then everybody dies."""
    while known := set(_descendants()):
        new = known
        while new:
            _signal(new, signal.SIGSTOP)
            new = set(_descendants()) - known
            known |= new
        _signal(known, signal.SIGKILL)
        time.sleep(0.001)
        for _ in _dead():
            pass


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
