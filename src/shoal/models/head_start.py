"""The head start of a load: weights are read while Python imports Transformers.

A command imports torch and Transformers for seconds, on one core. Meanwhile a thread reads the
files of the weights, so that they lie in the system's cache, and has the system find memory for
packed matrices: the first write to a huge page waits until it is cleared, which takes a virtual
machine up to a second for the weights of 135 million parameters. What is computed is the same with
and without a head start, and no module here imports torch.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
CHUNK = 32 * 2**20
"""The size of a mapping that small matrices share, the one kind that is made beforehand."""
BLOCK = 2**20
"""The bytes that are read at once."""
MOST = 2**30
"""The bytes of weights up to which memory is found beforehand; matrices of larger models have
mappings of their own."""
_running: HeadStart | None = None
"""The head start of the load that is under way."""


def mapping(size: int) -> mmap.mmap:
    """Returns memory in huge pages, from the head start if that has such a mapping ready."""
    running = _running
    if running is not None and size == CHUNK:
        with suppress(IndexError):
            return running.ready.pop()
    return _new(size)


def _new(size: int) -> mmap.mmap:
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE is not None:
        made.madvise(HUGE)
    return made


class HeadStart:
    """The reading of weights on a thread, from the beginning of a `with` block to its end.

    Files that cannot be read are left to the load, which says why.

    Args:
        files: the files of the weights.
        memory: True if the weights are going to be packed on a CPU.

    Attributes:
        bytes_read: the bytes that were read.
        ready: the mappings of `CHUNK` bytes that are ready; `mapping` takes them.
    """

    def __init__(self, files: Sequence[Path], *, memory: bool = True) -> None:
        self.bytes_read, self.ready, self._made = 0, list[mmap.mmap](), 0
        self._files: list[FileIO] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shoal-head-start", daemon=True)
        self._paths, self._memory = files, memory and HUGE is not None

    def __enter__(self) -> HeadStart:
        global _running
        for path in self._paths:
            with suppress(OSError):
                self._memory = self._memory and path.stat().st_size <= MOST
                self._files.append(FileIO(path))
        _running = self
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _running
        self._ended.set()
        self._thread.join()
        _running = None
        self.ready.clear()
        for file in self._files:
            file.close()

    def wait(self) -> None:
        """Waits until all is read."""
        self._thread.join()

    def _work(self) -> None:
        block = bytearray(BLOCK)
        for file in self._files:
            with suppress(OSError):
                while not self._ended.is_set() and (count := file.readinto(block)):
                    self.bytes_read += count
                    if self._memory and self.bytes_read >= (self._made + 1) * CHUNK:
                        self._prepare()

    def _prepare(self) -> None:
        """Makes a mapping and writes to its pages; without memory none is made."""
        with suppress(OSError):
            made = _new(CHUNK)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(made)), 0, CHUNK)
            self.ready.append(made)
        self._made += 1
