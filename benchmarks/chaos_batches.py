"""`shoal batch` in trouble: it is started again until every line is answered."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos_troubles import (
    MOST_RUNS,
    PATIENCE,
    PLACED,
    TIMEOUT,
    Json,
    Machine,
    Outcome,
    Texts,
    Trouble,
    differences,
    ends,
    is_cut,
    texts,
    working,
)  # fmt: skip

COMMAND = (sys.executable, "-m", "shoal", "batch")
OPTIONS = (*PLACED, "--compile", "off", "--timeout", TIMEOUT)
ON_RAY = ("--ray", "--workers", "2", "--cpus", "0.5")
MOST_WORKERS = 4  # killed in a run: a line that is alone with three killed workers has an error
REFUSED = 2  # the exit code of a command that says that it cannot go on

TROUBLES = {
    "killed": Trouble(kill=1.0),
    "killed worker on Ray": Trouble(kill=1.0, victims="ray"),
    "full disk": Trouble(room=6000),
    "slow disk": Trouble(slow=True),
    "clock jumps": Trouble(clocks=True),
    "everything": Trouble(kill=0.6, room=6000, slow=True, clocks=True),
}


def peace(asked: Path, folder: Path) -> list[Json]:
    """The answers of a run without trouble."""
    answers, machine = folder / "peace" / "answers.jsonl", Machine(Trouble(), folder / "peace")
    if start(machine, Trouble(), asked, answers).wait(PATIENCE):
        raise SystemExit("the run in peace failed")
    return read(answers)


def tried(
    trouble: Trouble, asked: Path, folder: Path, expected: Texts, chance: random.Random, planted: str = "",
    command: Sequence[str] = COMMAND,
) -> Outcome:  # fmt: skip
    """Runs batches until one ends well."""
    seen, began, code = Outcome(), time.perf_counter(), -1
    machine, answers = Machine(trouble, folder, planted), folder / "answers.jsonl"
    while code != 0:
        if seen.runs == MOST_RUNS:
            seen.faults.append(f"not ended after {MOST_RUNS} runs")
            break
        process = start(machine, trouble, asked, answers, command)
        seen.runs += 1
        if trouble.victims == "ray":
            seen.killed += kill_workers(process, chance)
        elif chance.random() < trouble.kill:
            seen.killed += killed_at_work(process, answers, chance)
        try:
            said = process.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            seen.faults.append("a run hangs")
            break
        code = process.returncode
        if code not in (0, -signal.SIGKILL):
            seen.refused += 1
            if "Traceback" in said:
                seen.faults.append(f"a run ended with a traceback: {said[-300:]}")
            if code == REFUSED or trouble.victims == "ray":
                seen.faults.append(f"a run could not go on: {said[-300:]}")
                break
    found = read(answers)
    seen.faults += compared(found, expected) + machine.faults()
    seen.met, seen.cut = machine.met, sum(is_cut(ends(entry)) for entry in found)
    if trouble.room is not None and not seen.refused:
        seen.faults.append("no run met the end of the disk")
    if trouble.kill == 1 and not seen.killed:  # in `everything` the disk may be faster
        seen.faults.append("nothing was killed")
    seen.seconds = time.perf_counter() - began
    return seen


def start(
    machine: Machine, trouble: Trouble, asked: Path, answers: Path, command: Sequence[str] = COMMAND
) -> subprocess.Popen[str]:  # fmt: skip
    """A run, under way."""
    arguments = [*command, str(asked), str(answers), *OPTIONS, *(ON_RAY if trouble.victims == "ray" else ())]
    return machine.start(arguments, answers, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def killed_at_work(process: subprocess.Popen[str], answers: Path, chance: random.Random) -> bool:
    """Kills a run a moment after its file has grown, also in the middle of a line; whether it still ran."""
    before = answers.stat().st_size if answers.exists() else 0
    until = time.perf_counter() + PATIENCE
    while process.poll() is None and time.perf_counter() < until:
        if answers.exists() and answers.stat().st_size > before:
            time.sleep(chance.uniform(0, 0.3))
            break
        time.sleep(0.001)
    ran = process.poll() is None
    process.kill()
    return ran


def kill_workers(process: subprocess.Popen[str], chance: random.Random) -> int:
    """Kills workers while they answer lines, and returns how many."""
    killed, until = 0, time.perf_counter() + PATIENCE
    while process.poll() is None and killed < MOST_WORKERS and time.perf_counter() < until:
        time.sleep(chance.uniform(0, 0.4))
        at_work = working(process.pid, "ray::Answerer.answer")
        if at_work:
            chance.choice(at_work).kill()
            killed += 1
            time.sleep(1)  # until the other one may have a new block
    return killed


def read(answers: Path) -> list[Json]:
    return [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()] if answers.exists() else []


def compared(found: Sequence[Json], expected: Texts) -> list[str]:
    """What is wrong with the answers of a file: one for each line, and no others."""
    many = Counter(entry["id"] for entry in found)
    faults = [f"line {i} has {many[i]} answers" for i in {*expected, *many} if many[i] != (i in expected)]
    for entry in found:
        faults += differences(f"line {entry['id']}", texts(entry), ends(entry), expected.get(entry["id"], ()))
    return faults
