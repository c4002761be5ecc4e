"""The time between tokens while prompts join: SARATHI's chunks, by their size, on a clock of prices.

    python benchmarks/joining.py                  # a pass takes 2.2 ms and 0.12 ms per position, as the bundled pair's on two cores
    python benchmarks/joining.py --device-bound   # a pass takes the larger of 7 ms and 0.026 ms per position, as on a GPU
    python benchmarks/joining.py --measured       # the bundled pair itself in float32, by the clock of this machine

Eight clients ask for one sample each, one request after the other, of which every eighth has a long prompt. The real engine decides
what is computed when; on the clock of prices drafts are free. `of their own`: a pass for the chunk of a prompt, then the round of
the rows that run. `fused`: chunks of that size, but for the last, ride in the passes of rounds, of prompts that do not fit into the
chunk that is served.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import command
import shoal
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.engine import scheduler
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.testing.scripted import table_model
from shoal.types.requests import Request, Row

VOCAB, CLIENTS, DRAFTS = 32, 8, 4
SHORT, LONG, EVERY = 60, 2000, 8
"""Tokens of prompts; every eighth one is long."""
CONTEXT = 1000
"""Tokens that rows of the bundled pair may have."""
WHOLE = 1_000_000
"""A chunk that holds every prompt."""
CHUNKS = (WHOLE, 512, 256, 128, 64)
WIDTH = 120
Price = Callable[[int], float]


def of_a_sum(positions: int) -> float:
    """Seconds of a round of the bundled pair on two cores, by benchmarks/virtual.py."""
    return 0.0022 + 0.00012 * positions


def of_a_device(positions: int) -> float:
    """Seconds of a target of 7.8 B on a device: weights are read in 7 ms, products take 0.026 ms per position."""
    return max(0.007, 0.000026 * positions)


@dataclass
class Run:
    """What rows waited for, in seconds of the clock.

    Attributes:
        waits: of each round, for each row that ran before it, the time since its last tokens.
        first: from a request with a long prompt to its first token.
        seconds: of all requests.
        tokens: of all samples.
        joint: rounds with a chunk of a prompt and rows that run.
        fused: chunks that rode in the passes of rounds.
        passes: passes of the target, prompts included.
    """

    waits: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    joint: int = 0
    fused: int = 0
    passes: int = 0

    def summary(self) -> dict[str, float]:
        """Milliseconds, tokens per second and counts."""
        p50, p99 = (1000 * float(np.quantile(self.waits, share)) for share in (0.5, 0.99))
        return {
            "wait p50": p50,
            "wait p99": p99,
            "wait max": 1000 * max(self.waits),
            "first token of a long prompt": 1000 * float(np.median(self.first)),
            "tokens/s": self.tokens / self.seconds,
            "rounds with a chunk": self.joint,
            "fused chunks": self.fused,
            "passes": self.passes,
        }


class Clients:
    """Clients of one engine.

    Args:
        chunk: the most tokens of a pass of their own, see `Engine`; if fused, of those that ride.
        price: seconds of a pass by its positions; None = the seconds of the bundled pair in float32.
        fused: chunks may ride, of prompts beyond what is served.
    """

    def __init__(self, chunk: int, price: Price | None, fused: bool) -> None:
        self.price, self.run, self.riding = price, Run(), chunk
        self._positions: list[int] = []  # of the passes of a step
        self._long = LONG
        if price is None:
            pair = shoal.load(dtype="float32")
            assert pair.draft_model is not None
            target, draft, vocabulary = pair.target, pair.draft_model.fork(), pair.target.vocab_size
            self.riding, self._long = min(chunk, scheduler.RIDING), CONTEXT * 9 // 10
        else:
            p, q = _pair()
            target, draft, vocabulary = table_model(p), table_model(q), VOCAB
        self.engine = Engine(
            target,
            ModelDrafter(draft, vocabulary),
            Fixed(DRAFTS),
            max_batch=CLIENTS,
            rule=Coupled(),
            chunk=max(chunk, scheduler.CHUNK) if fused else chunk,
            clock=lambda: self.run.seconds,
        )
        self.engine.scheduler.carries = lambda: fused
        if price is not None:  # its blocks are padded up to the chunk, behind the ends of rows
            self.engine.target.memory.reserve(CLIENTS, 2 * LONG)
        feed = self.engine.target.feed

        def priced(slots: Any, tokens: Any, counts: Sequence[int], **options: Any) -> Any:
            self._positions.append(sum(counts))
            return feed(slots, tokens, counts, **options)

        self.engine.target.feed = priced  # type: ignore[method-assign]
        self._asked = 0
        self._since: dict[Row, float] = {}  # when each row asked, or got its last tokens

    def ask(self, new: int) -> None:
        """One more request."""
        length = self._long if self._asked % EVERY == EVERY - 1 else SHORT
        prompt = tuple((self._asked + i * i) % VOCAB for i in range(length))
        request = Request(prompt, 1, Sampling(seed=self._asked), Limits(max_new_tokens=new, eos=()))
        (row,) = self.engine.submit(request)
        self._since[row] = self.run.seconds
        self._asked += 1

    def play(self, requests: int, new: int) -> Run:
        """Keeps eight requests under way until so many were asked, and the last has ended."""
        for _ in range(CLIENTS):
            self.ask(new)
        with mock.patch.object(scheduler, "RIDING", self.riding):
            while ended := self._step():
                for _ in range(min(ended - 1, requests - self._asked)):
                    self.ask(new)
        self.run.fused = self.engine.stats.fused_chunks
        return self.run

    def _step(self) -> int:
        """One round; returns 1 more than the requests that ended in it, 0 where nothing was left."""
        chunks = self.engine.stats.prefill_chunks
        self._positions, began = [], time.perf_counter()
        commits = self.engine.step()
        run, sizes = self.run, self._positions
        run.passes += len(sizes)
        run.seconds += time.perf_counter() - began if self.price is None else sum(map(self.price, sizes))
        run.joint += self.engine.stats.prefill_chunks > chunks and any(done.row.rounds > 1 for done in commits)
        for done in commits:
            run.tokens += len(done.tokens)
            since = self._since.pop(done.row)
            if done.row.new_tokens > len(done.tokens):
                run.waits.append(run.seconds - since)
            elif done.row.prompt_length == self._long:
                run.first.append(run.seconds - since)
            if not done.row.finish_reason:
                self._since[done.row] = run.seconds
        return 1 + sum(1 for done in commits if done.row.finish_reason) if commits or sizes else 0


def _pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token tables of a target and of a drafter that is a blend of it."""
    generator = torch.Generator().manual_seed(0)
    p, other = (torch.rand(VOCAB, VOCAB, generator=generator, dtype=torch.float64) ** 8 for _ in range(2))
    p, other = p / p.sum(-1, keepdim=True), other / other.sum(-1, keepdim=True)
    return p, 0.75 * p + 0.25 * other


