"""The rows of a draft model: slots of its own cache, in the order of the round's rows, and prompts.

A row's prompt is computed before its first draft, not earlier, together with the tokens decoded
since; rows that were decoded plainly in between are brought up to date in the same way. All of this
counts as preparation, not as drafting. A prompt of several rows is computed once: if the target
stores it once (`Row.prefix`), the drafter does too, at the same place of its own store; otherwise
it is copied between slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

import torch

from shoal.drafting.protocol import KeyValueMemory
from shoal.errors import InternalError
from shoal.models.cache.kept_prompts import KeptPrefixes
from shoal.models.prompt_passes import feed_prefix, feed_prompts
from shoal.models.runner import Runner
from shoal.types.requests import Prefix, Row
from shoal.types.rounds import PrefillChunk

NO_GROUP = -1


class DraftSlots:
    """The slots of one drafter's cache.

    Args:
        runner: the draft model with its cache.
        pending: the most tokens of a row that the first pass of a proposal is to feed.

    Attributes:
        runner: the draft model.
        kept: the memory of prompts for later rows that begin alike; None = none are kept.
        seconds: the seconds spent on prompts so far.
        computes_prompts: True if prompts are computed here, so that they may be kept.
    """

    computes_prompts = True

    def __init__(self, runner: Runner, pending: int = 2) -> None:
        self.runner, self._cache, self._pending = runner, runner.cache, pending
        self._places: dict[Row, int] = {}
        # The rows in slots that were never drafted for: none of their tokens were computed.
        self._empty: set[Row] = set()
        # slot -> the group with whose prompt it begins, also when its row has left
        self._prompts: dict[int, int] = {}
        self._stored: dict[Prefix, int] = {}  # prompts in the shared store -> their groups
        # A prompt that is not completely in the store, and the number of its tokens there.
        self._partial: tuple[Prefix, int] | None = None
        self.kept: KeptPrefixes | None = None
        self.seconds, self._taken = 0.0, 0.0

    def of(self, row: Row) -> int:
        """Returns the row's slot."""
        return self._places[row]

    @property
    def rows(self) -> dict[int, Row]:
        """The rows by their slots."""
        return {slot: row for row, slot in self._places.items()}

    def with_slots(self, rows: Iterable[Row]) -> list[Row]:
        """Returns the rows that have slots."""
        return [row for row in rows if row in self._places]

    def leave(self, rows: Iterable[Row] | None) -> None:
        """Frees the slots of rows; None = of all, with the prompts that rows have left in slots."""
        if rows is None:
            self._prompts, self._stored, self._partial = {}, {}, None
            rows = list(self._places)
        for row in rows:
            self._places.pop(row, None)
            self._empty.discard(row)

    def take_seconds(self) -> float:
        """Returns the seconds spent on prompts since the last call."""
        taken, self._taken = self.seconds - self._taken, self.seconds
        return taken

    def place(self, rows: Sequence[Row], drafting: Sequence[bool]) -> None:
        """Puts the rows into slots 0, 1, ... in their order.

        Rows that are drafted for are brought up to date: at most `pending` tokens of each are left
        to feed. The other rows are not computed.
        """
        new = []
        for slot, row in enumerate(rows):
            place = self._places.get(row)
            if place is None:
                new.append((row, slot))
            elif place != slot:
                self._move(row, slot)
        for row, slot in new:
            self._enter(row, slot)
        drafted = list(compress(enumerate(rows), drafting))
        first = [row for _, row in drafted if row in self._empty]
        if first or _late(drafted, self._cache.lengths, self._pending):
            with self._preparing():
                self._fill(first)
                held = self._cache.lengths
                late = _late(drafted, held, self._pending)
                feed_prompts(
                    self.runner, [(slot, row.tokens[held[slot] : -1]) for slot, row in late]
                )

    def keep_pace(self, chunks: Sequence[PrefillChunk]) -> None:
        """Computes chunks of the prompts that take several rounds, in the target's slots."""
        long = [chunk for chunk in chunks if chunk.stop - chunk.start < chunk.row.prompt_length - 1]
        if long:
            with self._preparing():
                for chunk in long:
                    self._compute(chunk)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Counts the time of passes over prompts, which are no part of a round."""
        started = time.perf_counter()
        yield
        self.runner.counts.take()
        self.seconds += time.perf_counter() - started

    def _compute(self, chunk: PrefillChunk) -> None:
        """Computes a chunk of a prompt.

        A chunk that does not follow the computed tokens is skipped: missing tokens are computed at
        the row's first draft.
        """
        row = chunk.row
        slot = chunk.slot
        ids = row.request.prompt_ids[chunk.start : chunk.stop]
        complete = chunk.stop == row.prompt_length - 1
        if row.prefix is not None:
            if chunk.start == 0:
                self._forget_overlapping(row.prefix)
                self._partial = row.prefix, 0
            if self._partial == (row.prefix, chunk.start):
                feed_prefix(
                    self.runner,
                    row.prefix,
                    chunk.start,
                    torch.tensor([ids], device=self.runner.device),
                )
                self._partial = row.prefix, chunk.stop
                self._stored |= {row.prefix: row.group} if complete else {}
            return
        if chunk.start == 0 and slot not in self._places.values():
            self._places[row], self._prompts[slot] = slot, NO_GROUP
            self._cache.enter(slot)
        if self._places.get(row) == slot and self._cache.lengths[slot] == chunk.start:
            feed_prompts(self.runner, [(slot, ids)])
            self._prompts[slot] = row.group if complete else NO_GROUP
            if complete:
                self._keep(row, row.request.prompt_ids[:-1])

    def _move(self, row: Row, slot: int) -> None:
        """Moves a row to a free slot.

        Rows only ever move down, so a row that is still in the way moves first.
        """
        if slot in self._places.values():
            raise InternalError(f"slot {slot} of the drafter is taken")
        source = self._places[row]
        self._cache.copy(source, slot, self._cache.lengths[source])
        self._prompts[slot] = self._prompts.get(source, NO_GROUP)
        self._places[row] = slot

    def _enter(self, row: Row, slot: int) -> None:
        """Puts a new row into a free slot.

        The row begins with its prompt if the row before it has left the same prompt there.
        """
        self._places[row] = slot
        if self._prompts.get(slot) == row.group and self._cache.reaches(
            slot, row.prompt_length - 1
        ):
            self._cache.copy(slot, slot, row.prompt_length - 1)
        else:
            self._cache.enter(slot)
            self._prompts[slot] = NO_GROUP
            self._empty.add(row)

    def _fill(self, rows: Sequence[Row]) -> None:
        """Computes or copies the prompts of rows in slots.

        Later tokens of a row are computed together with its prompt, if the prompt is not copied.
        """
        sources = {self._prompts.get(slot): slot for slot in self._places.values()}
        computed: list[tuple[int, Sequence[int]]] = []
        new: list[Row] = []
        copied: list[tuple[Row, int]] = []
        for row in rows:
            slot = self._places[row]
            self._cache.enter(slot, None if row.prefix is None else self._in_store(row))
            if row.prefix is not None:
                continue
            if row.group in sources:
                copied.append((row, sources[row.group]))
            else:
                sources[row.group] = slot
                computed.append((slot, row.tokens[self._restore(row, row.tokens[:-1]) : -1]))
                new.append(row)
        feed_prompts(self.runner, computed)
        late: list[tuple[int, Sequence[int]]] = []
        for row, source in copied:
            if self._cache.reaches(source, row.prompt_length - 1):
                self._cache.copy(source, self._places[row], row.prompt_length - 1)
            else:
                late.append((self._places[row], row.tokens[:-1]))
        feed_prompts(self.runner, late)
        for row in rows:
            self._empty.discard(row)
            self._prompts[self._places[row]] = row.group if row.prefix is None else NO_GROUP
        for row in new:
            self._keep(row, row.tokens[:-1])

    def _in_store(self, row: Row) -> Prefix:
        """Returns the row's prompt in the shared store; computes it if it is not there."""
        prefix = row.prefix
        assert prefix is not None
        if self._stored.get(prefix) != row.group:
            self._forget_overlapping(prefix)
            prompt = row.request.prompt_ids[: prefix.length]
            start = self._restore(row, prompt, prefix)
            ids = torch.tensor([prompt[start:]], dtype=torch.long, device=self.runner.device)
            feed_prefix(self.runner, prefix, start, ids)
            self._stored[prefix] = row.group
            self._cache.enter(self.of(row), prefix)
            self._keep(row, prompt)
        return prefix

    def _restore(self, row: Row, tokens: Sequence[int], prefix: Prefix | None = None) -> int:
        """Copies the kept beginning to the row's empty slot or to the store; returns its length."""
        if self.kept is None:
            return 0
        return self.kept.load(self._cache, row.request.owner, tokens, self.of(row), prefix)

    def _keep(self, row: Row, tokens: Sequence[int]) -> None:
        if self.kept is not None:
            self.kept.keep(self._cache, row.request.owner, tokens, self.of(row))

    def _forget_overlapping(self, prefix: Prefix) -> None:
        self._stored = {
            other: group for other, group in self._stored.items() if not _overlap(other, prefix)
        }

    def forget_from(self, first: int) -> None:
        """Forgets the rows in slots from `first` on, and prompts whose rows have left.

        No draft has moved such a row down since other rows left: its next draft computes its tokens
        anew.
        """
        self.leave([row for row, slot in self._places.items() if slot >= first])
        taken, groups = set(self._places.values()), {row.group for row in self._places}
        self._prompts = {slot: group for slot, group in self._prompts.items() if slot in taken}
        self._stored = {prefix: group for prefix, group in self._stored.items() if group in groups}


