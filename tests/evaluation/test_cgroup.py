"""A cgroup for each tested program: in a tree of plain files that looks like one, and in a real one where it is delegated."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxes import strongest
from shoal.errors import InternalError
from shoal.evaluation import processes, sandbox
from shoal.evaluation.language import MIB, Bounds, Step, StepResult
from shoal.evaluation.sandbox import Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are executed on Linux only")

BOTH = "cpu memory pids"
OWN = "user/app/own"


@pytest.fixture
def removable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real group is an empty directory for rmdir, a directory of plain files is not."""
    remove = os.rmdir

    def rmdir(path: str) -> None:
        for name in os.listdir(path):
            place = os.path.join(path, name)
            (remove if os.path.isdir(place) else os.unlink)(place)
        remove(path)

    monkeypatch.setattr(os, "rmdir", rmdir)


def tree(root: Path, controllers: dict[str, str], kind: str = "cgroup2", line: str = f"0::/{OWN}") -> Path:
    """/proc/self of a process in the group OWN, with the controllers enabled for children of these groups."""
    process, mounted = root / "proc", root / "mounted"
    (mounted / OWN).mkdir(parents=True)
    for group in ("", "user", "user/app", OWN):
        (mounted / group / "cgroup.subtree_control").write_text(controllers.get(group, "") + "\n")
    process.mkdir()
    (process / "cgroup").write_text(f"4:memory:/elsewhere\n{line}\n")
    (process / "mountinfo").write_text(
        f"21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw\n30 21 0:26 / {mounted} rw,nosuid shared:9 - {kind} none rw\n"
    )
    return process


@pytest.mark.usefixtures("removable")
@pytest.mark.parametrize(
    ("controllers", "user", "expected"),
    [
        ({OWN: BOTH, "user/app": BOTH}, 1000, OWN),
        ({OWN: "memory", "user/app": BOTH, "user": BOTH}, 1000, "user/app"),
        ({"": BOTH}, 1000, ""),
        ({OWN: "memory pids"}, 0, OWN),
        ({"user/app": BOTH, "user": BOTH, "": BOTH}, 0, None),
        ({OWN: "memory", "user/app": "pids cpu", "user": "memoryless pids"}, 1000, None),
        ({}, 1000, None),
    ],
)
def test_the_nearest_delegated_group_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: dict[str, str], user: int, expected: str | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = processes.delegated_folder(tree(tmp_path, controllers))
    assert found == ("" if expected is None else str(tmp_path / "mounted" / expected))
    assert not list((tmp_path / "mounted").rglob("shoal-*"))


@pytest.mark.usefixtures("removable")
def test_root_takes_groups_above_its_own_if_they_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {"user": {"trusted.delegate": b"1"}, "user/app": {"user.delegate": b"0"}}

    def mark(path: Path, name: str) -> bytes:
        try:
            return marks[str(path.relative_to(tmp_path / "mounted"))][name]
        except KeyError:
            raise OSError(errno.ENODATA, "no such attribute") from None

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getxattr", mark)
    assert processes.delegated_folder(tree(tmp_path, {"user/app": BOTH, "user": BOTH})) == str(tmp_path / "mounted" / "user")


def test_without_version_2_there_is_none(tmp_path: Path) -> None:
    everywhere = {OWN: BOTH, "user/app": BOTH, "user": BOTH, "": BOTH}
    assert processes.delegated_folder(tree(tmp_path / "1", everywhere, kind="cgroup")) == ""
    assert processes.delegated_folder(tree(tmp_path / "2", everywhere, line="1:cpu:/")) == ""
    assert processes.delegated_folder(tree(tmp_path / "3", everywhere, line="0::/../outside")) == ""
    assert processes.delegated_folder(tree(tmp_path / "4", everywhere, line="0::/not/mounted/here")) == ""
    assert processes.delegated_folder(tmp_path / "no proc") == ""


@pytest.mark.usefixtures("removable")
@pytest.mark.parametrize("refused", ["made", "limited", "entered"])
def test_a_group_that_does_not_work_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    make = os.makedirs

    def makes(path: str, exist_ok: bool = False) -> None:
        if refused == "made":
            raise PermissionError
        make(path, exist_ok=exist_ok)
        os.mkdir(os.path.join(path, {"limited": "pids.max", "entered": "cgroup.procs"}[refused]))  # cannot be written to

    process = tree(tmp_path, {OWN: BOTH})
    monkeypatch.setattr(os, "makedirs", makes)
    assert processes.delegated_folder(process) == ""
    assert not list((tmp_path / "mounted").rglob("shoal-*"))


