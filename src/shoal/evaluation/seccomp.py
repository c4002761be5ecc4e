"""The system calls that tested programs are refused, as a program for the kernel's seccomp filter.

Classic BPF (Linux, Documentation/userspace-api/seccomp_filter.rst): a refused call returns EPERM.
The list has the calls that reach other processes, mount, make namespaces, or use parts of the
kernel with a history of vulnerabilities.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

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


def program() -> bytes:
    """Returns an array of struct sock_filter for this machine.

    It is empty without seccomp or if the architecture is unknown.
    """
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
