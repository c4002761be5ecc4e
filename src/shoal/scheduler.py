"""Which rows run in the next round. Pure Python: it moves names of slots, never tensors.

Active rows always occupy the slots 0, 1, ..., so that a round's caches are views. A row that ends leaves at once; a waiting row
takes its slot, and when none waits the last row moves into the hole (compaction). A slot remembers whose prompt it holds even
after its row has gone: prompts are admitted first come, first served, so a group's waiting rows always find a copy.
A prompt in the shared store stays there for as long as a row of its group runs or waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.errors import RequestError
from shoal.request import Row
from shoal.schedule import Admission, Move, Round
from shoal.sharing import Store

NOBODY = -1
"""The group whose prompt a slot holds, when it holds none."""


@dataclass
class Scheduler:
    """Rows waiting, rows running, and who sits where.

    Attributes:
        capacity: most rows in a round. prompts: whether groups share theirs, see `shoal.sharing`.
    """

    capacity: int
    waiting: deque[Row] = field(default_factory=deque)
    prompts: str = "copied"

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise RequestError(f"max_batch must be >= 1, got {self.capacity}")
        self._slots: list[Row | None] = []
        self._resident: list[int] = []
        self._store = Store(self.prompts)

    @property
    def running(self) -> list[Row]:
        """Rows in slots, in slot order."""
        return [row for row in self._slots if row is not None]

    @property
    def idle(self) -> bool:
        return not self.waiting and not any(self._slots)

    def add(self, rows: Iterable[Row]) -> None:
        """Rows join the queue, also while others run."""
        self.waiting.extend(rows)

    def remove(self, rows: Iterable[Row]) -> None:
        """Rows leave at once, wherever they are."""
        gone = set(map(id, rows))
        if not gone:
            return
        self.waiting = deque(row for row in self.waiting if id(row) not in gone)
        self._slots = [None if row is not None and id(row) in gone else row for row in self._slots]
        self._store.keep({row.group for row in [*self.running, *self.waiting]})

    def forget(self, slot: int) -> None:
        """The prompt that the slot held is no longer there."""
        self._resident[slot] = NOBODY

    def expired(self, now: float) -> list[Row]:
        """Rows whose deadline has passed."""
        return [row for row in [*self.running, *self.waiting] if row.deadline is not None and now >= row.deadline]

    def next_round(self) -> Round:
        """Fills free slots from the queue, then closes what holes remain."""
        admissions = self._admit()
        moves = self._compact()
        return Round(self.running, admissions, moves, self._store.cells)

    def _admit(self) -> list[Admission]:
        admissions: list[Admission] = []
        computed: set[int] = set()
        while self.waiting and (slot := self._free_slot()) is not None:
            row = self.waiting.popleft()
            source = self._resident.index(row.group) if row.group in self._resident else None
            row.prefix = self._store.find(row.group)
            admission = Admission(row, source, source is not None and row.group in computed, row.prefix is not None)
            admissions.append(admission)
            if admission.computes:
                computed.add(row.group)
                row.prefix = self._store.admit(row.group, min(row.request.n, self.capacity), row.prompt_length - 1)
            self._slots[slot], row.slot = row, slot
            self._resident[slot] = row.group if row.prefix is None else NOBODY
        return admissions

    def _free_slot(self) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        if len(self._slots) == self.capacity:
            return None
        self._slots.append(None)
        self._resident.append(NOBODY)
        return len(self._slots) - 1

    def _compact(self) -> list[Move]:
        moves = []
        while None in self._slots:
            hole = self._slots.index(None)
            last = max((i for i, row in enumerate(self._slots) if row is not None), default=-1)
            if last < hole:
                del self._slots[hole:], self._resident[hole:]
                break
            row = self._slots[last]
            assert row is not None
            self._slots[hole], self._slots[last] = row, None
            self._resident[hole], row.slot = self._resident[last], hole
            moves.append(Move(row, last, hole))
        return moves
