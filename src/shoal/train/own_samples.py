"""The texts that are learned: the target's own, those of the standard library, and their windows.

The target's own texts are sampled once, in parts that survive an interruption.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.api import Shoal
from shoal.errors import RequestError
from shoal.loader import load
from shoal.stored_problems import stored_problems

LOG = logging.getLogger(__name__)
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


PART = 96
"""The number of prompts that are continued together."""
ROWS = 32
"""The rows of a batch."""
SEED = 21
HELD_OUT = 16
"""The number of parts of which one is kept for measuring."""


class OwnSamples:
    """The prompts and the target's continuations, in a directory.

    Args:
        work: the directory.
        source: the target, as `shoal.load` takes it; None = the bundled one.
        count: the number of samples.
        prompts: their texts, over and over, those that the target can continue; without any, small
            programming problems.
        new_tokens: the most tokens of a continuation.
        temperature: the temperature of the continuations.
        fixed: further settings that the directory must have been begun with.

    Raises:
        RequestError: the directory has samples of other settings.
    """

    def __init__(
        self,
        work: Path,
        source: str | None,
        prompts: Sequence[str],
        *,
        count: int,
        new_tokens: int,
        temperature: float,
        fixed: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._work, self._source, self._count = work, source, count
        self._new_tokens, self._temperature = new_tokens, temperature
        self._prompts = list(prompts) or stored_prompts(count)
        work.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {
            "target": source or "bundled",
            "samples": count,
            "new_tokens": new_tokens,
        }
        settings |= {"temperature": temperature, "prompts": len(self._prompts), **fixed}
        known = work / "settings.json"
        if known.exists() and (before := json.loads(known.read_text(encoding="utf-8"))) != settings:
            raise RequestError(
                f"{work} was begun with {before}, and not with {settings}: remove it, or give "
                f"these again"
            )
        known.write_text(json.dumps(settings), encoding="utf-8")

    def write(self) -> None:
        """Writes the parts that are missing."""
        starts = range(0, self._count, PART)
        if all(self._file(start).exists() for start in starts):
            return
        with load(self._source, max_batch=ROWS) as pair:
            self._prompts = _fitting(self._prompts, pair)
            for start in starts:
                if not self._file(start).exists():
                    LOG.info("the target writes: %d of %d samples", start, self._count)
                    self._write_part(pair, start)

    def _write_part(self, pair: Shoal, start: int) -> None:
        texts = [
            self._prompts[i % len(self._prompts)]
            for i in range(start, min(start + PART, self._count))
        ]
        result = pair.generate(
            texts,
            1,
            max_new_tokens=self._new_tokens,
            temperature=self._temperature,
            seed=SEED + start,
        )
        rows = [
            [*pair.tokenizer.encode(output.prompt), *output.samples[0].token_ids]
            for output in result
        ]
        partial = self._file(start).with_suffix(".partial.npy")
        np.save(partial, np.array([token for row in rows for token in row], dtype=np.int32))
        partial.replace(self._file(start))

    def _file(self, start: int) -> Path:
        return self._work / f"samples-{start // PART:04}.npy"

    def tokens(self, *, held_out: bool) -> Tokens:
        """Returns all samples in one row: those to learn from, or to measure on."""
        files = sorted(self._work.glob("samples-[0-9][0-9][0-9][0-9].npy"))
        chosen = (
            files[::HELD_OUT]
            if held_out
            else [file for i, file in enumerate(files) if i % HELD_OUT or len(files) == 1]
        )
        return np.concatenate([np.load(file) for file in chosen])


def stored_prompts(count: int) -> list[str]:
    """Returns `count` prompts of stored problems; all 10,400 if there are no more."""
    problems = stored_problems("prompts")
    if count > len(problems):
        problems += stored_problems("corpus")
    return [problem.prompt for problem in problems[:count]]


def _fitting(prompts: Sequence[str], pair: Shoal) -> list[str]:
    """Returns the prompts with room for half as many new tokens, or raises RequestError."""
    fitting_texts = [
        text for text in prompts if 0 < 1.5 * len(pair.tokenizer.encode(text)) < pair.target.context
    ]
    if not fitting_texts:
        raise RequestError(
            f"no prompt is short enough for {pair.target.name}, which holds "
            f"{pair.target.context} tokens"
        )
    return fitting_texts
