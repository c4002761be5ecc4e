"""The inner of the sandbox's two programs.

It restricts its own process, then executes the command in it.

    python -I -S sandbox_exec.py '{"command": [...], "environment": {...}, "workdir": "...",
    "visible": [...], "uid": ..., ...}'

It sets resource limits, changes to the user of its working directory and gives up new privileges.
Where the kernel has Landlock, it gives up all files that are not listed, signals to other
processes, and mounts; where the kernel has seccomp, the system calls that the filter refuses. On
descriptor 3 it reports an error, or "go" just before the program starts.

Run by path without the package around it, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
from typing import Any

REPORT = 3  # the descriptor to report on
NICE = 10  # the supervisor must be scheduled before a thousand of these
WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")
SHARED_MEMORY = "/dev/shm"
READABLE = ("/dev/random", "/dev/urandom", "/proc")

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_MS_BIND = 4096
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = (
    444,
    445,
    446,
)  # system calls, the same on every architecture
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_OWN_FILES = _WRITE_FILE | _READ_FILE | 1 << 5 | 1 << 8 | 1 << 14  # remove, make, truncate
_FILE_BITS = {
    1: 13,
    2: 14,
    3: 15,
    4: 15,
    5: 16,
}  # number of file access rights by version of Landlock
TCP_SINCE, SIGNALS_SINCE = 4, 6  # versions of Landlock

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _BeneathPath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Filter(ctypes.Structure):
    _fields_ = (("lines", ctypes.c_ushort), ("program", ctypes.c_char_p))


def landlock_version() -> int:
    """Returns the Landlock version: 1 guards files, 4 also TCP, 6 also signals; 0 = none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def main() -> None:
    """Restricts this process as the first argument says and executes the command in it."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    fcntl.fcntl(REPORT, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        os.chdir(spec["workdir"])
        os.umask(0o077)
        os.nice(NICE)
        _limit(spec["bounds"], os.getuid() if spec["uid"] is None else spec["uid"])
        shared = _share_memory(spec)
        if spec["uid"] is not None:
            _set_user(spec["uid"])
        if os.getpid() == 1:
            _fork_from_init()
        _libc.prctl(
            _PR_SET_PDEATHSIG, signal.SIGKILL
        )  # the change of user has reset the supervisor's setting
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        _apply_landlock(spec["workdir"], spec["visible"], shared)
        _apply_seccomp(bytes.fromhex(spec["filter"]))
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        os.write(REPORT, b"go")
        os.execve(spec["command"][0], spec["command"], spec["environment"])
    except OSError as error:
        os.write(REPORT, f"cannot start {spec['command'][0]}: {error}".encode())
        os._exit(127)


def _share_memory(spec: dict[str, Any]) -> int:
    """Puts the program's own directory at /dev/shm, where bubblewrap has not.

    Returns:
        The access that the program gets there; none where files of others could be reached.
    """
    whole = (1 << 16) - 1
    if spec["shared_memory"] == "owned":
        return 0 if spec["uid"] is None else _OWN_FILES
    own_mounts = os.readlink("/proc/self/ns/mnt") != spec["mounts"]
    if spec["shared_memory"] == "bound" or not own_mounts:
        return whole if own_mounts else 0  # the machine's own must never be covered
    mounted = _libc.mount(spec["shared"].encode(), SHARED_MEMORY.encode(), None, _MS_BIND, None)
    return 0 if mounted else whole


def _limit(bounds: dict[str, Any], uid: int) -> None:
    tasks = _tasks(uid) + bounds["processes"]
    limits = {
        resource.RLIMIT_CPU: (bounds["cpu_seconds"], bounds["cpu_seconds"] + 1),
        resource.RLIMIT_DATA: (bounds["memory_bytes"],)
        * 2,  # not AS: Java and Node reserve memory that they never use
        resource.RLIMIT_FSIZE: (bounds["file_bytes"],) * 2,
        resource.RLIMIT_NPROC: (tasks, tasks),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for limit, (soft, hard) in limits.items():
        allowed = resource.getrlimit(limit)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(limit, (soft, hard))


def _tasks(uid: int) -> int:
    """Counts the visible threads that the kernel already counts towards a user's limit.

    In a namespace only its own are visible.
    """
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # ended meanwhile
            continue
    return count


def _fork_from_init() -> None:
    """Continues in a child and exits like it.

    A namespace's first process ignores most signals, so the program must not be it.
    """
    child = os.fork()
    if child:
        ended = -1
        while ended != child:  # the namespace's orphans are reaped here too
            ended, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def _set_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _apply_landlock(workdir: str, visible: list[str], shared: int) -> None:
    """Applies Landlock: every access in the working directory, reading of the listed paths.

    In /dev/shm it allows the access `shared`.
    It allows no TCP and no signals to other processes. Landlock also refuses mounts, in user
    namespaces too, where a program could otherwise fill memory with file systems.
    """
    version = landlock_version()
    if not version:
        return
    everything = (1 << _FILE_BITS.get(version, 16)) - 1
    rules = _Ruleset(
        everything, 0b11 if version >= TCP_SINCE else 0, 0b11 if version >= SIGNALS_SINCE else 0
    )
    ruleset = _checked(
        _libc.syscall(
            _CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0
        )
    )
    for path in [*visible, *READABLE]:
        _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
    for path in WRITABLE:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    _allow(ruleset, workdir, everything)
    if shared:
        _allow(ruleset, SHARED_MEMORY, shared & everything)
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)))
    os.close(ruleset)


def _apply_seccomp(program: bytes) -> None:
    """Applies seccomp: from here on the filter checks every system call."""
    if program:
        lines = _Filter(len(program) // 8, program)
        _checked(
            _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(lines), 0, 0), "seccomp"
        )


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing, or not accessible to this user: nothing to allow
        return
    if not os.path.isdir(path):
        access &= ~_READ_DIR
    rule = _BeneathPath(access, parent)
    _checked(_libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), ctypes.c_uint32(0)))
    os.close(parent)


def _checked(returned: int, what: str = "Landlock") -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return returned


if __name__ == "__main__":
    main()
