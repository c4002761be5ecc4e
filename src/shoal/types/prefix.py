"""The place in the prefix store of a prompt that all rows of its group share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefix:
    """A prompt that is stored once, in slots base .. base + length - 1 of the store.

    Attributes:
        base: the first token slot.
        length: the number of tokens.
        drafted: True if the drafter's cache stores the prompt, too.
    """

    base: int
    length: int
    drafted: bool = True


def token_slots(prefixes: Iterable[Prefix]) -> int:
    """Returns the number of token slots that these prompts need: up to the end of the last one."""
    return max((prefix.base + prefix.length for prefix in prefixes), default=0)