class DraftMemory(KeyValueMemory):
    """The memory of a drafter's `slots`, which is that of its runner's cache."""

    def __init__(self, slots: DraftSlots) -> None:
        self.slots, self._own = slots, slots.runner.memory

    def _size(self, slots: int, capacity: int, cells: int) -> tuple[int, int, int]:
        """Returns the size of the cache for rows of the engine, in the drafter's own tokens."""
        return slots, capacity, cells

    @property
    def context(self) -> int:
        return self._own.context

    @property
    def shares(self) -> bool:
        return self._own.shares

    @property
    def attends_in_one_call(self) -> bool:
        return self._own.attends_in_one_call

    @property
    def captures_without_prefixes(self) -> bool:
        return self._own.captures_without_prefixes

    @property
    def allocated_bytes(self) -> int:
        return self._own.allocated_bytes

    def cache_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        return self._own.cache_bytes(*self._size(slots, capacity, cells))

    def grown_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        return self._own.grown_bytes(*self._size(slots, capacity, cells))

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        self._own.reserve(*self._size(slots, capacity, cells))

    def expect_drafts(self, longest: int) -> None:
        self._own.expect_drafts(longest)

    def wastes(self, slots: int, capacity: int, cells: int = 0) -> bool:
        return self._own.wastes(*self._size(slots, capacity, cells))

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Trims the cache; rows in slots that are removed, and prompts of no row, are forgotten."""
        self.slots.forget_from(slots)
        self._own.trim(*self._size(slots, capacity, cells))


def _late(rows: Iterable[tuple[int, Row]], held: Sequence[int], most: int) -> list[tuple[int, Row]]:
    """Returns the rows of which a cache lacks more than `most` committed tokens, with their slots.

    Args:
        rows: the rows with their slots.
        held: the tokens in each slot.
        most: the number of tokens.
    """
    return [(slot, row) for slot, row in rows if len(row.tokens) - held[slot] > most]


def _overlap(one: Prefix, other: Prefix) -> bool:
    return one.base < other.base + other.length and other.base < one.base + one.length
