"""What is lost or doubled when processes are killed, disks are full or slow, and clocks jump: nothing, or the exit code is 1.

    python benchmarks/chaos.py                # 40 requests of the bundled pair, once in peace and once under each trouble
    python benchmarks/chaos.py --json FILE

Under each trouble `shoal batch` is started again until every line is answered; there must be one answer for each, with the texts
of the run in peace, and no other line in the file. `killed`: SIGKILL soon after some answer; `full disk`: the file cannot grow
beyond a size (RLIMIT_FSIZE) that is raised from run to run, and each run must end by itself with an error; `slow disk`: every fsync
takes a while; `clock jumps`: `time.time` leaps by up to an hour at every call; `everything`: all of them. `served`: `shoal serve`
is killed while it answers, and what its clients got whole must be those texts, too.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import torch
import typer
from rich.console import Console
from rich.table import Table

import command
from shoal.bench.machine import machine
from shoal.bench.provenance import require_place, write_results

Json = dict[str, Any]
Texts = dict[int, list[str]]
PLACED = ("--dtype", "float32", "--quantize", "off")  # decided here, not by measurement: all runs must be the same
PROMPTS = ("def is_even(n):\n", "def add(a, b):\n", "class Stack:\n", "import math\n\n\ndef area(radius):\n")
SLOW_DISK = "import os, time\nright = os.fsync\nos.fsync = lambda file: (time.sleep(0.2), right(file))[1]\n"
CLOCK = "import random, time\nright_time = time.time\ntime.time = lambda: right_time() + random.uniform(-3600, 3600)\n"
MOST_RUNS = 200
PATIENCE = 300.0  # seconds that a run may take until it is a hang


@dataclass(frozen=True)
class Trouble:
    """What a run of `shoal batch` meets.

    Attributes:
        kill: the chance that a run gets SIGKILL after new answers. room: bytes by which the file may grow in a run; None = no
            limit. patch: a program that every Python of the run begins with.
    """

    kill: float = 0.0
    room: int | None = None
    patch: str = ""


TROUBLES = {
    "killed": Trouble(kill=1.0),
    "full disk": Trouble(room=6000),
    "slow disk": Trouble(patch=SLOW_DISK),
    "clock jumps": Trouble(patch=CLOCK),
    "everything": Trouble(kill=0.6, room=6000, patch=SLOW_DISK + CLOCK),
}


@dataclass(frozen=True)
class Outcome:
    """Of a trouble. runs: processes started; killed, refused: of these. faults: what must not be."""

    runs: int
    killed: int
    refused: int
    seconds: float
    faults: Sequence[str]


def lines(count: int) -> list[Json]:
    """Greedy and seeded requests."""
    chosen: list[Json] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
    return [
        {"id": i, "prompt": f"# {i}\n{PROMPTS[i % len(PROMPTS)]}", "n": 1 + i % 3, "max_tokens": 24, **chosen[i % 2]}
        for i in range(count)
    ]


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def under(trouble: Trouble, asked: Path, answers: Path, expected: Texts, chance: random.Random) -> Outcome:
    """Runs batches until one ends well."""
    started, codes, killed = time.perf_counter(), list[int](), 0
    faults: list[str] = []
    while not codes or codes[-1] != 0:
        if len(codes) == MOST_RUNS:
            faults.append(f"not ended after {MOST_RUNS} runs")
            break
        process = batch(trouble, asked, answers)
        if chance.random() < trouble.kill:
            killed += killed_at_work(process, answers, chance)
        code, said = process.wait(PATIENCE), process.stderr.read() if process.stderr else ""
        if code not in (0, -signal.SIGKILL) and "Traceback" in said:
            faults.append(f"a run ended with a traceback: {said[-300:]}")
        codes.append(code)
    faults += compared(answers, expected)
    refused = sum(code not in (0, -signal.SIGKILL) for code in codes)
    if trouble.room is not None and not refused:
        faults.append("no run met the end of the disk")
    return Outcome(len(codes), killed, refused, time.perf_counter() - started, faults)


def batch(trouble: Trouble, asked: Path, answers: Path) -> subprocess.Popen[str]:
    """A run, under way."""
    environment = dict(os.environ)
    if trouble.patch:
        patches = answers.parent / "patches"
        patches.mkdir(exist_ok=True)
        (patches / "sitecustomize.py").write_text(trouble.patch)
        environment["PYTHONPATH"] = os.pathsep.join([str(patches), environment.get("PYTHONPATH", "")])
    limit: Callable[[], None] | None = None
    if trouble.room is not None:
        most = (answers.stat().st_size if answers.exists() else 0) + trouble.room

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes then fail, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    arguments = [sys.executable, "-m", "shoal", "batch", str(asked), str(answers), *PLACED, "--compile", "off"]
    return subprocess.Popen(
        arguments, env=environment, preexec_fn=limit, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


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


def compared(answers: Path, expected: Texts) -> list[str]:
    """What is wrong with the answers of a file."""
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    ids = [entry["id"] for entry in found]
    faults = [f"line {i} has {ids.count(i)} answers" for i in {*expected, *ids} if ids.count(i) != 1]
    return faults + [
        f"line {entry['id']}: {texts(entry)!r} is not {expected[entry['id']]!r}"
        for entry in found
        if texts(entry) != expected[entry["id"]]
    ]


def texts(answer: Json) -> list[str]:
    return [choice["text"] for choice in answer.get("choices", ())] or [str(answer)]


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────────────


def served(asked: Sequence[Json], expected: Texts, chance: random.Random) -> Outcome:
    """Clients ask a server that is killed after every few answers and started again, and ask again what they did not get whole."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started, runs, killed, faults = time.perf_counter(), 0, 0, list[str]()
    waiting = list(asked)
    while waiting and runs < MOST_RUNS:
        arguments = [sys.executable, "-m", "shoal", "serve", "--port", str(port), *PLACED, "--compile", "off"]
        process = subprocess.Popen(
            [*arguments, "--log-level", "error"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        runs += 1
        try:
            ready(port, process)
            for request in waiting[: chance.randint(3, 8)]:
                found = answer(port, request)
                waiting.remove(request)
                if found != expected[request["id"]]:
                    faults.append(f"request {request['id']}: {found!r} is not {expected[request['id']]!r}")
            if waiting:
                killed += cut_off(port, waiting[0], expected[waiting[0]["id"]], process, faults, chance)
        finally:
            process.kill()
            process.wait()
    faults += [f"request {request['id']} has no answer" for request in waiting]
    return Outcome(runs, killed, 0, time.perf_counter() - started, faults)


def ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until the server answers."""
    until = time.perf_counter() + PATIENCE
    while time.perf_counter() < until and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def answer(port: int, request: Json) -> list[str]:
    body = {name: value for name, value in request.items() if name != "id"}
    return texts(httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE).json())


def cut_off(
    port: int, request: Json, expected: Sequence[str], process: subprocess.Popen[bytes], faults: list[str], chance: random.Random
) -> bool:  # fmt: skip
    """Kills the server while it streams; what its client has read must begin the texts, and must not look whole."""
    body = {name: value for name, value in request.items() if name != "id"}
    read, ended, cut = [""] * body["n"], False, chance.randint(1, 6)
    try:
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=PATIENCE) as response:
            for number, line in enumerate(response.iter_lines()):
                if number == cut:
                    process.kill()
                ended = ended or line == "data: [DONE]"
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    read[choice["index"]] += choice["text"]
    except httpx.TransportError:
        pass
    if ended and read != list(expected):
        faults.append(f"request {request['id']}: a stream ended whole with {read!r}, not {expected!r}")
    if not all(whole.startswith(part) for whole, part in zip(expected, read, strict=True)):
        faults.append(f"request {request['id']}: a stream had {read!r}, and the texts are {expected!r}")
    return not ended


# ── the run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(
    requests: Annotated[int, typer.Option(min=4)] = 40,
    seed: Annotated[int, typer.Option(help="of the moments at which processes are killed")] = 0,
    to: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Prints a table."""
    require_place(to)
    console, chance, asked = Console(width=120), random.Random(seed), lines(requests)
    found: dict[str, Outcome] = {}
    with TemporaryDirectory() as folder:
        source, peace = Path(folder, "requests.jsonl"), Path(folder, "peace.jsonl")
        source.write_text("".join(json.dumps(line) + "\n" for line in asked))
        if batch(Trouble(), source, peace).wait(PATIENCE):
            raise SystemExit("the run in peace failed")
        expected = {entry["id"]: texts(entry) for entry in map(json.loads, peace.read_text().splitlines())}
        for name, trouble in TROUBLES.items():
            console.print(f"{name} ...")
            answers = Path(folder, name.replace(" ", "-"), "answers.jsonl")
            answers.parent.mkdir()
            found[name] = under(trouble, source, answers, expected, chance)
        console.print("served ...")
        found["served"] = served(asked, expected, chance)
    table = Table("trouble", "runs", "killed at work", "ended by an error", "seconds", "lost, doubled or other")
    for name, outcome in found.items():
        counts = map(str, (outcome.runs, outcome.killed, outcome.refused, round(outcome.seconds)))
        table.add_row(name, *counts, "\n".join(outcome.faults) or "nothing")
    console.print(table)
    if to is not None:
        figures = {name: asdict(outcome) for name, outcome in found.items()}
        write_results(to, {"machine": machine(torch.device("cpu")), "requests": requests, "seed": seed, "troubles": figures})
    if any(outcome.faults for outcome in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    command.run(main)
