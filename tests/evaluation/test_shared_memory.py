"""Pools, queues and locks in every sandbox: a /dev/shm of the program's own, bounded, that leaves nothing behind."""

from __future__ import annotations

import os
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import sandbox_of
from shoal.evaluation import isolation, sandbox, sandbox_exec, supervisor
from shoal.evaluation.execution import execute
from shoal.evaluation.language import MIB, Bounds, StepResult
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox


@pytest.fixture(scope="module", params=isolation.BACKENDS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox of each backend that can give programs shared memory."""
    with sandbox_of(request.param) as made:
        if request.param == "limits" and supervisor.spare_uid() is None and sandbox_exec.landlock_version():
            pytest.skip("limits alone have no shared memory for users, and the documentation says so")
        yield made


def run(box: Sandbox, source: str, **bounds: int) -> StepResult:
    (step,) = sandbox.find_toolchain("python", box).steps(LANGUAGES["python"])
    return box.run({"main.py": textwrap.dedent(source)}, replace(step, bounds=replace(Bounds(), **bounds)))  # type: ignore[arg-type]


SHARED = """
import multiprocessing, multiprocessing.dummy, queue
from multiprocessing.shared_memory import SharedMemory
from concurrent.futures import ProcessPoolExecutor
def twice(x): return 2 * x
def put(lock, lines, count):
    with lock: lines.put(2); count.value += 1
if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    with multiprocessing.Pool(2) as pool: assert pool.map(twice, [1, 2]) == [2, 4]
    with multiprocessing.dummy.Pool(2) as pool: assert pool.map(twice, [1, 2]) == [2, 4]
    with ProcessPoolExecutor(2) as pool: assert list(pool.map(twice, [3])) == [6]
    lock, lines, count = multiprocessing.Lock(), multiprocessing.Queue(), multiprocessing.Value("i", 0)
    running = [multiprocessing.Process(target=put, args=(lock, lines, count)) for _ in range(3)]
    for process in running: process.start()
    assert [lines.get() for _ in running] == [2, 2, 2]
    for process in running: process.join()
    assert count.value == 3
    memory = SharedMemory(create=True, size=2**20)
    memory.buf[0] = 7
    again = SharedMemory(name=memory.name)
    assert again.buf[0] == 7
    again.close(); memory.close(); memory.unlink()
    print("shared")
"""


def test_pools_queues_and_locks_work(box: Sandbox) -> None:
    ended = run(box, SHARED)
    assert (ended.stdout, ended.reason, ended.returncode) == ("shared\n", "exit", 0), ended.stderr


BODIES = {
    "a pool": "    from multiprocessing import Pool\n"
    "    with Pool(2) as pool: return pool.map(helper, a)\n\ndef helper(x):\n    return 2 * x\n",
    "spawned processes": "    import multiprocessing\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(abs, [2 * x for x in a])\n",
    "its own function in spawned processes": "    import multiprocessing\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(helper, a)\n\n"
    "def helper(x):\n    return 2 * x\n",
    "its own class and queue by a fork server": "    import multiprocessing\n"
    "    context = multiprocessing.get_context('forkserver')\n    lines = context.Queue()\n"
    "    one = context.Process(target=work, args=(lines, [Number(x) for x in a]))\n"
    "    one.start(); said = lines.get(); one.join()\n    return said\n\n"
    "class Number:\n    def __init__(self, x): self.x = x\n\n"
    "def work(lines, numbers):\n    lines.put([2 * one.x for one in numbers])\n\n"
    "if __name__ == '__main__':\n    raise SystemExit\n",
    "threads": "    from multiprocessing.pool import ThreadPool\n"
    "    with ThreadPool(2) as pool: return pool.map(lambda x: 2 * x, a)\n",
}


@pytest.mark.slow(but=["bubblewrap-a pool-None", "namespaces-threads", "limits-a pool-None"])
@pytest.mark.parametrize("canonical", [None, "    raise ValueError"])
@pytest.mark.parametrize("name", BODIES)
def test_completions_may_use_them(box: Sandbox, name: str, canonical: str | None) -> None:
    """In two processes, and in one: there the canonical solution does not pass either."""
    tests = "_candidate = f\nassert _candidate([1, 2]) == [2, 4]\n"
    if canonical:
        tests += "assert _candidate.__module__ == 'solution'\n"
    result = execute(Problem("T/0", "python", "def f(a):\n", tests, "f", canonical), BODIES[name], box)
    assert (result.outcome, result.detail, result.in_subprocess) == ("passed", "", canonical is None)


@pytest.mark.parametrize("backend", ["bubblewrap", "namespaces"])
def test_the_machines_own_is_never_covered(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the namespaces around it, nothing is mounted."""
    with sandbox_of(backend) as box:
        monkeypatch.setattr(isolation, "wrapper_command", lambda *_: [])
        before = Path("/proc/self/mounts").read_text(encoding="utf-8")
        run(box, "pass")
        assert Path("/proc/self/mounts").read_text(encoding="utf-8") == before


def test_it_is_bounded_and_private_and_leaves_nothing_behind(box: Sandbox) -> None:
    token = uuid.uuid4().hex
    before = set(os.listdir("/dev/shm"))
    other = Path("/dev/shm") / f"other-{token}"
    other.write_text("secret")
    other.chmod(0o600)
    try:
        ended = run(
            box,
            f"""
            import os, time
            try: print(open({str(other)!r}).read())
            except OSError: pass
            try: open({str(other)!r}, "w").write("changed")
            except OSError: pass
            for number in range(40):
                with open(f"/dev/shm/{token}-{{number}}", "wb") as file: file.write(bytes(2**20))
            time.sleep(1000)
            """,
            workdir_bytes=16 * MIB,
        )
        assert ended.reason == "files"
        assert "secret" not in ended.stdout
        assert other.read_text() == "secret"
    finally:
        other.unlink()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if token in name]
