"""A server under load: many clients at once, of all kinds, against the bundled pair on this machine.

    python benchmarks/load.py --minutes 5            # 64 clients; in turns with speculation and without
    python benchmarks/load.py --minutes 5 --json FILE
    python benchmarks/load.py --soak 20000           # so many requests, of the kinds that leave things behind as well
    python benchmarks/load.py --soak 20000 --planted 4096    # with a leak of so many bytes a request, which must be seen

It starts `shoal serve` on a free loopback port and ends it. Exit code 1 if any request fails; if a greedy or seeded answer is not
what `generate` gives offline; if a text does not fit its grammar or holds a stop string; if rows are left in the server when all
clients are gone; if the server's memory, less what it says that its caches take, grows in the second half of a run of two minutes
or more; if SIGTERM does not end it. A soak adds schemas that are each new, chats, prompts that come back scored, bodies that are
refused and samples whose time is over at once. It is judged by the KiB that a request leaves behind in its second half: the
bytes in use are read between its turns (`held_memory.py`), and the lower bound of their slope must not be above 1 KiB.
Times to the first token and per token are those of streams that were read to their end, as their client saw them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

import shoal
from held_memory import Reading, growth
from provenance import place_of_results, write_results
from shoal.bench.machine import machine

Json = dict[str, Any]
PROMPTS = (
    "def is_even(n):\n", "def add(a, b):\n", "import math\n\n\ndef area(radius):\n", "class Stack:\n    def __init__(self):\n",
    "# The sum of a list.\ndef total(numbers):\n", "def reverse(text):\n    \"\"\"Return text backwards.\"\"\"\n",
)  # fmt: skip
LONG = "".join(f"def step_{i}(value):\n    return value + {i}\n\n\n" for i in range(40)) + "def step_40(value):\n"
REGEX = r"[a-z]{2,8}(, [a-z]{2,8}){0,3}"
SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["a", "b"]}, "even": {"type": "boolean"}}, "required": ["name", "even"],
    "additionalProperties": False,
}  # fmt: skip
PLACED = {"dtype": "float32", "quantize": "off"}  # decided here, not by measurement: both sides must be the same
PHASES = ("auto", "off")
TURNS = 4  # of each phase in a long run, so that both meet the same machine
SOAK_TURNS = 20  # of each phase in a soak: what is held is read between two
TURN = 30.0  # seconds that a turn lasts at least
WARM = 5.0  # seconds of each phase at most, before any is measured: the first also grows caches and learns what rounds cost
PATIENCE = 600  # seconds until an answer is a hang
LEVEL = 0.05  # of the server's memory, by which it may grow outside its caches from the second quarter to the last
LONG_ENOUGH = 120  # seconds from which memory is judged
ENOUGH = 10_000  # requests of a soak from which memory is judged by the request: caches are full by its middle
LEFT_KIB = 1.0  # that a request of a soak may leave behind


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        texts: what must come back; None = not known before. fits: what each choice must do, by its text and `ended_by`.
        leave: go away after so many events. path, status: where it goes, and how it is answered.
    """

    kind: str
    body: Json
    texts: tuple[str, ...] | None = None
    fits: Callable[[str, str], bool] = lambda text, ended_by: True
    leave: int | None = None
    path: str = "/v1/completions"
    status: int = 200


