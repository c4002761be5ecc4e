"""The memory of packed weights: huge pages where the system has them.

A pass reads all weights once, and with pages of 4 KiB a processor spends a third of that time on
finding them. Small matrices share a mapping, as a huge page has 2 MiB.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
SHARED_BYTES = 32 * 2**20
"""The size of a mapping that matrices share."""
ALIGNED = 4096
"""The alignment of a matrix in bytes."""
_lock = threading.Lock()
_shared: tuple[mmap.mmap, int] | None = None
"""The mapping that has room for more matrices, and the number of its bytes in use."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor without contents; its memory is freed with the last tensor of a mapping."""
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // ALIGNED) * ALIGNED
    try:
        place = _place(size) if HUGE is not None and size else None
    except OSError:  # no memory for a whole mapping, or the kernel has no huge pages
        place = None
    if place is None:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(place[0], dtype=dtype, count=count, offset=place[1]).view(*shape)


def _place(size: int) -> tuple[mmap.mmap, int]:
    """Returns a mapping, and the offset of so many free bytes in it."""
    global _shared
    if size > SHARED_BYTES // 4:
        return _mapping(size), 0
    with _lock:
        if _shared is None or _shared[1] + size > SHARED_BYTES:
            _shared = _mapping(SHARED_BYTES), 0
        made, used = _shared
        _shared = made, used + size
    return made, used


def _mapping(size: int) -> mmap.mmap:
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert HUGE is not None
    made.madvise(HUGE)
    return made
