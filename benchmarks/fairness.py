"""`python benchmarks/fairness.py`: how long others wait behind large requests, first come, first served and by quanta of tokens.

Two loads on the bundled pair, 16 slots. "behind": a request of 16 samples of 600 tokens, and after ten rounds five short ones of 16
tokens. "crowd": 64 requests of one sample of 150 tokens at once. Each repeat runs all quanta, on new engines, in turns. The tokens
of each seed must be the same with every quantum, or there is no table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import command
import shoal
from held_out import problems
from provenance import require_place, write_results
from shoal.api import Shoal
from shoal.bench.machine import machine
from shoal.engine.engine import Engine
from shoal.errors import InternalError
from shoal.sampling.acceptance import Coupled
from shoal.types.requests import Request, Row

SLOTS, ROOM = 16, 2**28
QUANTA = (None, 64, 256, 1024)
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One load with one quantum. Seconds: of all; from a request to its first tokens and to its end, each of those that count."""

    seconds: float
    first: Sequence[float]
    whole: Sequence[float]
    pauses: int
    computed: int
    tokens: Sequence[Ids]


class Client:
    """Asks an engine, and notes when rows were asked for, got their first tokens, and ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rows = engine, list[Row]()
        self.asked, self.first, self.ends = dict[Row, float](), dict[Row, float](), dict[Row, float]()

    def ask(self, prompt: Ids, n: int, new: int) -> list[Row]:
        """Rows that do not end before they have so many tokens."""
        sampling = shoal.Sampling(temperature=0.8, seed=len(self.rows), min_new_tokens=new)
        rows = self.engine.submit(Request(prompt, n, sampling, shoal.Limits(max_new_tokens=new)))
        self.rows += rows
        self.asked |= dict.fromkeys(rows, time.perf_counter())
        return rows

    def step(self) -> bool:
        """A round; False: all is done."""
        commits = self.engine.step()
        now = time.perf_counter()
        for commit in commits:
            self.first.setdefault(commit.row, now)
            if commit.sample is not None:
                self.ends[commit.row] = now
        return bool(commits)

    def run(self, counted: Sequence[Row], started: float) -> Run:
        """Runs to the end."""
        while self.step():
            pass
        ended = time.perf_counter()
        whole, first = ([at[row] - self.asked[row] for row in counted] for at in (self.ends, self.first))
        stats, tokens = self.engine.stats, [tuple(row.tokens) for row in self.rows]
        return Run(ended - started, first, whole, stats.pauses, stats.prefill_tokens, tokens)


def behind(client: Client, prompts: Sequence[Ids]) -> Run:
    """Short requests behind one that fills all slots."""
    started = time.perf_counter()
    client.ask(prompts[0], SLOTS, 600)
    for _ in range(10):
        client.step()
    return client.run([row for prompt in prompts[1:6] for row in client.ask(prompt, 1, 16)], started)


def crowd(client: Client, prompts: Sequence[Ids]) -> Run:
    """Requests of one sample each, four for every slot."""
    started = time.perf_counter()
    return client.run([row for prompt in prompts for row in client.ask(prompt, 1, 150)], started)


LOADS: dict[str, Callable[[Client, Sequence[Ids]], Run]] = {"behind": behind, "crowd": crowd}


def measure(pair: Shoal, load: str, quantum: int | None, prompts: Sequence[Ids]) -> Run:
    """One load on a new engine."""
    engine = pair.engine("auto", Coupled(), prefix_bytes=ROOM, quantum=quantum)
    engine.prepare()
    return LOADS[load](Client(engine), prompts)


def main(
    repeats: Annotated[int, typer.Option(min=1, help="of all quanta, in turns")] = 3,
    to: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Prints a table."""
    require_place(to)
    pair = shoal.load(max_batch=SLOTS)
    tokenizer = pair.tokenizer
    prompts = [tuple(tokenizer(problem.prompt)["input_ids"]) for problem in problems(4 * SLOTS, seed=7)]
    table = Table("load", "quantum", "first tokens, median s", "most", "end, median s", "all, s", "pauses", "prompt tokens")
    figures = []
    for load in LOADS:
        runs: dict[int | None, list[Run]] = {quantum: [] for quantum in QUANTA}
        for _ in range(repeats):
            for quantum in QUANTA:
                runs[quantum].append(measure(pair, load, quantum, prompts))
        if len({tuple(run.tokens) for each in runs.values() for run in each}) > 1:
            raise InternalError(f"{load}: the tokens depend on the quantum")
        for quantum, each in runs.items():
            first, most = median(median(run.first) for run in each), median(max(run.first) for run in each)
            whole, seconds = median(median(run.whole) for run in each), median(run.seconds for run in each)
            figures.append(
                {"load": load, "quantum": quantum, "first": first, "most": most, "whole": whole, "seconds": seconds}
                | {"pauses": each[0].pauses, "computed": each[0].computed}
            )
            named = "none" if quantum is None else str(quantum)
            said = (f"{value:.2f}" for value in (first, most, whole, seconds))
            table.add_row(load, named, *said, str(each[0].pauses), str(each[0].computed))
    Console(width=120).print(table)
    if to is not None:
        write_results(to, {"machine": machine(torch.device("cpu")), "repeats": repeats, "figures": figures})


if __name__ == "__main__":
    command.run(main)
