"""DISCO's stopping by ablation: `lookahead="auto"`, and the same rule that does not look at the drafter's confidence.

    python benchmarks/stopping.py --json FILE      # on a clock of its own, which repeats to the last digit
    python benchmarks/stopping.py --flat 0.1       # where a pass costs the same for any number of positions, a step a tenth of it
    python benchmarks/stopping.py --wall           # the bundled pair on this machine, which must be idle

Both rules plan by the same estimates and costs, and may end each row's draft before each of its tokens.
With confidence, a draft's chance is that of drafts of which the drafter was as sure; without, that of drafts at its position.
Beside them stands "one length" for all rows, known before the round begins: what `auto` is where rounds are captured. A GPU can
then go on with the next round before the host has seen this one, which is worth 11 to 14 % of a round (docs/measurements/gpu.md)
and is not counted here.
What the rules themselves compute takes no time on the clock: it is the same. The texts and the clock are those of `virtual.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import command
import shoal
from held_out import problems
from provenance import require_place, write_results
from regret import SWEEP
from shoal.bench.machine import machine
from shoal.lookahead.acceptance import Acceptance
from shoal.lookahead.auto import Auto
from shoal.lookahead.controller import Controller, EvenAuto, PairCosts, as_controller, by_name
from shoal.lookahead.plan import DraftPlan, Stopping
from shoal.types.requests import Row
from virtual import QUEUES, WARM_UP, WIDTH, PassCosts, Trace, _Text, costs_of, run, traces

COSTS = Path(__file__).parent / "results" / "2026-11-22-x86_64-2-threads-virtual.json"
WITH, WITHOUT, EVEN = "with confidence", "without", "one length"
BINS = len(Acceptance.EDGES) + 1


class ByPosition(Stopping):
    """The rule without the drafter's confidence: each draft has the acceptance of its position."""

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        self._by_confidence = [[chances[position]] * BINS for chances in self._by_position]
        return super().shorten(position, confidence)


class WithoutConfidence(Auto):
    """`auto`, with drafts that end by position."""

    def _best(self, rows: Sequence[Row], *, waiting: bool) -> DraftPlan | None:
        made = super()._best(rows, waiting=waiting)
        assert made is None or isinstance(made, Stopping)
        return made and ByPosition(made.plan, made.weights, made._by_confidence, made._by_position)


RULES: dict[str, Callable[[PairCosts], Auto]] = {WITH: Auto, WITHOUT: WithoutConfidence, EVEN: EvenAuto}


@dataclass(frozen=True)
class Line:
    """One batch size: speed-ups over plain decoding by setting, and those of the two rules in each run."""

    queue: str
    batch: int
    speedups: dict[str, float]
    runs: dict[str, list[float]]

    @property
    def best(self) -> str:
        """The best fixed draft length, 0 included."""
        return max((name for name in self.speedups if name not in RULES), key=self.speedups.__getitem__)

    @property
    def gains(self) -> list[float]:
        """What the confidence brings in each run, as a share of the rate without it."""
        return [a / b - 1 for a, b in zip(self.runs[WITH], self.runs[WITHOUT], strict=True)]


# ── on a clock of its own ───────────────────────────────────────────────────────────────────────────────────────────


def lines(
    facts: PassCosts, known: Sequence[Trace], batches: Sequence[int], tokens: int, runs: int, stops: bool
) -> Iterator[Line]:
    """Every batch size, without a queue and with one."""
    for queue, more in QUEUES.items():
        for batch in batches:
            rates = {
                name: _rates(name, facts, known, batch, batch * (1 + more), tokens, runs, stops)
                for name in ("off", *(f"fixed:{k}" for k in SWEEP), *RULES)
            }
            by_run = {name: [a / b for a, b in zip(each, rates["off"], strict=True)] for name, each in rates.items()}
            speedups = {name: geometric_mean(each) for name, each in by_run.items()}
            yield Line(queue, batch, speedups, {name: by_run[name] for name in RULES})


def _rates(
    name: str, facts: PassCosts, known: Sequence[Trace], batch: int, rows: int, tokens: int, runs: int, stops: bool
) -> list[float]:
    """Tokens per second of runs of one setting, which all settings decode with the same texts and luck."""
    costs, rates = PairCosts(packed=True), []
    for i in range(-WARM_UP, runs):
        rng = np.random.default_rng(i if i >= 0 else 1000 - i)
        texts = [_Text(known[j], tokens, stops, rng) for j in rng.integers(len(known), size=rows)]
        rates.append(run(_controller(name, costs), facts, texts, batch, rng, lambda: 0.0))
    return rates[WARM_UP:]


