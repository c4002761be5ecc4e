"""The peak memory of tensors, counted.

It is not guessed from the process size, which holds Python, torch and its code pages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """Counts, on a CPU, the most bytes of tensors alive at once that `work` allocated.

    `work` is run under the profiler.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    alive = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def peak_device_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Returns, on CUDA, the most bytes that torch held during `work`.

    They include all that was there before: weights, captured graphs.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)
