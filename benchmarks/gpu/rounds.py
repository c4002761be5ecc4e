"""A plain and a speculative round under the profiler: top kernels, gaps, copies, and the share of a round in which nothing runs.

The rounds are timed without the profiler first. Kernel times are the device's own (CUPTI). "idle" is the share of a round's time in
which the device computes nothing: what the host keeps it waiting for. The floor is that of a plain round: weights, keys and values
once.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/rounds.py
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from common import arguments, deliver, device_or_exit, failures_of
from shoal.api import Shoal
from shoal.bench.imposed import imposing
from shoal.bench.roofline import Load, ceilings
from shoal.bench.shapes import shaped_pair
from shoal.bench.work import timed
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.types.requests import Request

WARM_UPS = 8
"""Rounds in which prompts are computed and rounds are captured."""
PROMPT = 512
TOP = 12
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


def recorded(events: Any, device: torch.device) -> list[Interval]:
    """What the profiler saw on the device; on a CPU the operations that call no other."""
    if device.type == "cuda":
        kept = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    else:
        kept = [event for event in events if not event.cpu_children]
    return [Interval(event.time_range.start, event.time_range.end, event.name) for event in kept]


def started(pair: Shoal, lookahead: str, rows: int, prompt: int, tokens: int) -> Engine:
    """An engine whose rows all run, its passes built."""
    pair = imposing(pair, 0.8)
    assert pair.rule is not None
    engine = pair.engine(lookahead, pair.rule)
    generator = torch.Generator().manual_seed(0)
    for _ in range(rows):
        ids = torch.randint(pair.target.vocab_size, (prompt,), generator=generator).tolist()
        engine.submit(Request(tuple(ids), 1, Sampling(temperature=0.8, seed=1), Limits(max_new_tokens=tokens)))
    for _ in range(WARM_UPS):
        engine.step()
    return engine


def measured(pair: Shoal, lookahead: str, rows: int, prompt: int, rounds: int, bandwidth: float) -> tuple[Line, list[Line]]:
    """The line of a kind of round, and the lines of its kernels and gaps."""
    device = pair.target.device
    engine = started(pair, lookahead, rows, prompt, tokens=8 * (WARM_UPS + 2 * rounds + 2))
    before, lengths = engine.stats.committed, sum(engine.target.cache.lengths[:rows])
    with timed(device) as watch:
        for _ in range(rounds):
            engine.step()
    each, committed = watch.seconds / rounds, (engine.stats.committed - before) / rounds
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler, timed(device):
        for _ in range(rounds):
            engine.step()
    intervals = recorded(profiler.events(), device)
    union = busy_intervals(intervals)
    busy = sum(one.end - one.start for one in union) / rounds
    span = (union[-1].end - union[0].start) / rounds if union else 0.0
    copies = Counter(one.name for one in intervals if one.is_copy)
    load = Load.of(pair.target)
    assert load is not None
    floor = (load.weights + load.kv * (lengths + rounds / 2 * committed)) / bandwidth
    failures = failures_of([pair.target, pair.draft_model])
    line = {
        "lookahead": lookahead, "ms": 1000 * each, "ms per token": 1000 * each * rows / committed if committed else 0.0,
        "busy ms": busy / 1000, "idle": 1 - busy / span if span else 1.0, "floor / time": floor / each,
        "kernels": sum(not one.is_copy for one in intervals) / rounds,
        "uploads": sum(n for name, n in copies.items() if "HtoD" in name) / rounds,
        "downloads": sum(n for name, n in copies.items() if "DtoH" in name) / rounds,
        "failure": "; ".join(failures) or "-",
    }  # fmt: skip
    return line, [*_top(intervals, lookahead, rounds), *_longest(union, lookahead, rounds)]


def _top(intervals: Sequence[Interval], lookahead: str, rounds: int) -> list[Line]:
    times: dict[str, list[float]] = defaultdict(list)
    for one in intervals:
        times[one.name].append(one.end - one.start)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        {
            "lookahead": lookahead,
            "kind": "kernel",
            "name": name[:90],
            "count": len(us) / rounds,
            "us per round": sum(us) / rounds,
        }
        for name, us in ranked
    ]


def _longest(union: Sequence[Interval], lookahead: str, rounds: int) -> list[Line]:
    return [
        {"lookahead": lookahead, "kind": "gap", "name": name[:90], "count": 1 / rounds, "us per round": us / rounds}
        for us, name in gaps(union)[:TOP]
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="7.8b/310m", help="as in shoal bench (default: 7.8b/310m)")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    device = device_or_exit(options.device)
    pair = shaped_pair(options.shape, dtype="auto", device=options.device, max_batch=options.rows)
    bandwidth, lines, details = ceilings(device, pair.target.dtype).bytes, [], []
    for lookahead in ("off", "fixed:6"):
        line, detail = measured(pair, lookahead, options.rows, options.prompt_tokens, options.rounds, bandwidth)
        lines.append(line)
        details += detail
    title = f"a round of {options.rows} rows, {pair.target.name}, {pair.target.dtype}, acceptance 0.8 imposed"
    deliver("kernels and gaps of these rounds", list(details[0]), details, device, options.results, "kernels")
    deliver(title, list(lines[0]), lines, device, options.results, "rounds")
    raise SystemExit(0 if all(line["failure"] == "-" for line in lines) else 1)


if __name__ == "__main__":
    main()
