"""The admission of rows: the next row of the queue gets a slot and its prompt, or waits.

Pure Python. A decision is made on data that does not change, and the scheduler carries it out.
`decide` tries several states of the caches, from the one that keeps most prompts to the one that
keeps fewest. For each it finds the row's prompt, chooses a slot, and asks if there is memory for
the row. `SlotRows` is the present state of the caches, which the scheduler changes by its
decisions.

A prompt may be stored once for all rows of its group (`PrefixStore` has its place). m_c tokens of
prompt and n rows of m_d new tokens then take m_c + n * m_d token slots instead of n * (m_c + m_d);
how often a pass reads the prompt is the attention method's (bifurcated attention, Athiwaratkun et
al., ICML 2024, arXiv 2403.08845).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.errors import RequestError
from shoal.types.requests import Prefix, Row
from shoal.types.rounds import Move, PrefillChunk, PromptOrigin

NO_GROUP = -1
"""The group of a slot that holds no complete prompt."""
POLICIES = ("auto", "shared", "copied")
MIN_SAVED_TOKENS = 2048
"""The token slots that sharing must save before `auto` shares a prompt.

Below this number, the additional attention calls per layer of the padded method cost as much as
they save (measured at commit 35f59082).
"""


def check_policy(name: str) -> None:
    """Raises RequestError if a name is not in `POLICIES`."""
    if name not in POLICIES:
        raise RequestError(f"prefix_sharing must be one of {', '.join(POLICIES)}, got {name!r}")


@dataclass(frozen=True)
class PrefixStore:
    """A map of the token slots that hold the prompts of groups.

    A store does not change: its methods return other stores.

    Attributes:
        policy: "auto" (by `MIN_SAVED_TOKENS`), "grouped" (prompts of several rows), "shared"
            (always) or "copied" (never).
        prefixes: the stored prompts by group, in the order in which they were added.
    """

    policy: str = "auto"
    prefixes: Mapping[int, Prefix] = field(default_factory=dict)

    def add(self, group: int, rows: int, length: int, drafted: bool = True) -> PrefixStore:
        """Returns the store with the prompt of a group, in the first hole that is large enough.

        Returns the same store if the prompt is better copied.

        Args:
            rows: the rows of the group that may run at once.
            length: the tokens of its prompt that are stored, all but the last.
            drafted: True if the drafter's cache stores them, too.
        """
        if length < 1 or not self._shares(rows, length):
            return self
        base = 0
        for other in sorted(self.prefixes.values(), key=lambda prefix: prefix.base):
            if other.base - base >= length:
                break
            base = other.base + other.length
        return PrefixStore(self.policy, {**self.prefixes, group: Prefix(base, length, drafted)})

    def without(self, groups: Collection[int]) -> PrefixStore:
        """Returns the store without the prompts of these groups."""
        return PrefixStore(
            self.policy,
            {group: prefix for group, prefix in self.prefixes.items() if group not in groups},
        )

    def _shares(self, rows: int, length: int) -> bool:
        least = {"auto": MIN_SAVED_TOKENS, "grouped": 1, "shared": 0}.get(self.policy, math.inf)
        return (rows - 1) * length >= least


class Prefixes(Protocol):
    """The prefixes of earlier rows, for prompts that begin alike (see `PrefixCache`)."""

    def kept_length(self, row: Row) -> int:
        """Returns how many leading tokens of the row's prompt are kept; its last does not count."""

    def promise(self, row: Row, other: Row) -> int:
        """Returns how many tokens will be kept once the other row has had a round."""


Fits = Callable[[Sequence[Row], int, Mapping[int, Prefix]], bool]
"""A function (rows, number of slots, stored prompts by group) -> True if they fit into memory."""


@dataclass(frozen=True)
class CacheState:
    """The content of the caches when a row asks for a slot.

    Attributes:
        rows: the row in each slot; None = free.
        slot_groups: for each slot, the group whose complete prompt it holds.
        store: the stored prompts.
        completed: the groups whose prompts are completed in this round, so that copies of them come
            after that.
    """

    rows: Sequence[Row | None]
    slot_groups: Sequence[int]
    store: PrefixStore
    completed: Collection[int] = ()

    @property
    def in_slots(self) -> list[Row]:
        """The rows with a slot."""
        return [row for row in self.rows if row is not None]


