"""What surrounds a program: namespaces around it, the paths that it sees, and what of this holds on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from glob import glob
from pathlib import Path

from shoal.evaluation import confine, seccomp, warden

WAYS = ("bubblewrap", "namespaces", "limits")
"""From the strongest to the weakest."""

TOOLS = {"bubblewrap": "bwrap", "namespaces": "unshare"}
"""The programs they need."""

_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "include", "share")
SYSTEM = (
    *(f"{root}/{part}" for root in ("", "/usr", "/usr/local") for part in _PARTS),
    *("/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/java-*", "/etc/php", "/etc/perl"),
)
"""What every program may read: programs, libraries and their settings, and nothing that belongs to a person or a service."""


def around(way: str, room: str, visible: Iterable[str]) -> list[str]:
    """The command that puts what follows it into namespaces; none for limits alone.

    `room` may be written to; `visible` are the paths that may be read.
    """
    return {"bubblewrap": _bubblewrap, "namespaces": _unshare, "limits": lambda *_: []}[way](room, list(visible))


def visible(programs: Iterable[str], more: Iterable[str]) -> list[str]:
    """All that may be read: the system's paths, installations of programs (absolute paths) and of this Python, and `more`."""
    system = [path for pattern in SYSTEM for path in sorted(glob(pattern))]
    absolute = filter(os.path.isabs, [*programs, confine_python()])
    hops = [hop for program in absolute for hop in _hops(Path(program)) if not _below(str(hop), system)]
    outside = sorted(path for path in {*more, *(str(_installation(hop)) for hop in hops)} if not _below(path, system))
    return [*system, *(path for path in outside if not _below(path, set(outside) - {path}))]


def confine_python() -> str:
    """The interpreter that confines: the one that a virtual environment was made of, so that only this must be visible."""
    return str(Path(sys.executable).resolve())


def barriers(way: str) -> dict[str, bool]:
    """What a program may want to reach, and whether it is kept from it on this machine."""
    strongest, namespaces, landlock = way == "bubblewrap", way != "limits", confine.landlock_version()
    own_user = warden.spare_uid() is not None
    return {
        "the network by TCP": namespaces or landlock >= confine.TCP_SINCE,
        "the network by other protocols": namespaces,
        "writing outside its directory": strongest or landlock >= 1,
        "reading files but the system's and its language's": strongest or landlock >= 1,
        "the environment of other processes": namespaces or own_user or landlock >= 1,
        "signals to other processes": namespaces or own_user or landlock >= confine.SIGNALS_SINCE,
        "sockets in the file system": strongest,
        "System V memory, which outlives its processes": namespaces,
        "system calls that programs have no use for": bool(seccomp.program()),
    }


def describe(way: str, *, cgroup: bool) -> str:
    """What a way keeps programs from on this machine, and what not, in one line; `cgroup`: each program has one."""
    user = " with a user id for each program" if warden.spare_uid() is not None else ""
    by = "a cgroup for each program" if cgroup else "no cgroup, none is delegated here"
    always = f"limits on time, memory, files, processes and output ({by}); killed whole, daemons included"
    kept, open_ = (", ".join(name for name, holds in barriers(way).items() if holds is wanted) for wanted in (True, False))
    return f"{way}{user}; {always}; kept from: {kept or 'nothing'}" + (f"; NOT kept from: {open_}" if open_ else "")


def _bubblewrap(room: str, visible: list[str]) -> list[str]:
    return [
        _tool("bubblewrap"),
        *_each("--dir", _parents([*visible, room])),  # otherwise made for root alone
        *[word for path in visible for word in ("--ro-bind-try", path, path)],
        *["--dev", "/dev", "--proc", "/proc", "--bind", room, room, "--remount-ro", "/dev", "--remount-ro", "/"],
        *["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"],
        *[*_rights(), "--"],
    ]


def _rights() -> list[str]:
    """Root stays root until confine.py takes another user: only so are namespaces made without one for users."""
    if os.getuid() == 0:
        return ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return ["--unshare-user", *(["--disable-userns"] if _disables_userns(_tool("bubblewrap")) else [])]


@lru_cache
def _disables_userns(tool: str) -> bool:
    """Whether this bubblewrap can forbid further user namespaces: since version 0.8."""
    return "--disable-userns" in subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout


def _unshare(room: str, visible: list[str]) -> list[str]:
    user = [] if os.getuid() == 0 else ["--user", "--map-current-user"]
    spaces = ["--net", "--pid", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]
    return [_tool("namespaces"), *user, *spaces, "--"]


def _tool(way: str) -> str:
    return shutil.which(TOOLS[way]) or TOOLS[way]


def _each(option: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (option, path)]


def _below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is, or lies in, one of these."""
    return any(Path(folder) in (Path(path), *Path(path).parents) for folder in folders)


def _parents(paths: Iterable[str]) -> list[str]:
    """The directories above these that are made for them, from the outside in."""
    return sorted({str(folder) for path in paths for folder in Path(path).parents if folder != Path("/")})


def _hops(program: Path) -> Iterator[Path]:
    """A path and all that it leads to through links."""
    for _ in range(40):  # as many as the kernel follows
        yield program
        if not program.is_symlink():
            break
        program = Path(os.path.normpath(program.parent / program.readlink()))
    yield program.resolve()


def _installation(program: Path) -> Path:
    """The directory that a program and what it needs were installed in; never a home or a repository."""
    for folder in program.parents:
        if folder.name == "node_modules":
            return folder
    folder = program.parent
    whole = folder.parent if folder.name == "bin" else folder
    if not _personal(whole):
        return whole
    return program if _personal(folder) else folder


def _personal(folder: Path) -> bool:
    return folder in (Path("/"), Path.home(), Path.home() / ".local") or (folder / ".git").exists()
