"""What the scheduler tells the caches before a round; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.types.prefix import Prefix
from shoal.types.requests import Row


@dataclass(frozen=True)
class Admission:
    """A row enters `row.slot`. `source`: slot to copy the prompt from. `fresh`: the source is itself computed in this round.
    `stored`: the prompt is in the shared store already, or comes there by an earlier admission of this round."""

    row: Row
    source: int | None
    fresh: bool = False
    stored: bool = False

    @property
    def computes(self) -> bool:
        """Nobody has the prompt yet."""
        return self.source is None and not self.stored


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..stop-1 of a row's prompt are computed: into its prefix, or the slot it has before the round's moves."""

    row: Row
    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Move:
    """A row was moved from slot `source` to slot `target`; its tokens must follow."""

    row: Row
    source: int
    target: int


@dataclass(frozen=True)
class Round:
    """What to do before the round, in this order: admissions (old sources, chunks of prompts, fresh sources), then moves.

    Attributes:
        rows: of the round, in slots 0, 1, ... prefilling: the row whose prompt is not complete; it is in a slot above theirs.
        slots: that many the cache must have meanwhile. prefixes: the prompts that its shared store must have room for.
    """

    rows: Sequence[Row]
    admissions: Sequence[Admission] = ()
    chunks: Sequence[PrefillChunk] = ()
    moves: Sequence[Move] = ()
    prefilling: Row | None = None
    slots: int = 0
    prefixes: Sequence[Prefix] = ()

    @property
    def in_slots(self) -> list[Row]:
        """Rows with a slot."""
        return [*self.rows] if self.prefilling is None else [*self.rows, self.prefilling]
