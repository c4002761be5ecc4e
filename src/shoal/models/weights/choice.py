"""The choice whether the weights of a shape are packed: measured once per CPU, kept on disk.

The form changes the rounding, and with it the tokens of a seed. So the first choice for a shape is
kept in the user's cache folder and every later process makes the same choice. A take multiplies by
weights that are not in the CPU's cache, as those of a model are not in the next pass; disturbed
takes do not change the choice (see `ratios`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shoal.durable import cache_folder
from shoal.models import formats
from shoal.models.weights.matrix import AS_IS, INPUT_MAJOR, PACKED, Key, Matrix
from shoal.models.weights.packing import packed, packing
from shoal.native import processor
from shoal.native.build import machine_flags, missing

LOG = logging.getLogger("shoal")
TOKENS = (1, 8, 40)
"""The numbers of tokens per product: a row that decodes, a batch, a batch that verifies drafts."""
TOLERATED = 1.25
"""The largest tolerated ratio of the packed products' time to the others'.

Packed weights are kept unless their products take more, on average over `TOKENS`.
"""
WORST = 2.0
"""The ratio from which on the cause is a disturbance: a thread that waited for a processor."""
SECONDS = 1.0
"""The most seconds for all shapes of a model, unless the fewest takes of each need more."""
ROUNDS = (6, 40)
"""The least and the most takes of each product."""
ROWS = 4096
"""The number of outputs from which on a product takes proportionally longer.

Of a larger matrix, `ROWS` outputs are measured.
"""
ROTATED = 96 * 2**20
"""The most bytes of weights to multiply by in turns."""
COPIES = 16
"""The most matrices to multiply by in turns.

Small matrices would take longer to pack than to measure.
"""


def by_facts(keys: Collection[Key]) -> dict[Key, str]:
    """Returns the forms without packing: input-major where MKL multiplies, which is in float32."""
    return {
        (shape, dtype): INPUT_MAJOR if dtype == torch.float32 and formats.cpu().mkl else AS_IS
        for shape, dtype in keys
    }


def by_measurement(keys: Collection[Key]) -> dict[Key, str]:
    """Returns the forms with packing where this CPU gains by it.

    A choice is known from an earlier process, or measured and remembered.
    """
    forms = by_facts(keys)
    wanted = {key: _name(key) for key in keys if packing(key[1]) is not None}
    place = _place() if wanted else None
    known = _read(place)
    new = {}
    for name in sorted(set(wanted.values()) - known.keys()):
        shape, dtype = next(
            (shape, dtype) for (shape, dtype), other in wanted.items() if other == name
        )
        times = measured(shape, dtype, SECONDS / len(set(wanted.values())))
        new[name] = {"packs": packs(times), "ratios": [round(ratio, 2) for ratio in ratios(times)]}
    if new:
        known = _remember(place, new)
    return forms | {key: PACKED for key, name in wanted.items() if known[name]["packs"]}


Takes = Mapping[int, Sequence[tuple[float, float]]]
"""The seconds of products by plain and by packed weights, for each number of tokens.

The two products of a pair follow each other.
"""


def packs(takes: Takes) -> bool:
    """Returns True if packed weights are kept: unless they are clearly slower."""
    return sum(ratios(takes)) <= TOLERATED * len(takes)


def ratios(takes: Takes) -> list[float]:
    """Returns the time of products by packed weights over that of the others, per number of tokens.

    Each value is the smaller of two robust ratios, capped at `WORST`: that of the shortest takes,
    and the median ratio of neighbours. So packed weights lose only if a disturbance fools both
    ratios, for several numbers of tokens. The other forms are the worse choice nearly everywhere.
    """
    shortest = [
        min(packed for _, packed in pairs) / min(plain for plain, _ in pairs)
        for pairs in takes.values()
    ]
    neighbours = [median(packed / plain for plain, packed in pairs) for pairs in takes.values()]
    return [min(a, b, WORST) for a, b in zip(shortest, neighbours, strict=True)]


def measured(shape: tuple[int, int], dtype: torch.dtype, seconds: float) -> Takes:
    """Returns takes of products by cold weights, for each of `TOKENS`."""
    ends, (out, width) = time.perf_counter() + seconds, (min(shape[0], ROWS), shape[1])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator).to(dtype)
    inputs = {
        tokens: torch.randn(tokens, width, generator=generator).to(dtype) for tokens in TOKENS
    }
    copies = min(max(2, math.ceil(min(1.25 * cache_bytes(), ROTATED) / weight.nbytes)), COPIES)
    form = by_facts([(shape, dtype)])[shape, dtype]
    pairs = [(Matrix(weight.clone(), None, form), packed(weight, None)) for _ in range(copies)]
    takes: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in TOKENS}
    cold = cycle(pairs)
    for done in range(-1, ROUNDS[1]):
        if done >= ROUNDS[0] and time.perf_counter() > ends:
            break
        for tokens, x in inputs.items():
            plain, fast = next(cold)
            pair = _seconds(plain.linear, x), _seconds(fast.linear, x)
            if done >= 0:  # libraries make their kernels in the first take
                takes[tokens].append(pair)
    return takes


@torch.inference_mode()
def _seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    started = time.perf_counter()
    product(x)
    return time.perf_counter() - started


def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Returns the size in bytes of the last-level cache as Linux tells it, else 32 MiB."""
    units = {"K": 2**10, "M": 2**20}
    try:
        sizes = [file.read_text(encoding="utf-8").strip() for file in folder.glob("index*/size")]
        return max(int(size[:-1]) * units[size[-1]] for size in sizes)
    except (OSError, ValueError, KeyError, IndexError):
        return 32 * 2**20


# ── the choices on disk ───────────────────────────────────────────────────────────────────────────


def _name(key: Key) -> str:
    """Returns the shape and dtype that decide the time of a product, as text."""
    (out, width), dtype = key
    return f"{str(dtype).removeprefix('torch.')} {min(out, ROWS)}x{width}"


def _facts() -> str:
    """Returns the other facts that decide it: the CPU, its caches, the threads, the library."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
            model,
        )
    except OSError:
        pass
    flags = ",".join(sorted(processor.cpu_flags()))
    library = f"torch {torch.__version__}, {missing() or ' '.join(machine_flags())}"
    return f"{model}; {flags}; {cache_bytes()}; {torch.get_num_threads()} threads; {library}"


def _place() -> Path | None:
    """Returns the file for this CPU; None where there is no folder for it."""
    folder = cache_folder()
    return (
        None
        if folder is None
        else folder
        / f"weights-{hashlib.blake2b(_facts().encode(), digest_size=8).hexdigest()}.json"
    )


def _read(place: Path | None) -> dict[str, Any]:
    """Returns the choices in a file; none where it is missing or damaged."""
    try:
        known = (
            json.loads(place.read_text(encoding="utf-8"))["choices"] if place is not None else {}
        )
        return {name: choice for name, choice in known.items() if isinstance(choice["packs"], bool)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(place: Path | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """Adds choices to the file and returns all choices.

    The choices that another process has written meanwhile count.
    """
    known = {**new, **_read(place)}
    if place is not None:
        try:
            handle, beside = tempfile.mkstemp(dir=place.parent, prefix=f"{place.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"facts": _facts(), "choices": known}, file, indent=1)
                Path(beside).replace(place)
            except BaseException:
                Path(beside).unlink()
                raise
        except OSError as error:
            LOG.warning(
                "cannot remember how weights are multiplied fastest, so each process measures "
                "it: %s",
                error,
            )
    return known
