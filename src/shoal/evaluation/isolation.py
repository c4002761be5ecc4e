"""The isolation of a program.

It consists of its namespaces, the paths that it can read, and the limits that this machine
enforces.

The system calls that tested programs are refused are a program for the kernel's seccomp filter.
Classic BPF (Linux, Documentation/userspace-api/seccomp_filter.rst): a refused call returns EPERM.
The list has the calls that reach other processes, mount, make namespaces, or use parts of the
kernel with a history of vulnerabilities.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from glob import glob
from pathlib import Path

from shoal.evaluation import sandbox_exec, supervisor

BACKENDS = ("bubblewrap", "namespaces", "limits")
"""The backends, from the strongest to the weakest."""

TOOLS = {"bubblewrap": "bwrap", "namespaces": "unshare"}
"""The programs they need."""

SHARED_MEMORY = {"bubblewrap": "bound", "namespaces": "mounted", "limits": "owned"}
"""How programs come to a private /dev/shm, without which no Python has pools, queues and locks.

A directory is there in place of the machine's: bubblewrap has put it there, or sandbox_exec.py
does. With limits alone it is the machine's, and a program has its own files there if it has a user
id of its own.
"""

_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "include", "share")
SYSTEM = (
    *(f"{root}/{part}" for root in ("", "/usr", "/usr/local") for part in _PARTS),
    *("/nix/store", "/etc/alternatives", "/etc/ld.so.cache"),
    *("/etc/java*", "/etc/php*", "/etc/perl", "/etc/R", "/etc/racket", "/etc/mono"),
    *("/etc/localtime", "/etc/timezone", "/etc/locale.alias", "/etc/nsswitch.conf"),
    # Node.js ends at once if there is a configuration of OpenSSL that it may not read.
    *("/etc/ssl/openssl*", "/etc/pki/tls/openssl*", "/etc/crypto-policies"),
    # Java and Go ask for the processors, the bounds of their cgroup and the size of large pages.
    *("/sys/devices/system/cpu", "/sys/fs/cgroup"),
    *("/sys/kernel/mm/hugepages", "/sys/kernel/mm/transparent_hugepage"),
)
"""The paths that every program may read.

They hold programs, libraries, their settings and the kernel's files that runtimes read. Nothing
that belongs to a person or a service is among them. Without namespaces around it, a program that
opens another path is refused (EACCES), which some runtimes take worse than a path that does not
exist.
"""


def wrapper_command(backend: str, workdir: str, visible: Iterable[str]) -> list[str]:
    """Returns the command that runs the command behind it in namespaces; empty for "limits".

    `workdir` and its shared memory are writable, the paths `visible` are readable.
    """
    return {"bubblewrap": _bubblewrap, "namespaces": _unshare, "limits": lambda *_: []}[backend](
        workdir, list(visible)
    )


def shared_memory(workdir: str) -> str:
    """Returns the directory that is the /dev/shm of the program in this directory."""
    return f"{workdir}-shm"


def visible(programs: Iterable[str], more: Iterable[str]) -> list[str]:
    """Returns all readable paths.

    They are the system's, the installations of programs (absolute paths) and of this Python, and
    `more`.
    """
    system = [path for pattern in SYSTEM for path in sorted(glob(pattern))]
    absolute = filter(os.path.isabs, [*programs, sandbox_python()])
    links = [
        link
        for program in absolute
        for link in _symlink_chain(Path(program))
        if not _is_inside(str(link), system)
    ]
    outside = sorted(
        path
        for path in {*more, *(str(_installation(link)) for link in links)}
        if not _is_inside(path, system)
    )
    return [*system, *(path for path in outside if not _is_inside(path, set(outside) - {path}))]


def sandbox_python() -> str:
    """Returns the interpreter of sandbox_exec.py.

    It is the base of a virtual environment, so that only its installation must be visible.
    """
    return str(Path(sys.executable).resolve())


def protections(backend: str) -> dict[str, bool]:
    """Returns the resources that a program could reach, and whether this machine guards each."""
    strongest = backend == "bubblewrap"
    namespaces = backend != "limits"
    landlock = sandbox_exec.landlock_version()
    own_user = supervisor.spare_uid() is not None
    return {
        "the network by TCP": namespaces or landlock >= sandbox_exec.TCP_SINCE,
        "the network by other protocols": namespaces,
        "writing outside its directory": strongest or landlock >= 1,
        "reading files but the system's and its language's": strongest or landlock >= 1,
        "the environment of other processes": namespaces or own_user or landlock >= 1,
        "signals to other processes": namespaces
        or own_user
        or landlock >= sandbox_exec.SIGNALS_SINCE,
        "sockets in the file system": strongest,
        "System V memory, which outlives its processes": namespaces,
        "system calls that programs have no use for": bool(refused_calls()),
    }


def describe(backend: str, *, cgroup: bool) -> str:
    """Describes a backend on one line, for reports: the things that it prevents here, and the rest.

    Args:
        cgroup: each program has one.
    """
    always = (
        f"limits on time, memory, files, processes and output ({_groups(cgroup)}); killed "
        f"whole, daemons included"
    )
    kept, open_ = _reach(backend)
    return f"{_users(backend)}; {always}; kept from: {kept or 'nothing'}" + (
        f"; NOT kept from: {open_}" if open_ else ""
    )


def essentials(backend: str, *, cgroup: bool) -> list[str]:
    """Describes a backend in short lines for people: its name, and its gaps."""
    _, open_ = _reach(backend)
    return [
        f"{_users(backend)}; {_groups(cgroup)}",
        *([f"NOT kept from: {open_}"] if open_ else []),
    ]


def _users(backend: str) -> str:
    return backend + (
        " with a user id for each program" if supervisor.spare_uid() is not None else ""
    )


def _groups(cgroup: bool) -> str:
    return "a cgroup for each program" if cgroup else "no cgroup, none is delegated here"


def _reach(backend: str) -> tuple[str, str]:
    """Returns the resources that are guarded, and those that are not."""
    known = protections(backend).items()
    kept, open_ = (
        ", ".join(name for name, holds in known if holds is wanted) for wanted in (True, False)
    )
    return kept, open_


def _bubblewrap(workdir: str, visible: list[str]) -> list[str]:
    return [
        _tool("bubblewrap"),
        *_each("--dir", _parents([*visible, workdir])),  # otherwise only root could enter them
        *[word for path in visible for word in ("--ro-bind-try", path, path)],
        *[
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--bind",
            workdir,
            workdir,
            "--bind",
            shared_memory(workdir),
            "/dev/shm",
            "--remount-ro",
            "/dev",
            "--remount-ro",
            "/",
        ],
        *[
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--die-with-parent",
            "--new-session",
        ],
        *[*_rights(), "--"],
    ]


def _rights() -> list[str]:
    """Returns the options for rights.

    Root keeps its id until sandbox_exec.py changes it: bubblewrap then needs no user namespace.
    """
    if os.getuid() == 0:
        return ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        "--unshare-user",
        # so that there are no further user namespaces (version 0.8 and later)
        *(["--disable-userns"] if "--disable-userns" in _help(_tool("bubblewrap")) else []),
    ]


@lru_cache
def _help(tool: str) -> str:
    return subprocess.run(
        [tool, "--help"], capture_output=True, encoding="utf-8", check=False
    ).stdout


def _unshare(workdir: str, visible: list[str]) -> list[str]:
    user = [] if os.getuid() == 0 else ["--user", "--map-current-user"]
    if user and "--keep-caps" in _help(_tool("namespaces")):
        user.append("--keep-caps")  # sandbox_exec.py mounts, then gives them up
    spaces = ["--net", "--pid", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]
    return [_tool("namespaces"), *user, *spaces, "--"]


def _tool(backend: str) -> str:
    return shutil.which(TOOLS[backend]) or TOOLS[backend]


def _each(option: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (option, path)]


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    """Tells whether a path is one of these folders or lies in one."""
    return any(Path(folder) in (Path(path), *Path(path).parents) for folder in folders)


def _parents(paths: Iterable[str]) -> list[str]:
    """Returns the directories above these paths, outermost first."""
    return sorted(
        {str(folder) for path in paths for folder in Path(path).parents if folder != Path("/")}
    )


def _symlink_chain(program: Path) -> Iterator[Path]:
    """Yields a path and the targets of its symbolic links, one after the other."""
    for _ in range(40):  # the kernel's limit
        yield program
        if not program.is_symlink():
            break
        program = Path(os.path.normpath(program.parent / program.readlink()))
    yield program.resolve()


def _installation(program: Path) -> Path:
    """Returns the directory of a program's installation, never a home or a repository."""
    for folder in program.parents:
        if folder.name == "node_modules":
            return folder
    folder = program.parent
    whole = folder.parent if folder.name == "bin" else folder
    if not _is_personal(whole):
        return whole
    return program if _is_personal(folder) else folder


