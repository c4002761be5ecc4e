"""PAD, SPLIT and the fused kernel in one table: what a pass of the target costs with each, as single launches and as a CUDA graph.

Rows at lengths spread between half the context and all of it; one new token each (plain decoding) and seven (verifying six drafts).
The floor is the time to read the weights once, at the bandwidth of a large copy. The methods take turns, so that all meet the same
clocks.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/passes.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch

from common import arguments, deliver, device_or_exit
from shoal.bench.measure import in_turns
from shoal.bench.roofline import Load, ceilings
from shoal.bench.shapes import shaped_pair
from shoal.bench.work import timed
from shoal.models import compiled, loading
from shoal.models.runner import Runner

WARM_UPS = 3
Kind = tuple[str, str | None]
Line = dict[str, Any]


def prepared(hf: Any, attention: str, executor: str | None, starts: Sequence[int], room: int) -> Runner:
    """A runner with rows of those lengths in its cache, and room for more tokens."""
    runner = loading.wrap(hf, attention, attention)
    runner.use_static_passes(executor)
    runner = runner.fork()
    runner.reserve(len(starts), max(starts) + room)
    tokens = torch.randint(runner.vocab_size, (len(starts), max(starts)), device=runner.device)
    runner.feed(range(len(starts)), tokens, starts, want_logits=False)
    return runner


def pass_seconds(runner: Runner, starts: Sequence[int], q: int) -> float:
    """Of one pass of q tokens per row, which is then forgotten."""
    slots, tokens = range(len(starts)), torch.ones(len(starts), q, dtype=torch.long, device=runner.device)
    with timed(runner.device) as watch:
        runner.feed(slots, tokens, [q] * len(starts))
    for slot, start in zip(slots, starts, strict=True):
        runner.cache.rollback(slot, start)
    return watch.seconds


def kinds(device: torch.device) -> Iterator[Kind]:
    """(attention, executor of static passes or None) of every method; SPLIT reads lengths on the host and has no static form."""
    methods, executor = (["pad", "split", "fused"], "graphed") if device.type == "cuda" else (["pad", "split"], "eager")
    for attention, static_executor in product(methods, (None, executor)):
        if static_executor is None or attention in compiled.ATTENTION:
            yield attention, static_executor


def lines_of(methods: dict[Kind, Runner], starts: Sequence[int], q: int, repeats: int, floor: float) -> Iterator[Line]:
    """A line for each method, all measured in turns; the first passes build what is built once."""
    times: dict[Kind, list[float]] = {kind: [] for kind in methods}
    for _, kind in in_turns(list(methods), WARM_UPS + repeats):
        times[kind].append(pass_seconds(methods[kind], starts, q))
    for (attention, executor), every in times.items():
        kept = [1000 * seconds for seconds in every[WARM_UPS:]]
        yield {
            "new tokens": q, "attention": attention, "passes": executor or "single launches", "ms": median(kept),
            "fastest": min(kept), "slowest": max(kept), "floor / time": 1000 * floor / median(kept),
        }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="7.8b/310m", help="as in shoal bench (default: 7.8b/310m)")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the longest row (default: 1024)")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = device_or_exit(options.device)
    target = shaped_pair(options.shape, dtype="auto", device=options.device, max_batch=options.rows).target
    load = Load.of(target)
    assert load is not None
    floor = load.weights / ceilings(device, target.dtype).bytes
    starts = [int(options.context * (0.5 + 0.5 * b / max(1, options.rows - 1))) for b in range(options.rows)]
    methods = {kind: prepared(target.hf, *kind, starts, room=8) for kind in kinds(device)}
    lines = [line for q in (1, 7) for line in lines_of(methods, starts, q, options.repeats, floor)]
    title = f"a pass of {target.name}, {target.dtype}: {options.rows} rows, up to {options.context} tokens"
    deliver(f"{title}; floor {1000 * floor:.3g} ms", list(lines[0]), lines, device, options.results, "passes")


if __name__ == "__main__":
    main()
