"""The processes of tested programs: those below the supervisor, and a cgroup for each program.

Processes are found in /proc, measured, stopped and killed. Where a cgroup (version 2) is delegated,
each program has one: the kernel bounds the memory and processes of the group in total. Only a
cgroup bounds the kernel's own memory for a program (full socket buffers) and files that only a
mapping keeps.

The supervisor has no package around it and loads this file by its path, so it imports the standard
library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CAP_SYS_PTRACE = 19


def descendants() -> list[int]:
    """Returns every process below this one, in any session or namespace."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    pids = children.get(os.getpid(), [])
    for pid in pids:  # the list grows during the loop
        pids.extend(children.get(pid, []))
    return pids


def may_inspect_all() -> bool:
    """Tells whether this process may read other users' /proc entries; root sometimes may not."""
    capabilities = next(
        line for line in _read("/proc/self/status").splitlines() if line.startswith("CapEff:")
    )
    return bool(int(capabilities.split()[1], 16) >> _CAP_SYS_PTRACE & 1)


@contextlib.contextmanager
def effective_user(uid: int) -> Iterator[None]:
    """Takes a user's id for the block; -1: no change.

    The id may inspect that user's processes, but lets them send no signals here.
    """
    os.setresgid(-1, uid, -1)
    os.setresuid(-1, uid, -1)
    try:
        yield
    finally:
        os.setresuid(-1, os.getuid(), -1)
        os.setresgid(-1, os.getgid(), -1)


def exceeds_memory(pids: list[int], limit: int) -> bool:
    """Tells whether processes together hold more bytes than the limit.

    The exact sum (PSS) is slower to read, so the upper bound goes first.
    """
    return all(sum(map(size, pids)) > limit for size in (_resident_bytes, _proportional_bytes))


def _resident_bytes(pid: int) -> int:
    """Returns the bytes of private and shared memory of a process."""
    return _status_bytes(f"/proc/{pid}/status", "RssAnon:", "RssShmem:") or 0


def _proportional_bytes(pid: int) -> int:
    """Returns the bytes of a process with shared pages divided among their processes (PSS).

    They are undivided if PSS cannot be read.
    """
    size = _status_bytes(f"/proc/{pid}/smaps_rollup", "Pss:")
    return _resident_bytes(pid) if size is None else size


def _status_bytes(path: str, *names: str) -> int | None:
    """Returns the sum of these fields; None if the process has ended or may not be inspected."""
    with contextlib.suppress(OSError):
        return sum(
            1024 * int(line.split()[1])
            for line in _read(path).splitlines()
            if line.startswith(names)
        )
    return None


def unlinked_bytes(pids: list[int]) -> int:
    """Returns the bytes in open files of no directory: removed, or in memory (memfd_create)."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        sizes[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def reaped() -> Iterator[tuple[int, int]]:
    """Reaps every child that has ended: (process id, wait status)."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield ended


def kill_descendants() -> None:
    """Stops every process below this one until no new ones appear, then kills them all."""
    while known := set(descendants()):
        new = known
        while new:
            _signal(new, signal.SIGSTOP)
            new = set(descendants()) - known
            known |= new
        _signal(known, signal.SIGKILL)
        time.sleep(0.001)
        for _ in reaped():
            pass


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


CONTROLLERS = frozenset({"memory", "pids"})
SANDBOX_TASKS, SANDBOX_BYTES = 5, 64 * 2**20
"""The tasks and bytes that the sandbox itself may use in the group.

They are for bubblewrap or unshare, sandbox_exec.py and their children.
"""

TRIAL_BOUNDS = {"memory_bytes": 2**26, "workdir_bytes": 0, "processes": 8}
DELEGATED = (
    "trusted.delegate",
    "user.delegate",
)  # extended attributes of a directory that systemd has delegated
REMOVE_TIMEOUT = 2.0  # seconds for killed processes to leave their group


def delegated_folder(process: Path = Path("/proc/self")) -> str:
    """Returns the directory in which groups may be made, "" if there is none.

    The search goes from this process's own group upwards. A directory qualifies if it has the
    controllers enabled for its children and a trial group can be made there, limited and entered.
    Root may do so anywhere, so for root a directory above its own group must also be marked as
    delegated.
    """
    with contextlib.suppress(OSError, ValueError):
        for folder, own in _groups(process):
            allowed = own or os.geteuid() != 0 or _is_delegated(folder)
            if (
                allowed
                and set((folder / "cgroup.subtree_control").read_text(encoding="utf-8").split())
                >= CONTROLLERS
                and _works(folder)
            ):
                return str(folder)
    return ""


def limit_group(group: str, bounds: dict[str, Any]) -> None:
    """Makes the group if there is none yet, and sets its limits.

    A cgroup counts files in memory (tmpfs) as memory, so the bound on files is added to the bound
    on memory.

    Raises:
        OSError: it cannot be made or limited.
    """
    os.makedirs(group, exist_ok=True)
    _write(group, "memory.max", bounds["memory_bytes"] + bounds["workdir_bytes"] + SANDBOX_BYTES)
    _write(group, "pids.max", bounds["processes"] + SANDBOX_TASKS)
    for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
        with contextlib.suppress(OSError):  # without swap accounting, or a kernel before 4.19
            _write(group, name, value)


def enter_group(group: str) -> None:
    """Moves this process and its future children into the group."""
    _write(group, "cgroup.procs", 0)


def group_out_of_memory(group: str) -> bool:
    """Tells whether the kernel killed a process of the group for lack of memory; "" = no group."""
    if not group:
        return False
    with contextlib.suppress(OSError):
        events = dict(
            line.split()
            for line in Path(group, "memory.events").read_text(encoding="utf-8").splitlines()
        )
        return int(events.get("oom_kill", 0)) > 0
    return False


def remove_group(group: str) -> None:
    """Kills the processes of the group, if it exists, and removes it; "" is no group."""
    if not os.path.isdir(group):
        return
    with contextlib.suppress(OSError):  # a kernel before 5.14
        _write(group, "cgroup.kill", 1)
    until = time.monotonic() + REMOVE_TIMEOUT
    while time.monotonic() < until:
        try:
            os.rmdir(group)
        except OSError as error:
            if error.errno == errno.EBUSY:  # killed processes have not left yet
                time.sleep(0.005)
                continue
        return


def _groups(process: Path) -> Iterator[tuple[Path, bool]]:
    """Yields the process's group of version 2 and the groups above it, innermost first.

    Yields:
        (directory, whether it is the process's own group).
    """
    lines = (process / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    mounts = [
        line.split()
        for line in (process / "mountinfo")
        .read_text(encoding="utf-8", errors="surrogateescape")
        .splitlines()
    ]
    mounted = next((words[4] for words in mounts if words[words.index("-") + 1] == "cgroup2"), None)
    if own is None or mounted is None or ".." in own.split("/"):
        return
    root = Path(mounted)
    folder = root / own
    while True:
        yield folder, folder == root / own
        if folder == root:
            return
        folder = folder.parent


def _is_delegated(folder: Path) -> bool:
    for name in DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _works(folder: Path) -> bool:
    """Tells whether a group can be made in a directory, limited and entered."""
    trial = str(folder / f"shoal-{uuid.uuid4().hex}")
    try:
        limit_group(trial, TRIAL_BOUNDS)
        command = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', trial]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
    finally:
        remove_group(trial)


def _write(group: str, name: str, value: int) -> None:
    with open(os.path.join(group, name), "w", encoding="ascii") as file:
        file.write(str(value))
