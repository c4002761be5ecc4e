"""The scheduler decides which rows run in the next round.

Pure Python: it assigns slots and never touches tensors. Rows that run always occupy the slots 0, 1,
..., so that the caches of a round are views. A row that ends leaves its slot at once. A waiting row
takes the slot, and if none waits, the last row moves there (compaction). A slot still holds the
prompt of its row after the row has left. Prompts are admitted first come, first served, so that the
waiting rows of a group find a copy, and each prompt is computed once. A prompt in the prefix store
stays there for as long as a row of its group runs or waits.

Rows of several calls come first come, first served, or in the order of `shoal.engine.waiting`:
then rows may also pause.

Prompts with deadlines take turns (see `shoal.engine.waiting`), and between two of its rows a prompt
may lose its place to another: a copy, if another row takes the slot; a stored prompt, if there are
more prompts than slots, or too little memory. It is then computed again, at most once per row. Rows
whose prompts are still in the caches go first within a turn, so that this is rare.

While rows run, at most `chunk` tokens of prompts are computed in a pass of their own before each
round. A longer prompt is computed in chunks over several rounds, in a slot above those of the rows
that run, and no row is admitted before it is complete. If the target can carry prompts, its chunks
ride in the rounds' own passes, but for the last one, with which its row joins (after SARATHI, arXiv
2308.16369). The tokens with which a paused row comes back are a prompt like any other. The limit
holds while no row runs if any row has a deadline, as deadlines are checked between chunks.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.engine.admission import (
    CacheState,
    Decision,
    Fits,
    Prefixes,
    PrefixStore,
    decide,
    find_prompt,
)
from shoal.engine.waiting import Deadlines, Fairness, Waiting
from shoal.errors import RequestError
from shoal.types.requests import Row
from shoal.types.schedule import Admission, Move, PrefillChunk, PromptOrigin, ScheduledRound

NO_GROUP = -1
"""The group of a slot that holds no complete prompt."""
CHUNK = 512
"""The most prompt tokens between two rounds.

They are enough to use the weights that a pass reads well, and few enough not to delay running rows.
"""
RIDING = 64
"""The most prompt tokens that ride in a round's own pass; the rows of the round wait for them."""
MIN_WAIT = 64
"""The saved tokens for which a row waits a round, for a prefix that is computed in this one."""


