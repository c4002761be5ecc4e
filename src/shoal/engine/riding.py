"""Chunks of long prompts that ride in the passes of the rows that run.

After SARATHI (Agrawal et al. 2023, arXiv 2308.16369): a round's pass takes the next chunk of a
waiting prompt along as one more row, which has no drafts and takes no part in the verdict. One pass
in place of two reads the weights once. The scheduler decides which chunk rides; which passes take
one is decided by `shoal.models.prompt_passes.carries_prompts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shoal.engine.running_rows import Batch
from shoal.errors import ModelError
from shoal.models.prompt_passes import carries_prompts, feed_carrying
from shoal.types.schedule import PrefillChunk
from shoal.types.trees import Block


class Rides:
    """The chunks that ride in the passes of an engine's rows.

    Args:
        batch: the running rows, with the target.

    Attributes:
        tokens: the number of prompt tokens that have ridden in the round under way.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch, self.tokens = batch, 0
        batch.scheduler.carries = partial(carries_prompts, batch.target)
        self._computed: PrefillChunk | None = None  # the drafter has not heard of it

    def feed(self, slots: Sequence[int], block: Block) -> Tensor:
        """Appends a block to the rows that run, and the next chunk of a prompt if one can ride.

        If the pass fails, it is computed without the chunk, and no other chunk rides: passes of
        their own say whose prompt has failed.

        Returns:
            The logits of the block.
        """
        batch = self._batch
        chunk = batch.scheduler.riding()
        if chunk is not None:
            prompt = chunk.row.tokens[chunk.start : chunk.stop]
            try:
                logits = feed_carrying(batch.target, slots, block, chunk.slot, prompt)
            except ModelError:
                batch.scheduler.carries = lambda: False
            else:
                self._note(chunk)
                return logits
        tokens, counts, parents = block
        return batch.target.feed(slots, tokens, counts, parents=parents)

    def _note(self, chunk: PrefillChunk) -> None:
        self.tokens, self._computed = chunk.stop - chunk.start, chunk
        self._batch.scheduler.rode(chunk)
        stats = self._batch.stats
        stats.prefill_chunks += 1
        stats.fused_chunks += 1
        stats.prefill_tokens += self.tokens

    def keep_pace(self, *, drafting: bool) -> None:
        """Begins a round: the drafter and the guides compute the chunk of the one before.

        Args:
            drafting: True if the drafter computes long prompts along with the target.
        """
        chunk, self._computed, self.tokens = self._computed, None, 0
        if chunk is not None and chunk.row.finish_reason is None:
            self._batch.keep_pace([chunk], drafting=drafting)
