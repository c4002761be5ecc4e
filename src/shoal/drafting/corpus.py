"""Lookups in the index of a corpus: the longest end of a row in its texts, and the tokens after it.

After He et al., "REST: Retrieval-based speculative decoding" (NAACL 2024, arXiv 2311.08252): in a
suffix array all places of one sequence of tokens are neighbours. A lookup takes a few binary
searches for each part of the index and each token.

The files are those of `shoal index` and `suffix:index=FILE`. A file holds parts of at most
`PART_TOKENS` tokens, so that building takes bounded memory. A part is the tokens of its texts,
int32, each text followed by `END`, and the places of all its tokens, int32, in the order of the
texts that begin there, compared over `DEPTH` tokens. The places are sorted by prefix doubling
(Manber and Myers, "Suffix arrays", 1993), a sort of numpy for each doubling. A JSON object behind
the parts describes them; its length and checksum follow. Numbers are little-endian.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import RequestError

END = -1
"""The token that follows each text."""
DEPTH = 64
"""The number of tokens by which two places are ordered. A power of 2.

A match and the tokens drafted after it are mostly shorter.
"""
PART_TOKENS = 1 << 22
"""The most tokens of a part: sorting takes about 50 bytes for each."""
MAGIC = b"shoal-ix"
TRAILER = struct.Struct("<II8s")  # length and checksum of the object before it, MAGIC
BLOCK = 1 << 20


def sorted_places(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the places of all tokens but `END`, [places], sorted by the next `DEPTH` tokens."""
    ranks = tokens.astype(np.int64) + 1  # END has 0
    order = np.argsort(ranks, kind="stable")
    ahead = 1
    while ahead < DEPTH:
        keys = ranks * (int(ranks.max()) + 1)
        keys[:-ahead] += ranks[ahead:]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        steps = np.empty(len(keys), dtype=np.int64)
        steps[0] = 0
        np.cumsum(keys[1:] != keys[:-1], out=steps[1:])
        ranks[order] = steps
        if steps[-1] == len(steps) - 1:
            break
        ahead *= 2
    return order[tokens[order] != END].astype(np.int32)


class IndexWriter:
    """A writer that writes a part whenever there are enough tokens.

    Args:
        file: an empty file, open for writing.
        part: the most tokens of a part; a single text may be longer.

    Attributes:
        tokens: the number of tokens written so far.
        texts: the number of texts written so far.
    """

    def __init__(self, file: BinaryIO, part: int = PART_TOKENS) -> None:
        self._file, self._part = file, part
        self._waiting: list[NDArray[np.int32]] = []
        self._held = 0
        self._parts: list[dict[str, int]] = []
        self.tokens = self.texts = 0
        self._largest = -1
        file.write(MAGIC)

    def add(self, ids: Sequence[int]) -> None:
        """Adds a text; an empty one is skipped."""
        if not ids:
            return
        text = np.array([*ids, END], dtype="<i4")
        if self._held + len(text) > self._part:
            self._write_part()
        self._waiting.append(text)
        self._held += len(text)
        self.tokens, self.texts = self.tokens + len(ids), self.texts + 1
        self._largest = max(self._largest, int(text.max()))

    def _write_part(self) -> None:
        if not self._held:
            return
        tokens = np.concatenate(self._waiting)
        self._waiting, self._held = [], 0
        places = sorted_places(tokens)
        checksum = 0
        for values in (tokens, places):
            data = values.tobytes()
            checksum = zlib.crc32(data, checksum)
            self._file.write(data)
        self._parts.append({"tokens": len(tokens), "places": len(places), "checksum": checksum})

    def finish(self, tokenizer: str) -> int:
        """Writes the rest and the description of the file; returns the number of parts.

        Args:
            tokenizer: the tokenizer's fingerprint.
        """
        self._write_part()
        about = {
            "parts": self._parts,
            "tokenizer": tokenizer,
            "largest": self._largest,
            "depth": DEPTH,
        }
        data = json.dumps(about).encode()
        self._file.write(data + TRAILER.pack(len(data), zlib.crc32(data), MAGIC))
        return len(self._parts)


@dataclass(frozen=True)
class Part:
    """A part of an index.

    Attributes:
        tokens: the tokens in the file, mapped into memory.
        places: the places in the file, mapped into memory.
    """

    tokens: memoryview
    places: memoryview


@dataclass(frozen=True)
class Index:
    """An index that was opened.

    Attributes:
        parts: the parts.
        tokenizer: the fingerprint of its tokenizer.
        largest: the largest id of a token.
    """

    parts: tuple[Part, ...]
    tokenizer: str
    largest: int