def measured(price: Price | None, chunks: Sequence[int], requests: int, new: int) -> list[dict[str, Any]]:
    """A line for each size of chunk, and each way to compute it."""
    return [
        {"chunk": chunk, "fused": fused, **Clients(chunk, price, fused).play(requests, new).summary()}
        for chunk in chunks
        for fused in (False, True)
    ]


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """A table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("chunk", "computed", *list(found[0])[2:]):
        table.add_column(name, justify="right")
    for one in found:
        way = "fused" if one["fused"] else "of their own"
        chunk = "whole" if one["chunk"] == WHOLE else str(one["chunk"])
        table.add_row(chunk, way, *(f"{value:.1f}" for value in list(one.values())[2:]))
    console.print(table)


def main(
    chunks: Annotated[
        str, typer.Option(help="Prompt tokens before a round at the most; `whole`: no bound.")
    ] = "whole,512,256,128,64",
    device_bound: Annotated[bool, typer.Option("--device-bound", help="Passes at the price of a device's.")] = False,
    own_clock: Annotated[
        bool, typer.Option("--measured", help="Passes of the bundled pair, by this machine's clock.")
    ] = False,
    requests: Annotated[int, typer.Option(help="In all.")] = 128,
    tokens: Annotated[int, typer.Option(help="New ones of each request.")] = 96,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """The tail of the time between tokens by the size of chunks, in passes of their own and fused with the round."""
    require_place(json_path)
    sizes = [WHOLE if text == "whole" else int(text) for text in chunks.split(",")]
    price = None if own_clock else of_a_device if device_bound else of_a_sum
    found = measured(price, sizes, requests, tokens)
    show(found, Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH))
    if json_path is not None:
        asked = {"device bound": device_bound, "measured": own_clock, "requests": requests, "tokens": tokens, "whole": WHOLE}
        write_results(json_path, {"machine": machine(torch.device("cpu")), **asked, "lines": found})


if __name__ == "__main__":
    command.run(main)
