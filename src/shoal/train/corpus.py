"""The text that the pair is trained on: generated problems and the standard library."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.problems.generator import FunctionProblem, generate
from shoal.train.tokenizer import END, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX

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
FIM_SHARE = 0.1
TOP_LEVEL = re.compile(r"\n\n+(?=[^\s)\]}])")


@dataclass(frozen=True)
class CorpusSize:
    """The size of the corpus."""

    problems: int = 36_000
    stdlib_characters: int = 4_300_000
    held_out_problems: int = 1000  # half of them of held-out templates
    held_out_characters: int = 250_000


@dataclass(frozen=True)
class Corpus:
    """The documents of a corpus, shuffled, without the end-of-text token."""

    train: list[str]
    problems: list[str]
    stdlib: list[str]


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


def problem_documents(problems: Sequence[FunctionProblem], rng: random.Random) -> Iterator[str]:
    """Yields problems as documents: most with tests, some without, some two by two."""
    remaining = list(problems)
    while remaining:
        problem = remaining.pop()
        shape = rng.random()
        if shape < 0.7 or not remaining:
            yield problem.document
        elif shape < 0.85:
            yield problem.function
        else:
            yield problem.function + "\n\n" + remaining.pop().document


def fill_in_middle(document: str, rng: random.Random) -> str:
    """Moves a middle part of a document to its end, behind the fill-in-the-middle tokens."""
    start, stop = sorted(rng.sample(range(len(document) + 1), 2))
    prefix, middle, suffix = document[:start], document[start:stop], document[stop:]
    return FIM_PREFIX + prefix + FIM_SUFFIX + suffix + FIM_MIDDLE + middle


def build_corpus(size: CorpusSize, seed: int) -> Corpus:
    """Builds a corpus; it is determined by seed, size and Python version."""
    rng = random.Random(seed)
    train = list(problem_documents(generate(seed, size.problems, "train"), rng))
    train += stdlib_pieces(False, size.stdlib_characters, seed)
    train = [
        fill_in_middle(document, rng) if rng.random() < FIM_SHARE else document
        for document in train
    ]
    rng.shuffle(train)
    held_out = generate(seed, size.held_out_problems // 2, "templates")
    held_out += generate(seed, size.held_out_problems // 2, "constants")
    rng.shuffle(held_out)
    return Corpus(
        train=train,
        problems=[problem.document for problem in held_out],
        stdlib=list(stdlib_pieces(True, size.held_out_characters, seed)),
    )


def pack(documents: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    """Joins all documents in one row of token ids, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END)
    rows = tokenizer.encode_batch_fast(list(documents))
    return np.concatenate([np.array([*row.ids, end], dtype=np.uint16) for row in rows])


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
