"""Where the prefix store keeps a prompt for all rows of its group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefix:
    """A prompt that is stored once: its tokens 0..length-1 lie in token slots base, base + 1, ...
    of the prefix store.

    Attributes:
        drafted: the drafter's cache stores it, too.
    """

    base: int
    length: int
    drafted: bool = True


def token_slots(prefixes: Iterable[Prefix]) -> int:
    """Token slots that a prefix store needs for these prompts: up to the end of the last one."""
    return max((prefix.base + prefix.length for prefix in prefixes), default=0)
