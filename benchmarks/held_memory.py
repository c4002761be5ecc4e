"""What a server's process holds, and what a request leaves there: `benchmarks/load.py --soak` judges by it.

    PYTHONMALLOC=malloc python benchmarks/held_memory.py 0 serve ...     # as `shoal serve ...`

Each line of the server's standard input is answered by one on its standard output, once garbage is collected: the bytes that
the C library counts as in use, and how many objects of each type Python has. Bytes in use leave out what makes the resident memory
scatter: pages that were freed and are kept, and room that was taken and not yet written to. With PYTHONMALLOC=malloc Python's own
objects are among them. The first argument is a planted leak: so many bytes are kept for good for each request that is decoded.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import theilslopes

Json = dict[str, Any]
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
FEWEST = 6  # readings of which growth is told
SURE = 0.99  # the confidence with which the slope lies between its bounds
TYPES = 8  # of which is told how they grow
PLANTED: list[bytes] = []


# ── in the server's process ─────────────────────────────────────────────────────────────────────────────────────────


class MallInfo(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def held() -> Json:
    """Returns what the process holds once garbage is collected: bytes in all heaps and in pieces of their own, and objects."""
    gc.collect()
    types = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallInfo
    told = ask()
    return {"bytes": told.uordblks + told.hblkhd, "types": dict(types)}


def answer() -> None:
    """Answers each line of the standard input."""
    for _ in sys.stdin:
        print(json.dumps(held()), flush=True)


def plant(size: int) -> None:
    """Has each submission leave `size` bytes behind."""
    from shoal.serve.worker import Worker

    submit = Worker._submit

    def leaking(self: Worker, submission: Any) -> None:
        PLANTED.append(os.urandom(size))
        submit(self, submission)

    Worker._submit = leaking  # type: ignore[method-assign]


# ── in the process that asks ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Reading:
    """What a server held between two turns, while no row was in it.

    Attributes:
        requests: how many it had answered.
        size: the bytes in use, without what it says that its caches take.
        types: the objects of each type.
    """

    requests: int
    size: int
    types: Json


def growth(readings: Sequence[Reading]) -> Json | None:
    """Returns what a request leaves behind in the second half of a run, in KiB, with its bounds; None of too few readings.

    The slope is the median of those between all pairs of readings, which a few odd ones do not move; its bounds are those by
    ranks (Sen 1968). The types are those whose objects grew most, by 1,000 requests: they say where to look.
    """
    late = readings[len(readings) // 2 :]
    if len(late) < FEWEST:
        return None
    asked = [one.requests for one in late]
    slope, _, low, high = theilslopes([one.size / 2**10 for one in late], asked, alpha=SURE)
    more = {name: count - late[0].types.get(name, 0) for name, count in late[-1].types.items()}
    most = sorted(more, key=lambda name: -more[name])[:TYPES]
    return {
        "left_kib": round(float(slope), 2), "at_least_kib": round(float(low), 2), "at_most_kib": round(float(high), 2),
        "readings": len(late), "mib": [round(one.size / 2**20, 2) for one in readings],
        "objects_per_1000": {name: round(1000 * more[name] / (asked[-1] - asked[0]), 1) for name in most if more[name] > 0},
    }  # fmt: skip


if __name__ == "__main__":
    from shoal.cli import main

    leak = int(sys.argv.pop(1))
    if leak:
        plant(leak)
    threading.Thread(target=answer, daemon=True).start()
    main()