@dataclass
class Scheduler:
    """The rows that wait, the rows that run, and their slots.

    A round takes no time for rows that wait.

    Attributes:
        capacity: the most rows in slots at any time.
        waiting: the rows without a slot.
        fairness: decides whose rows go first, and which of them pause.
        prefix_sharing: the way in which groups store their prompts, see
            `shoal.engine.admission`.
        chunk: the most prompt tokens computed before a round while rows run or any row has a
            deadline.
        fits: called before a row is admitted. A row that would be the only one in a slot is
            admitted whatever it returns, unless `memory_reserved`.
        memory_reserved: True if memory is taken beside the rows, so that even a single row may have
            to wait.
        kept: the prefixes of earlier rows (`shoal.engine.prefix_cache`); None = there are none.
        carries: returns True if a round's pass may take a chunk of a prompt along
            (`shoal.models.prompt_passes.carries_prompts`).
        rows_now: returns the most rows in slots in the coming round, at most `capacity`; see
            `shoal.engine.batch_size.BatchSize.rows`.
    """

    capacity: int
    waiting: Waiting = field(default_factory=Waiting)
    fairness: Fairness = field(default_factory=Fairness)
    prefix_sharing: str = "copied"
    chunk: int = CHUNK
    fits: Fits = lambda rows, slots, prefixes: True
    memory_reserved: bool = False
    kept: Prefixes | None = None
    carries: Callable[[], bool] = lambda: False
    rows_now: Callable[[int, int, float], int] = lambda running, waiting, seconds_per_token: (
        sys.maxsize
    )

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.capacity), ("chunk", self.chunk)):
            if value < 1:
                raise RequestError(f"{name} must be >= 1, got {value}")
        self._slots: list[Row | None] = []
        self._slot_groups: list[int] = []  # the group of the complete prompt in each slot
        self._store = PrefixStore(self.prefix_sharing)
        self._deadlines = Deadlines()
        self._group_sizes: Counter[int] = Counter()  # rows in slots or the queue
        self._prefilling: Row | None = None
        self._prefilled = 0
        self._calls = itertools.count()
        self._paused = itertools.count(NO_GROUP - 1, -1)

    @property
    def in_slots(self) -> list[Row]:
        """The rows in slots, in slot order."""
        return [row for row in self._slots if row is not None]

    @property
    def running(self) -> list[Row]:
        """The rows in slots whose prompts are complete."""
        return [row for row in self._slots if row is not None and row is not self._prefilling]

    @property
    def prefilling(self) -> bool:
        """True if a prompt is not complete yet."""
        return self._prefilling is not None

    @property
    def idle(self) -> bool:
        """True if no row waits, and none is in a slot."""
        return not self.waiting and not any(self._slots)

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of one call to the queue, also while others run."""
        call = next(self._calls)
        for row in rows:
            row.call = call
        self.waiting.add(rows)
        self.fairness.enter(rows)
        self._group_sizes.update(row.group for row in rows)
        self._deadlines.add(rows)

    def remove(self, rows: Iterable[Row]) -> None:
        """Removes rows from the queue or from their slots; rows that have left are ignored."""
        for row in rows:
            if row in self.waiting:
                self.waiting.remove(row)
            elif 0 <= row.slot < len(self._slots) and self._slots[row.slot] is row:
                self._slots[row.slot] = None
            else:
                continue
            self._deadlines.discard(row)
            self.fairness.leave(row)
            self._leave_group(row)

    def to_pause(self) -> Row | None:
        """Returns the row that is to give its slot to a waiting one; None = no row.

        See `shoal.engine.waiting`.
        """
        if not self.waiting or self._prefilling is not None or None in self._slots:
            return None
        return self.fairness.to_pause(self.running, self.waiting.calls)

    def pause(self, row: Row) -> None:
        """Moves a running row from its slot back to the queue."""
        self._slots[row.slot] = None
        self._leave_group(row)
        row.pause(next(self._paused))
        row.prefix = None
        self._group_sizes[row.group] = 1
        self.waiting.put_back(row)

    def put_back(self, row: Row) -> None:
        """Adds a row again that was removed, and has no new tokens; it goes first of its call."""
        self.waiting.put_back(row)
        self.fairness.enter([row])
        self._group_sizes[row.group] += 1
        self._deadlines.add([row])

    def _leave_group(self, row: Row) -> None:
        self._group_sizes[row.group] -= 1
        is_last = not self._group_sizes[row.group]
        if is_last:
            del self._group_sizes[row.group]
        if is_last or row is self._prefilling:  # the prompt is not complete
            self._store = self._store.without([row.group])
        if row is self._prefilling:
            self._prefilling = None

    def forget(self, slot: int) -> None:
        """Notes that the slot no longer holds a complete prompt."""
        self._slot_groups[slot] = NO_GROUP

    def refuse(self, round_: ScheduledRound) -> list[Row]:
        """Removes the rows that a round admits or goes on prefilling, with their prompts.

        Returns:
            These rows.
        """
        groups = {chunk.row.group for chunk in round_.chunks}
        self._store = self._store.without(groups)
        self._slot_groups = [NO_GROUP if group in groups else group for group in self._slot_groups]
        refused = list(
            dict.fromkeys(
                [*(a.row for a in round_.admissions), *(chunk.row for chunk in round_.chunks)]
            )
        )
        for row in refused:
            self.forget(row.slot)
        self.remove(refused)
        return refused

    def expire(self, now: float) -> list[Row]:
        """Removes the rows whose deadline has passed; returns them."""
        due = self._deadlines.due(now)
        self.remove(due)
        return due

    def next_round(self) -> ScheduledRound:
        """Returns the next round.

        It continues the prompt that is not complete, fills free slots from the queue, then closes
        the gaps that remain.
        """
        admissions: list[Admission] = []
        chunks: list[PrefillChunk] = []
        budget = self.chunk if self.running or self._deadlines else sys.maxsize
        if self._prefilling is not None:
            budget -= self._prefill(self._prefilling, budget, chunks)
        free = self._free() if self.waiting and self._prefilling is None else 0
        while self.waiting and self._prefilling is None and free > len(admissions):
            admission = self._admit(budget, [chunk.row for chunk in chunks])
            if admission is None:
                break
            admissions.append(admission)
            if admission.origin is PromptOrigin.COMPUTE:
                self._prefilled = admission.restored
                budget -= self._prefill(admission.row, budget, chunks)
        return self.close_up(admissions, chunks)

    def _free(self) -> int:
        """Returns the number of rows that may join those in slots."""
        rows = self.in_slots
        return self.rows_now(len(rows), len(self.waiting), self._seconds_per_token(rows)) - len(
            rows
        )

    def _seconds_per_token(self, rows: Sequence[Row]) -> float:
        """Returns the least time budget per token of these rows and the next.

        Returns infinity if none has a deadline.
        """
        if not self._deadlines:
            return math.inf
        limits = [row.request.limits for row in (*rows, next(iter(self.waiting)))]
        return min(
            math.inf if each.time_budget is None else each.time_budget / each.max_new_tokens
            for each in limits
        )

    def close_up(
        self, admissions: Sequence[Admission] = (), chunks: Sequence[PrefillChunk] = ()
    ) -> ScheduledRound:
        """Returns a round of the running rows, with the moves that close the gaps between them."""
        slots = len(self._slots)
        moves = self._compact()
        return ScheduledRound(
            self.running,
            admissions,
            chunks,
            moves=moves,
            prefilling=self._prefilling,
            slots=slots,
            prefixes=self._store.prefixes,
        )

    def release_free_slots(self) -> ScheduledRound:
        """Closes the gaps between rows, and gives up the prompts in free slots.

        The caches may then be trimmed to the size of the rows in slots. Returns the round of
        `close_up`.
        """
        for slot, row in enumerate(self._slots):
            if row is None:
                self.forget(slot)
        return replace(self.close_up(), slots=len(self._slots))

    def _prefill(self, row: Row, most: int, chunks: list[PrefillChunk]) -> int:
        """Adds the next chunk of the row's prompt; returns the number of its tokens.

        A chunk that can ride is not added: the round's pass takes it along.
        """
        start, length = self._prefilled, row.entry_length - 1
        if row is self._prefilling or length - start > most:
            self._prefilling = row
            if self.riding() is not None:
                return 0
        self._prefilled = min(start + most, length)
        self._prefilling = row if self._prefilled < length else None
        if self._prefilling is None and row.prefix is None:
            self._slot_groups[row.slot] = row.group
        chunks.append(PrefillChunk(row, row.slot, start, self._prefilled))
        return self._prefilled - start

    def riding(self) -> PrefillChunk | None:
        """Returns the chunk that is to ride in the pass of the running rows; None = none is."""
        row, stop = self._prefilling, self._prefilled + RIDING
        if row is None or row.prefix is not None or stop >= row.entry_length - 1:
            return None
        if not self.running or not self.carries():
            return None
        return PrefillChunk(row, row.slot, self._prefilled, stop)

    def rode(self, chunk: PrefillChunk) -> None:
        """Notes that a pass has computed the chunk of `riding`."""
        self._prefilled = chunk.stop

    def _admit(self, budget: int, computed: Sequence[Row]) -> Admission | None:
        """Gives a slot to the next row of the queue; returns None if the row waits.

        Args:
            budget: the tokens that may still be computed in this round.
            computed: the rows whose prompts are completed in it.
        """
        row = self.waiting.first(self.fairness.first(self.waiting.calls), self._cached_groups())
        state = CacheState(
            tuple(self._slots),
            tuple(self._slot_groups),
            self._store,
            {other.group for other in computed},
        )
        known = 0
        if self.kept is not None and find_prompt(row, state)[0] is PromptOrigin.COMPUTE:
            known = self.kept.known(row)
            if any(self.kept.awaited(row, other) >= known + MIN_WAIT for other in computed):
                return None
        decision = decide(
            row,
            state,
            budget,
            capacity=self.capacity,
            fits=self.fits,
            must_fit=self.memory_reserved,
            known=known,
        )
        self._store = decision.store
        if decision.slot is None:
            return None
        self.waiting.remove(row)
        self._seat(row, decision, decision.slot)
        restored = known if decision.origin is PromptOrigin.COMPUTE else 0
        if not row.paused_at:
            row.restored = restored
        return Admission(row, decision.origin, decision.source, restored)

    def _seat(self, row: Row, decision: Decision, slot: int) -> None:
        """Gives the row its slot, and the place of its stored prompt."""
        kept = len(decision.kept.rows)
        del self._slots[kept:], self._slot_groups[kept:]
        if slot == kept:
            self._slots.append(None)
            self._slot_groups.append(NO_GROUP)
        self._slots[slot], row.slot = row, slot
        row.prefix = self._store.prefixes.get(row.group)
        copied = decision.source is not None
        self._slot_groups[slot] = row.group if copied else NO_GROUP

    def _cached_groups(self) -> list[int]:
        """Returns the groups whose prompts the next admissions may replace.

        These are the prompts in free slots and in the prefix store.
        """
        free = [
            group for row, group in zip(self._slots, self._slot_groups, strict=True) if row is None
        ]
        return [*free, *self._store.prefixes]

    def _compact(self) -> list[Move]:
        moves = []
        while None in self._slots:
            hole = self._slots.index(None)
            last = max(
                (
                    i
                    for i, row in enumerate(self._slots)
                    if row is not None and row is not self._prefilling
                ),
                default=-1,
            )
            if last < hole:
                break
            row = self._slots[last]
            assert row is not None
            self._slots[hole], self._slots[last] = row, None
            self._slot_groups[hole], row.slot = self._slot_groups[last], hole
            moves.append(Move(row, last, hole))
        while self._slots and self._slots[-1] is None:
            del self._slots[-1], self._slot_groups[-1]
        return moves
