"""The isolation of tested programs, checked without running an attack: commands, visible paths, Landlock, seccomp."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import RequestError
from shoal.evaluation import isolation, sandbox_exec
from shoal.evaluation.language import Bounds, Step
from shoal.evaluation.sandbox import Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are executed on Linux only")

KERNEL_HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) > 0
"""Asked here, not of the module that is tested."""


def test_both_backends_with_namespaces_take_one_for_the_network() -> None:
    assert "--unshare-net" in isolation.wrapper_command("bubblewrap", "/workdir", [])
    assert "--net" in isolation.wrapper_command("namespaces", "/workdir", [])


def test_the_root_of_bubblewrap_is_empty_but_for_what_is_listed() -> None:
    words = isolation.wrapper_command("bubblewrap", "/tmp/workdir", ["/usr/bin", "/opt/node"])
    mounted = [words[place + 1] for place, word in enumerate(words) if word in ("--bind", "--ro-bind", "--ro-bind-try")]
    assert mounted == ["/usr/bin", "/opt/node", "/tmp/workdir", "/tmp/workdir-shm"]
    assert words[words.index("--bind") + 1] == "/tmp/workdir"
    assert "/" in [words[place + 1] for place, word in enumerate(words) if word == "--remount-ro"]


@pytest.mark.parametrize(("says", "given"), [("--disable-userns  Disable further use", True), ("--bind", False)])
def test_users_may_make_no_more_user_namespaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, given: bool
) -> None:
    tool = tmp_path / "bwrap"
    tool.write_text(f"#!/bin/sh\necho '{says}'\n")
    tool.chmod(0o755)
    monkeypatch.setitem(isolation.TOOLS, "bubblewrap", str(tool))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    words = isolation.wrapper_command("bubblewrap", "/workdir", [])
    assert "--unshare-user" in words
    assert ("--disable-userns" in words) is given


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def test_an_installation_is_visible_and_what_lies_around_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    (tmp_path / "home" / "bin").mkdir(parents=True)
    real = program(tmp_path / "versions" / "3.7" / "bin" / "python3.7")
    (tmp_path / "current").symlink_to(tmp_path / "versions" / "3.7")
    (tmp_path / "home" / "bin" / "python3").symlink_to(tmp_path / "current" / "bin" / "python3.7")
    cases = {
        real: {"versions/3.7"},
        tmp_path / "home" / "bin" / "python3": {"home/bin", "current", "versions/3.7"},
        program(tmp_path / "repository" / "node"): {"repository/node"},
        program(tmp_path / "repository" / "bin" / "node"): {"repository/bin"},
        program(tmp_path / "home" / ".local" / "bin" / "node"): {"home/.local/bin"},
        program(tmp_path / "lib" / "node_modules" / "typescript" / "bin" / "tsc"): {"lib/node_modules"},
        program(tmp_path / "jdk" / "bin" / "java"): {"jdk"},
    }
    before = set(isolation.visible([], []))
    for asked, expected in cases.items():
        shown = set(isolation.visible([str(asked)], [])) - before
        assert shown == {str(tmp_path / path) for path in expected}, asked


def test_nothing_personal_is_visible_by_default() -> None:
    shown = isolation.visible(["/bin/sh", "/usr/bin/python3"], [])
    assert not {"/", "/usr", "/usr/local", "/usr/src", "/etc", "/etc/passwd", "/var", "/tmp", "/home", "/root"} & set(shown)
    assert not [path for path in shown if isolation._is_inside(__file__, [path])]


@pytest.mark.skipif(not KERNEL_HAS_LANDLOCK, reason="the kernel has no Landlock")
def test_landlock_alone_closes_files(tmp_path: Path) -> None:
    """The last step without any namespaces around it, and as the same user, so that nothing else can refuse."""
    assert sandbox_exec.landlock_version() > 0
    workdir, secret = tmp_path / "workdir", tmp_path / "secret"
    workdir.mkdir()
    secret.write_text("told")
    line = f"cat {secret}; echo written > {secret}; echo inside > here; cat here"
    spec: dict[str, Any] = {
        "command": ["/bin/sh", "-c", line], "environment": {"PATH": "/usr/bin:/bin"}, "workdir": str(workdir), "uid": None,
        "visible": isolation.visible(["/bin/sh"], []), "filter": "",
        "shared": "", "shared_memory": "owned", "mounts": "", "bounds": {**vars(Bounds())},
    }  # fmt: skip
    command = [sys.executable, "-I", "-S", sandbox_exec.__file__, json.dumps(spec)]
    reporting = ["/bin/sh", "-c", 'exec 3> "$0"; exec "$@"', str(tmp_path / "report"), *command]
    done = subprocess.run(reporting, capture_output=True, text=True, check=False)
    assert (tmp_path / "report").read_text() == "go"
    assert (done.stdout, secret.read_text()) == ("inside\n", "told")


def test_walls_that_hold_nothing_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides is what a first program reaches, not what a tool is called."""
    monkeypatch.setattr(isolation, "TOOLS", {})
    monkeypatch.setattr(isolation, "wrapper_command", lambda *_: [])
    with pytest.raises(RequestError, match=r"bubblewrap: programs reach .*the network; namespaces: programs reach"):
        Sandbox()


