"""The outer of the sandbox's two programs.

It runs commands in a working directory of their own and leaves nothing behind.

    python -I -S supervisor.py < job     one line of JSON; the end of standard input means: stop

Each program to be tested has a supervisor. It is a process of its own so that all processes that
the program starts are below it: the kernel makes it the parent of every orphan
(PR_SET_CHILD_SUBREAPER), so daemons are found and killed too, and it still cleans up when the
process that asked for it is killed. It writes one line of JSON: how the last command ended, and
why.

Run by path without the package around it, so it imports the standard library and two neighbouring
files only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import sys
import time
from types import ModuleType
from typing import Any


def _load(name: str) -> ModuleType:
    """Loads a file of this directory as a module."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes = _load("processes")

POLL_SECONDS = 0.02, 1.0  # between two checks of the running processes, at least and at most
OWN_PROCESSES = 4  # of the sandbox itself: sandbox_exec, bubblewrap or unshare and their child
FOR_SANDBOX_EXEC = ("workdir", "shared", "shared_memory", "visible", "filter")
FLOOD = 64  # times the output that is kept: more ends a program
REPORT = 3  # the descriptor on which sandbox_exec.py reports
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Runs the job on standard input, step after step as long as they end with exit code 0."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    uid = spare_uid()
    ended: dict[str, Any] = {}
    earlier = ""
    try:
        _create_workdir(job["workdir"], job["files"], uid)
        _create_workdir(job["shared"], {}, uid)
        for number, step in enumerate(job["steps"]):
            ended = {"step": number, **_Command(job, step, uid).run(), "earlier_stderr": earlier}
            if ended["reason"] != "exit" or ended["returncode"] != 0:
                break
            earlier += ended["stderr"]
    finally:
        processes.kill_descendants()
        processes.remove_group(job["cgroup"])
        for folder in (job["workdir"], job["shared"]):
            _remove_workdir(folder)
        for file in _owned_memory(uid):
            with contextlib.suppress(OSError):
                os.unlink(file)
    print(json.dumps(ended), flush=True)


def spare_uid() -> int | None:
    """Returns a user id that no user has, which root gives to the program.

    It is None if that is not possible, as for ordinary users. With it the kernel counts processes,
    guards files and checks signals for this program alone.
    """
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        first, _, count = max(
            (tuple(map(int, line.split())) for line in lines), key=lambda part: part[2]
        )
    if count < 2**16:
        return None
    spare = min(2**30, first + count - 5_000)
    return spare + os.getpid() % min(4_000_000, first + count - spare - 1)


