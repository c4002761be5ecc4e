"""The processes below the supervisor: found in /proc, measured, stopped and killed.

The supervisor has no package around it and loads this file by its path, so it imports the standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterator

_CAP_SYS_PTRACE = 19


def descendants() -> list[int]:
    """Returns every process below this one, in any session or namespace."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = children.get(os.getpid(), [])
    for pid in found:  # the list grows during the loop
        found.extend(children.get(pid, []))
    return found


def may_inspect_all() -> bool:
    """Tells whether this process may read the /proc entries of other users.

    Root in a container often may not.
    """
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
    """Returns the bytes in open files that are in no directory.

    They are removed files, and files in memory (memfd_create).
    """
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
