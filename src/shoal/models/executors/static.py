"""Passes of fixed shape (`shoal.models.compiled`), captured into CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoal.models.compiled import Passes
from shoal.models.executors.protocol import Batch, Output
from shoal.models.lean.forward import known_tokens


class StaticPasses:
    """Computes a batch that fits a bucket, as a graph of that bucket.

    Args:
        passes: the passes of the model.
        known_ids: ids that the model can read.
        ordinary: computes a batch by the other executors: the first of its bucket, and one that fails.
    """

    name = "static passes"

    def __init__(self, passes: Passes, known_ids: int, ordinary: Callable[[Batch], Output]) -> None:
        self._passes, self._known_ids, self._ordinary = passes, known_ids, ordinary

    def refuses(self, batch: Batch) -> str | None:
        """Returns the reason: a prompt, a failure, or rows that no bucket covers."""
        if not batch.want_logits:
            return "they compute logits, and prompts need none"
        return batch.reads_model or self._passes.refuses(batch.plan, batch.cache)

    def __call__(self, batch: Batch) -> Output:
        """Computes a pass."""
        outputs: list[Output] = []

        def ordinary() -> Tensor:
            outputs.append(self._ordinary(batch))
            return outputs[-1].logits

        tokens = known_tokens(batch.plan, batch.tokens, self._known_ids)
        logits = self._passes.logits(batch.plan, tokens, batch.cache, ordinary)
        return outputs[-1] if outputs else Output(logits, None, self.name)