@dataclass(frozen=True)
class Decision:
    """A decision about a row that asks for a slot.

    Attributes:
        state: the content that the caches keep. Other prompts are given up, also if the row waits:
            it needs their memory.
        store: the stored prompts once the row is admitted.
        slot: the row's slot; None = the row waits.
        origin: the origin of its prompt, see `shoal.types.rounds.Admission`.
        source: the source of its prompt, see `shoal.types.rounds.Admission`.
    """

    state: CacheState
    store: PrefixStore
    slot: int | None = None
    origin: PromptOrigin = PromptOrigin.COMPUTE
    source: int | None = None


def decide(
    row: Row,
    state: CacheState,
    budget: int,
    capacity: int,
    fits: Fits,
    must_fit: bool,
    hits: int = 0,
) -> Decision:
    """Returns the decision about a row that asks for a slot.

    Args:
        state: the content of the caches.
        budget: the prompt tokens that may still be computed in this round.
        capacity: the most rows in slots.
        fits: returns True if there is memory for rows.
        must_fit: False = a row that would be the only one is admitted without asking. The engine
            has refused rows that are too large for that (`shoal.engine.memory.Memory.check`).
        hits: the tokens of its prompt that need not be computed.
    """
    for candidate in _states(row, state, capacity):
        origin, source = find_prompt(row, candidate)
        slot = choose_slot(row, origin, candidate, budget, capacity, hits)
        if slot is None:
            return Decision(state, state.store)
        store = _with_prompt(row, origin, candidate.store, capacity)
        decision = Decision(candidate, store, slot, origin, source)
        if fits([*candidate.in_slots, row], max(len(candidate.rows), slot + 1), store.prefixes):
            return decision
    return Decision(candidate, candidate.store) if must_fit or state.in_slots else decision


def _states(row: Row, state: CacheState, capacity: int) -> Iterator[CacheState]:
    """Yields the states that the caches may keep, the one with most prompts first.

    The first keeps at most as many stored prompts as slots, the second only those that a row reads.
    The third keeps none; it comes only if no row is in a slot.
    """
    read = {other.group for other in [*state.in_slots, row]}
    unread = [group for group in state.store.prefixes if group not in read]
    computes = find_prompt(row, state)[0] is PromptOrigin.COMPUTE
    excess = max(0, len(state.store.prefixes) + computes - capacity)
    yield replace(state, store=state.store.without(unread[:excess]))
    yield replace(state, store=state.store.without(unread))
    if not state.in_slots:
        yield CacheState((), (), PrefixStore(state.store.policy))


def find_prompt(row: Row, state: CacheState) -> tuple[PromptOrigin, int | None]:
    """Returns the origin of the row's prompt, and the slot to copy it from."""
    if row.group in state.store.prefixes:
        return PromptOrigin.SHARED, None
    if row.group in state.slot_groups:
        later = row.group in state.completed
        return (
            PromptOrigin.COPY_AFTER_COMPUTE if later else PromptOrigin.COPY,
            state.slot_groups.index(row.group),
        )
    return PromptOrigin.COMPUTE, None


def choose_slot(
    row: Row, origin: PromptOrigin, state: CacheState, budget: int, capacity: int, hits: int = 0
) -> int | None:
    """Returns the first free slot, or None.

    A prompt that takes several rounds gets a slot above all taken slots, because the rows that run
    meanwhile need adjacent slots.
    """
    takes_several_rounds = origin is PromptOrigin.COMPUTE and row.entry_length - 1 - hits > budget
    if takes_several_rounds and not budget:
        return None
    if None in state.rows and not takes_several_rounds:
        return state.rows.index(None)
    return len(state.rows) if len(state.rows) < capacity else None


def _with_prompt(row: Row, origin: PromptOrigin, store: PrefixStore, capacity: int) -> PrefixStore:
    """Returns the store with the row's prompt if the prompt is computed and sharing it pays.

    The tokens of a row that was paused are not stored: no other row has them.
    """
    if origin is not PromptOrigin.COMPUTE or row.paused_at:
        return store
    rows = min(row.request.n, capacity)
    return store.add(row.group, rows, row.prompt_length - 1, drafted=row.draft_reach > 0)