def test_files_in_reach_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = lambda *_: [f"/{name}" for name in os.listdir("/")]  # noqa: E731
    monkeypatch.setattr(isolation, "TOOLS", {})
    monkeypatch.setattr(isolation, "wrapper_command", lambda *_: [])
    monkeypatch.setattr(isolation, "visible", everything)
    with pytest.raises(RequestError, match="programs reach files and the network"):
        Sandbox()


# ---------------------------------------------------------------------------------------------------------------------
# The filter of system calls, run as the kernel runs it


def decide(machine: str, number: int, *, flags: int = 0, arch: int | None = None) -> int:
    """What the filter of a machine returns for a system call: the kernel's own rules for classic BPF."""
    arch = isolation.AUDIT_ARCH[machine] if arch is None else arch
    data = {0: number, 4: arch, 16: flags}
    lines = list(struct.iter_unpack("=HBBI", isolation.assemble(machine)))
    place, held = 0, 0
    while True:
        code, yes, no, operand = lines[place]
        if code == 0x06:
            return operand
        if code == 0x20:
            held, step = data[operand], 0
        else:
            holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]
            step = yes if holds else no
        place += 1 + step


ALLOWED, REFUSED, ABSENT = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


@pytest.mark.parametrize("machine", isolation.AUDIT_ARCH)
def test_the_filter_refuses_what_is_listed_and_nothing_else(machine: str) -> None:
    refused = {isolation._of(machine, number) for number in isolation.NUMBERS.values()}
    assert len(refused) == len(isolation.NUMBERS)
    expected = {number: REFUSED if number in refused else ALLOWED for number in range(470)} | {435: ABSENT}
    assert {number: decide(machine, number) for number in range(470)} == expected
    clone = isolation._of(machine, isolation.CLONE)
    threads, processes = 0x003D0F00, 0x01200011  # what C libraries pass for a thread, and for fork
    assert decide(machine, clone, flags=threads) == decide(machine, clone, flags=processes) == ALLOWED
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, flags=flag | 17) == REFUSED
    assert decide(machine, 1 << 30) == decide(machine, 39, arch=0x40000003) == REFUSED  # x32, and 32 bits


HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@pytest.mark.skipif(not HEADER.exists(), reason="the C library's headers are not here")
def test_the_numbers_are_those_of_the_headers() -> None:
    known = {
        name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text(encoding="utf-8"))
    }
    ours = {name: isolation._of("x86_64", number) for name, number in isolation.NUMBERS.items()} | {
        "clone": 56,
        "clone3": 435,
    }
    assert {name: known.get(name, number) for name, number in ours.items()} == ours


def test_the_filter_is_given_to_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not isolation.refused_calls():
        pytest.skip("no seccomp here")
    with Sandbox("limits") as box:
        ended = box.run({}, Step(["/bin/sh", "-c", "grep Seccomp: /proc/self/status"]))
    assert ended.stdout.split() == ["Seccomp:", "2"]
