"""Plain and speculative rounds in four ways, under the profiler: kernels, gaps, copies, the share in which nothing runs.

The ways: rounds captured with Triton layers (what a user gets), Triton layers launched one by one, rounds captured with the model's
modules, and modules launched one by one. Greedy tokens of the ways are compared first: in 16 bit, sums in another order may part
rows, so the line tells how many tokens are the same before the first difference, and nothing fails for it. The files are written
after each way: a run that is stopped keeps those that it measured.

The rounds are timed without the profiler first. "host" is the share of that time in which the device had no captured function to
work on, by its own events: what the host keeps it waiting for. Kernel times, and "idle", the share in which none ran, are the
device's own under the profiler (CUPTI), which slows the host and each launch. The floor is that of a plain round: weights, keys and
values once.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/rounds.py
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from common import arguments, deliver, device_or_exit, dtype_of, failures_of
from shoal.api import Shoal
from shoal.bench.random_pairs import imposing, shaped_pair
from shoal.bench.work import Load, ceilings, timed
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.models.compiled.captured_round import CapturedRound
from shoal.types.requests import Request

WARM_UPS = 8
"""Rounds in which prompts are computed and rounds are captured."""
PROMPT = 512
TOP = 12
COMPARED = 32
"""Greedy tokens of each row by which the ways are compared."""
WAYS: dict[str, dict[str, tuple[str | None, bool]]] = {
    "cuda": {
        "captured": ("graphed", True),
        "Triton layers": (None, True),
        "captured modules": ("graphed", False),
        "modules": (None, False),
    },
    "pretend": {"captured modules": ("graphed", False), "modules": (None, False)},
    "cpu": {"captured modules": ("eager", False), "modules": (None, False)},
}
"""The executor of captured rounds, and whether Triton layers compute, by the name of the way."""
LOOKAHEADS = ("off", "fixed:6")
Line = dict[str, Any]


class Interval(NamedTuple):
    """What ran on the device, microseconds."""

    start: float
    end: float
    name: str

    @property
    def is_copy(self) -> bool:
        return self.name.startswith(("Memcpy", "Memset"))


def busy_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of what computes, by start; copies do not count. Each has the name of the last of its members."""
    union: list[Interval] = []
    for one in sorted(interval for interval in intervals if not interval.is_copy):
        if union and one.start <= union[-1].end:
            union[-1] = Interval(union[-1].start, max(union[-1].end, one.end), one.name)
        else:
            union.append(one)
    return union


def gaps(union: Sequence[Interval]) -> list[tuple[float, str]]:
    """Microseconds between them, longest first, and what ran before and after."""
    found = [(b.start - a.end, f"{a.name} .. {b.name}") for a, b in pairwise(union)]
    return sorted(found, reverse=True)


def traced() -> ProfilerActivity:
    """What the profiler follows: a GPU, or where there is none the CPU."""
    return (
        ProfilerActivity.CUDA
        if torch.version.cuda and ProfilerActivity.CUDA in supported_activities()
        else ProfilerActivity.CPU
    )


def recorded(events: Any) -> list[Interval]:
    """What the profiler saw on the device; without one the operations that call no other."""
    if traced() is ProfilerActivity.CUDA:
        kept = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    else:
        kept = [event for event in events if not event.cpu_children]
    return [Interval(event.time_range.start, event.time_range.end, event.name) for event in kept]


def switch(pair: Shoal, ways: dict[str, tuple[str | None, bool]]) -> Callable[[str], None]:
    """A function that lets both models of the pair compute in a way from now on."""
    models = [model for model in (pair.target, pair.draft_model) if model is not None]
    layers = [model.bridge.layers for model in models]

    def use(way: str) -> None:
        executor, wanted = ways[way]
        for model, own in zip(models, layers, strict=True):
            model.bridge.layers = own if wanted else None
            model.capture_rounds(executor)

    return use


def greedy(pair: Shoal, rows: int, prompt: int) -> list[Sequence[int]]:
    """The first greedy tokens of rows with prompts of their own, decoded with drafts."""
    prompts = _prompts(pair, rows, prompt)
    result = pair.generate(prompts, 1, temperature=0.0, max_new_tokens=COMPARED, lookahead=LOOKAHEADS[-1], eos=())
    return [sample.token_ids for output in result for sample in output.samples]