def open_index(path: str) -> Index:
    """Returns the index in a file, read and checked as a whole, once until the file changes.

    Raises:
        RequestError: the file cannot be read, is no index, or is damaged.
    """
    try:
        state = os.stat(path)
        return _open(str(Path(path).resolve()), state.st_size, state.st_mtime_ns, state.st_ino)
    except RequestError:  # a ValueError, too
        raise
    except OSError as error:
        raise RequestError(f"cannot read index {path!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise _damage_error(path, str(error)) from error


def fitting_index(path: str, vocab_size: int) -> Index:
    """Returns the index in a file, for a target with `vocab_size` tokens.

    Raises:
        RequestError: see `open_index`, or the index has tokens that the target has not.
    """
    index = open_index(path)
    if index.largest >= vocab_size:
        raise RequestError(
            f"index {path!r} is one of another tokenizer: it has token {index.largest}, and the "
            f"target has {vocab_size} tokens"
        )
    return index


def _damage_error(path: str, why: str) -> RequestError:
    return RequestError(
        f"index {path!r} is damaged or cut short ({why}): build it again with `shoal index`"
    )


@lru_cache(maxsize=8)
def _open(path: str, size: int, changed: int, inode: int) -> Index:
    """Opens an index.

    Args:
        path: the path of the file.
        size: the size of the file in bytes.
        changed: the time of its last change; part of the cache's key.
        inode: the number of the file; part of the cache's key.
    """
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
        if start != MAGIC:
            raise RequestError(f"{path!r} is no index: `shoal index --output FILE` makes one")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    length, checksum, magic = TRAILER.unpack(mapped[-TRAILER.size :])
    data = mapped[max(size - TRAILER.size - length, 0) : size - TRAILER.size]
    if magic != MAGIC or zlib.crc32(data) != checksum:
        raise _damage_error(path, "its end is not that of an index")
    about: dict[str, Any] = json.loads(bytes(data))
    parts: list[Part] = []
    at = len(MAGIC)
    for one in about["parts"]:
        ends = at + 4 * one["tokens"], at + 4 * (one["tokens"] + one["places"])
        if (
            ends[1] > size - TRAILER.size - length
            or _checksum(mapped[at : ends[1]]) != one["checksum"]
        ):
            raise _damage_error(path, f"part {len(parts)} is not what was written")
        parts.append(Part(mapped[at : ends[0]].cast("i"), mapped[ends[0] : ends[1]].cast("i")))
        at = ends[1]
    if not parts or about["depth"] != DEPTH:
        raise _damage_error(path, "it holds no texts that this version reads")
    return Index(tuple(parts), str(about["tokenizer"]), int(about["largest"]))


def _checksum(data: memoryview) -> int:
    """Returns the checksum of the data, read in blocks so that it need not stay in memory."""
    checksum = 0
    for start in range(0, len(data), BLOCK):
        checksum = zlib.crc32(data[start : start + BLOCK], checksum)
    return checksum


LONGEST = DEPTH // 2
"""The most tokens of a row that are matched: the next tokens are in the order of the index, too."""
COUNTED = 128
"""The number of places whose next token is read.

If there are more places, evenly spaced ones are read: places are sorted by the tokens that follow,
so the shares of the tokens are kept.
"""


class Interval(NamedTuple):
    """The places first..last-1 of a part."""

    part: Part
    first: int
    last: int

    def narrowed(self, depth: int, token: int) -> Interval:
        """Returns the places that have the token `depth` tokens further on."""
        return Interval(self.part, self._search(depth, token), self._search(depth, token + 1))

    def _search(self, depth: int, token: int) -> int:
        """Returns the first place with this token, or a greater one, `depth` tokens further on."""
        (tokens, places), low, high = (self.part.tokens, self.part.places), self.first, self.last
        size = len(tokens)
        while low < high:
            middle = (low + high) // 2
            at = places[middle] + depth
            if (tokens[at] if at < size else END) < token:
                low = middle + 1
            else:
                high = middle
        return low

    def goes_on(self, depth: int) -> bool:
        """Returns True if some text has a token there; the end of a text precedes all tokens."""
        return (
            self.last > self.first
            and self.part.tokens[self.part.places[self.last - 1] + depth] != END
        )


class CorpusPlace(NamedTuple):
    """The places of a sequence of tokens in a corpus.

    Attributes:
        intervals: the intervals of the parts that have the sequence.
        length: the number of its tokens.
    """

    intervals: tuple[Interval, ...]
    length: int

    def continued(self) -> CorpusPlace:
        return self

    def counts(self) -> list[tuple[float, int]]:
        """Returns (weight, token) for each next token, of equal weights the lower id first.

        The weight is about the number of times that the token follows.
        """
        if self.length >= DEPTH:
            return []
        weights: dict[int, float] = {}
        for part, first, last in self.intervals:
            looked = range(first, last, max((last - first) // COUNTED, 1))
            followers = Counter(part.tokens[part.places[place] + self.length] for place in looked)
            for token, seen in followers.items():
                weights[token] = weights.get(token, 0.0) + seen * (last - first) / len(looked)
        weights.pop(END, None)
        return sorted((weight, token) for token, weight in weights.items())

    def after(self, token: int) -> CorpusPlace:
        """Returns the place after one more token, which must follow here in some text."""
        narrowed = [one.narrowed(self.length, token) for one in self.intervals]
        return CorpusPlace(tuple(one for one in narrowed if one.last > one.first), self.length + 1)


NOWHERE = CorpusPlace((), 0)


class Corpus:
    """A collection of texts in which rows are looked up by their `index`."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def place(self, tokens: Sequence[int]) -> CorpusPlace:
        """Returns the place of the longest end of a row after which some text goes on.

        The end has at most `LONGEST` tokens.
        """
        end = list(tokens[-LONGEST:])
        intervals: dict[int, tuple[Interval, ...]] = {}

        def stands(length: int) -> bool:
            intervals[length] = self._intervals(end[len(end) - length :])
            return bool(intervals[length])

        longest = _longest(stands, len(end))
        return CorpusPlace(intervals[longest], longest) if longest else NOWHERE

    def _intervals(self, tokens: Sequence[int]) -> tuple[Interval, ...]:
        """Returns the intervals of the parts that have these tokens and go on after them."""
        kept = []
        for part in self._index.parts:
            interval = Interval(part, 0, len(part.places))
            for depth, token in enumerate(tokens):
                interval = interval.narrowed(depth, token)
                if interval.last == interval.first:
                    break
            if interval.goes_on(len(tokens)):
                kept.append(interval)
        return tuple(kept)


def _longest(stands: Callable[[int], bool], most: int) -> int:
    """Returns the greatest length that stands somewhere; all shorter ones stand as well.

    Lengths are doubled first, because most matches are short.
    """
    low, high = 0, 1
    while high <= most and stands(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if stands(middle) else (low, middle)
    return low
