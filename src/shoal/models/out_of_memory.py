"""The recognition of exceptions that mean a lack of memory, and the one error that they become."""

from __future__ import annotations

import errno
from types import TracebackType

from shoal.errors import OutOfMemory

SIGNS = (
    "out of memory",  # CUDA's allocator, "CUDA error: out of memory", drivers, ROCm
    "can't allocate memory",  # PyTorch on a CPU
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER
    # a new handle fails for want of memory, though the status then says "not initialized"
    "cublascreate",
)
"""The texts in the messages of such errors; libraries raise them as plain RuntimeErrors."""
ADVICE = "lower max_batch, n, max_new_tokens or use dtype='bfloat16'"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that there was no memory, on any device."""
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


class explained:
    """A context in which out of memory becomes an `OutOfMemory` with advice.

    Every other error passes unchanged. The traceback of the cause is dropped: its frames hold the
    tensors that took the memory.
    """

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (MemoryError, RuntimeError, OSError)) and is_out_of_memory(error):
            raise OutOfMemory(
                f"{self._who}: out of memory ({error}); {ADVICE}"
            ) from error.with_traceback(None)
