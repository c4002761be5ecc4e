"""Sizes that static passes come in: few enough that each is built once and used often. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

COLUMNS = (1, 2, 3, 5, 7, 9, 13, 17)
"""Columns of a block: the last committed token and up to 16 drafts."""
FEWEST_KEYS = 64


class Bucket(NamedTuple):
    """The shape of a static pass: rows, columns of the block, keys per row."""

    rows: int
    q: int
    keys: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.q} tokens over {self.keys} keys"


def bucket_for(rows: int, q: int, keys: int, capacity: int) -> Bucket | None:
    """The smallest bucket that holds a pass; None for a block wider than any (a prompt's).

    Args:
        keys: in the slot of the longest row, after the pass. capacity: of the cache; no bucket has more keys.
    """
    columns = next((c for c in COLUMNS if c >= q), None)
    if columns is None:
        return None
    return Bucket(step_up(rows), columns, min(max(1 << (keys - 1).bit_length(), FEWEST_KEYS), capacity))


def step_up(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most half as much again."""
    power = 1 << (size - 1).bit_length()
    between = 3 * power // 4
    return between if power > 2 and size <= between else power


def reservation(slots: int, capacity: int) -> tuple[int, int]:
    """What to reserve for `slots` rows of `capacity` tokens: a bucket's rows, a scratch slot, and a length that other runs will
    ask for as well, so that passes built for one run serve the next. No length is none."""
    return step_up(slots) + 1, step_up(max(capacity, FEWEST_KEYS)) if capacity else 0
