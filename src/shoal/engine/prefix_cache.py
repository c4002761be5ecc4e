"""Prompts of earlier rows, kept for later rows that begin with the same tokens.

They serve a chat's next turn, or a common system prompt. Prompts are kept as soon as a row's first
round has shown that their logits are finite. If a row was its prompt's only sample, all of its
tokens are kept. An owner's tokens are not used for another's rows: otherwise one user could detect
another user's prompt by timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.drafting.draft_slots import DraftSlots
from shoal.drafting.protocol import Drafter
from shoal.models.cache.kept_prompts import common
from shoal.models.runner import Runner
from shoal.models.weights.versions import sums
from shoal.types.requests import Row
from shoal.types.rounds import Commit

PROBED = 8
"""The number of tokens of the pass by which a target is recognised."""


class PrefixMemory:
    """The memory for the prefixes of a target and of its draft model.

    It belongs to one engine, or to several one after the other.

    Args:
        target: the model.
        draft_model: the model that drafts for it; None = there is none.
        nbytes: the most bytes of the keys and values of kept tokens, those of the draft model
            included.

    Attributes:
        kept: the prefixes of the target.
        kept_for_drafts: the prefixes of the draft model.
        draft_model: the draft model's module.
    """

    def __init__(self, target: Runner, draft_model: Runner | None, nbytes: int) -> None:
        if draft_model is not None and not (
            draft_model.can_keep_prefixes and not draft_model.memory.block
        ):
            draft_model = None  # a drafter keeps no states
        self.draft_model = None if draft_model is None else draft_model.hf
        self._tokens = nbytes // (
            target.memory.kept_token_bytes
            + (0 if draft_model is None else draft_model.memory.kept_token_bytes)
        )
        self._new_kept = target.new_kept, (target if draft_model is None else draft_model).new_kept
        self._probed: Tensor | None = None
        self._sums: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all prefixes."""
        self.kept, self.kept_for_drafts = (new_kept(self._tokens) for new_kept in self._new_kept)

    @property
    def allocated_bytes(self) -> int:
        """The bytes allocated for kept tokens, with room for more of them."""
        return self.kept.allocated_bytes + self.kept_for_drafts.allocated_bytes

    @torch.inference_mode()
    def recognise(self, target: Runner) -> None:
        """Forgets all prefixes if the target has changed since the last call.

        Its weights and buffers are compared by sums over all of their bytes. A pass over `PROBED`
        tokens detects other code, such as hooks or an adapter that is switched off. Changes of the
        draft model are not looked for, because they change no distribution.
        """
        runner = target.fork_for_ordinary_passes()
        runner.memory.reserve(1, PROBED)
        runner.cache.rollback(0, 0)
        ids = torch.arange(PROBED, device=runner.device)[None] % min(
            runner.known_ids, runner.vocab_size
        )
        logits, found = runner.feed([0], ids, [PROBED]).clone(), sums(runner.hf)
        if (
            self._probed is None
            or not torch.equal(logits, self._probed)
            or len(found) != len(self._sums)
            or not all(map(torch.equal, found, self._sums))
        ):
            self.clear()
        self._probed, self._sums = logits, found


class PrefixCache:
    """The kept prefixes in the use of one engine's target.

    A draft model keeps as many tokens for itself (`shoal.drafting.draft_slots`).

    Args:
        target: the model.
        drafter: the drafter of the engine; None = there is none.
        memory: the memory of the prefixes.
    """

    def __init__(self, target: Runner, drafter: Drafter | None, memory: PrefixMemory) -> None:
        slots = None if drafter is None else drafter.memory
        _ = target.memory.token_bytes  # a new cache has its layers once this is known
        if (
            isinstance(slots, DraftSlots)
            and slots.computes_prompts
            and slots.hf is memory.draft_model
        ):
            _ = slots.token_bytes
            slots.keep_prefixes(memory.kept_for_drafts)
        self._kept, self._cache, self._memory = memory.kept, target.cache, memory
        self._kept.serves(self._cache)

    @property
    def allocated_bytes(self) -> int:
        """The bytes allocated for kept tokens, the drafter's included, with room for more."""
        return self._memory.allocated_bytes

    def known(self, row: Row) -> int:
        """Returns how many tokens at the beginning of the row's prompt are kept.

        The prompt's last token does not count.
        """
        return self._kept.known(row.request.owner, row.tokens[: row.entry_length - 1])

    def awaited(self, row: Row, other: Row) -> int:
        """Returns how many tokens will be kept once another row has had a round.

        They are tokens at the beginning of the row's prompt.
        """
        if row.request.owner != other.request.owner:
            return 0
        prompt = other.request.prompt_ids
        shared = common(row.tokens[: row.entry_length - 1], prompt)
        return self._kept.reachable(shared, len(prompt) - 1)

    def restore(self, row: Row, count: int) -> None:
        """Copies the first `count` tokens of the row's prompt to its place in the cache.

        `known` found them in this round.
        """
        self._kept.load(self._cache, row.request.owner, row.tokens[:count], row.slot, row.prefix)

    def keep(self, row: Row) -> None:
        """Keeps all tokens in the cache of a row that is to be paused."""
        self._kept.keep(self._cache, row.request.owner, row.tokens[:-1], row.slot)

    def learn(self, commits: Sequence[Commit]) -> None:
        """Keeps tokens with which later rows may begin.

        Args:
            commits: those of rows that have just had a round, or several, without a fault.
        """
        for row, new in ((done.row, len(done.tokens)) for done in commits):
            if row.finish_reason and row.request.n == 1:
                self.keep(row)
            elif row.new_tokens == new and not row.index:
                self._kept.keep(self._cache, row.request.owner, row.request.prompt_ids, row.slot)
            self._kept.settle(self._cache, row.slot)
