"""The texts of Python's standard library, and the batches of windows of a corpus."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]

# Tests and vendored packages, and packages that are mostly tables rather than code.
EXCLUDED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "turtledemo",
    "__pycache__",
    "__phello__",
}
HELD_OUT_FILES = 20  # one file of the standard library in this many is held out
MAX_PIECE = 4000  # characters
TOP_LEVEL = re.compile(r"\n\n+(?=[^\s)\]}])")


def stdlib_files() -> list[Path]:
    """Returns the Python files of the running interpreter's standard library, sorted by name."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def is_held_out(file: Path) -> bool:
    """Tells whether a file of the standard library belongs to the held-out split."""
    name = file.relative_to(sysconfig.get_path("stdlib")).as_posix()
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_FILES == 0


def stdlib_pieces(held_out: bool, characters: int, seed: int) -> Iterator[str]:
    """Runs of top-level definitions, file by file in a seeded order, up to `characters`."""
    files = [file for file in stdlib_files() if is_held_out(file) == held_out]
    random.Random(seed).shuffle(files)
    total = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        for piece in _pieces(text):
            if total >= characters:
                return
            total += len(piece)
            yield piece


def _pieces(text: str) -> Iterator[str]:
    """Cuts a file between top-level definitions into pieces of some thousand characters."""
    piece = ""
    for part in TOP_LEVEL.split(text):
        if piece and len(piece) + len(part) > MAX_PIECE:
            yield piece
            piece = ""
        piece += part.rstrip()[:MAX_PIECE] + "\n\n\n"
    if piece.strip():
        yield piece.rstrip() + "\n"


class Windows:
    """The batches of windows of a packed corpus; batch number `step` is always the same."""

    def __init__(self, tokens: Tokens, length: int, batch: int, seed: int) -> None:
        count = len(tokens) // length
        self.rows = tokens[: count * length].reshape(count, length)
        self.batch_size = min(batch, count)
        self.seed = seed
        self._epoch = -1
        self._order = np.arange(count)

    def __getitem__(self, step: int) -> npt.NDArray[np.int64]:
        """Returns the token ids of a step, of shape (batch, length)."""
        epoch, place = divmod(step, len(self.rows) // self.batch_size)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
            self._epoch = epoch
        chosen = self._order[place * self.batch_size : (place + 1) * self.batch_size]
        return self.rows[chosen].astype(np.int64)