def _is_personal(folder: Path) -> bool:
    return folder in (Path("/"), Path.home(), Path.home() / ".local") or (folder / ".git").exists()


AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of the architectures (linux/audit.h)."""

_COLUMNS = ("x86_64", "aarch64")
NUMBERS: dict[
    str, int | tuple[int, int]
] = {  # of system calls (asm/unistd.h); one number: the same on both
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": 438,
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "personality": (135, 92),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "memfd_secret": 447,
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "quotactl_fd": 443,
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
CLONE, CLONE3 = (56, 220), 435
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET

_X32 = 0x40000000  # x86_64 numbers every call a second time from here on
_ACTIONS = "/proc/sys/kernel/seccomp/actions_avail"
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FLAGS_AT = (
    0,
    4,
    16,
)  # offsets in struct seccomp_data; the flags are the first argument's lower half
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def refused_calls() -> bytes:
    """Returns an array of struct sock_filter, empty without seccomp or on unknown architectures."""
    machine = platform.machine()
    return assemble(machine) if machine in AUDIT_ARCH and os.path.exists(_ACTIONS) else b""


def assemble(machine: str) -> bytes:
    """Returns the filter of an architecture: every call that is not refused is allowed.

    clone3 passes its flags in memory, which no filter can read, so it returns ENOSYS. C libraries
    then use clone, which is refused with the flags for new namespaces.
    """
    refused = [_of(machine, number) for number in NUMBERS.values()]
    many = len(refused)
    allow, refuse, absent = 8 + many, 9 + many, 10 + many  # where these returns stand
    lines = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 0, refuse - 2, AUDIT_ARCH[machine])]
    lines += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, refuse - 4, 0, _X32)]
    lines += [(_EQUAL, refuse - 5 - place, 0, number) for place, number in enumerate(refused)]
    lines += [
        (_EQUAL, absent - 5 - many, 0, CLONE3),
        (_EQUAL, 0, allow - 6 - many, _of(machine, CLONE)),
    ]
    lines += [(_LOAD, 0, 0, _FLAGS_AT), (_ANY_BIT, refuse - 8 - many, 0, NEW_NAMESPACES)]
    lines += [(_RETURN, 0, 0, end) for end in (_ALLOW, _ERROR | errno.EPERM, _ERROR | errno.ENOSYS)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _of(machine: str, number: int | tuple[int, int]) -> int:
    return number if isinstance(number, int) else number[_COLUMNS.index(machine)]
