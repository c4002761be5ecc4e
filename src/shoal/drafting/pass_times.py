"""What passes of a target take by their columns, measured in the rows of a round."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from shoal.models.runner import Runner

TIMES = 3
"""Passes of a size, the fastest of which counts: disturbances only make a pass slower."""
_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], list[float]]] = weakref.WeakKeyDictionary()


def pass_times(target: Runner, rows: Sequence[tuple[int, int, int]], size: int, most: int) -> Callable[[int], float]:
    """Seconds of a pass with so many columns beside each row's last token; between the sizes tried, by their neighbours.

    Args:
        rows: slot, last token, and tokens in the cache, of each. size: what is known of so many rows is not measured again.
        most: columns beside the last token.
    """
    known = _known.setdefault(target.hf, {})
    sizes = [0, most // 4, most // 2, most]
    if (size, most) not in known:
        known[size, most] = [_seconds(target, rows, columns) for columns in sizes]
    seconds = known[size, most]
    return lambda columns: float(np.interp(columns, sizes, seconds))


def _seconds(target: Runner, rows: Sequence[tuple[int, int, int]], columns: int) -> float:
    """Of the fastest of some passes over the target's own cache, which is then as it was. They are in no counter of the target."""
    runner = target.over_same_cache(target.hf, target.lean)
    block = torch.tensor([[token] * (1 + columns) for _, token, _ in rows], device=target.device)
    found = []
    for _ in range(TIMES):
        started = time.perf_counter()
        runner.feed([slot for slot, _, _ in rows], block, [1 + columns] * len(rows))
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        found.append(time.perf_counter() - started)
        for slot, _, length in rows:
            runner.cache.rollback(slot, length)
    return min(found)
