"""`python benchmarks/pieces.py`: how many steps of a drafter to compute before the host looks at their confidences.

Where drafts end by confidence, each look is a wait for the device, and what was computed beyond the end is computed in vain. Both
are counted for `auto` over texts of the bundled pair (`benchmarks/virtual.py`), with costs of a GPU that are given, not measured:
a round of the target, a step of the drafter, a wait.

Policies: a look after each `n` steps, 16 being all that `auto` ever drafts; and the same, but before the first look as many steps
as the shortest of the last four rounds needed ("recent, n").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple, cast

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import command
import shoal
import virtual
from shoal.lookahead.controller import Auto, PairCosts
from shoal.types.requests import Row
from shoal.types.rounds import Outcome
from virtual import Trace

WARM_UP = 2
RUNS = 6
TOKENS = 256
RECENT = 4
BOUND = 206
"""Positions of a pass from which an H200 computes for longer than it reads 16-bit weights."""


class Costs(NamedTuple):
    """Seconds of a target's pass, of a step, of a wait."""

    target: float
    step: float
    wait: float

    def verify(self, positions: int) -> float:
        return self.target * max(1.0, positions / BOUND) + self.wait


class Counts(NamedTuple):
    """Of a run: tokens per second; looks, steps and steps in vain of a round."""

    rate: float
    looks: float
    steps: float
    vain: float


Policy = Callable[[int, list[int]], int]
"""Steps computed so far, positions looked at in each round before -> steps to have computed at the next look."""


def by_piece(piece: int) -> Policy:
    return lambda computed, recent: computed + piece


def by_recent(piece: int) -> Policy:
    def policy(computed: int, recent: list[int]) -> int:
        wanted = max(computed + 1, min(recent[-RECENT:], default=0) if not computed else 0)
        return -(-wanted // piece) * piece

    return policy


POLICIES: dict[str, Policy] = {f"{n}": by_piece(n) for n in (1, 2, 3, 4, 16)}
POLICIES |= {f"recent, {n}": by_recent(n) for n in (1, 2, 3)}


def run(policy: Policy, texts: list[virtual._Text], batch: int, known: PairCosts, costs: Costs) -> Counts:
    """Decodes the texts, `batch` at a time."""
    controller, rows, waiting = Auto(known), texts[:batch], texts[batch:]
    seconds, tokens, rounds, looks, steps, vain, recent = 0.0, 0, 0, 0, 0, 0, list[int]()
    while rows:
        ends = list(controller.lengths(cast(list[Row], rows), len(waiting)))
        computed = asked = 0
        most, drafting = max(ends), 0.0
        while asked < max(ends):
            wanted = min(policy(computed, recent), most)
            drafting += (wanted - computed) * costs.step + costs.wait
            computed, looks = wanted, looks + 1
            while asked < min(computed, max(ends)):
                sure = [row.trace.confidence[min(row.done + asked, row.most - 1)] for row in rows]
                ends = [min(both) for both in zip(ends, controller.shorten(asked, sure), strict=True)]
                asked += 1
        if most:
            recent.append(asked)
        spent = drafting + costs.verify(len(rows) * (1 + max(ends)))
        accepted = [row.accepted(end) for row, end in zip(rows, ends, strict=True)]
        for row, taken in zip(rows, accepted, strict=True):
            committed = min(taken + 1, row.end - row.done)
            row.done, tokens = row.done + committed, tokens + committed
        between = drafting * (computed - 1) / computed if computed else 0.0
        controller.learn(Outcome(ends, accepted, computed, spent, drafting, 0.0, between))
        seconds, rounds, steps, vain = seconds + spent, rounds + 1, steps + computed, vain + computed - asked
        rows = [row for row in rows if row.done < row.end]
        rows, waiting = rows + waiting[: batch - len(rows)], waiting[batch - len(rows) :]
    return Counts(tokens / seconds, looks / rounds, steps / rounds, vain / rounds)


def compare(texts: list[Trace], batch: int, costs: Costs) -> dict[str, Counts]:
    """Means over runs by policy; all decode the same texts with the same luck."""
    found = {}
    for name, policy in POLICIES.items():
        known, counts = PairCosts(packed=False), []
        for i in range(-WARM_UP, RUNS):
            rng = np.random.default_rng(i + 100)
            chosen = rng.integers(len(texts), size=4 * batch if batch > 1 else 6)
            rows = [virtual._Text(texts[j], TOKENS, False, rng) for j in chosen]
            counts.append(run(policy, rows, batch, known, costs))
        found[name] = Counts(*np.mean(counts[WARM_UP:], axis=0).tolist())
    return found


def main(
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,8,32",
    target_ms: Annotated[float, typer.Option(help="Of a target's pass.")] = 3.9,
    step_ms: Annotated[float, typer.Option(help="Of a drafter's step.")] = 0.5,
    wait_ms: Annotated[float, typer.Option(help="Of the host for the device.")] = 0.05,
) -> None:
    """Tokens per second by how often the host looks at confidences; by costs that are given, not measured."""
    console, costs = Console(highlight=False), Costs(target_ms / 1000, step_ms / 1000, wait_ms / 1000)
    virtual.PROBLEMS = 16
    texts = virtual.traces(shoal.load(max_batch=32), TOKENS)
    for batch in (int(size) for size in batch_sizes.split(",")):
        table = Table("steps per look", "v 1", "looks", "steps", "in vain", title=f"{batch} rows", box=box.SIMPLE_HEAD)
        found = compare(texts, batch, costs)
        for name, one in found.items():
            figures = f"{one.rate / found['1'].rate:.3f}", f"{one.looks:.2f}", f"{one.steps:.2f}", f"{one.vain:.2f}"
            table.add_row(name, *figures)
        console.print(table)


if __name__ == "__main__":
    command.run(main)
