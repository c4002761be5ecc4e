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
round. A longer prompt is computed in chunks over several rounds, in a slot above the slots of the
running rows, and no row is admitted before it is complete. If the target can carry prompts, all
chunks but the last ride in the rounds' own passes; with the last chunk its row joins (after
SARATHI, arXiv 2308.16369). The tokens with which a paused row comes back are a prompt like any
other. The limit holds while no row runs if any row has a deadline, as deadlines are checked between
chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.engine.admission import Fits, Prefixes, SlotRows, decide, find_prompt
from shoal.engine.waiting import Deadlines, Fairness, GroupSizes, Waiting
from shoal.errors import RequestError
from shoal.types.requests import Row
from shoal.types.rounds import Admission, PrefillChunk, PromptOrigin, ScheduledRound

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
        slots: the rows in slots, and the prompts in the caches.
        capacity: the most rows in slots at any time.
        waiting: the rows without a slot.
        fairness: decides whose rows go first, and which of them pause.
        prefix_sharing: the way in which groups store their prompts, see
            `shoal.engine.admission`.
        chunk: the most prompt tokens computed before a round while rows run or any row has a
            deadline.
        fits: called before a row is admitted. If no other row is in a slot, a row is admitted even
            if it returns False, unless `memory_reserved`.
        memory_reserved: True if memory is taken beside the rows, so that even a single row may have
            to wait.
        prefixes: the prefixes of earlier rows (`shoal.engine.prefix_cache`); None = there are none.
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
    prefixes: Prefixes | None = None
    carries: Callable[[], bool] = lambda: False
    rows_now: Callable[[int, int, float], int] = lambda running, waiting, seconds_per_token: (
        sys.maxsize
    )

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.capacity), ("chunk", self.chunk)):
            if value < 1:
                raise RequestError(f"{name} must be >= 1, got {value}")
        self.slots = SlotRows(self.prefix_sharing)
        self._deadlines = Deadlines()
        self._groups = GroupSizes()

    @property
    def running(self) -> list[Row]:
        """The rows in slots whose prompts are complete."""
        return self.slots.running

    @property
    def idle(self) -> bool:
        """True if no row waits, and none is in a slot."""
        return not self.waiting and not self.slots.rows_in_slots

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of one call to the queue, also while others run."""
        self._groups.enter(rows)
        self.waiting.add(rows)
        self.fairness.enter(rows)
        self._deadlines.add(rows)

    def remove(self, rows: Iterable[Row]) -> None:
        """Removes rows from the queue or from their slots; rows that have left are ignored."""
        for row in rows:
            if row in self.waiting:
                self.waiting.remove(row)
            elif row not in self.slots:
                continue
            self._deadlines.discard(row)
            self.fairness.leave(row)
            self.slots.leave(row, self._groups.leave(row))

    def to_pause(self) -> Row | None:
        """Returns the row whose slot goes to a waiting one (`shoal.engine.waiting`), or None."""
        if not self.waiting or self.slots.filling is not None or None in self.slots.rows:
            return None
        return self.fairness.to_pause(self.running, self.waiting.calls)

    def pause(self, row: Row) -> None:
        """Moves a running row from its slot back to the queue."""
        self.slots.leave(row, self._groups.leave(row))
        self._groups.pause(row)
        self.waiting.put_back(row)

    def put_back(self, row: Row) -> None:
        """Adds a removed row without new tokens again, first among the rows of its call."""
        self.waiting.put_back(row)
        self.fairness.enter([row])
        self._groups.come_back(row)
        self._deadlines.add([row])

    def refuse(self, round_: ScheduledRound) -> list[Row]:
        """Removes the rows that a round admits or goes on prefilling, with their prompts.

        Returns:
            These rows.
        """
        groups = {chunk.row.group for chunk in round_.chunks}
        self.slots.forget_groups(groups)
        rows = list(
            dict.fromkeys(
                [*(a.row for a in round_.admissions), *(chunk.row for chunk in round_.chunks)]
            )
        )
        for row in rows:
            self.slots.forget(row.slot)
        self.remove(rows)
        return rows

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
        slots = self.slots
        if slots.filling is not None:
            budget -= self._prefill(slots.filling, budget, chunks)
        free = self._free() if self.waiting and slots.filling is None else 0
        while self.waiting and slots.filling is None and free > len(admissions):
            admission = self._admit(budget, [chunk.row for chunk in chunks])
            if admission is None:
                break
            admissions.append(admission)
            if admission.origin is PromptOrigin.COMPUTE:
                slots.computed_tokens = admission.restored
                budget -= self._prefill(admission.row, budget, chunks)
        return self.close_up(admissions, chunks)

    def _free(self) -> int:
        """Returns the number of rows that may join those in slots."""
        rows = self.slots.rows_in_slots
        seconds = self._deadlines.seconds_per_token((*rows, next(iter(self.waiting))))
        return self.rows_now(len(rows), len(self.waiting), seconds) - len(rows)

    def close_up(
        self, admissions: Sequence[Admission] = (), chunks: Sequence[PrefillChunk] = ()
    ) -> ScheduledRound:
        """Returns a round of the running rows, with the moves that close the gaps between them."""
        slots = len(self.slots.rows)
        moves = self.slots.compact()
        return ScheduledRound(
            self.running,
            admissions,
            chunks,
            moves=moves,
            prefilling=self.slots.filling,
            slots=slots,
            prefixes=self.slots.store.prefixes,
        )

    def release_free_slots(self) -> ScheduledRound:
        """Closes the gaps between rows, and gives up the prompts in free slots.

        The caches may then be trimmed to the size of the rows in slots. Returns the round of
        `close_up`.
        """
        for slot, row in enumerate(self.slots.rows):
            if row is None:
                self.slots.forget(slot)
        return replace(self.close_up(), slots=len(self.slots.rows))

    def _prefill(self, row: Row, most: int, chunks: list[PrefillChunk]) -> int:
        """Adds the next chunk of the row's prompt; returns the number of its tokens.

        A chunk that can ride is not added: the round's pass takes it along.
        """
        slots = self.slots
        if row is slots.filling or row.entry_length - 1 - slots.computed_tokens > most:
            slots.filling = row
            if self.riding() is not None:
                return 0
        chunk = slots.fill(row, most)
        chunks.append(chunk)
        return chunk.stop - chunk.start

    def riding(self) -> PrefillChunk | None:
        """Returns the chunk that is to ride in the pass of the running rows; None = none is."""
        row, stop = self.slots.filling, self.slots.computed_tokens + RIDING
        if row is None or row.prefix is not None or stop >= row.entry_length - 1:
            return None
        if not self.running or not self.carries():
            return None
        return PrefillChunk(row, row.slot, self.slots.computed_tokens, stop)

    def _admit(self, budget: int, computed: Sequence[Row]) -> Admission | None:
        """Gives a slot to the next row of the queue; returns None if the row waits.

        Args:
            budget: the tokens that may still be computed in this round.
            computed: the rows whose prompts are completed in it.
        """
        call, groups = self.fairness.first(self.waiting.calls), self.slots.replaceable_groups
        row = self.waiting.first(call, groups)
        state = self.slots.state(computed)
        hits = 0
        if self.prefixes is not None and find_prompt(row, state)[0] is PromptOrigin.COMPUTE:
            hits = self.prefixes.kept_length(row)
            if any(self.prefixes.promise(row, other) >= hits + MIN_WAIT for other in computed):
                return None
        decision = decide(
            row,
            state,
            budget,
            capacity=self.capacity,
            fits=self.fits,
            must_fit=self.memory_reserved,
            hits=hits,
        )
        if not self.slots.seat(row, decision):
            return None
        self.waiting.remove(row)
        restored = hits if decision.origin is PromptOrigin.COMPUTE else 0
        if not row.paused_at:
            row.restored = restored
        return Admission(row, decision.origin, decision.source, restored)
