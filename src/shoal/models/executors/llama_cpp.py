"""The passes of a GGUF file's model by llama.cpp (`shoal.models.gguf`)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from shoal.errors import InternalError, ModelError, OutOfMemory
from shoal.models.cache import Plan
from shoal.models.executors.executor import PassBatch, PassOutput
from shoal.models.gguf.gguf_model import GgufModel, complaint, library
from shoal.models.gguf.sequences import PASS_TOKENS, Feed, Sequences
from shoal.models.lean.forward import known_tokens

NO_ROOM, NO_MEMORY = 1, -2
"""The numbers that `llama_decode` returns."""


class LlamaCpp:
    """The executor that computes chains of tokens by calls of `llama_decode`.

    A pass is one call, or several if it has more than `PASS_TOKENS` tokens.
    """

    name = "llama.cpp"

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._feed = Feed()

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason why llama.cpp does not compute the batch, or None.

        Reasons are draft trees, hidden states and vectors.
        """
        if batch.plan.parents is not None:
            return "llama.cpp takes chains of tokens, no draft trees"
        return batch.reads_model

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass.

        Raises:
            ModelError: llama.cpp failed.
            OutOfMemory: llama.cpp has no memory for the pass.
        """
        plan, cache = batch.plan, batch.cache
        if not isinstance(cache, Sequences):
            raise InternalError("llama.cpp got a cache that is not its own")
        threads = torch.get_num_threads()
        library().llama_set_n_threads(cache.context, threads, threads)
        counts = np.array(plan.counts)
        real = np.arange(plan.q) < counts[:, None]
        ids = known_tokens(plan, batch.tokens, self._model.vocab_size).numpy()[:, : plan.q][real]
        places = plan.positions.numpy()[real]
        rows = np.repeat(plan.slots, counts)
        cache.hear(rows.tolist(), ids.tolist())
        vocab = self._model.vocab_size
        logits = torch.empty(len(ids) if batch.want_logits else 1, vocab)
        for first in range(0, len(ids), PASS_TOKENS):
            part = slice(first, first + PASS_TOKENS)
            self._decode(
                cache, self._feed.fill(ids[part], places[part], rows[part], batch.want_logits)
            )
            if batch.want_logits:
                _read_logits(cache, logits[part])
        return PassOutput(_by_row(plan, logits) if batch.want_logits else logits, None, self.name)

    def _decode(self, cache: Sequences, batch: ctypes.Structure) -> None:
        code = library().llama_decode(cache.context, batch)
        if code in (NO_ROOM, NO_MEMORY):
            raise OutOfMemory(
                f"{self._model.file}: llama.cpp has no memory for a pass: {complaint('no reason')}"
            )
        if code:
            raise ModelError(
                f"{self._model.file}: llama.cpp failed at a pass ({code}): {complaint('no reason')}"
            )


def _read_logits(cache: Sequences, logits: Tensor) -> None:
    """Copies the logits of the last call, [tokens, vocab] float32.

    The next call overwrites them.
    """
    ctypes.memmove(logits.data_ptr(), library().llama_get_logits(cache.context), logits.nbytes)


def _by_row(plan: Plan, logits: Tensor) -> Tensor:
    """Converts [tokens, vocab] to [rows, q, vocab]."""
    if len(logits) == plan.rows * plan.q:
        return logits.view(plan.rows, plan.q, -1)
    return plan.spread(logits)
