"""A cgroup (version 2) for each judged program, where one is delegated: the kernel bounds memory and processes as a whole.

What only it bounds: the kernel's own memory for a program (full socket buffers), and files that nothing but a mapping holds.

The warden has no package around it and loads this file by its path, so it imports the standard library only.
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
OWN_TASKS, OWN_BYTES = 5, 64 * 2**20
"""What the sandbox itself may hold in the group: bubblewrap or unshare, confine.py and their children."""

TRIAL = {"memory_bytes": 2**26, "room_bytes": 0, "processes": 8}
DELEGATED = ("trusted.delegate", "user.delegate")  # extended attributes by which systemd marks what it leaves to others
PATIENCE = 2.0  # seconds in which killed processes leave their group


def delegated(process: Path = Path("/proc/self")) -> str:
    """The directory in which groups may be made, "" if there is none.

    It is the nearest of this process's own group and those above it that has the controllers enabled for its children and
    lets a trial group be made, limited and entered. Root may do so everywhere: above its own group a directory must be
    marked as delegated.
    """
    with contextlib.suppress(OSError, ValueError):
        for folder, own in _groups(process):
            allowed = own or os.geteuid() != 0 or _marked(folder)
            if allowed and set((folder / "cgroup.subtree_control").read_text().split()) >= CONTROLLERS and _works(folder):
                return str(folder)
    return ""


def limit(group: str, bounds: dict[str, Any]) -> None:
    """Makes the group if there is none yet, and sets its limits.

    Files in memory (tmpfs) count as memory there, so that those of the room come on top of the program's memory.

    Raises: OSError if it cannot be made or limited.
    """
    os.makedirs(group, exist_ok=True)
    _write(group, "memory.max", bounds["memory_bytes"] + bounds["room_bytes"] + OWN_BYTES)
    _write(group, "pids.max", bounds["processes"] + OWN_TASKS)
    for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
        with contextlib.suppress(OSError):  # without swap accounting, or a kernel before 4.19
            _write(group, name, value)


def enter(group: str) -> None:
    """Moves this process, and so all that it starts, into the group."""
    _write(group, "cgroup.procs", 0)


def out_of_memory(group: str) -> bool:
    """Whether the kernel has killed something in the group because its memory was full; "" is no group."""
    if not group:
        return False
    with contextlib.suppress(OSError):
        events = dict(line.split() for line in Path(group, "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0)) > 0
    return False


def remove(group: str) -> None:
    """Kills what is in the group, if it exists, and removes it; "" is no group."""
    if not os.path.isdir(group):
        return
    with contextlib.suppress(OSError):  # a kernel before 5.14
        _write(group, "cgroup.kill", 1)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            os.rmdir(group)
        except OSError as error:
            if error.errno == errno.EBUSY:  # processes that were killed are still leaving
                time.sleep(0.005)
                continue
        return


def _groups(process: Path) -> Iterator[tuple[Path, bool]]:
    """The directories of the process's group of version 2 and of those above it, from the inside out; which is its own."""
    lines = (process / "cgroup").read_text().splitlines()
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
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


def _marked(folder: Path) -> bool:
    for name in DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _works(folder: Path) -> bool:
    """Whether a group can be made there, limited and entered."""
    trial = str(folder / f"shoal-{uuid.uuid4().hex}")
    try:
        limit(trial, TRIAL)
        command = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', trial]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
    finally:
        remove(trial)


def _write(group: str, name: str, value: int) -> None:
    with open(os.path.join(group, name), "w", encoding="ascii") as file:
        file.write(str(value))
