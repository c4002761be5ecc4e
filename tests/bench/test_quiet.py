"""The gate of measurements: which processes count, how long it waits, what it marks. On processes that the tests make up.

Tests of: bench.machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shoal.bench import machine as bench_machine
from shoal.bench.machine import BusyProcess, Process, Processes, QuietGate, busy_processes, processes

OWN = 100
HERE = Process(1, "pytest", 5.0, 3.0)
IDLE = Process(1, "sshd", 1.0, 7.0)


def after(process: Process, seconds: float = 0.0, reaped: float = 0.0) -> Process:
    return replace(process, seconds=process.seconds + seconds, reaped=process.reaped + reaped)


# ── which processes count ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("seconds", "spent", "busy"),
    [(10.0, 1.9, False), (10.0, 2.1, True), (0.1, 0.04, False), (0.1, 0.06, True), (10.0, 0.0, False)],
)
def test_a_process_counts_above_a_fifth_of_a_core(seconds: float, spent: float, busy: bool) -> None:
    found = busy_processes({OWN: HERE, 7: IDLE}, {OWN: HERE, 7: after(IDLE, spent)}, seconds, OWN)
    assert found == ((BusyProcess("sshd", pytest.approx(spent / seconds)),) if busy else ())


def test_the_own_process_and_its_descendants_do_not_count() -> None:
    child, grandchild = Process(OWN, "worker", 6.0, 0.0), Process(101, "cc", 7.0, 0.0)
    before = {1: IDLE, OWN: HERE, 101: child}
    later = {1: IDLE, OWN: after(HERE, 9.0, 9.0), 101: after(child, 9.0), 102: after(grandchild, 9.0)}
    assert busy_processes(before, later, 10.0, OWN) == ()
    child_ended = {1: IDLE, OWN: HERE, 102: after(grandchild, 9.0)}  # after the grandchild was looked at
    assert busy_processes(before, child_ended, 10.0, OWN) == ()
    named = [one.name for one in busy_processes(before, later, 10.0, own=101)]  # the control: seen from the child
    assert named == ["pytest"]


def test_a_process_that_began_meanwhile_counts_and_one_that_ended_counts_by_its_parent() -> None:
    make, compiler = Process(1, "make", 2.0, 1.0), Process(50, "cc", 3.0, 100.0)
    new = Process(50, "ld", 20.0, 5.0)
    before = {OWN: HERE, 50: make, 51: compiler}
    later = {OWN: HERE, 50: after(make, reaped=104.0), 52: new}
    # 104 s were waited for, of which the compiler had used 100 before
    assert busy_processes(before, later, 10.0, OWN) == (BusyProcess("ld", 0.5), BusyProcess("make", 0.4))


def test_the_time_of_a_grandchild_before_is_not_counted_again_where_both_have_ended() -> None:
    """A shell waits for a script that waited for its program; of a program whose script goes on, the shell knows nothing."""
    shell, script, program = Process(1, "bash", 2.0, 1.0), Process(50, "sh", 3.0, 0.0), Process(51, "cc", 4.0, 100.0)
    before = {OWN: HERE, 50: shell, 51: script, 52: program}
    later = {OWN: HERE, 50: after(shell, reaped=104.0)}
    assert busy_processes(before, later, 10.0, OWN) == (BusyProcess("bash", 0.4),)
    goes_on = {OWN: HERE, 50: after(shell, reaped=5.0), 51: after(script, reaped=104.0)}
    assert busy_processes(before, goes_on, 10.0, OWN) == (BusyProcess("bash", 0.5), BusyProcess("sh", 0.4))
    not_waited_for = {OWN: HERE, 50: after(shell, 4.0)}
    assert busy_processes(before, not_waited_for, 10.0, OWN) == (BusyProcess("bash", 0.4),)


def test_an_id_that_was_given_again_is_another_process() -> None:
    other = Process(1, "python", 90.0, 4.0)
    assert busy_processes({7: IDLE}, {7: other}, 10.0, OWN) == (BusyProcess("python", 0.4),)


# ── where they are read ─────────────────────────────────────────────────────────────────────────────────────────────


def test_proc_is_read_whatever_a_process_is_called(tmp_path: Path) -> None:
    for pid in ("self", "12"):
        (tmp_path / pid).mkdir()
        fields = ["S", "1", *"0" * 9, "150", "50", "30", "20", *"0" * 4, "4200", "0"]
        (tmp_path / pid / "stat").write_text(f"12 (a) b ( c) {' '.join(fields)}\n")
    (tmp_path / "13").mkdir()  # ended while it was looked at
    ticks = os.sysconf("SC_CLK_TCK")
    assert processes(tmp_path) == {12: Process(1, "a) b ( c", 4200 / ticks, 200 / ticks, 50 / ticks)}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_a_real_process_that_computes_is_found() -> None:
    before = processes()
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # it has used its time, and waits
    later = processes()
    child.communicate(b"\n")
    assert before is not None
    assert later is not None
    spent = later[child.pid]
    assert spent.total >= 0.25
    assert spent.parent == os.getpid()
    assert not [one for one in busy_processes(before, later, 1.0, os.getpid()) if one.cores == spent.total]


def test_without_proc_psutil_is_asked_and_without_both_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = SimpleNamespace(user=2.0, system=1.0, children_user=0.5, children_system=0.25)
    infos = [
        {"pid": 9, "ppid": 1, "name": "mds", "create_time": 3.0, "cpu_times": times},
        {"pid": 10, "ppid": 1, "name": "hidden", "create_time": 3.0, "cpu_times": None},
    ]
    module = ModuleType("psutil")
    module.process_iter = lambda _: [SimpleNamespace(info=info) for info in infos]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "psutil", module)
    assert processes(tmp_path) == {9: Process(1, "mds", 3.0, 3.0, 0.75)}
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert processes(tmp_path) is None


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Machine:
    """Another process that computes at `cores` until `until`, on a clock that sleeping moves."""

    until: float
    cores: float = 1.0
    now: float = 0.0
    said: list[str] = field(default_factory=list)

    def read(self) -> Processes | None:
        return {OWN: HERE, 7: after(Process(1, "cc", 1.0, 0.0), self.cores * min(self.now, self.until))}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def gate(self, timeout: float) -> QuietGate:
        return QuietGate(timeout, self.said.append, self.read, lambda: self.now, self.sleep, OWN)


def test_a_quiet_machine_is_looked_at_once() -> None:
    machine = Machine(until=0.0)
    gate = machine.gate(30.0)
    gate.wait()
    gate.wait()
    assert machine.now == bench_machine.WINDOW
    assert not machine.said
    assert gate.timeout == 30.0


def test_it_waits_until_the_machine_is_quiet_and_says_so_once() -> None:
    machine = Machine(until=4.0)
    gate = machine.gate(30.0)
    gate.wait()
    assert machine.now == 4.0 + bench_machine.WINDOW
    assert machine.said == ["waiting for a quiet machine, at most 30 s: cc at 100% of a core"]
    assert gate.timeout == 26.0


def test_waiting_is_bounded_over_all_measurements() -> None:
    machine = Machine(until=1e9)
    gate = machine.gate(3.0)
    for _ in range(5):
        gate.wait()
        with gate.watch() as seen:
            machine.sleep(1.0)
        assert seen.busy == (BusyProcess("cc", 1.0),)
    assert machine.now == 3.0 + 5 * 1.0
    assert len(machine.said) == 2
    assert machine.said[1].startswith("not quiet: cc at 100% of a core; what was measured")


def test_after_a_disturbed_measurement_it_looks_again_and_after_a_quiet_one_not() -> None:
    machine = Machine(until=0.0)
    gate = machine.gate(30.0)
    gate.wait()
    with gate.watch() as seen:
        machine.sleep(1.0)
    assert seen.busy == ()
    machine.until, machine.cores = 2.0, 1.0  # computes from now on
    with gate.watch() as seen:
        machine.sleep(1.0)
    assert not gate.quiet
    before = machine.now
    gate.wait()
    assert machine.now == before + bench_machine.WINDOW


def test_no_time_to_wait_means_marking_only() -> None:
    machine = Machine(until=1e9)
    gate = machine.gate(0.0)
    gate.wait()
    assert machine.now == 0.0
    with gate.watch() as seen:
        machine.sleep(2.0)
    assert seen.busy


def test_where_processes_cannot_be_seen_it_says_so_and_marks_nothing() -> None:
    machine = Machine(until=1e9)
    gate = replace(machine.gate(30.0), read=lambda: None)
    gate.wait()
    gate.wait()
    assert len(machine.said) == 1
    assert "cannot be seen" in machine.said[0]
    with gate.watch() as seen:
        machine.sleep(2.0)
    assert seen.busy is None


def test_by_default_the_processes_of_this_machine_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Iterator[Processes] = iter([{7: IDLE}, {7: after(IDLE, 60.0)}])
    monkeypatch.setattr(bench_machine, "processes", lambda: next(calls))
    with QuietGate().watch() as seen:
        pass
    assert seen.busy is not None
    assert [one.name for one in seen.busy] == ["sshd"]
