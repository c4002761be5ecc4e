"""Which exceptions mean that there is no memory, wherever they come from, and the one error that they become."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import OutOfMemory

SIGNS = (
    "out of memory",  # CUDA's allocator, "CUDA error: out of memory", drivers, ROCm
    "can't allocate memory",  # PyTorch on a CPU
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER
    "cublascreate",  # a new handle fails for want of memory, though the status then says "not initialized"
)
"""What such errors say; libraries raise them as plain RuntimeErrors."""
ADVICE = "lower max_batch, n, max_new_tokens or use dtype='bfloat16'"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that there was no memory, on any device."""
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


@contextmanager
def explained(who: str) -> Iterator[None]:
    """Out of memory becomes an `OutOfMemory` that says what to do; anything else stays what it is.

    The traceback of the cause is dropped: its frames hold the tensors that took the memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{who}: out of memory ({error}); {ADVICE}") from error.with_traceback(None)
