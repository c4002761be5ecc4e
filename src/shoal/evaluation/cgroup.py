"""A cgroup (version 2) for each tested program, if one is delegated.

The kernel bounds the memory and processes of the group in total. Only a cgroup bounds the kernel's
own memory for a program (full socket buffers) and files that only a mapping keeps.

The supervisor has no package around it and loads this file by its path, so it imports the standard
library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def delegated(process: Path = Path("/proc/self")) -> str:
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


def limit(group: str, bounds: dict[str, Any]) -> None:
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


def enter(group: str) -> None:
    """Moves this process and its future children into the group."""
    _write(group, "cgroup.procs", 0)


def out_of_memory(group: str) -> bool:
    """Tells whether the kernel has killed a process of the group for lack of memory.

    The text "" stands for no group.
    """
    if not group:
        return False
    with contextlib.suppress(OSError):
        events = dict(
            line.split()
            for line in Path(group, "memory.events").read_text(encoding="utf-8").splitlines()
        )
        return int(events.get("oom_kill", 0)) > 0
    return False


def remove(group: str) -> None:
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
        limit(trial, TRIAL_BOUNDS)
        command = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', trial]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
    finally:
        remove(trial)


def _write(group: str, name: str, value: int) -> None:
    with open(os.path.join(group, name), "w", encoding="ascii") as file:
        file.write(str(value))
