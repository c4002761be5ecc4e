"""`python benchmarks/virtual.py`: draft length controllers compared in simulated time, which other processes do not disturb.

Two runs of the same work on a shared machine differ by more than two good controllers do. So this script measures only the costs of
passes and how the pair agrees along texts that the target wrote. Then every controller decodes the same texts in simulation: a
draft at a position is accepted with that position's sum of min(p, q), as in rejection sampling, and a round takes the cost of its
passes, times noise. Hundreds of runs take a minute.

In the i-th run all controllers have the same luck: one uniform per text and position decides whether a draft there is accepted.
That is rejection sampling still, as a position is decided once at most: it is committed then, whatever came of it. Without this,
two runs of a batch of 16 differ by more than a good controller loses, and the best of ten draft lengths is the luckiest one.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from time import thread_time
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from numpy.random import Generator
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import command
import shoal
from held_out import problems
from provenance import require_place, write_results
from regret import CONTROLLERS, SWEEP
from scaling import CONTEXT, prepared_pass
from shoal.bench.machine import machine
from shoal.bench.work import TimedBlock, timed
from shoal.lookahead.controller import Controller, PairCosts, as_controller, by_name
from shoal.models.runner import Runner
from shoal.types.requests import Row
from shoal.types.rounds import Outcome

TEMPERATURE = 0.8
PROBLEMS, SAMPLES = 48, 2
WIDTH = 120
"""Columns where stdout is no terminal."""
QUEUES = {"none": 0, "three batches": 3}
"""Rows that wait for a slot, in batches: with none, the run is as long as its slowest row."""
WARM_UP = 2
"""Runs by which a controller that learns gets to know the pair, as in `shoal bench`."""
NOISE = 0.1
"""A pass takes exp(x) times its cost, x exponential with this mean: disturbances only ever slow down."""
SHUFFLED, UNSURE = 0.02, 0.3
"""Acceptance and confidence of a shuffled drafter."""
DRAFTS = 4
"""Draft length with which a proposal and its steps are timed."""
PROMPT = 48
"""Tokens of a prompt, which the drafter computes before it drafts for a row."""


@dataclass(frozen=True)
class Trace:
    """A text of the target, by position: probability that a draft is accepted; the drafter's highest probability; and how many
    tokens it has up to its end."""

    acceptance: list[float]
    confidence: list[float]
    length: int


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a round with one target pass, of a drafter's pass, by positions: {size: seconds}; and of a proposal beside its
    passes."""

    verify: dict[int, float]
    step: dict[int, float]
    start: float = 0.0

    def of(self, table: dict[int, float], size: int, rng: Generator) -> float:
        """Between the measured sizes, on a straight line; beyond the largest, on the last one."""
        sizes, costs = list(table), list(table.values())
        slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        seconds = np.interp(size, sizes, costs) + slope * max(size - sizes[-1], 0)
        return float(seconds * np.exp(rng.exponential(NOISE)))


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def traces(pair: shoal.Shoal, tokens: int) -> list[Trace]:
    """Texts for held-out problems, decoded plainly, and the distributions of both models along them."""
    assert pair.draft_model is not None
    prompts = [problem.prompt for problem in problems(PROBLEMS)]
    controls: dict[str, Any] = {"lookahead": "off", "temperature": TEMPERATURE, "seed": 1, "max_new_tokens": tokens}
    ends = pair.generate(prompts, SAMPLES, **controls)
    whole = pair.generate(prompts, SAMPLES, **controls, eos=())
    found = []
    for ended, output in zip(ends, whole, strict=True):
        prompt = list(pair.tokenizer.encode(output.prompt))
        for end, sample in zip(ended.samples, output.samples, strict=True):
            ids = torch.tensor([prompt + list(sample.token_ids)])
            p, q = (_distributions(model, ids, len(prompt)) for model in (pair.target, pair.draft_model))
            accepted = torch.minimum(p, q).sum(dim=-1)
            found.append(Trace(accepted.tolist(), q.amax(dim=-1).tolist(), len(end.token_ids)))
    return found


