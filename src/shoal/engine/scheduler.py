"""Which rows run in the next round. Pure Python: it moves names of slots, never tensors.

Active rows always occupy the slots 0, 1, ..., so that a round's caches are views. A row that ends leaves at once; a waiting row
takes its slot, and when none waits the last row moves into the hole (compaction). A slot remembers whose prompt it holds even
after its row has gone: prompts are admitted first come, first served, so a group's waiting rows find a copy, and a prompt is
computed once. A prompt in the shared store stays there for as long as a row of its group runs or waits.

Prompts with deadlines take turns (see `shoal.engine.waiting`). Between two of its rows a prompt may then lose its place to
another: a
copy if the slot is taken, a stored one if there are more prompts than slots, or too little memory. It is then computed again, at
most once per row; rows whose prompts are at hand go first, so that this is rare.

While rows run, at most `chunk` tokens of prompts are computed before each round (chunked prefill, Agrawal et al. 2023, "SARATHI",
arXiv 2308.16369). A longer prompt is computed in chunks, in a slot above theirs, and nobody is admitted before it is complete. The
same holds while nothing runs if any row has a deadline: deadlines are read between the chunks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.engine.deadlines import Deadlines
from shoal.engine.prefix_store import PrefixStore
from shoal.engine.waiting import Waiting
from shoal.errors import RequestError
from shoal.types.prefix import Prefix
from shoal.types.requests import Row
from shoal.types.schedule import Admission, Move, PrefillChunk, Round

NOBODY = -1
"""The group whose prompt a slot holds, when it holds none."""
CHUNK = 512
"""Prompt tokens between two rounds: enough for a pass to be worth its weights, few enough to wait for."""


@dataclass
class Scheduler:
    """Rows waiting, rows running, and who sits where. A round costs nothing per row that waits.

    Attributes:
        capacity: most rows in slots. waiting: rows without one.
        prefix_sharing: whether groups share theirs, see `shoal.engine.prefix_store`.
        chunk: most prompt tokens computed before a round that rows are waiting for, or before deadlines are read.
        fits: is there memory for these rows in that many slots, and for these shared prompts? Asked before a row is
            admitted, unless it would be alone.
        memory_reserved: something beside the rows takes memory, and a row that would be alone may not fit either.
    """

    capacity: int
    waiting: Waiting = field(default_factory=Waiting)
    prefix_sharing: str = "copied"
    chunk: int = CHUNK
    fits: Callable[[Sequence[Row], int, Sequence[Prefix]], bool] | None = None
    memory_reserved: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.capacity), ("chunk", self.chunk)):
            if value < 1:
                raise RequestError(f"{name} must be >= 1, got {value}")
        self._slots: list[Row | None] = []
        self._resident: list[int] = []
        self._store = PrefixStore(self.prefix_sharing)
        self._deadlines = Deadlines()
        self._groups: Counter[int] = Counter()  # rows of each that are in slots or wait
        self._prefilling: Row | None = None
        self._prefilled = 0

    @property
    def in_slots(self) -> list[Row]:
        """Rows in slots, in slot order."""
        return [row for row in self._slots if row is not None]

    @property
    def running(self) -> list[Row]:
        """Those of them with complete prompts."""
        return [row for row in self._slots if row is not None and row is not self._prefilling]

    @property
    def idle(self) -> bool:
        return not self.waiting and not any(self._slots)

    def add(self, rows: Sequence[Row]) -> None:
        """Rows of one call join the queue, also while others run."""
        self.waiting.add(rows)
        self._groups.update(row.group for row in rows)
        self._deadlines.add(rows)

    def remove(self, rows: Iterable[Row]) -> None:
        """Rows leave at once, wherever they are; those that have left before are passed over."""
        for row in rows:
            if row in self.waiting:
                self.waiting.remove(row)
            elif self._has_slot(row):
                self._slots[row.slot] = None
            else:
                continue
            self._deadlines.discard(row)
            self._leave_group(row)

    def _has_slot(self, row: Row) -> bool:
        return 0 <= row.slot < len(self._slots) and self._slots[row.slot] is row

    def _leave_group(self, row: Row) -> None:
        if row is self._prefilling:
            self._store.forget(row.group)  # it is not complete
            self._prefilling = None
        self._groups[row.group] -= 1
        if not self._groups[row.group]:
            del self._groups[row.group]
            self._store.forget(row.group)

    def forget(self, slot: int) -> None:
        """The prompt that the slot held is no longer there."""
        self._resident[slot] = NOBODY

    def refuse(self, round_: Round) -> list[Row]:
        """The rows that a round admits, or goes on prefilling, cannot be served: they leave, with all that they were to bring."""
        for group in {chunk.row.group for chunk in round_.chunks}:
            self._store.forget(group)
            self._resident = [NOBODY if held == group else held for held in self._resident]
        refused = list(dict.fromkeys([*(a.row for a in round_.admissions), *(chunk.row for chunk in round_.chunks)]))
        for row in refused:
            self.forget(row.slot)
        self.remove(refused)
        return refused

    def expire(self, now: float) -> list[Row]:
        """Rows whose deadline has passed leave; returns them."""
        due = self._deadlines.due(now)
        self.remove(due)
        return due

    def next_round(self) -> Round:
        """Goes on with the prompt that is not complete, fills free slots from the queue, then closes what holes remain."""
        admissions: list[Admission] = []
        chunks: list[PrefillChunk] = []
        left = self.chunk if self.running or self._deadlines else sys.maxsize
        if self._prefilling is not None:
            left -= self._fill(self._prefilling, left, chunks)
        while self.waiting and self._prefilling is None:
            admission = self._admit(left, {chunk.row.group for chunk in chunks})
            if admission is None:
                break
            admissions.append(admission)
            if admission.computes:
                self._prefilled = 0
                left -= self._fill(admission.row, left, chunks)
        return self.close_up(admissions, chunks)

    def close_up(self, admissions: Sequence[Admission] = (), chunks: Sequence[PrefillChunk] = ()) -> Round:
        """The rows that run, side by side: what there is to do, and the moves that close the holes between them."""
        slots = len(self._slots)
        moves = self._compact()
        return Round(self.running, admissions, chunks, moves, self._prefilling, slots, self._store.prefixes)

    def release_free_slots(self) -> Round:
        """As `close_up`, and what free slots hold is given up: the caches may be trimmed to what the rows in slots need."""
        for slot, row in enumerate(self._slots):
            if row is None:
                self.forget(slot)
        moves = self.close_up().moves
        return Round(
            self.running, moves=moves, prefilling=self._prefilling, slots=len(self._slots), prefixes=self._store.prefixes
        )

    def _fill(self, row: Row, most: int, chunks: list[PrefillChunk]) -> int:
        """Adds the next chunk of the row's prompt; returns its tokens."""
        start, length = self._prefilled, row.prompt_length - 1
        self._prefilled = min(start + most, length)
        self._prefilling = row if self._prefilled < length else None
        if self._prefilling is None:
            self._resident[row.slot] = row.group if row.prefix is None else NOBODY
        chunks.append(PrefillChunk(row, row.slot, start, self._prefilled))
        return self._prefilled - start

    def _admit(self, left: int, fresh: Collection[int]) -> Admission | None:
        """The next row in the queue takes a slot, if there is one for it.

        Args:
            left: tokens that may still be computed in this round. fresh: groups whose prompts are completed in it.
        """
        row = self.waiting.first(self._at_hand())
        if not self.in_slots and not self._fits(row, 0):
            self._store.clear()  # nobody reads it; alone a row always fits
        source = self._resident.index(row.group) if row.group in self._resident else None
        stored = self._store.find(row.group)
        admission = Admission(row, source, source is not None and row.group in fresh, stored is not None)
        short = left - (row.prompt_length - 1) if admission.computes else 0
        slot = self._free_slot(above=short < 0)
        if slot is None or (short < 0 and not left):
            return None
        if not self._place(row, slot, admission.computes):
            return None
        self.waiting.remove(row)
        if slot == len(self._slots):
            self._slots.append(None)
            self._resident.append(NOBODY)
        self._slots[slot], row.slot = row, slot
        self._resident[slot] = NOBODY if admission.computes or row.prefix is not None else row.group
        return admission

    def _at_hand(self) -> list[int]:
        """Groups whose prompts the next admissions may push out: those in free slots and in the store."""
        return [group for row, group in zip(self._slots, self._resident, strict=True) if row is None] + self._store.groups

    def _place(self, row: Row, slot: int, computes: bool) -> bool:
        """Whether the row fits; `row.prefix` is then where its prompt is or will be stored, if it is shared.

        Prompts that no row in a slot reads are given up if there is no room, or if there are as many prompts as slots.
        """
        read = {other.group for other in [*self.in_slots, row]}
        unread = [group for group in self._store.groups if group not in read]
        excess = max(0, len(self._store.groups) + computes - self.capacity)
        for given_up in (unread[:excess], unread[excess:]):
            for group in given_up:
                self._store.forget(group)
            row.prefix = self._store.find(row.group)
            if computes:
                self._store.forget(row.group)
                rows, length = min(row.request.n, self.capacity), row.prompt_length - 1
                row.prefix = self._store.admit(row.group, rows, length, drafted=row.draft_reach > 0)
            if self._fits(row, slot):
                return True
        alone = not (self.in_slots or self.memory_reserved)
        if computes and not alone:
            self._store.forget(row.group)
        return alone  # then it always fits

    def _fits(self, row: Row, slot: int) -> bool:
        return self.fits is None or self.fits([*self.in_slots, row], max(len(self._slots), slot + 1), self._store.prefixes)

    def _free_slot(self, above: bool) -> int | None:
        """above: a slot above all that are taken."""
        if None in self._slots and not above:
            return self._slots.index(None)
        return len(self._slots) if len(self._slots) < self.capacity else None

    def _compact(self) -> list[Move]:
        moves = []
        while None in self._slots:
            hole = self._slots.index(None)
            last = max(
                (i for i, row in enumerate(self._slots) if row is not None and row is not self._prefilling), default=-1
            )
            if last < hole:
                break
            row = self._slots[last]
            assert row is not None
            self._slots[hole], self._slots[last] = row, None
            self._resident[hole], row.slot = self._resident[last], hole
            moves.append(Move(row, last, hole))
        while self._slots and self._slots[-1] is None:
            del self._slots[-1], self._resident[-1]
        return moves
