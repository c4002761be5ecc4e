"""What surrounds a program: namespaces around it, directories hidden from it, and what of this holds on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from shoal.evaluation import confine, warden

WAYS = ("bubblewrap", "namespaces", "limits")
"""From the strongest to the weakest."""

TOOLS = {"bubblewrap": "bwrap", "namespaces": "unshare"}
"""The programs they need."""


def around(way: str, room: str, readable: Iterable[str]) -> list[str]:
    """The command that puts what follows it into namespaces; none for limits alone.

    `room` may be written to; `readable` are the paths in hidden directories that may be read.
    """
    return {"bubblewrap": _bubblewrap, "namespaces": _unshare, "limits": lambda *_: []}[way](room, list(readable))


def needed(programs: Iterable[str], more: Iterable[str]) -> list[str]:
    """What must stay readable in hidden directories: installations of programs (absolute paths), this Python's, and `more`."""
    paths = {sys.prefix, sys.base_prefix, *more}
    for program in filter(os.path.isabs, programs):
        paths |= {str(_installation(path)) for path in (Path(program), Path(program).resolve())}
    return sorted(path for path in paths if _is_hidden(path))


def barriers(way: str) -> dict[str, bool]:
    """What a program may want to reach, and whether it is kept from it on this machine."""
    strongest, namespaces, landlock = way == "bubblewrap", way != "limits", confine.landlock_version()
    own_user = warden.spare_uid() is not None
    return {
        "the network by TCP": namespaces or landlock >= confine.TCP_SINCE,
        "the network by other protocols": namespaces,
        "writing outside its directory": strongest or landlock >= 1,
        "reading homes and temporary directories": strongest or landlock >= 1,
        "the environment of other processes": namespaces or own_user or landlock >= 1,
        "signals to other processes": namespaces or own_user or landlock >= confine.SIGNALS_SINCE,
        "sockets in the file system": strongest,
        "System V memory, which outlives its processes": namespaces,
    }


def describe(way: str) -> str:
    """What a way keeps programs from on this machine, and what not, in one line."""
    user = " with a user id for each program" if warden.spare_uid() is not None else ""
    always = "limits on time, memory, files, processes and output; killed whole, daemons included"
    kept, open_ = (", ".join(name for name, holds in barriers(way).items() if holds is wanted) for wanted in (True, False))
    return f"{way}{user}; {always}; kept from: {kept or 'nothing'}" + (f"; NOT kept from: {open_}" if open_ else "")


def _bubblewrap(room: str, readable: list[str]) -> list[str]:
    hidden = _hidden()
    # Root stays root until confine.py takes another user: only so are namespaces made without one for users.
    rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.getuid() == 0 else ["--unshare-user"]
    return [
        *[_tool("bubblewrap"), "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"],
        *_each("--tmpfs", hidden),
        *_each("--dir", _parents([*readable, room])),  # otherwise made for root alone
        *[word for path in readable for word in ("--ro-bind-try", path, path)],
        *["--bind", room, room],
        *_each("--remount-ro", [*hidden, "/dev"]),
        *["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"],
        *[*rights, "--"],
    ]


def _unshare(room: str, readable: list[str]) -> list[str]:
    user = [] if os.getuid() == 0 else ["--user", "--map-current-user"]
    spaces = ["--net", "--pid", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]
    return [_tool("namespaces"), *user, *spaces, "--"]


def _tool(way: str) -> str:
    return shutil.which(TOOLS[way]) or TOOLS[way]


def _each(option: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (option, path)]


def _hidden() -> list[str]:
    return sorted({*confine.hidden_directories(), tempfile.gettempdir()})


def _is_hidden(path: str | Path) -> bool:
    return any(Path(folder) in Path(path).parents for folder in _hidden())


def _parents(paths: Iterable[str]) -> list[str]:
    """The hidden directories above these, from the outside in."""
    return sorted({str(folder) for path in paths for folder in Path(path).parents if _is_hidden(folder)})


def _installation(program: Path) -> Path:
    """The directory that a program and what it needs were installed in."""
    for folder in program.parents:
        if folder.name == "node_modules":
            return folder
    folder = program.parent
    return folder.parent if folder.name == "bin" and folder.parent != Path.home() else folder
