"""The results of the checks of a load, kept on disk for the next load.

The checks compare a model's passes with plain forwards (`shoal.models.selfcheck`). The same files,
code, settings and processor give the same results, so a second load reads them. A load of a model
of 135 million parameters spends a third of its time on the checks.

All checks of a load have one measure of the distance between two computations of the same logits.
Rounding makes outliers: among a million logits in bfloat16 the largest difference is a standard
deviation even if the distributions are the same for every draw. A fault moves most logits of a
position.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.durable import cache_folder
from shoal.native.build import instructions, missing, remark

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-8, torch.float16: 1e-4, torch.bfloat16: 0.005}
"""The largest divergence that rounding explains, in nats.

A pretrained model of 30 layers shows 2e-11 in float32 and 9e-4 in bfloat16; in float64 the models'
own norms and softmax still round to float32. Scores scaled by a tenth too much cost 0.02 in any
format, a few keys that one of its layers does not see 0.008, norms exchanged in one layer 0.4.
"""
GROUPS = 1e-6
"""The largest divergence in float32 where features are rounded to 16 bits in groups, in nats.

Another order of sums changes a rounding by a 32,767th of the group's largest: the model of `LIMITS`
shows 5e-8.
"""
KEYS = 1e-4
"""The largest divergence in float32 where keys and values are rounded to bytes, in nats.

Another order of sums changes a rounding by a 127th of the head's largest, and with it all that
later layers round: the model of `LIMITS` shows 8e-6.
"""
BYTES = {torch.float64: 0.05, torch.float32: 0.05, torch.float16: 0.25, torch.bfloat16: 0.25}
"""The largest divergence that rounding explains where activations are rounded to bytes, in nats.

The keys are the formats around these products, where another order of sums changes a rounding by a
127th: the pretrained model of `LIMITS` shows 0.02 in float32 and 0.09 in bfloat16.
"""


def divergences(logits: Tensor, right: Tensor) -> Tensor:
    """Computes the Kullback-Leibler divergence of each position from the right one, in nats.

    The temperature is the one at which the right logits of the position have a standard deviation
    of one: a tiny model's logits of 0.1 count as much as a trained model's of 20. The divergence is
    about half the mean square of the differences, in these deviations.

    Args:
        logits: [positions, vocab].
        right: [positions, vocab].

    Returns:
        [positions] float64.
    """
    ours, theirs = logits.double(), right.double()
    spread = theirs.std(dim=-1, keepdim=True).clamp(min=1e-9)
    own, true = (ours / spread).log_softmax(dim=-1), (theirs / spread).log_softmax(dim=-1)
    below = true - own
    # A sum of terms that are never negative.
    return (true.exp() * (torch.expm1(-below) + below)).sum(dim=-1)


LEAST_BYTES = 8 * 2**20
"""The size of the files from which on results are kept; smaller models are checked in no time."""
MOST_FILES = 256
"""The most files of results on the disk; the oldest go."""
SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".py")
"""The suffixes of the files of a directory that decide on the numbers of a model."""


class KeptChecks:
    """The kept results of one model's checks, in the file `place`, or nowhere (None)."""

    def __init__(self, place: Path | None = None) -> None:
        self._place = place

    def read(self, check: str) -> dict[str, Any] | None:
        """Returns the result of a check, or None if it is not kept."""
        result = self._results().get(check)
        return result if isinstance(result, dict) else None

    def write(self, check: str, result: dict[str, Any]) -> None:
        """Keeps the result of a check; a disk that is full keeps nothing."""
        if self._place is None:
            return
        beside = self._place.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            beside.write_text(json.dumps({**self._results(), check: result}), encoding="utf-8")
            beside.replace(self._place)
            _remove_oldest(self._place.parent)

    def _results(self) -> dict[str, Any]:
        """Returns all results, none for a file that is damaged or of another user."""
        if self._place is None:
            return {}
        with suppress(OSError, ValueError):
            if self._place.stat().st_uid in (os.geteuid(), 0):
                results = json.loads(self._place.read_text(encoding="utf-8"))
                return results if isinstance(results, dict) else {}
        return {}


def kept_checks(source: str | Path, **settings: object) -> KeptChecks:
    """Returns the kept results of a model that is loaded from files.

    Args:
        source: a directory or a file. Other checkpoints and small models are checked at each load.
        settings: the settings that the model is loaded by.
    """
    path, folder = Path(source).expanduser(), cache_folder()
    files = [path] if path.is_file() else list(_files_of(path))
    stats = [(file.resolve(), file.stat()) for file in files]
    if folder is None or sum(stat.st_size for _, stat in stats) < LEAST_BYTES:
        return KeptChecks()
    facts = [
        *(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats),
        *(f"{name}={setting}" for name, setting in sorted(settings.items())),
        *sorted(instructions()),
        platform.machine(),
        os.environ.get("SHOAL_MARCH", ""),
        missing() or remark(),
        _code(),
    ]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=12).hexdigest()
    return KeptChecks(folder / f"checks-{digest}.json")


def _files_of(directory: Path) -> Iterable[Path]:
    if directory.is_dir():
        yield from (file for file in sorted(directory.iterdir()) if file.suffix in SUFFIXES)


@cache
def _code() -> str:
    """Returns a digest of the code that computes passes."""
    digest = hashlib.blake2b(digest_size=12)
    for package in ("torch", "transformers", "numpy"):
        digest.update(metadata.version(package).encode())
    package_files = Path(str(resources.files("shoal")))
    for room in ("models", "native"):
        for file in sorted((package_files / room).rglob("*.*")):
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("checks-*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MOST_FILES]:
        file.unlink(missing_ok=True)