def _create_workdir(workdir: str, files: dict[str, str], uid: int | None) -> None:
    os.mkdir(workdir, 0o700)
    for name, text in files.items():
        with open(os.path.join(workdir, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    for path in (workdir, *(os.path.join(workdir, name) for name in files)):
        if uid is not None:
            os.chown(path, uid, uid)


def _remove_workdir(workdir: str) -> None:
    """Removes the directory at any depth and with any permissions.

    chmod would follow a link that replaced the directory.
    """
    writable = [] if os.path.islink(workdir) else [["chmod", "-R", "u+rwX", workdir]]
    for command in (*writable, ["rm", "-rf", workdir]):
        pid = os.fork()
        if pid == 0:
            os.close(2)
            os.execvp(command[0], command)
        os.waitpid(pid, 0)


class _Command:
    """A command from its start until all processes that it started have ended."""

    def __init__(self, job: dict[str, Any], step: dict[str, Any], uid: int | None) -> None:
        inner = {**step, "uid": uid, "mounts": os.readlink("/proc/self/ns/mnt")}
        inner |= {name: job[name] for name in FOR_SANDBOX_EXEC}
        command = [
            *job["wrapper"],
            job["python"],
            "-I",
            "-S",
            "-c",
            job["sandbox_exec"],
            json.dumps(inner),
        ]
        self.bounds: dict[str, Any] = step["bounds"]
        self.folders: list[str] = [job["workdir"], job["shared"]]
        self.uid = uid
        self.cgroup: str = job["cgroup"]
        self.inspecting_uid = -1 if uid is None or processes.may_inspect_all() else uid
        self.written = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
        self.received = 0
        self.status: int | None = None
        self.began = time.monotonic()
        if self.cgroup:
            processes.limit_group(self.cgroup, self.bounds)
        self.pid, self.pipes = _start(command, self.cgroup, uid)

    def run(self) -> dict[str, Any]:
        """Watches the command until it ends or exceeds a bound, then kills its other processes."""
        reason = self._watch()
        seconds = time.monotonic() - self.began
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):  # its process group does not exist yet
                os.killpg(
                    self.pid, signal.SIGKILL
                )  # ends a process group, and with it a namespace, at once
        processes.kill_descendants()
        while (
            self.pipes and not self._writes_too_much()
        ):  # no writer is left, so each pipe soon reaches its end
            self._read_pipes(0.0)
        for pipe in self.pipes:
            os.close(pipe)
        if reason == "exit" and self.status != 0 and processes.group_out_of_memory(self.cgroup):
            reason = "memory"
        elif reason == "exit" and self.written["report"] != b"go":
            reason = (
                "setup"  # bubblewrap, unshare or sandbox_exec.py failed before the command began
            )
        return {
            "reason": reason,
            "returncode": self.status,
            "seconds": seconds,
            "stdout": self._text("stdout"),
            "stderr": self._text("stderr") + self._text("report").removeprefix("go"),
        }

    def _watch(self) -> str:
        """Waits for the command's end; returns why: "exit", "stopped" or the bound exceeded."""
        pause, longest = POLL_SECONDS
        while True:
            stopped = not self._read_pipes(pause)
            if self._has_ended():
                return "exit"
            if stopped:
                return "stopped"
            if self._writes_too_much():
                return "output"
            began = time.monotonic()
            if began - self.began > self.bounds["wall_seconds"]:
                return "time"
            if exceeded := self._exceeded_bound():
                return exceeded
            pause = min(
                max(POLL_SECONDS[0], 10 * (time.monotonic() - began)), longest
            )  # checks take a tenth of a core

    def _read_pipes(self, seconds: float) -> bool:
        """Reads the output, and waits for it at most that long.

        Returns:
            False if standard input has ended: the answer is not wanted any more.
        """
        ready, _, _ = select.select([0, *self.pipes], [], [], seconds)
        for pipe in set(ready) - {0}:
            chunk = os.read(pipe, 2**16)
            self._keep(self.written[self.pipes[pipe]], chunk)
            if not chunk:
                os.close(pipe)
                del self.pipes[pipe]
        return 0 not in ready

    def _keep(self, text: bytearray, chunk: bytes) -> None:
        """Adds a part of the output, of which the beginning and the end are kept."""
        text += chunk
        self.received += len(chunk)
        half = self.bounds["output_bytes"] // 2
        del text[half : max(len(text) - half, half)]

    def _writes_too_much(self) -> bool:
        return self.received > FLOOD * self.bounds["output_bytes"]

    def _has_ended(self) -> bool:
        """Reaps the processes that have ended; True if the command itself is one of them."""
        for pid, status in processes.reaped():
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def _exceeded_bound(self) -> str:
        """Returns the bound that all processes together, or the directory, exceed.

        It is "processes", "memory", "files", or "".
        """
        running = processes.descendants()
        if len(running) > self.bounds["processes"] + OWN_PROCESSES:
            return "processes"
        with processes.effective_user(self.inspecting_uid):
            if processes.exceeds_memory(running, self.bounds["memory_bytes"]):
                return "memory"
            unlinked = processes.unlinked_bytes(running)
        named = sum(512 * entry.stat().st_blocks for entry in _owned_memory(self.uid))
        return "files" if _is_full(self.folders, self.bounds, unlinked + named) else ""

    def _text(self, name: str) -> str:
        return self.written[name].decode("utf-8", errors="replace")


def _start(command: list[str], group: str, uid: int | None) -> tuple[int, dict[int, str]]:
    """Starts the command, in a cgroup if any; returns its process id and pipes by descriptor."""
    pipes = {
        name: os.pipe() for name in ("report", "stdout", "stderr")
    }  # their writing ends are 4 or more
    if uid is not None:  # only the owner of a pipe opens it by a name such as /dev/stdout
        for name in ("stdout", "stderr"):
            os.fchown(pipes[name][1], uid, uid)
    pid = os.fork()
    if pid == 0:
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            _raise_oom_score()
            if group:
                processes.enter_group(group)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for name, descriptor in (("stdout", 1), ("stderr", 2), ("report", REPORT)):
                os.dup2(pipes[name][1], descriptor)
            os.execv(command[0], command)
        finally:
            os._exit(127)
    for _, writing in pipes.values():
        os.close(writing)
    return pid, {reading: name for name, (reading, _) in pipes.items()}


def _raise_oom_score() -> None:
    """Makes the kernel kill this process and its descendants first when memory runs out."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
    ):
        file.write("1000")


def _owned_memory(uid: int | None) -> list[os.DirEntry[str]]:
    """Returns the files of a program's user in the machine's /dev/shm."""
    entries = []
    with contextlib.suppress(OSError):
        for entry in [] if uid is None else os.scandir("/dev/shm"):
            with contextlib.suppress(OSError):  # removed meanwhile
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    entries.append(entry)
    return entries


def _is_full(workdirs: list[str], bounds: dict[str, Any], used: int) -> bool:
    """Tells whether the files of directories, with `used` bytes elsewhere, exceed a bound.

    The bounds are on bytes and on the number of files.
    """
    count, folders = 0, [*workdirs]
    while folders:
        with contextlib.suppress(OSError):  # removed meanwhile
            for entry in os.scandir(folders.pop()):
                status = entry.stat(follow_symlinks=False)
                used, count = used + 512 * status.st_blocks, count + 1
                if used > bounds["workdir_bytes"] or count > bounds["workdir_files"]:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return used > bounds["workdir_bytes"]


if __name__ == "__main__":
    main()
