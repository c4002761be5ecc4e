"""Peak memory of tensors, counted, not guessed from the process size (which holds Python, torch and its code pages)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """Most bytes of tensors alive at once that `work` allocated, itself run once more under the profiler."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    alive = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak
