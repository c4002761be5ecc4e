"""The sizes of captured passes and of caches. Pure Python.

There are few sizes, so that the captures of one run serve the next.
"""

from __future__ import annotations

from typing import NamedTuple

FEWEST_KEYS = 64
KEYS_OF_KERNEL = 256
"""The number of keys that capacities are multiples of where a kernel attends."""


class Bucket(NamedTuple):
    """The shape of a captured pass: rows, columns of the block, keys per row."""

    rows: int
    q: int
    keys: int


def keys_for(keys: int, capacity: int) -> int:
    """Returns the number of keys that a pass over at least `keys` keys spans.

    The number is a power of two, but no more than the cache has.

    Args:
        keys: keys in the slot of the longest row, after the pass.
        capacity: tokens that a slot of the cache holds.
    """
    return min(max(1 << (keys - 1).bit_length(), FEWEST_KEYS), capacity)


def step_up(size: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most half as much again."""
    power = 1 << (size - 1).bit_length()
    between = 3 * power // 4
    return between if power > 2 and size <= between else power


def reservation(slots: int, capacity: int, *, by_kernel: bool) -> tuple[int, int]:
    """Returns the slots and the capacity to reserve for `slots` rows of `capacity` tokens.

    The slots are the rows of a bucket and a scratch slot. The capacity is a length that other runs
    will ask for as well, so that rounds captured for one run serve the next; a capacity of 0 stays
    0.

    Padding has a slot, not a cell of another row's: padded attention reads whole slots, and would
    meet there what padding wrote.

    Args:
        by_kernel: True if a kernel attends, which reads lengths on the device; rounds over whole
            slots then cost nothing, and capacities need no powers of two.
    """
    if not capacity:
        return step_up(slots) + 1, 0
    if by_kernel:
        return step_up(slots) + 1, -(-capacity // KEYS_OF_KERNEL) * KEYS_OF_KERNEL
    return step_up(slots) + 1, step_up(max(capacity, FEWEST_KEYS))
