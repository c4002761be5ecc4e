"""Prompts of earlier rows, kept for later ones that begin with the same tokens: a chat's next turn, a common system prompt.

Prompts are kept as soon as a row's first round has shown that their logits are finite, and the whole of a row that was its prompt's
only sample. An owner's tokens are not used for another's rows: nobody finds them out by the time that an answer takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.drafting.protocol import Drafter
from shoal.drafting.slots import DraftSlots
from shoal.models.cache.kept import KeptPrefixes
from shoal.models.cache.prefix_tree import common
from shoal.models.runner import Runner
from shoal.types.requests import Row


class PrefixCache:
    """The target's kept prefixes. A draft model keeps as many tokens for itself (`shoal.drafting.slots`).

    Args:
        target: the model. drafter: what drafts for it.
        nbytes: what keys and values of kept tokens may take, the drafter's included.
    """

    def __init__(self, target: Runner, drafter: Drafter | None, nbytes: int) -> None:
        memory = None if drafter is None else drafter.memory
        self._slots = slots = memory if isinstance(memory, DraftSlots) and memory.computes_prompts else None
        tokens = nbytes // (target.token_bytes + (0 if slots is None else slots.token_bytes))
        self._kept = KeptPrefixes(target.cache, tokens)
        if slots is not None:
            slots.keep_prefixes(tokens)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that kept tokens take, the drafter's included, and what is there for more of them."""
        return self._kept.allocated_bytes + (0 if self._slots is None else self._slots.kept_prefix_bytes)

    def known(self, row: Row) -> int:
        """How many tokens the row's prompt begins with that are kept, all but its last at most."""
        return self._kept.known(row.request.owner, row.tokens[: row.entry_length - 1])

    def awaited(self, row: Row, other: Row) -> int:
        """How many tokens the row's prompt begins with that are kept once another row has had a round."""
        if row.request.owner != other.request.owner:
            return 0
        return common(row.tokens[: row.entry_length - 1], other.request.prompt_ids)

    def restore(self, row: Row, count: int) -> None:
        """Copies the first `count` tokens of the row's prompt, which `known` found in this round, to its place in the cache."""
        self._kept.load(row.request.owner, row.tokens[:count], row.slot, row.prefix)

    def keep(self, row: Row) -> None:
        """Keeps all that the cache holds of a row that is to be paused."""
        self._kept.keep(row.request.owner, row.tokens[:-1], row.slot)

    def learn(self, rows: Sequence[Row]) -> None:
        """Keeps what later rows may begin with, of rows that have just had a round without a fault."""
        for row in rows:
            if row.finish_reason and row.request.n == 1:
                self.keep(row)
            elif row.rounds == 1 and not row.index:
                self._kept.keep(row.request.owner, row.request.prompt_ids, row.slot)