def _controller(name: str, costs: PairCosts) -> Controller:
    return RULES[name](costs) if name in RULES else as_controller(by_name(name))


def flat(share: float) -> PassCosts:
    """A target that weights bind: a pass of any size takes 10 ms; a drafter step takes `share` of it."""
    return PassCosts({1: 0.01, 1024: 0.01}, {1: 0.01 * share, 1024: 0.01 * share})


# ── on the wall ─────────────────────────────────────────────────────────────────────────────────────────────────────


def on_the_wall(batches: Sequence[int], tokens: int, runs: int) -> Iterator[Line]:
    """The bundled pair decodes the same tokens by both rules and plainly, in turns."""
    pair = shoal.load(max_batch=max(batches))
    prompts = [problem.prompt for problem in problems(max(batches))]
    for batch in batches:
        rates: dict[str, list[float]] = {name: [] for name in ("off", *RULES)}
        costs = {name: PairCosts(packed=True) for name in RULES}
        texts: set[tuple[tuple[int, ...], ...]] = set()
        for i in range(-WARM_UP, runs):
            for name in rates:
                rule = RULES[name](costs[name]) if name in RULES else "off"
                started = time.perf_counter()
                found = pair.generate(
                    prompts[:batch], 1, lookahead=rule, seed=i % 1000, temperature=0.8, max_new_tokens=tokens, eos=()
                )
                rates[name].append(batch * tokens / (time.perf_counter() - started))
                texts.add(tuple(output.samples[0].token_ids for output in found))
        if len(texts) != WARM_UP + runs:
            raise SystemExit(
                f"the rules wrote {len(texts)} different batches in {WARM_UP + runs} runs: their times say nothing"
            )
        by_run = {
            name: [a / b for a, b in zip(each[WARM_UP:], rates["off"][WARM_UP:], strict=True)]
            for name, each in rates.items()
        }
        yield Line(
            "none", batch, {name: median(each) for name, each in by_run.items()}, {name: by_run[name] for name in RULES}
        )


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def show(found: Sequence[Line], console: Console) -> None:
    """A line for each batch size."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in (
        "waiting",
        "batch",
        "best fixed",
        "v plain",
        f"{WITH} v plain",
        f"{WITHOUT} v plain",
        f"{EVEN} v plain",
        "gain",
        "worst..best run",
    ):
        table.add_column(name, justify="right")
    for one in found:
        with_, without = one.speedups[WITH], one.speedups[WITHOUT]
        table.add_row(
            one.queue, str(one.batch), one.best, f"{one.speedups[one.best]:.2f}", f"{with_:.2f}", f"{without:.2f}",
            f"{one.speedups[EVEN]:.2f}",
            f"{with_ / without - 1:+.1%}", f"{min(one.gains):+.1%}..{max(one.gains):+.1%}",
        )  # fmt: skip
    console.print(table)


def main(
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="Per row at most.")] = 256,
    stops: Annotated[bool, typer.Option("--eos", help="On the clock, rows end where their text does.")] = False,
    runs: Annotated[int, typer.Option(help="Of each setting.")] = 12,
    costs: Annotated[Path, typer.Option(help="A file of `virtual.py --json`, whose costs the clock takes.")] = COSTS,
    share: Annotated[
        float, typer.Option("--flat", help="Instead, passes of equal cost, and a drafter step of this share of one.")
    ] = 0.0,
    wall: Annotated[bool, typer.Option("--wall", help="Time the bundled pair; for an idle machine.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all speed-ups there.")] = None,
) -> None:
    """What stopping drafts by the drafter's confidence brings, in virtual time or on the wall clock."""
    require_place(json_path)
    batches = [int(batch) for batch in batch_sizes.split(",")]
    report: dict[str, Any] = {"clock": "wall" if wall else "virtual", "tokens": tokens, "runs": runs, "eos": stops}
    if wall:
        found = list(on_the_wall(batches, tokens, runs))
    else:
        facts = flat(share) if share else costs_of(json.loads(costs.read_text(encoding="utf-8"))["prices"])
        report |= {"prices": asdict(facts), "prices from": None if share else costs.name}
        found = list(lines(facts, traces(shoal.load(), tokens), batches, tokens, runs, stops))
    show(found, Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH))
    if json_path is not None:
        write_results(
            json_path, {"machine": machine(torch.device("cpu")), **report, "lines": [asdict(one) for one in found]}
        )


if __name__ == "__main__":
    command.run(main)