class SlotRows:
    """The rows in slots, and the prompts that the slots and the prefix store hold.

    Attributes:
        rows: the row in each slot; None = free.
        groups: for each slot, the group whose complete prompt it holds, or `NO_GROUP`.
        store: the stored prompts.
        filling: the row whose prompt is not complete yet; None = there is none.
        computed_tokens: the number of tokens of that prompt that are computed.
    """

    def __init__(self, policy: str) -> None:
        self.rows: list[Row | None] = []
        self.groups: list[int] = []
        self.store = PrefixStore(policy)
        self.filling: Row | None = None
        self.computed_tokens = 0

    def __contains__(self, row: Row) -> bool:
        return 0 <= row.slot < len(self.rows) and self.rows[row.slot] is row

    @property
    def rows_in_slots(self) -> list[Row]:
        """The rows in slots, in slot order."""
        return [row for row in self.rows if row is not None]

    @property
    def running(self) -> list[Row]:
        """The rows in slots whose prompts are complete."""
        return [row for row in self.rows if row is not None and row is not self.filling]

    @property
    def replaceable_groups(self) -> list[int]:
        """The groups whose prompts the next admissions may replace.

        These are the prompts in free slots and in the prefix store.
        """
        free = [group for row, group in zip(self.rows, self.groups, strict=True) if row is None]
        return [*free, *self.store.prefixes]

    def state(self, computed: Sequence[Row]) -> CacheState:
        """Returns the content of the caches, for `decide`.

        Args:
            computed: the rows whose prompts are completed in this round.
        """
        completed = {row.group for row in computed}
        return CacheState(tuple(self.rows), tuple(self.groups), self.store, completed)

    def seat(self, row: Row, decision: Decision) -> bool:
        """Gives the row its slot, and the place of its stored prompt; returns False if it waits."""
        self.store, slot = decision.store, decision.slot
        if slot is None:
            return False
        count = len(decision.state.rows)
        del self.rows[count:], self.groups[count:]
        if slot == count:
            self.rows.append(None)
            self.groups.append(NO_GROUP)
        self.rows[slot], row.slot = row, slot
        row.prefix = self.store.prefixes.get(row.group)
        copied = decision.source is not None
        self.groups[slot] = row.group if copied else NO_GROUP
        return True

    def fill(self, row: Row, most: int) -> PrefillChunk:
        """Returns the next chunk of the row's prompt, of at most `most` tokens."""
        start, length = self.computed_tokens, row.entry_length - 1
        self.computed_tokens = min(start + most, length)
        self.filling = row if self.computed_tokens < length else None
        if self.filling is None and row.prefix is None:
            self.groups[row.slot] = row.group
        return PrefillChunk(row, row.slot, start, self.computed_tokens)

    def rode(self, chunk: PrefillChunk) -> None:
        """Notes that a round's pass has computed a chunk of the prompt."""
        self.computed_tokens = chunk.stop

    def leave(self, row: Row, is_last: bool) -> None:
        """Takes a row out of its slot if it has one, and gives up a prompt that no row needs.

        Args:
            is_last: True if no other row of its group waits or runs.
        """
        if row in self:
            self.rows[row.slot] = None
        if is_last or row is self.filling:  # the prompt is not complete
            self.store = self.store.without([row.group])
        if row is self.filling:
            self.filling = None

    def forget(self, slot: int) -> None:
        """Notes that the slot no longer holds a complete prompt."""
        self.groups[slot] = NO_GROUP

    def forget_groups(self, groups: Collection[int]) -> None:
        """Notes that neither slots nor the store hold the prompts of these groups any longer."""
        self.store = self.store.without(groups)
        self.groups = [NO_GROUP if group in groups else group for group in self.groups]

    def compact(self) -> list[Move]:
        """Closes the gaps between the rows whose prompts are complete; returns the moves."""
        moves = []
        while None in self.rows:
            hole = self.rows.index(None)
            last = max((row.slot for row in self.running), default=-1)
            if last < hole:
                break
            row = self.rows[last]
            assert row is not None
            self.rows[hole], self.rows[last] = row, None
            self.groups[hole], row.slot = self.groups[last], hole
            moves.append(Move(row, last, hole))
        while self.rows and self.rows[-1] is None:
            del self.rows[-1], self.groups[-1]
        return moves
