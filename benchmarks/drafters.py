"""`python benchmarks/drafters.py`: drafters of the bundled target by task and batch: tokens per target pass, the drafter's share of
the time, tokens per second against plain decoding and against the draft model. Wall clock, so on a quiet machine.

Tasks: "code", a held-out problem per row; "edit", a function that is written again; "quotes", a summary that quotes its prompt;
"json", an object by a schema; "text", comments at T = 1; "samples", all rows of one prompt; "epochs", prompts that were answered
before, as in epochs of RL. Drafters take turns on the same work, every other turn in reverse order, each with an engine of its own,
which has seen a few batches before; figures are medians. Whatever loses is shown.

Counts alone, at a fixed draft length: --lookahead 8 --tasks samples,epochs --batch-sizes 8 --repeats 8.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import command
import shoal
from held_out import decode, problems
from provenance import require_place, write_results
from shoal.bench import in_turns
from shoal.bench.machine import machine
from shoal.config import Grammar
from shoal.drafting.draft import read_draft
from shoal.engine.engine import Engine
from shoal.errors import InternalError, RequestError
from shoal.sampling.acceptance import RULES
from shoal.types.requests import Request
from shoal.types.stats import Stats

DRAFTERS = "plain bundled ngram suffix suffix:scope=engine recycling auto+bundled".split()
TASKS = "code edit quotes json text samples epochs".split()
WARM_UP = 3
"""Batches that a drafter has before it is measured: `auto` learns what it costs and brings."""
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "numbers", "found"],
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "found": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 4, "maxItems": 8},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Medians over the repeats of a drafter on a task.

    Attributes:
        per_pass: tokens per row and target pass. drafted: tokens per row and target pass. accepted: share of these.
        share: of the time of rounds, the drafter's. v_plain, v_model: tokens per second over those of the same repeat.
        by_drafter: counts of all repeats.
    """

    task: str
    batch: int
    drafter: str
    tokens_per_second: float
    per_pass: float
    drafted: float
    accepted: float
    share: float
    v_plain: float
    v_model: float | None
    by_drafter: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One batch by one drafter."""

    stats: Stats
    seconds: float

    @property
    def speed(self) -> float:
        return self.stats.committed / self.seconds


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def texts(task: str, count: int) -> list[str]:
    """Prompts of a task."""
    found = problems(3 * count)
    own = found[:count]
    if task == "edit":
        return [f"{one.prompt}{one.solution}\n\n\n{one.prompt}" for one in own]
    if task == "quotes":
        whole = ["\n\n\n".join(f"{one.prompt}{one.solution}" for one in found[3 * i : 3 * i + 3]) for i in range(count)]
        return [f'{text}\n\n\n# The first line above is "def' for text in whole]
    if task == "json":
        return [f"{one.prompt}\n# an example as JSON:\n" for one in own]
    if task == "text":
        return [f"# Notes on {one.template.replace('_', ' ')}.\n#\n# " for one in own]
    return [one.prompt for one in own]


def batches(task: str, batch: int, repeats: int, tokens: int, temperature: float, tokenizer: Any) -> list[list[Request]]:
    """The requests of the first batches, and of each repeat."""
    groups = 1 if task == "samples" else batch
    prompts = [tuple(tokenizer.encode(text)) for text in texts(task, groups * (repeats + WARM_UP))]
    grammar = Grammar("json_schema", SCHEMA) if task == "json" else None
    limits = shoal.Limits(max_new_tokens=tokens, eos=None if task == "json" else ())
    found = []
    for repeat in range(repeats + WARM_UP):
        own = prompts[:groups] if task == "epochs" else prompts[groups * repeat : groups * (repeat + 1)]
        sampling = shoal.Sampling(temperature=1.0 if task == "text" else temperature, seed=repeat, grammar=grammar)
        found.append([Request(ids, batch // groups, sampling, limits) for ids in own])
    return found


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def engine_of(pair: shoal.Shoal, name: str, lookahead: str, rule: str) -> Engine:
    """An engine that drafts so; what drafts cost and bring is learned by it alone."""
    if name == "plain":
        return pair.engine("off", RULES[rule]())
    assert pair.draft_model is not None
    draft = read_draft(name)
    assert draft is not None
    drafter = draft.drafter(pair.target, pair.new_drafter())
    return pair.engine(lookahead, RULES[rule](), drafter=drafter)


def timed(engine: Engine, requests: Sequence[Request]) -> Run:
    """All rows of a batch, prompts included."""
    started = time.perf_counter()
    stats = decode(engine, requests)
    return Run(stats, time.perf_counter() - started)


def require_identity(pair: shoal.Shoal, names: Sequence[str], lookahead: str, rule: str) -> None:
    """Raises InternalError: greedy ids by some drafter differ from those of plain decoding."""
    sampling, limits = shoal.Sampling(temperature=0.0), shoal.Limits(max_new_tokens=32)
    found = {}
    for name in ["plain", *names]:
        engine = engine_of(pair, name, "4" if lookahead == "auto" else lookahead, rule)
        prompts = [tuple(pair.tokenizer.encode(text)) for text in texts("edit", 2)]
        rows = [engine.submit(Request(ids, 2, sampling, limits)) for ids in prompts]
        while engine.step():
            pass
        found[name] = [row.tokens for group in rows for row in group]
        if found[name] != found["plain"]:
            raise InternalError(
                f"greedy ids by {name} differ from plain ones; nothing that follows would be worth measuring"
            )


def lines(pair: shoal.Shoal, task: str, batch: int, names: Sequence[str], given: Settings) -> list[Line]:
    """Of all drafters on one task."""
    work = batches(task, batch, given.repeats, given.tokens, given.temperature, pair.tokenizer)
    engines = {name: engine_of(pair, name, given.lookahead, given.rule) for name in names}
    for engine in engines.values():
        for first in work[:WARM_UP]:
            decode(engine, first)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for repeat, name in in_turns(names, given.repeats):
        runs[name].append(timed(engines[name], work[WARM_UP + repeat]))
    return [_line(task, batch, name, runs) for name in names]


def _line(task: str, batch: int, name: str, runs: dict[str, list[Run]]) -> Line:
    own = runs[name]
    total = sum((run.stats for run in own), Stats())

    def over(other: str) -> float | None:
        return median(a.speed / b.speed for a, b in zip(own, runs[other], strict=True)) if other in runs else None

    return Line(
        task, batch, name,
        tokens_per_second=median(run.speed for run in own),
        per_pass=total.acceptance_length,
        drafted=total.drafted / total.row_rounds,
        accepted=total.acceptance_rate,
        share=median(run.stats.seconds_propose / run.stats.seconds_rounds for run in own),
        v_plain=over("plain") or 0.0,
        v_model=over("bundled"),
        by_drafter={word: asdict(counts) for word, counts in total.by_drafter.items()},
    )  # fmt: skip


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Settings:
    """What one file of results has in common."""

    lookahead: str
    rule: str
    tokens: int
    repeats: int
    temperature: float
    drafters: list[str]


def show(found: Sequence[Line], console: Console) -> None:
    """A table per task."""
    for task in dict.fromkeys(line.task for line in found):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=task, title_justify="left")
        for name in (
            "batch",
            "drafter",
            "tokens/pass",
            "drafted",
            "accepted",
            "drafter's time",
            "tokens/s",
            "v plain",
            "v model",
        ):
            table.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=True)
        for line in found:
            if line.task == task:
                model = "" if line.v_model is None else f"{line.v_model:.2f}"
                table.add_row(
                    str(line.batch), line.drafter, f"{line.per_pass:.2f}", f"{line.drafted:.2f}", f"{line.accepted:.2f}",
                    f"{line.share:.1%}", f"{line.tokens_per_second:.0f}", f"{line.v_plain:.2f}", model,
                )  # fmt: skip
        console.print(table)


def resumed(place: Path | None, settings: Settings) -> list[Line]:
    """What a file of the same settings has already.

    Raises:
        RequestError: it has results of other settings.
    """
    if place is None or not place.exists():
        return []
    known = json.loads(place.read_text(encoding="utf-8"))
    if known["settings"] != asdict(settings):
        raise RequestError(f"{place} has results of other settings: give another file, or remove it")
    return [Line(**line) for line in known["lines"]]


def cells(tasks: Sequence[str], sizes: Sequence[int], done: Sequence[Line]) -> Iterator[tuple[str, int]]:
    """What is still to be measured."""
    have = {(line.task, line.batch) for line in done}
    for task in tasks:
        for batch in sizes:
            if (task, batch) not in have:
                yield task, batch


def main(
    drafters: Annotated[str, typer.Option(help="Names separated by |; plain and bundled are compared with.")] = "|".join(
        DRAFTERS
    ),
    tasks: Annotated[str, typer.Option(help=f"Some of {', '.join(TASKS)}.")] = ",".join(TASKS),
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,8,32",
    tokens: Annotated[int, typer.Option(help="Per row.")] = 48,
    repeats: Annotated[int, typer.Option(help="Batches of each drafter, after the first ones.")] = 5,
    lookahead: Annotated[str, typer.Option(help="auto, or a draft length.")] = "auto",
    rule: Annotated[str, typer.Option(help="rejection or coupled.")] = "rejection",
    temperature: Annotated[float, typer.Option(help="But of the task text.")] = 0.8,
    quick: Annotated[bool, typer.Option("--quick", help="Two batches of 24 tokens, 1 and 8 rows.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything there; goes on with what is there.")
    ] = None,
) -> None:
    """Tokens per target pass, the drafter's share of the time and tokens/s of drafters, by task and batch."""
    require_place(json_path)
    names, chosen = drafters.split("|"), tasks.split(",")
    if unknown := [task for task in chosen if task not in TASKS]:
        raise RequestError(f"tasks must be some of {', '.join(TASKS)}, got {unknown[0]!r}")
    names = ["plain", *(name for name in names if name != "plain")]
    if quick:
        batch_sizes, tokens, repeats = "1,8", 24, 2
    sizes = [int(batch) for batch in batch_sizes.split(",")]
    settings = Settings(lookahead, rule, tokens, repeats, temperature, names)
    found = resumed(json_path, settings)
    pair = shoal.load(max_batch=max(sizes))
    require_identity(pair, names[1:], lookahead, rule)
    about = machine(pair.target.device)
    for task, batch in track(list(cells(chosen, sizes, found)), "decoding", console=Console(stderr=True)):
        found += lines(pair, task, batch, names, settings)
        if json_path is not None:
            report = {"machine": about, "settings": asdict(settings), "lines": [asdict(line) for line in found]}
            write_results(json_path, report)
    show(found, Console(highlight=False, width=None if sys.stdout.isatty() else 120))


if __name__ == "__main__":
    command.run(main)