def test_removing_waits_for_who_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, refusals, removed = tmp_path / "group", [errno.EBUSY, errno.EBUSY], []
    group.mkdir()

    def rmdir(path: str) -> None:
        if refusals:
            raise OSError(refusals.pop(), "busy")
        removed.append(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    processes.remove_group(str(group))
    assert removed == [str(group)]
    assert (group / "cgroup.kill").read_text() == "1"


# ── programs ────────────────────────────────────────────────────────────────────────────────────────────────────────

BOUNDS = Bounds(memory_bytes=100 * MIB, workdir_bytes=30 * MIB, processes=20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that passes for a delegated group; what is made there stays, since rmdir does not remove files."""
    monkeypatch.setattr(processes, "delegated_folder", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StepResult]]:
    """Runs a shell script in a group of known name, folder / "shoal-0"."""
    with Sandbox(strongest()) as box:
        assert "(a cgroup for each program)" in box.isolation
        monkeypatch.setattr(uuid.UUID, "hex", "0")
        yield lambda script, *more: box.run({}, Step(["/bin/sh", "-c", script], BOUNDS), *more)


def held(group: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in group.iterdir()}


def test_a_program_is_put_into_a_group_with_its_bounds(folder: Path, run: Callable[..., StepResult]) -> None:
    assert run("exit 0").succeeded
    assert held(folder / "shoal-0") == {
        "memory.max": str(130 * MIB + processes.SANDBOX_BYTES), "memory.swap.max": "0", "memory.oom.group": "1",
        "pids.max": str(20 + processes.SANDBOX_TASKS), "cgroup.procs": "0", "cgroup.kill": "1",
    }  # fmt: skip


def test_each_step_has_its_own_bounds(folder: Path, run: Callable[..., StepResult]) -> None:
    assert run("exit 0", Step(["/bin/sh", "-c", "exit 0"], Bounds(processes=7))).succeeded
    assert held(folder / "shoal-0")["pids.max"] == str(7 + processes.SANDBOX_TASKS)


@pytest.mark.parametrize(
    ("kills", "script", "reason"), [(1, "exit 1", "memory"), (0, "exit 1", "exit"), (1, "exit 0", "exit")]
)
def test_programs_that_the_kernel_killed_for_memory_say_so(
    folder: Path, run: Callable[..., StepResult], kills: int, script: str, reason: str
) -> None:
    (folder / "shoal-0").mkdir()
    (folder / "shoal-0" / "memory.events").write_text(f"low 0\nmax 3\noom {kills}\noom_kill {kills}\n")
    assert run(script).reason == reason


def test_the_group_of_a_killed_supervisor_is_removed(
    folder: Path, run: Callable[..., StepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> subprocess.Popen[bytes]:
        made = start_supervisor()
        made.kill()
        return made

    start_supervisor = sandbox._start_supervisor
    monkeypatch.setattr(sandbox, "_start_supervisor", killed)
    (folder / "shoal-0").mkdir()
    with pytest.raises(InternalError, match="supervisor"):
        run("exit 0")
    assert held(folder / "shoal-0") == {"cgroup.kill": "1"}


def test_without_a_group_the_sandbox_says_so_and_runs_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "delegated_folder", lambda: "")
    with Sandbox(strongest()) as box:
        assert "no cgroup, none is delegated here" in box.isolation
        assert box.run({"memory.events": "oom_kill 1"}, Step(["/bin/sh", "-c", "exit 1"])).reason == "exit"


@pytest.mark.skipif(not processes.delegated_folder(), reason="no cgroup is delegated here")
def test_a_real_group_bounds_memory_and_is_gone_in_the_end() -> None:
    """Memory in pipes, which only the kernel counts."""
    fill = "import os\nfor _ in range(100):\n r, w = os.pipe()\n os.set_blocking(w, False)\n os.write(w, bytes(2**16))\n"
    fill += "taken = [bytearray(2**20) for _ in range(2**11)]"
    before = set(Path(processes.delegated_folder()).iterdir())
    with Sandbox(strongest()) as box:
        ended = box.run({"main.py": fill}, Step([sys.executable, "main.py"], BOUNDS))
    assert not ended.succeeded
    assert set(Path(processes.delegated_folder()).iterdir()) == before
