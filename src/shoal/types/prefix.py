"""Where a prompt lies that is stored once for all rows of its group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefix:
    """A prompt kept once: tokens 0..length-1 lie in cells base, base + 1, ... of the shared store. `drafted`: the drafter keeps it,
    too."""

    base: int
    length: int
    drafted: bool = True


def cells(prefixes: Iterable[Prefix]) -> int:
    """Cells of the shared store up to the end of the last of these prompts."""
    return max((prefix.base + prefix.length for prefix in prefixes), default=0)
