"""The scheduler's orders to the caches before a round; plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.types.requests import Prefix, Row


class PromptOrigin(Enum):
    """The origin of the prompt of a row that enters a slot."""

    COMPUTE = auto()
    """The row computes the prompt, in `ScheduledRound.chunks` of this round and maybe of later
    ones: into the prefix store if the row has a prefix, else into its slot."""
    COPY = auto()
    """The prompt is copied from another slot, before prompts are computed."""
    COPY_AFTER_COMPUTE = auto()
    """The prompt is copied from another slot, where a row of the group computes it in this
    round."""
    SHARED = auto()
    """The prompt is in the prefix store, or an earlier row of this round computes it there."""


@dataclass(frozen=True)
class Admission:
    """The entry of a row into `row.slot`.

    Attributes:
        origin: the origin of its prompt.
        source: the slot to copy the prompt from, for the two origins that copy.
        restored: the number of tokens of a prompt to compute that are kept of earlier rows.
    """

    row: Row
    origin: PromptOrigin
    source: int | None = None
    restored: int = 0


@dataclass(frozen=True)
class PrefillChunk:
    """The tokens start..stop-1 of a row's prompt, to be computed.

    They go into the row's prefix, or into the slot that the row has before the round's moves.
    """

    row: Row
    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Move:
    """A row that was moved from slot `source` to slot `target`; its keys and values must follow."""

    row: Row
    source: int
    target: int


@dataclass(frozen=True)
class ScheduledRound:
    """The work of the caches before a round, in this order.

    Copies (COPY), other admissions, chunks of prompts, copies of the prompts that the chunks
    complete (COPY_AFTER_COMPUTE), moves.

    Attributes:
        rows: the rows of the round, in slots 0, 1, ...
        admissions: the rows that enter slots.
        chunks: the parts of prompts to compute.
        moves: the rows that change slots.
        prefilling: the row whose prompt is not complete yet, in a slot above those of `rows`.
        slots: the number of slots that the caches need until the moves are done.
        prefixes: the prompts that the prefix store holds, by group.
    """

    rows: Sequence[Row]
    admissions: Sequence[Admission] = ()
    chunks: Sequence[PrefillChunk] = ()
    moves: Sequence[Move] = ()
    prefilling: Row | None = None
    slots: int = 0
    prefixes: Mapping[int, Prefix] = field(default_factory=dict)

    @property
    def in_slots(self) -> list[Row]:
        """The rows with a slot."""
        return [*self.rows] if self.prefilling is None else [*self.rows, self.prefilling]