@dataclass
class Seen:
    """What clients saw in one phase."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def document(self) -> Json:
        """Counts, and times in milliseconds."""
        return {
            "requests": dict(self.kinds), "failures": self.failures, "seconds": self.seconds, "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds, "streams": len(self.first),
            "first_token_ms": percentiles(self.first), "per_token_ms": percentiles(self.between),
        }  # fmt: skip


def percentiles(seconds: list[float]) -> Json | None:
    """p50 and p95 in milliseconds; None of fewer than two."""
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50": 1000 * cuts[9], "p95": 1000 * cuts[18]}


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────────────


def known_asks() -> list[Ask]:
    """Greedy and seeded requests, with what the library gives for them offline."""
    pair, asks = shoal.load(**PLACED), []
    for place, prompt in enumerate(PROMPTS):
        limits = {"max_tokens": 16 + 16 * place, "stop": ["\n\n", "else"] if place % 2 else []}
        for kind, n, chosen in (
            ("greedy", 1 + place % 3, {"temperature": 0}),
            ("seeded", 4, {"temperature": 0.8, "seed": place}),
        ):
            options = {**chosen, "max_new_tokens": limits["max_tokens"], "stop": limits["stop"]}
            samples = pair.generate(prompt, n, lookahead="off", rule="coupled", **options)[0].samples
            body = {"prompt": prompt, "n": n, **chosen, **limits}
            asks.append(Ask(kind, body, tuple(sample.text for sample in samples)))
    return asks


def asks(known: list[Ask], chance: random.Random, soak: bool = False) -> Iterator[Ask]:
    """What one client asks, without end."""
    complete = ("eos", "stop")
    while True:
        prompt = chance.choice(PROMPTS)
        told = chance.choice(known)
        stop = chance.choice(["return", "\n    ", "n"])
        sampled = {"prompt": prompt, "n": chance.randint(1, 4), "max_tokens": chance.randint(1, 96), "top_p": 0.95}
        yield chance.choice([
            told,
            Ask(f"{told.kind} stream", {**told.body, "stream": True}, told.texts),
            Ask("stream", {**sampled, "stream": True, "min_p": 0.02}),
            Ask("cancel", {**sampled, "max_tokens": 512, "stream": True}, leave=chance.randint(1, 6)),
            Ask("stop", {**sampled, "stop": [stop]}, fits=lambda text, ended_by, stop=stop: stop not in text),
            Ask("best_of", {**sampled, "n": 1, "best_of": 4, "logprobs": 2}),
            Ask("long", {**sampled, "prompt": LONG, "repetition_penalty": 1.1}),
            Ask(
                "regex", {**sampled, "grammar": {"type": "regex", "text": REGEX}},
                fits=lambda text, ended_by: ended_by not in complete or bool(re.fullmatch(REGEX, text)),
            ),
            Ask(
                "schema", {**sampled, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
                fits=lambda text, ended_by: ended_by not in complete or set(json.loads(text)) == {"name", "even"},
            ),
            *(odd_asks(prompt, sampled, chance) if soak else ()),
        ])  # fmt: skip


def odd_asks(prompt: str, sampled: Json, chance: random.Random) -> list[Ask]:
    """What a soak asks beside: whatever may leave something behind in a server."""
    name = f"key_{chance.getrandbits(64):x}"
    schema = {"type": "object", "properties": {name: {"type": "integer"}, "kind": {"enum": [name, "b"]}}, "required": [name]}
    said = [{"role": "user", "content": f"{prompt}{name}"}] * chance.randint(1, 3)
    wrong = chance.choice(
        [{"prompt": 7}, {"temperature": -1}, {name: 1}, {"guided_regex": "("}, {"guided_json": {"type": name}}]
    )
    return [
        Ask("new schema", {**sampled, "n": 1, "guided_json": schema}),
        Ask("chat", {"messages": said, "n": sampled["n"], "max_tokens": sampled["max_tokens"]}, path="/v1/chat/completions"),
        Ask("echo", {**sampled, "prompt": f"{prompt}{name}", "n": 1, "max_tokens": 0, "echo": True, "logprobs": 1}),
        Ask("no time", {**sampled, "time_budget": 0.001}),
        Ask("bad", {**sampled, **wrong}, status=400),
    ]


# ── clients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def client(
    http: httpx.AsyncClient, asking: Iterator[Ask], speculation: str, until: float, seen: Seen, most: Iterator[int]
) -> None:
    """Asks one thing after the other, while `most` has numbers; whatever goes wrong is a failure, and it goes on."""
    for ask in asking:
        if time.perf_counter() > until or next(most, None) is None:
            return
        seen.kinds[ask.kind] += 1
        body = {**ask.body, "speculation": speculation}
        try:
            found = await (streamed(http, body, ask.leave, seen) if ask.body.get("stream") else whole(http, ask, body, seen))
        except Exception as error:
            seen.failures.append(f"{ask.kind}: {type(error).__name__}: {error}")
            continue
        texts = tuple(text for text, _ in found)
        if ask.texts not in (None, texts):
            seen.failures.append(f"{ask.kind}: offline it is {ask.texts!r}, served {texts!r}")
        if not all(ask.fits(*one) for one in found):
            seen.failures.append(f"{ask.kind}: {found!r} does not fit")


async def whole(http: httpx.AsyncClient, ask: Ask, body: Json, seen: Seen) -> list[tuple[str, str]]:
    """Texts and endings of an answer; nothing of one that refuses."""
    response = await http.post(ask.path, json=body)
    if response.status_code != ask.status:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    if ask.status != 200:
        return []
    answer = response.json()
    seen.tokens += answer["usage"]["completion_tokens"]
    ends = [took["ended_by"] for took in answer["usage"]["choices"]]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    return list(zip(texts, ends, strict=True))


async def streamed(http: httpx.AsyncClient, body: Json, leave: int | None, seen: Seen) -> list[tuple[str, str]]:
    """The same of a stream; nothing of one that is left."""
    body |= {"stream_options": {"include_usage": True}, "shoal": {"details": True}}
    texts, ends = [""] * body["n"], [""] * body["n"]
    clocks: list[list[tuple[float, int]]] = [[] for _ in texts]
    asked = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for number, event in numbered(events(response)):
            if number == leave:
                return []
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                clocks[choice["index"]].append((time.perf_counter(), choice["shoal"]["committed"]))
            for took in (event["usage"] or {}).get("choices", ()):
                ends[took["index"]] = took["ended_by"]
                seen.tokens += took["completion_tokens"]
    if not all(ends):
        raise RuntimeError("the stream ended without its usage")
    seen.first.append(min(clock[0][0] for clock in clocks) - asked)
    for (start, before), (end, after) in ((clock[0], clock[-1]) for clock in clocks):
        if after > before:
            seen.between.append((end - start) / (after - before))
    return list(zip(texts, ends, strict=True))


async def events(response: httpx.Response) -> AsyncIterator[Json]:
    """The objects of a stream, which must end as streams do."""
    line = ""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            yield event
        elif line == "data: [DONE]":
            return
    raise RuntimeError("the stream broke off")


async def numbered(items: AsyncIterator[Json]) -> AsyncIterator[tuple[int, Json]]:
    """Items with their numbers, from 0."""
    number = 0
    async for item in items:
        yield number, item
        number += 1


# ── the server ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def server(options: list[str], leak: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and process; SIGTERM must end it. With `leak`, which may be 0, it tells what it holds."""
    flags = [part for name, value in PLACED.items() for part in (f"--{name}", value)]
    program = ["-m", "shoal"] if leak is None else [str(Path(__file__).with_name("held_memory.py")), str(leak)]
    command = [sys.executable, *program, "serve", "--port", "0", "--json", "--log-level", "warning", *flags, *options]
    own, pipe = {} if leak is None else {"PYTHONMALLOC": "malloc"}, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=os.environ | own) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            if not told:
                raise SystemExit("the server did not start")
            yield json.loads(told)["url"].removesuffix("/v1"), process
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def resident(process: int) -> int | None:
    """Bytes of memory; None where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


async def watch(http: httpx.AsyncClient, process: int, sizes: list[tuple[int, int, int]], asked: Callable[[], int]) -> None:
    """Notes now and then how much memory the server has, how much of it caches take, which grow up to their bounds, and how
    many requests there have been."""
    while True:
        with suppress(httpx.HTTPError, KeyError):
            told = await figures(http)
            size = resident(process)
            if size is not None:
                sizes.append((size, int(told["shoal_kv_bytes"] + told["shoal_prefix_bytes"]), asked()))
        await asyncio.sleep(2)


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    """What /metrics says, by name with labels."""
    lines = [line.rsplit(" ", 1) for line in (await http.get("/metrics")).text.splitlines() if line.startswith("shoal_")]
    return {name: float(value) for name, value in lines}


async def settled(http: httpx.AsyncClient) -> float:
    """Waits until no rows are left in the server, 10 seconds at most: the last cancellations may be a round away."""
    left = await rows(http)
    for _ in range(100):
        if left <= 0:
            break
        await asyncio.sleep(0.1)
        left = await rows(http)
    return left


async def read(http: httpx.AsyncClient, process: subprocess.Popen[str], requests: int) -> Reading:
    """Reads what the server holds while no row is in it."""
    await settled(http)
    assert process.stdin is not None
    assert process.stdout is not None
    told = await figures(http)
    process.stdin.write("\n")
    process.stdin.flush()
    held = json.loads(await asyncio.to_thread(process.stdout.readline))
    return Reading(requests, held["bytes"] - int(told["shoal_kv_bytes"] + told["shoal_prefix_bytes"]), held["types"])


async def rows(http: httpx.AsyncClient) -> float:
    """How many the server says it has, running and waiting; -1 if its engine is gone."""
    told = await figures(http)
    return told["shoal_rows_running"] + told["shoal_rows_waiting"] if told["shoal_up"] else -1.0


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def load(
    url: str, process: subprocess.Popen[str], known: list[Ask], seconds: float, clients: int, seed: int, soak: int = 0
) -> Json:
    """Both phases in turns, or the requests of a soak; what was seen and what was left."""
    sizes: list[tuple[int, int, int]] = []
    readings: list[Reading] = []
    limits = httpx.Limits(max_connections=clients + 1)
    found: Json = {"clients": clients}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:
        chances = {phase: [random.Random(f"{seed} {number}") for number in range(clients)] for phase in PHASES}
        each = {phase: [asks(known, chance, bool(soak)) for chance in own] for phase, own in chances.items()}
        seen, early = {phase: Seen() for phase in PHASES}, Seen()
        counted = (early, *seen.values())

        def asked() -> int:
            return sum(one.kinds.total() for one in counted)

        watcher = asyncio.create_task(watch(http, process.pid, sizes, asked))

        async def turn_of(phase: str, lasts: float, into: Seen, most: Iterator[int]) -> None:
            started = time.perf_counter()
            await asyncio.gather(*(client(http, asking, phase, started + lasts, into, most) for asking in each[phase]))
            into.seconds += time.perf_counter() - started

        for phase in PHASES:
            await turn_of(phase, min(WARM, seconds / 10), early, itertools.count())
        turns = max(1, min(TURNS, int(seconds / len(PHASES) / TURN)))
        if soak:  # two requests of a client in a turn at the least
            turns = max(1, min(SOAK_TURNS, soak // (2 * clients * len(PHASES))))
        for turn in range(turns):
            for phase in PHASES if turn % 2 == 0 else PHASES[::-1]:
                most = iter(range(soak // len(PHASES) // turns)) if soak else itertools.count()
                await turn_of(phase, math.inf if soak else seconds / len(PHASES) / turns, seen[phase], most)
                if soak:
                    readings.append(await read(http, process, asked()))
        found["phases"] = {phase: seen[phase].document() for phase in PHASES}
        found["warm_up"] = {"requests": dict(early.kinds), "failures": early.failures}
        watcher.cancel()
        found["rows_left"] = await settled(http)
    found["memory"], found["growth"] = memory(sizes), growth(readings)
    return found


def memory(sizes: list[tuple[int, int, int]]) -> Json | None:
    """The server's resident memory, in MiB, as medians of the quarters of the run: all of it, and without its caches."""
    if len(sizes) < 4:
        return None
    quarters = [sizes[len(sizes) * i // 4 : len(sizes) * (i + 1) // 4] for i in range(4)]

    def medians(of: Callable[[int, int, int], int]) -> list[float]:
        return [statistics.median(of(*size) for size in part) for part in quarters]

    return {
        "quarters_mib": [round(size / 2**20) for size in medians(lambda *size: size[0])],
        "without_caches_mib": [round(size / 2**20) for size in medians(lambda all_, caches, _: all_ - caches)],
        "requests": [round(number) for number in medians(lambda *size: size[2])],
    }


def failures(found: Json, seconds: float, code: int | None, soak: int = 0) -> list[str]:
    """Everything that must not be."""
    phases = {**found["phases"], "warm_up": found.get("warm_up", {"failures": []})}
    wrong = [f"{name}: {failure}" for name, phase in phases.items() for failure in phase["failures"]]
    if found["rows_left"]:
        wrong.append(f"{found['rows_left']:g} rows are left in the server")
    if found["memory"] and seconds >= LONG_ENOUGH:
        (_, _, _, whole), (_, second, _, last) = found["memory"]["quarters_mib"], found["memory"]["without_caches_mib"]
        if last - second > LEVEL * whole:
            wrong.append(f"memory without caches grew from {second} to {last} MiB")
    grown = found.get("growth")
    if grown and soak >= ENOUGH and grown["at_least_kib"] > LEFT_KIB:
        wrong.append(f"a request left {grown['left_kib']} KiB behind, {grown['at_least_kib']} at the least")
    if code != 0:
        wrong.append(f"SIGTERM ended the server with exit code {code}")
    return wrong


def show(found: Json) -> None:
    """A table."""
    print("speculation  requests  streams  tokens/s   first token p50, p95    per token p50, p95")
    for name, phase in found["phases"].items():
        times = [
            f"{part['p50']:8.0f} {part['p95']:8.0f} ms" if (part := phase[key]) else f"{'too few':>20}"
            for key in ("first_token_ms", "per_token_ms")
        ]
        count = sum(phase["requests"].values())
        print(f"{name:<11}  {count:8}  {phase['streams']:7}  {phase['tokens_per_second']:8.0f}   {times[0]}   {times[1]}")
    for name, key in (("memory", "quarters_mib"), ("memory without caches", "without_caches_mib")):
        print(f"{name} by quarters of the run:", found["memory"] and found["memory"][key], "MiB")
    if grown := found["growth"]:
        print("a request left {left_kib} KiB behind, between {at_least_kib} and {at_most_kib}".format(**grown))
        print("objects more, by 1,000 requests:", grown["objects_per_1000"])
    print("rows left:", found["rows_left"])
    for failure in found["failures"][:20]:
        print("FAILED", failure)
    print(f"{len(found['failures'])} failures")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of both phases together")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="N requests instead, of odd kinds as well")
    parser.add_argument(
        "--planted", type=int, default=0, metavar="BYTES", help="that each request of a soak shall leave behind"
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of what clients ask, the same in both phases")
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write all figures there")
    arguments, options = parser.parse_known_args()  # the rest is for `shoal serve`
    seconds = 60 * arguments.minutes
    known = known_asks()
    options += ["--chat-template", "chatml"] if arguments.soak else []
    with server(options, arguments.planted if arguments.soak else None) as (url, process):
        found = asyncio.run(load(url, process, known, seconds, arguments.clients, arguments.seed, soak=arguments.soak))
    found["failures"] = failures(found, 0 if arguments.soak else seconds, process.returncode, arguments.soak)
    if arguments.json:
        write_results(arguments.json, {"machine": machine(torch.device("cpu")), **found})
    show(found)
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