def costs_of(prices: dict[str, Any]) -> PassCosts:
    """The costs that a file of this script has as `prices`."""
    tables = ({int(size): seconds for size, seconds in prices[name].items()} for name in ("verify", "step"))
    return PassCosts(*tables, prices.get("start", 0.0))


@torch.inference_mode()
def _distributions(runner: Runner, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """[new tokens, vocab]: of each token after the prompt."""
    logits = runner.hf(ids.to(runner.device)).logits[0, prompt - 1 : -1].double().cpu()
    return (logits / TEMPERATURE).softmax(dim=-1)


def pass_costs(pair: shoal.Shoal, rows: Sequence[int], repeats: int) -> PassCosts:
    """Medians of passes at these numbers of rows, and what a plain round and a proposal take beside theirs."""
    assert pair.draft_model is not None
    verify: dict[int, list[float]] = {}
    step: dict[int, list[float]] = {}
    rest: list[float] = []
    start: list[float] = []
    for _ in track(range(repeats), "timing passes", console=Console(stderr=True)):
        for batch in rows:
            for k in (0, 1, 3, 7):
                verify.setdefault(batch * (k + 1), []).append(_timed(pair.target, batch, k + 1))
            step.setdefault(batch * PROMPT, []).append(_timed(pair.draft_model, batch, PROMPT))
            plain, drafted = (
                pair.generate("def f(", batch, lookahead=k, max_new_tokens=32, eos=()).stats for k in (0, DRAFTS)
            )
            rest.append((plain.seconds_rounds - plain.seconds_target) / plain.rounds)
            start.append((drafted.seconds_propose - drafted.seconds_draft) / drafted.rounds)
            step.setdefault(batch, []).append(drafted.seconds_draft / drafted.draft_passes)
    whole = {size: median(rest) + median(seconds) for size, seconds in sorted(verify.items())}
    return PassCosts(whole, {size: median(seconds) for size, seconds in sorted(step.items())}, median(start))


def _timed(runner: Runner, rows: int, q: int) -> float:
    runner = runner.fork()
    prepared_pass(runner, rows, q, CONTEXT)()
    work = prepared_pass(runner, rows, q, CONTEXT)
    with timed(runner.device) as watch:
        work()
    return watch.seconds


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


_serials = itertools.count()


class _Text:
    """A row as far as a controller sees it, and whether a draft at each of its positions would be accepted."""

    prompt_length = PROMPT

    def __init__(self, trace: Trace, most: int, stops: bool, rng: Generator) -> None:
        self.trace, self.most, self.done = trace, most, 0
        self.end = min(trace.length, most) if stops else most
        self.serial = self.group = next(_serials)
        self.accepts = rng.random(len(trace.acceptance)) < trace.acceptance
        self.held = 0  # tokens that the drafter has computed

    @property
    def tokens(self) -> range:
        return range(self.prompt_length + self.done)

    @property
    def remaining(self) -> int:
        return self.most - self.done

    @property
    def max_draft_length(self) -> int:
        return self.remaining - 1

    def accepted(self, drafted: int) -> int:
        """How many of so many drafts would be accepted."""
        decided = self.accepts[self.done : self.done + drafted]
        return len(decided) if decided.all() else int(decided.argmin())


def run(
    controller: Controller,
    facts: PassCosts,
    texts: Sequence[_Text],
    batch: int,
    rng: Generator,
    clock: Callable[[], float] | None = None,
) -> float:
    """Tokens per second of decoding `texts`, `batch` at a time; `clock` times what the controller computes."""
    clock = clock or thread_time
    rows, waiting = list(texts[:batch]), list(texts[batch:])
    seconds, tokens = 0.0, 0
    while rows:
        with _watch(clock) as controlling:
            lengths = list(controller.lengths(cast(Sequence[Row], rows), len(waiting)))
        preparing = _catch_up(facts, rows, lengths, rng)
        ends, laps = _draft(controller, facts, rows, lengths, rng, clock)
        drafting = controlling.seconds + (facts.start if laps else 0.0) + sum(laps)
        time = drafting + facts.of(facts.verify, len(rows) + sum(ends), rng)
        accepted = [row.accepted(end) for row, end in zip(rows, ends, strict=True)]
        for row, taken, length in zip(rows, accepted, lengths, strict=True):
            committed = min(taken + 1, row.end - row.done)
            row.done, tokens = row.done + committed, tokens + committed
            row.held = len(row.tokens) - 1 if length else row.held
        with _watch(clock) as controlling:
            controller.learn(Outcome(ends, accepted, len(laps), time, drafting, preparing, sum(laps[1:])))
        seconds += time + preparing + controlling.seconds
        rows = [row for row in rows if row.done < row.end]
        rows, waiting = rows + waiting[: batch - len(rows)], waiting[batch - len(rows) :]
    return tokens / seconds


def _catch_up(facts: PassCosts, rows: Sequence[_Text], lengths: Sequence[int], rng: Generator) -> float:
    """Seconds of the drafter's pass over what it lacks of the rows that are drafted for."""
    lacking = sum(len(row.tokens) - 1 - row.held for row, length in zip(rows, lengths, strict=True) if length)
    return facts.of(facts.step, lacking, rng) if lacking else 0.0


def _draft(
    controller: Controller,
    facts: PassCosts,
    rows: Sequence[_Text],
    lengths: Sequence[int],
    rng: Generator,
    clock: Callable[[], float],
) -> tuple[list[int], list[float]]:
    """Draft lengths, and the seconds of each drafter step."""
    ends, laps = list(lengths), list[float]()
    while len(laps) < max(ends):
        seconds, steps = facts.of(facts.step, len(rows), rng), len(laps)
        if controller.shorten is not None:
            sure = [row.trace.confidence[min(row.done + steps, row.most - 1)] for row in rows]
            with _watch(clock) as controlling:
                ends = [min(both) for both in zip(ends, controller.shorten(steps, sure), strict=True)]
            seconds += controlling.seconds
        laps.append(seconds)
    return ends, laps


@contextmanager
def _watch(clock: Callable[[], float]) -> Iterator[TimedBlock]:
    """The controller's own work is measured, by default in processor time, as it is done here."""
    watch, started = TimedBlock(), clock()
    yield watch
    watch.seconds = clock() - started


@dataclass(frozen=True)
class Comparison:
    """One line of the table: speed-ups over plain decoding, geometric means over runs."""

    drafter: str
    queue: str
    batch: int
    speedups: dict[str, float]

    @property
    def best(self) -> str:
        """The best fixed draft length, 0 included."""
        return max((name for name in self.speedups if name not in CONTROLLERS), key=self.speedups.__getitem__)

    def regret(self, name: str) -> float:
        """Share of the best fixed setting's speed that is lost."""
        return 1 - self.speedups[name] / self.speedups[self.best]


def lines(
    facts: PassCosts, texts: Sequence[Trace], batches: Sequence[int], tokens: int, runs: int, stops: bool
) -> Iterator[Comparison]:
    """For the pair and for a shuffled drafter; without a queue and with one."""
    shuffled = [Trace([SHUFFLED] * tokens, [UNSURE] * tokens, text.length) for text in texts]
    names = ("off", *(f"fixed:{k}" for k in SWEEP), *CONTROLLERS)
    for drafter, known in (("the pair's", texts), ("shuffled", shuffled)):
        for queue, more in QUEUES.items():
            for batch in batches:
                rates = {name: _rates(name, facts, known, batch, batch * (1 + more), tokens, runs, stops) for name in names}
                speedups = {
                    name: geometric_mean(a / b for a, b in zip(rates[name], rates["off"], strict=True)) for name in names
                }
                yield Comparison(drafter, queue, batch, speedups)


def _rates(
    name: str,
    facts: PassCosts,
    known: Sequence[Trace],
    batch: int,
    rows: int,
    tokens: int,
    runs: int,
    stops: bool,
    seed: int = 0,
) -> list[float]:
    """Of one setting that gets to know the pair; every setting decodes the same texts in its i-th run with a seed."""
    pair_costs = PairCosts(packed=True)
    rates = []
    for i in range(-WARM_UP, runs):
        rng = np.random.default_rng(10_000 * seed + (i if i >= 0 else 1000 - i))
        chosen = rng.integers(len(known), size=rows)
        texts = [_Text(known[j], tokens, stops, rng) for j in chosen]
        rates.append(run(as_controller(by_name(name, pair_costs)), facts, texts, batch, rng))
    return rates[WARM_UP:]


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def show(found: Sequence[Comparison], console: Console) -> None:
    """A table per drafter and queue."""
    for drafter, queue in dict.fromkeys((one.drafter, one.queue) for one in found):
        console.print(f"{drafter} drafter, rows waiting: {queue}", style="bold", markup=False)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in (
            "batch",
            "best fixed",
            "v plain",
            *(f"{name} {what}" for name in CONTROLLERS for what in ("v plain", "regret")),
        ):
            table.add_column(name, justify="right")
        for one in found:
            if (one.drafter, one.queue) == (drafter, queue):
                figures = [
                    text for name in CONTROLLERS for text in (f"{one.speedups[name]:.2f}", f"{one.regret(name):+.1%}")
                ]
                table.add_row(str(one.batch), one.best, f"{one.speedups[one.best]:.2f}", *figures)
        console.print(table)
        console.print()


def main(
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="Per row at most.")] = 256,
    stops: Annotated[bool, typer.Option("--eos", help="Rows end where their text does.")] = False,
    runs: Annotated[int, typer.Option(help="Of each controller.")] = 12,
    repeats: Annotated[int, typer.Option(help="Of each timed pass.")] = 9,
    facts_path: Annotated[
        Path | None, typer.Option("--facts", help="Read what is measured from there, or write it there.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all speed-ups there.")] = None,
) -> None:
    """Regret of draft length controllers against the best fixed draft length, in virtual time, for the bundled pair."""
    require_place(json_path, facts_path)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    batches = [int(batch) for batch in batch_sizes.split(",")]
    if facts_path is not None and facts_path.exists():
        known = json.loads(facts_path.read_text(encoding="utf-8"))
        facts = costs_of(known["prices"])
        texts = [Trace(**text) for text in known["texts"]]
    else:
        pair = shoal.load(max_batch=max(batches))
        texts, facts = traces(pair, tokens), pass_costs(pair, batches, repeats)
        if facts_path is not None:
            facts_path.write_text(
                json.dumps({"prices": asdict(facts), "texts": [asdict(text) for text in texts]}), encoding="utf-8"
            )
    console.print(
        "ms of a round by positions: " + _ms(facts.verify), "ms of a drafter step by rows: " + _ms(facts.step), sep="\n"
    )
    total = 2 * len(QUEUES) * len(batches)
    found = list(
        track(lines(facts, texts, batches, tokens, runs, stops), "decoding", total=total, console=Console(stderr=True))
    )
    show(found, console)
    if json_path is not None:
        report = {"prices": asdict(facts), "tokens": tokens, "runs": runs, "lines": [asdict(one) for one in found]}
        write_results(json_path, {"machine": machine(torch.device("cpu"))} | report)


def _ms(costs: dict[int, float]) -> str:
    return ", ".join(f"{size}: {1000 * seconds:.1f}" for size, seconds in costs.items())


if __name__ == "__main__":
    command.run(main)
