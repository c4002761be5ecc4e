"""`shoal serve` in trouble: clients ask until each request has one whole answer, and ask again what was broken off."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

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

OPTIONS = (*PLACED, "--compile", "off", "--timeout", TIMEOUT, "--log-format", "json")
ON_RAY = ("--ray", "--replicas", "2", "--cpus", "0.5")
CLIENTS = 4
PATH = "/v1/completions"
MOST_TIMES = 200  # that a request is asked
MOST_REPLICAS = 3  # killed in a run

TROUBLES = {
    "killed": Trouble(kill=1.0),
    "killed replica on Ray": Trouble(kill=1.0, victims="ray"),
    "full disk": Trouble(room=4000),
    "slow disk": Trouble(slow=True),
    "clock jumps": Trouble(clocks=True),
    "everything": Trouble(kill=0.6, room=4000, slow=True, clocks=True),
}


@dataclass
class Asked:
    """What clients share.

    Attributes:
        waiting: requests that have no whole answer. answers: how many each has. times: how often each was asked.
        life: answers of the server's process that runs, by how many texts they have. most: of these in a life.
        ends: what ended the texts of each answer.
    """

    waiting: deque[Json]
    expected: Texts
    most: int
    answers: Counter[int] = field(default_factory=Counter)
    times: Counter[int] = field(default_factory=Counter)
    life: list[int] = field(default_factory=list)
    ends: list[list[str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.expected)


def tried(
    trouble: Trouble, asked: Sequence[Json], folder: Path, expected: Texts, chance: random.Random, planted: str = ""
) -> Outcome:
    """Runs servers until all requests are answered."""
    seen, began = Outcome(), time.perf_counter()
    machine, shared = Machine(trouble, folder, planted), Asked(deque(asked), expected, len(asked))
    if trouble.room is not None:
        shared.most = (len(asked) + 1) // 2  # so that a server also starts on a full disk
        machine.environment["XDG_CACHE_HOME"] = str(machine.folder / "cache")
    while not shared.done and seen.runs < MOST_RUNS and not shared.over.is_set():
        seen.runs += 1
        live(trouble, machine, shared, seen, chance)
    log = machine.folder / "log"
    seen.faults += shared.faults + logged(log.read_text(errors="replace", encoding="utf-8"), trouble.room is None)
    seen.faults += [f"request {i} has {shared.answers[i]} answers" for i in expected if shared.answers[i] != 1]
    seen.faults += machine.faults()
    seen.met, seen.again = machine.met, shared.times.total() - len(shared.answers)
    seen.cut = sum(map(is_cut, shared.ends))
    if trouble.kill == 1 and not seen.killed:
        seen.faults.append("nothing was killed")
    if trouble.room is not None and log.stat().st_size < trouble.room:
        seen.faults.append("the log did not meet the end of the disk")
    seen.seconds = time.perf_counter() - began
    return seen


def live(trouble: Trouble, machine: Machine, shared: Asked, seen: Outcome, chance: random.Random) -> None:
    """One process of the server, from its start to its end."""
    port = free_port()
    process = start(trouble, machine, port)
    shared.life, kills = [], 0
    try:
        if not ready(port, process):
            shared.faults.append(f"the server did not start: {process.poll()}")
            shared.over.set()
            return
        most = 0 if chance.random() >= trouble.kill else 1 if trouble.victims == "process" else MOST_REPLICAS
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, f"http://127.0.0.1:{port}", process, shared) for _ in range(CLIENTS)]
            while kills < most and killed_at_work(trouble, process, shared, clients, chance):
                kills += 1
            for one in clients:
                one.result()
        seen.killed += kills
        if not kills:
            shared.faults += counted(f"http://127.0.0.1:{port}/metrics", shared.life)
        end(process, kills > 0 and trouble.victims == "process", trouble, seen)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def end(process: subprocess.Popen[str], killed: bool, trouble: Trouble, seen: Outcome) -> None:
    """Ends a server by SIGTERM; its exit code is not 0 where its last words had no place on the disk."""
    if not killed:
        process.send_signal(signal.SIGTERM)
    code = process.wait(PATIENCE)
    seen.refused += code not in (0, -signal.SIGKILL)
    if not killed and code != 0 and trouble.room is None:
        seen.faults.append(f"the server ended with {code}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(trouble: Trouble, machine: Machine, port: int) -> subprocess.Popen[str]:
    """A server that keeps its log and earlier answers in the machine's folder."""
    log = machine.folder / "log"
    arguments = [sys.executable, "-m", "shoal", "serve", "--port", str(port), *OPTIONS]
    arguments += ["--draft", f"suffix:answers={machine.folder / 'answers'}", *(ON_RAY if trouble.victims == "ray" else ())]
    with log.open("a", encoding="utf-8") as stderr:
        return machine.start(arguments, machine.folder / "none", stdout=subprocess.DEVNULL, stderr=stderr)


