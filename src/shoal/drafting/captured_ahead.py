"""The captured round that a device goes on with while the host commits the one before.

The device can fill the inputs of the next round by the results of the last one
(`NextRound.fill`) if the rows, their settings and their draft lengths stay the same. So
the next round is launched before the host waits for the verdict: no device stands still while the
host appends tokens, decodes text, learns and streams.

A row that ends in the round before has its part of the launched round computed in vain. The results
of the other rows hold, whatever became of it: no row depends on another. Rows therefore keep their
slots until the launched round is over, and no row joins before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.drafting.captured_inputs import DraftRound
from shoal.drafting.model import ModelDrafter
from shoal.models.cache import SlotCache
from shoal.models.compiled.captured_round import CapturedRound, Launched
from shoal.models.runner import Runner
from shoal.types.requests import Row


class RoundAhead(NamedTuple):
    """A round that was launched while the round before it was under way.

    Attributes:
        round: the functions of both rounds.
        work: the round before, whose rows, settings and draft lengths this one has.
        launched: the target's pass.
        caches: the caches that the round writes to.
        stores: the keys of the first layer of each cache, as they were.
        lengths: the length of each row in the target's cache that the round begins at; empty until
            the verdict of the round before is known.
    """

    round: CapturedRound
    work: DraftRound
    launched: Launched
    caches: Sequence[SlotCache]
    stores: Sequence[Tensor]
    lengths: Sequence[int] = ()

    def places(self, running: Sequence[Row]) -> list[int]:
        """Returns the places of the rows that still run; none if the round does not hold.

        It does not hold if a row has other tokens or another slot than the round was launched with,
        or if a cache has changed its size.

        Args:
            running: the rows in slots.
        """
        known, target = {row: place for place, row in enumerate(self.work.rows)}, self.caches[0]
        same = all(
            cache.stores_of(0)[0] is keys
            for cache, keys in zip(self.caches, self.stores, strict=True)
        )
        holds = same and all(
            row.slot == known.get(row) and target.lengths[row.slot] == self.lengths[row.slot]
            for row in running
        )
        return sorted(row.slot for row in running) if holds else []

    def narrowed(
        self, places: Sequence[int], target: Runner, drafter: ModelDrafter | None
    ) -> DraftRound:
        """Returns the round of the rows at these places, by the caches as they are now."""
        work = self.work
        rows, lengths = [work.rows[b] for b in places], [work.lengths[b] for b in places]
        plan = target.plan([row.slot for row in rows], [1 + length for length in lengths])
        if work.first is None or drafter is None:
            return work._replace(rows=rows, lengths=lengths, plan=plan)
        slots, cache = drafter.slots(rows), drafter.runner.cache
        held = [cache.lengths[slot] for slot in slots]
        pending = [drafter.read_as(row).tokens[own:] for row, own in zip(rows, held, strict=True)]
        first = drafter.runner.plan(slots, [len(tokens) for tokens in pending])
        return work._replace(
            rows=rows, lengths=lengths, plan=plan, first=first, pending=pending, held=held
        )


def may_follow(
    round_: CapturedRound, work: DraftRound, target: Runner, drafter: ModelDrafter | None
) -> bool:
    """Returns True if a round like this one can be launched before the verdict is known.

    All rows must be drafted for alike, in both rounds whatever is accepted; both caches must have
    the room; and all functions must have been checked.
    """
    kind, k, rows = round_.kind, work.k, len(work.rows)
    if kind.looks or not round_.can_advance(k):
        return False
    room = min(target.cache.capacity, kind.target_keys) - max(work.plan.tails)
    if work.first is not None and drafter is not None:
        if type(drafter).observe is not ModelDrafter.observe:
            return False  # it may read the logits, which the next round writes over
        keys = min(drafter.runner.cache.capacity, kind.draft_keys)
        room = min(room, keys - (max(work.first.tails) + k - 1))
    return (
        room > k
        and work.plan.slots == list(range(rows))
        and all(
            length == k and _lasts(row, k)
            for row, length in zip(work.rows, work.lengths, strict=True)
        )
    )


def _lasts(row: Row, k: int) -> bool:
    """Returns True if k drafts fit behind those of this round, if all of these are accepted."""
    reach = row.draft_context - len(row.tokens) + 1
    return row.remaining >= 2 * (k + 1) and (not k or reach >= 2 * k + 1)
