"""The data of a round: the scheduler's orders before it, its measurements and its commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.types.requests import Prefix, Row
from shoal.types.samples import Sample

Faults = dict[Row, dict[int, ShoalError]]
"""The reasons why a model has no distribution for a row, by column of the pass. A row whose
accepted path leads to such a column ends there. The engine must remove the keys and values that the
pass wrote at a faulty column, also if no row reaches it (padding, rejected drafts).

Plain decoding would end the row at the same token, with one exception. If a draft writes NaN into
its own key or value, every position of that row fails in this pass: a masked key has weight 0, and
0 * NaN is NaN. The row then ends even if that draft would have been rejected. Committed tokens and
other rows are not affected.
"""


@dataclass(frozen=True)
class Outcome:
    """The measurements of a round that a draft length controller gets.

    Attributes:
        drafted: drafted tokens per row; the depth of a tree.
        accepted: accepted tokens per row, without replacement and bonus.
        steps: the number of positions that the drafter looked at.
        seconds: the duration of the whole round without its planning.
        seconds_drafting: the part of `seconds` spent on the proposal.
        seconds_preparing: time beside the round in which the drafter computed prompts, and tokens
            that were decoded without it.
        seconds_between: the part of `seconds_drafting` from the first position looked at to the
            last: the time of all steps but one. None = unknown.
        nodes: the number of nodes of each row's tree; None = all are chains.
        forced: the number of further tokens of each row, which a grammar forces; None = none. Their
            acceptance is in no other field.
        seconds_planning: the time in which draft lengths and uniforms were computed, beside
            `seconds`. Most rounds keep the plan of an earlier one.
        rounds: the number of rounds, each as described; more than one only if all were plain
            (`shoal.engine.multi_step`).
        riding: the prompt tokens of another row in the target's pass.
    """

    drafted: list[int]
    accepted: list[int]
    steps: int
    seconds: float
    seconds_drafting: float
    seconds_preparing: float = 0.0
    seconds_between: float | None = None
    nodes: list[int] | None = None
    forced: list[int] | None = None
    seconds_planning: float = 0.0
    rounds: int = 1
    riding: int = 0


class Commit(NamedTuple):
    """The tokens that a round added to one row.

    Attributes:
        tokens: the tokens that the round appended, before a stop string cut the row's end; they are
            committed for good.
        accepted: the number of `tokens`, the first ones, that were drafted.
        text: the new text that may be shown (streaming only).
        sample: the sample, if the row ended.
        drafts: the ids of the row's draft tree.
        drafters: the names of the drafters that proposed them.
        path: the nodes that were kept.
    """

    row: Row
    tokens: list[int]
    accepted: int
    text: str = ""
    sample: Sample | None = None
    drafts: Sequence[int] = ()
    drafters: Sequence[str] = ()
    path: Sequence[int] = ()

    @property
    def rejected(self) -> list[tuple[int, str]]:
        """The rejected drafts, in the order of the tree's nodes: token id and drafter."""
        kept = set(self.path)
        nodes = enumerate(zip(self.drafts, self.drafters, strict=False))
        return [draft for node, draft in nodes if node not in kept]


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
