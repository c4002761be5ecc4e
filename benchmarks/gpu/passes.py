"""What a pass of the target costs with PAD and the fused kernel, by modules and by Triton layers, beside its floor.

Rows at lengths spread between half the context and all of it; one new token each (plain decoding) and seven (verifying six drafts).
The floor is the time to read the weights, and the keys and values that the rows really have, once at the bandwidth of a large copy.
"executor" computes the passes, which are launched kernel by kernel; captured rounds are for `rounds.py`. "ms" is of passes that
wait in the device's queue, by device events; "latency" that of one alone by the clock, from the call until the logits are there.
The methods take turns, so that all meet the same clocks.

Exits with 1 where the modules computed what Triton layers should have.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/passes.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from common import PRETEND, arguments, deliver, device_or_exit, dtype_of
from shoal.bench import in_turns
from shoal.bench.random_pairs import shaped_pair
from shoal.bench.work import Load, ceilings, timed
from shoal.models import loading
from shoal.models.passes import use_fused_layers
from shoal.models.runner import Runner

WARM_UPS = 2
QUEUED = 4
"""Passes that wait in the queue while one is timed, so that launching them is no part of it unless it takes longer."""
NEW_TOKENS = (1, 7)
Kind = tuple[str, bool]
"""Attention, whether Triton layers compute."""
Line = dict[str, Any]


def prepared(hf: Any, attention: str, fused: bool, starts: Sequence[int], room: int) -> Runner:
    """A runner with rows of those lengths in its cache, and room for more tokens."""
    runner = loading.wrap(hf, attention, attention)
    if fused:
        use_fused_layers(runner)
    runner = runner.fork()
    runner.memory.reserve(len(starts), max(starts) + room)
    for slot, start in enumerate(starts):
        tokens = torch.randint(runner.vocab_size, (1, start), device=runner.device)
        runner.feed([slot], tokens, [start], want_logits=False)
    return runner


def feed(runner: Runner, starts: Sequence[int], q: int) -> None:
    """One pass of q tokens per row, which is then forgotten."""
    slots, tokens = range(len(starts)), torch.ones(len(starts), q, dtype=torch.long, device=runner.device)
    runner.feed(slots, tokens, [q] * len(starts))
    for slot, start in zip(slots, starts, strict=True):
        runner.cache.rollback(slot, start)


def latency(runner: Runner, starts: Sequence[int], q: int) -> float:
    """Seconds of one pass alone."""
    with timed(runner.device) as watch:
        feed(runner, starts, q)
    return watch.seconds


def queued(runner: Runner, starts: Sequence[int], q: int) -> float:
    """Seconds per pass of several in a row, by device events on CUDA."""
    if runner.device.type != "cuda":
        started = time.perf_counter()
        for _ in range(QUEUED):
            feed(runner, starts, q)
        return (time.perf_counter() - started) / QUEUED
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    feed(runner, starts, q)  # the first finds the queue empty
    begin.record()
    for _ in range(QUEUED):
        feed(runner, starts, q)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / QUEUED


def kinds(kernels: bool, methods: Sequence[str]) -> Iterator[Kind]:
    """Every method by the model's modules, and, where there are kernels, the first by Triton layers."""
    yield from ((attention, False) for attention in methods)
    if kernels:
        yield methods[0], True


def floor_seconds(load: Load, starts: Sequence[int], q: int, bandwidth: float) -> float:
    """Weights once, and the keys and values of each row once."""
    return (load.weights + load.kv * sum(start + q for start in starts)) / bandwidth


def lines_of(
    methods: dict[Kind, Runner], starts: Sequence[int], q: int, repeats: int, floor: float, context: str
) -> Iterator[Line]:
    """A line for each method, all measured in turns."""
    times: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in methods}
    for _, kind in in_turns(list(methods), WARM_UPS + repeats):
        times[kind].append((queued(methods[kind], starts, q), latency(methods[kind], starts, q)))
    for kind, every in times.items():
        taken = [1000 * seconds for seconds, _ in every[WARM_UPS:]]
        yield {
            "context": context, "tokens": max(starts), "new tokens": q, "attention": kind[0],
            "executor": methods[kind].explain(range(len(starts)), [q] * len(starts)).executor,
            "ms": median(taken), "fastest": min(taken), "slowest": max(taken),
            "latency": 1000 * median(alone for _, alone in every[WARM_UPS:]), "floor / time": 1000 * floor / median(taken),
        }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="7.8b/310m", help="as in shoal bench (default: 7.8b/310m)")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument(
        "--contexts", default="short=1024", help="NAME=TOKENS,...: of the longest row; at the first by all methods"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = device_or_exit(options.device)
    target = shaped_pair(options.shape, dtype=dtype_of(options.device), device=str(device), max_batch=options.rows).target
    load = Load.of(target)
    assert load is not None
    bandwidth, honest = ceilings(device, target.dtype).bytes, True
    kernels = device.type == "cuda" and options.device != PRETEND
    attention = ["fused", "pad"] if kernels else ["pad", "split"]
    for context in options.contexts.split(","):
        name, _, tokens = context.partition("=")
        starts = [int(int(tokens) * (0.5 + 0.5 * b / max(1, options.rows - 1))) for b in range(options.rows)]
        methods = {kind: prepared(target.hf, *kind, starts, max(NEW_TOKENS) + 1) for kind in kinds(kernels, attention)}
        lines = [
            line
            for q in NEW_TOKENS
            for line in lines_of(methods, starts, q, options.repeats, floor_seconds(load, starts, q, bandwidth), name)
        ]
        title = f"a pass of {target.name}, {target.dtype}: {options.rows} rows, up to {tokens} tokens"
        floor = 1000 * floor_seconds(load, starts, 1, bandwidth)
        deliver(
            f"{title}; floor of one token {floor:.3g} ms", list(lines[0]), lines, device, options.results, f"passes-{name}"
        )
        honest = honest and len({line["executor"] for line in lines}) == len({fused for _, fused in methods})
        attention = attention[:1]  # a long cache for each method would not fit
        methods.clear()
    raise SystemExit(0 if honest else 1)


if __name__ == "__main__":
    main()
