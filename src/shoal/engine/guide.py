"""The guide of a target, and its expert: models that read the text beside it
(`sampling.guidance`).

Between rounds the cache of each of these models holds the same tokens as the target's cache: the
committed tokens of each guided row except the last. If the row has a prompt for the model, that
prompt takes the place of the row's own. A round feeds the model the columns that the target
verifies, and keeps the columns that the target keeps. Rows without guidance have a slot in the
cache, and are not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.config import GUIDES_PROMPTS, Sampling
from shoal.drafting.draft_slots import DraftSlots
from shoal.drafting.protocol import KeyValueMemory
from shoal.errors import BadLogits
from shoal.models.runner import Runner
from shoal.types.requests import Row
from shoal.types.rounds import Faults, PrefillChunk
from shoal.types.stats import Stats
from shoal.types.trees import Block


@dataclass(frozen=True)
class AfterAnother:
    """A row for a model with a prompt of its own: that prompt, then the new tokens of the row.

    It has all that slots ask of a row. Two of one row are equal.
    """

    row: Row
    prompt: Sequence[int] = field(compare=False)
    prefix = None

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.row.tokens[self._new :]]

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def group(self) -> int:
        return self.row.group

    @property
    def _new(self) -> int:
        return self.row.prompt_length


class Guide:
    """The guide of one engine, or its expert.

    Args:
        model: the model; the engine gets a cache of its own.
        role: the guide reads negative prompts, the expert positive ones; where a row has none, both
            read its prompt.
    """

    def __init__(self, model: Runner, role: Literal["guide", "expert"] = "guide") -> None:
        self.runner = model.fork(ordinary=True)
        self.slots = DraftSlots(self.runner, pending=1)
        self.role = role

    def own_prompt(self, sampling: Sampling) -> Sequence[int]:
        """Returns the ids that this model reads in place of the prompt; empty = the prompt."""
        return getattr(sampling, GUIDES_PROMPTS[self.role])

    def _as_read(self, row: Row) -> Row:
        """Returns the row with the prompt that this model reads."""
        other = self.own_prompt(row.request.sampling)
        return cast(Row, AfterAnother(row, other)) if other else row

    def _own(self, rows: Iterable[Row]) -> list[Row]:
        return [self._as_read(row) for row in rows]

    def logits(self, rows: Sequence[Row], block: Block) -> Tensor | None:
        """Computes this model's logits of a verification pass.

        Args:
            block: the target's block, without columns that a drafter adds for itself.

        Returns:
            The logits of the guided rows, [guided rows, q, vocab]; None if no row is guided.
        """
        guided = [_is_guided(row) for row in rows]
        if not any(guided):
            return None
        read = self._own(rows)
        self.slots.place(read, guided)
        own = [b for b, is_guided in enumerate(guided) if is_guided]
        tokens, counts, parents = block
        own_counts = [counts[b] for b in own]
        width = max(own_counts)  # the drafts of other rows may be longer
        columns = tokens[torch.tensor(own, device=tokens.device), :width]
        for place, b in enumerate(own):
            if read[b] is not rows[b] and not rows[b].new_tokens:
                columns[place, 0] = read[b].tokens[-1]  # that of its own prompt
        logits = self.runner.feed(
            [self.slots.of(read[b]) for b in own],
            columns,
            own_counts,
            parents=None if parents is None else [parents[b] for b in own],
        )
        return pad(logits, (0, 0, 0, tokens.shape[1] - width))

    def keep(self, rows: Sequence[Row], columns: Sequence[Sequence[int]], faults: Faults) -> None:
        """Keeps the columns of the last pass that the rows have committed.

        Args:
            rows: the rows, with their new tokens.
            columns: for each row, the columns of its committed tokens but the last, from the root.
            faults: the faults of the pass. Values that are not finite are zeroed: hidden keys count
                with weight 0, and 0 * NaN is NaN.
        """
        cache = self.runner.cache
        for row, own in zip(rows, columns, strict=True):
            if _is_guided(row):
                read = self._as_read(row)
                slot = self.slots.of(read)
                cache.keep(slot, len(read.tokens) - 1 - len(own), own)
                if any(isinstance(error, BadLogits) for error in faults.get(row, {}).values()):
                    cache.zero_non_finite(slot)

    def prepare(self, chunks: Iterable[PrefillChunk]) -> None:
        """Keeps pace with the target, which has computed these chunks of prompts.

        A row that was paused is left out: its tokens are computed together when it is back. A
        prompt of the model's own is left out as well: it is computed when its row begins.
        """
        own = [chunk for chunk in chunks if self._as_read(chunk.row) is chunk.row]
        self.slots.keep_pace(
            [chunk for chunk in own if _is_guided(chunk.row) and not chunk.row.paused_at]
        )

    def leave(self, rows: Iterable[Row]) -> None:
        """Forgets rows that leave their slots, for any reason."""
        self.slots.leave(self._own(rows))

    def pause(self, rows: Sequence[Row]) -> None:
        """Frees the slots of rows that come back with the same tokens."""
        self.slots.leave(self._own(rows))

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        """Forgets rows that become copies of others: their tokens are computed anew."""
        self.slots.leave(self._own(row for row, _ in copies))

    def count(self, stats: Stats) -> None:
        """Adds the work since the last call."""
        passes, seconds = self.runner.counts.take()
        stats.guide_passes += passes
        stats.seconds_target += seconds
        stats.seconds_prefill += self.slots.take_seconds()
        stats.count_executors(self.role, self.runner.counts.take_executors())


def _is_guided(row: Row) -> bool:
    return row.request.sampling.guidance != 0


class Together(KeyValueMemory):
    """The memory of a target and of its guides, which hold equally many tokens.

    Args:
        target: the target's; all guides have its context.
        guides: those of the guide and of the expert.
    """

    def __init__(self, target: KeyValueMemory, guides: Iterable[KeyValueMemory]) -> None:
        self._all, self._target = (target, *guides), target

    @property
    def context(self) -> int:
        return self._target.context

    @property
    def shares(self) -> bool:
        return all(one.shares for one in self._all)

    @property
    def attends_in_one_call(self) -> bool:
        return all(one.attends_in_one_call for one in self._all)

    @property
    def captures_without_prefixes(self) -> bool:
        return any(one.captures_without_prefixes for one in self._all)

    @property
    def allocated_bytes(self) -> int:
        return sum(one.allocated_bytes for one in self._all)

    def cache_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        return sum(one.cache_bytes(slots, capacity, cells) for one in self._all)

    def grown_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        return sum(one.grown_bytes(slots, capacity, cells) for one in self._all)

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        for one in self._all:
            one.reserve(slots, capacity, cells)

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        for one in self._all:
            one.trim(slots, capacity, cells)

    def expect_drafts(self, longest: int) -> None:
        for one in self._all:
            one.expect_drafts(longest)

    def wastes(self, slots: int, capacity: int, cells: int = 0) -> bool:
        return any(one.wastes(slots, capacity, cells) for one in self._all)
