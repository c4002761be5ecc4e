"""What the scheduler tells the caches before a round; plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.types.prefix import Prefix
from shoal.types.requests import Row


class PromptOrigin(Enum):
    """Where the prompt of a row that enters a slot comes from."""

    COMPUTE = auto()
    """This row computes it, in `Round.chunks` of this round and maybe of later ones: into the
    prefix store if the row has a prefix, else into its slot."""
    COPY = auto()
    """It is copied from another slot, before prompts are computed."""
    COPY_AFTER_COMPUTE = auto()
    """It is copied from another slot, where another row of the group computes it in this round."""
    SHARED = auto()
    """It is in the prefix store, or an earlier row of this round computes it there."""


@dataclass(frozen=True)
class Admission:
    """A row enters `row.slot`. `source`: the slot to copy its prompt from, for the two origins that
    copy. `restored`: tokens of a prompt to compute that are kept of earlier rows."""

    row: Row
    origin: PromptOrigin
    source: int | None = None
    restored: int = 0


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..stop-1 of a row's prompt are computed: into its prefix, or into the slot it has
    before the round's moves."""

    row: Row
    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Move:
    """A row was moved from slot `source` to slot `target`; its keys and values must follow."""

    row: Row
    source: int
    target: int


@dataclass(frozen=True)
class Round:
    """What the caches do before a round, in this order: copies (COPY), other admissions, chunks of
    prompts, copies of what they complete (COPY_AFTER_COMPUTE), moves.

    Attributes:
        rows: of the round, in slots 0, 1, ...
        prefilling: the row whose prompt is not complete yet, in a slot above theirs.
        slots: how many the caches need until the moves are done.
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
        """Rows with a slot."""
        return [*self.rows] if self.prefilling is None else [*self.rows, self.prefilling]
