"""`python benchmarks/prefixes.py`: requests whose prompts begin alike, with prompts of earlier ones kept and without.

Two loads on the bundled pair. "clients": 64 requests at once, one system prompt of 600 tokens, questions of 20 to 60 tokens, 24 new
tokens each. "chats": 8 conversations of 5 turns; a turn is the conversation so far, a question of 40 tokens and an answer of 40.
Each repeat runs both ways, on new engines, in turns. Greedy ids must be the same both ways, or there is no table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.api import Shoal
from shoal.bench.machine import machine
from shoal.engine.engine import Engine
from shoal.errors import InternalError
from shoal.sampling.acceptance import Coupled
from shoal.types.requests import Request, Row

ROOM = 2**28
SYSTEM, CLIENTS = 600, 64
CHATS, TURNS, QUESTION, ANSWER = 8, 5, 40, 40
Ids = tuple[int, ...]
TEXT = "".join(f"def step_{i}(value):\n    return value * {i} + {i % 7}\n\n\n" for i in range(200))


@dataclass(frozen=True)
class Run:
    """One load, one way: wall seconds, those of prompts, tokens of prompts computed and copied, ids of all answers."""

    seconds: float
    seconds_prompts: float
    computed: int
    copied: int
    ids: Sequence[Ids]


def finish(engine: Engine, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """The answers to prompts that come together."""
    limits, greedy = shoal.Limits(max_new_tokens=new), shoal.Sampling(temperature=0.0)
    rows: list[Row] = [row for group in engine.submit_all(Request(p, 1, greedy, limits) for p in prompts) for row in group]
    while engine.step():
        pass
    return [tuple(row.tokens[row.prompt_length :]) for row in rows]


def clients(engine: Engine, words: Ids, random_: random.Random) -> list[Ids]:
    """64 requests of one system prompt."""
    asked = [words[:SYSTEM] + piece(words, random_.randint(20, 60), random_) for _ in range(CLIENTS)]
    return finish(engine, asked, 24)


def chats(engine: Engine, words: Ids, random_: random.Random) -> list[Ids]:
    """Conversations whose turns come together."""
    said = [piece(words, QUESTION, random_) for _ in range(CHATS)]
    for _ in range(TURNS):
        answers = finish(engine, said, ANSWER)
        said = [before + answer + piece(words, QUESTION, random_) for before, answer in zip(said, answers, strict=True)]
    return said


def piece(words: Ids, length: int, random_: random.Random) -> Ids:
    """So many tokens from somewhere in the text."""
    start = random_.randrange(len(words) - length)
    return words[start : start + length]


LOADS: dict[str, Callable[[Engine, Ids, random.Random], list[Ids]]] = {"clients": clients, "chats": chats}


def run(pair: Shoal, load: str, room: int, seed: int) -> Run:
    """A load on a new engine."""
    engine = pair.engine("auto", Coupled(), prefix_bytes=room)
    words = tuple(pair.tokenizer(TEXT)["input_ids"])
    started = time.perf_counter()
    ids = LOADS[load](engine, words, random.Random(seed))
    seconds, stats = time.perf_counter() - started, engine.stats
    return Run(seconds, stats.seconds_prefill, stats.prefill_tokens, stats.restored_tokens, ids)


def measure(pair: Shoal, load: str, repeats: int) -> dict[str, Any]:
    """Medians over the repeats; the first of each way warms up and is not counted. Raises InternalError for other ids."""
    found: dict[str, list[Run]] = {"kept": [], "computed": []}
    for repeat in range(repeats + 1):
        for way, room in (("kept", ROOM), ("computed", 0)):
            found[way].append(run(pair, load, room, repeat))
        kept, computed = found["kept"][-1], found["computed"][-1]
        if kept.ids != computed.ids:
            raise InternalError(f"{load}: kept prompts changed greedy ids")
    counted = {way: runs[1:] for way, runs in found.items()}
    pairs = list(zip(counted["kept"], counted["computed"], strict=True))
    line: dict[str, Any] = {"load": load, "speedup": median(b.seconds / a.seconds for a, b in pairs)}
    line["least"], line["most"] = min(b.seconds / a.seconds for a, b in pairs), max(b.seconds / a.seconds for a, b in pairs)
    for way, runs in counted.items():
        one = {
            name: median(getattr(each, name) for each in runs)
            for name in ("seconds", "seconds_prompts", "computed", "copied")
        }
        line[way] = one
    return line


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """Both loads."""
    shown = Table(title="Prompts of earlier requests kept, against computed anew; greedy ids equal")
    for title in (
        "load",
        "times as fast",
        "range",
        "prompt tokens computed",
        "without",
        "share of prompts in the time",
        "without",
    ):
        shown.add_column(title, justify="right")
    for line in lines:
        kept, computed = line["kept"], line["computed"]
        shares = [f"{way['seconds_prompts'] / way['seconds']:.0%}" for way in (kept, computed)]
        shown.add_row(
            line["load"], f"{line['speedup']:.2f}", f"{line['least']:.2f}..{line['most']:.2f}", f"{kept['computed']:.0f}",
            f"{computed['computed']:.0f}", *shares,
        )  # fmt: skip
    return shown


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Of each way, one more to warm up.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
) -> None:
    """Requests whose prompts begin alike, with prompts of earlier ones kept and without."""
    require_place(json)
    pair = shoal.load()
    lines = [measure(pair, load, repeats) for load in LOADS]
    Console().print(table(lines))
    if json is not None:
        write_results(json, {"machine": machine(torch.device("cpu")), "loaded": pair.loaded, "lines": lines})


if __name__ == "__main__":
    command.run(main)