def agreement(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference of each row."""
    same = sum(
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        for a, b in zip(one, other, strict=True)
    )
    return same / sum(map(len, one))


def _prompts(pair: Shoal, rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(pair.target.vocab_size, (length,), generator=generator).tolist() for _ in range(rows)]


def started(pair: Shoal, lookahead: str, rows: int, prompt: int, tokens: int) -> Engine:
    """An engine whose rows all run, its passes built."""
    pair = imposing(pair, 0.8)
    assert pair.rule is not None
    engine = pair.engine(lookahead, pair.rule)
    for ids in _prompts(pair, rows, prompt):
        engine.submit(Request(tuple(ids), 1, Sampling(temperature=0.8, seed=1), Limits(max_new_tokens=tokens)))
    for _ in range(WARM_UPS):
        engine.step()
    return engine


def floor_seconds(pair: Shoal, drafts: int, tokens: float, bandwidth: float) -> float:
    """Weights, keys and values of the target once, those of the drafter once per draft."""
    target, drafter = Load.of(pair.target), None if pair.draft_model is None else Load.of(pair.draft_model)
    assert target is not None
    moved = target.weights + target.kv * tokens
    if drafter is not None:
        moved += drafts * (drafter.weights + drafter.kv * tokens)
    return moved / bandwidth


@contextmanager
def working() -> Iterator[list[float]]:
    """Within it, the list receives the seconds that the device works on each captured round."""
    seconds, collect = list[float](), CapturedRound.collect

    def noted(self: CapturedRound, launched: Any, rows: Any) -> Any:
        found = collect(self, launched, rows)
        seconds.append(found.drafting + found.verifying)
        return found

    with patch.object(CapturedRound, "collect", noted):
        yield seconds


def measured(
    pair: Shoal, way: str, lookahead: str, options: Any, bandwidth: float, trace: Path | None
) -> tuple[Line, list[Line]]:
    """The line of a kind of round, and the lines of its kernels and gaps."""
    device, rounds, rows = pair.target.device, options.rounds, options.rows
    engine = started(pair, lookahead, rows, options.prompt_tokens, tokens=8 * (WARM_UPS + 2 * rounds + 2))
    before, lengths = engine.stats.committed, sum(engine.target.cache.lengths[:rows])
    with working() as worked, timed(device) as watch:
        for _ in range(rounds):
            engine.step()
    each, committed = watch.seconds / rounds, (engine.stats.committed - before) / rounds
    with profile(activities=[traced()], acc_events=True) as profiler, timed(device):
        for _ in range(rounds):
            engine.step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    intervals = recorded(profiler.events())
    union = busy_intervals(intervals)
    busy = sum(one.end - one.start for one in union) / rounds
    span = (union[-1].end - union[0].start) / rounds if union else 0.0
    copies = Counter(one.name for one in intervals if one.is_copy)
    floor = floor_seconds(pair, int(lookahead.partition(":")[2] or 0), lengths + rounds / 2 * committed, bandwidth)
    failures = failures_of([pair.target, pair.draft_model])
    line = {
        "way": way, "lookahead": lookahead, "ms": 1000 * each, "ms per token": 1000 * each * rows / committed if committed else 0.0,
        "host": 1 - sum(worked) / watch.seconds if worked else None,
        "busy ms": busy / 1000, "idle": 1 - busy / span if span else 1.0, "floor / time": floor / each,
        "kernels": sum(not one.is_copy for one in intervals) / rounds,
        "uploads": sum(n for name, n in copies.items() if "HtoD" in name) / rounds,
        "downloads": sum(n for name, n in copies.items() if "DtoH" in name) / rounds,
        "failure": "; ".join(failures) or "-",
    }  # fmt: skip
    name = f"{way}, {lookahead}"
    return line, [*_top(intervals, name, rounds), *_longest(union, name, rounds)]


def _top(intervals: Sequence[Interval], name: str, rounds: int) -> list[Line]:
    times: dict[str, list[float]] = defaultdict(list)
    for one in intervals:
        times[one.name].append(one.end - one.start)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        {"round": name, "kind": "kernel", "name": kernel[:90], "count": len(us) / rounds, "us per round": sum(us) / rounds}
        for kernel, us in ranked
    ]


def _longest(union: Sequence[Interval], name: str, rounds: int) -> list[Line]:
    return [
        {"round": name, "kind": "gap", "name": between[:90], "count": 1 / rounds, "us per round": us / rounds}
        for us, between in gaps(union)[:TOP]
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="7.8b/310m", help="as in shoal bench (default: 7.8b/310m)")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--lookaheads", default=",".join(LOOKAHEADS), help="off or fixed:K, ... (default: %(default)s)")
    parser.add_argument("--quantize", default="off", help="weights of one byte, as in shoal.load: target=int8,draft=int8")
    parser.add_argument("--ways", help="WAY,...: of captured, Triton layers, captured modules, modules (default: all)")
    options = parser.parse_args()
    device = device_or_exit(options.device)
    place = {"dtype": dtype_of(options.device), "device": str(device)}
    pair = shaped_pair(options.shape, **place, max_batch=options.rows, quantize=options.quantize)
    bandwidth, lines, details = ceilings(device, pair.target.dtype).bytes, [], []
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
    ways = WAYS[options.device.partition(":")[0]]
    title = f"a round of {options.rows} rows, {pair.target.name}, {pair.target.dtype}, acceptance 0.8 imposed"
    title += "" if options.quantize == "off" else f", {options.quantize}"
    use, first = switch(pair, ways), None
    for way in options.ways.split(",") if options.ways else ways:
        use(way)
        tokens = greedy(pair, options.rows, options.prompt_tokens)
        first = first or tokens
        for lookahead in options.lookaheads.split(","):
            trace = (
                options.results and options.results / f"{way.replace(' ', '-')}-{lookahead.replace(':', '-')}-trace.json.gz"
            )
            line, detail = measured(pair, way, lookahead, options, bandwidth, trace)
            lines.append({**line, "greedy as the first way": agreement(first, tokens)})
            details += detail
        deliver("kernels and gaps of these rounds", list(details[0]), details, device, options.results, "kernels")
        deliver(title, list(lines[0]), lines, device, options.results, "rounds")
    raise SystemExit(0 if all(line["failure"] == "-" for line in lines) else 1)


if __name__ == "__main__":
    main()