def ready(port: int, process: subprocess.Popen[str]) -> bool:
    """Waits until the server answers; whether it does."""
    until = time.perf_counter() + PATIENCE
    while time.perf_counter() < until and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    return False


def killed_at_work(
    trouble: Trouble, process: subprocess.Popen[str], shared: Asked, clients: Sequence[Future[None]], chance: random.Random
) -> bool:  # fmt: skip
    """Kills a moment after some answers, whatever is under way then. False: all was answered before."""
    enough = len(shared.life) + chance.randint(3, 8)
    while len(shared.life) < enough and not all(one.done() for one in clients):
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.3))
    victims = [process] if trouble.victims == "process" else working(process.pid, "ray::ServeReplica")
    if all(one.done() for one in clients) or not victims:
        return False
    chance.choice(victims).kill()
    return True


# ── clients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def client(url: str, process: subprocess.Popen[str], shared: Asked) -> None:
    """Asks one request after the other on a connection that it keeps, until none waits or the server is gone."""
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        while shared.waiting and process.poll() is None and len(shared.life) < shared.most:
            try:
                request = shared.waiting.popleft()
            except IndexError:
                return
            i = request["id"]
            shared.times[i] += 1
            if shared.times[i] > MOST_TIMES:
                shared.over.set()
                shared.faults.append(f"request {i} was asked {MOST_TIMES} times")
                return
            found = ask(http, request, f"{i}-{shared.times[i]}")
            shared.faults += found.faults(f"request {i}", shared.expected[i])
            if found.whole:
                shared.answers[i] += 1
                shared.life.append(len(found.texts))
                shared.ends.append(found.ended)
            else:
                shared.waiting.append(request)
                time.sleep(0.2)


@dataclass
class Found:
    """What a client has of an answer.

    Attributes:
        whole: it came to its end. finished: how often each text of a stream was said to have ended.
    """

    texts: list[str]
    ended: list[str] = field(default_factory=list)
    whole: bool = False
    finished: list[int] | None = None

    def faults(self, what: str, expected: Sequence[str]) -> list[str]:
        """A whole answer is the expected one; the texts of a broken one begin it."""
        if self.whole:
            twice = (
                [] if self.finished in (None, [1] * len(expected)) else [f"{what}: its texts ended {self.finished} times"]
            )
            return differences(what, self.texts, self.ended, expected) + twice
        pairs = zip(self.texts, expected, strict=True)
        return [f"{what} had {text!r}, and the text is {right!r}" for text, right in pairs if not right.startswith(text)]


def ask(http: httpx.Client, request: Json, key: str) -> Found:
    """An answer as a whole, or as a stream."""
    body = {name: value for name, value in request.items() if name != "id"}
    found = Found([""] * body["n"])
    headers = {"x-request-id": key}
    try:
        if request["id"] % 4 < 2:
            response = http.post(PATH, json=body, headers=headers)
            if response.status_code >= 500:  # said, so asked again
                return found
            return Found(texts(response.json()), ends(response.json()), True)
        more = {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", PATH, json={**body, **more}, headers=headers) as response:
            if response.status_code < 500:
                streamed(response.iter_lines(), found)
    except httpx.TransportError:
        pass
    return found


def streamed(lines: Iterable[str], found: Found) -> None:
    """Reads events."""
    found.finished = [0] * len(found.texts)
    for line in lines:
        found.whole = found.whole or line == "data: [DONE]"
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        found.ended = ends(event) or found.ended
        for choice in event.get("choices", ()):
            found.texts[choice["index"]] += choice["text"]
            found.finished[choice["index"]] += choice["finish_reason"] is not None


# ── what the server says of itself ──────────────────────────────────────────────────────────────────────────────────


def logged(log: str, whole: bool) -> list[str]:
    """No request may have two lines. whole: the disk took all lines, so that each is an object, but for one that a kill tore."""
    many: Counter[str] = Counter()
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, Mapping) and entry.get("path") == PATH:
            many[entry["request_id"]] += 1
    faults = [f"the log has request {key} {times} times" for key, times in many.items() if times > 1]
    return faults if many or not whole else ["the log has no request"]


def counted(url: str, life: Sequence[int]) -> list[str]:
    """The server's counts against the answers that clients have of it; it may count a moment after it has answered."""
    known, found, until = (len(life), sum(life)), (0, 0), time.perf_counter() + 5
    while found != known and time.perf_counter() < until:
        found = counts(httpx.get(url, timeout=PATIENCE).text)
    return [] if found == known else [f"the server counts {found} answers and texts, its clients {known}"]


def counts(metrics: str) -> tuple[int, int]:
    """Answers and texts as /metrics has them; of all replicas, if there are some."""
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    answers = [one.value for one in samples if one.name == "shoal_requests_total" and one.labels["path"] == PATH]
    return int(sum(answers)), int(sum(one.value for one in samples if one.name == "shoal_rows_total"))
