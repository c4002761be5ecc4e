"""The passes of Llama-like models without their modules (`shoal.models.lean`).

A pass is one call of C, or goes layer by layer.
"""

from __future__ import annotations

from shoal.models.attention.native import MOST_COLUMNS, takes
from shoal.models.executors.executor import PassBatch, PassOutput
from shoal.models.lean.forward import LeanPass

REPLACED = "weights or layers of the model were replaced by others"
C_DECODER, C_LAYERS = "C decoder", "C layers"


class CDecoder:
    """The executor that computes a pass in one call of the kernel `decode`."""

    name = C_DECODER

    def __init__(self, lean: LeanPass) -> None:
        self._lean = lean

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason why C does not compute the batch, or None.

        Reasons are packed weights of another form, hidden states, or too many tokens a row.
        """
        if self._lean.whole is None:
            return self._lean.no_whole or "it was not made"
        if self._lean.decoder.stale:
            return REPLACED
        if batch.hidden_layers:
            return batch.reads_model
        if not takes(batch.plan):
            return f"{batch.plan.q} tokens of a row in one pass, and it takes {MOST_COLUMNS}"
        return None

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass.

        Raises:
            MemoryError: there is no memory for the pass.
            IndexError: an id that the model does not have.
        """
        whole = self._lean.whole
        assert whole is not None
        logits = whole(batch.plan, batch.tokens, batch.cache, batch.want_logits, batch.vectors)
        return PassOutput(logits, None, self.name)


class LayerLoop:
    """The executor that computes a pass layer by layer, by PyTorch's products and kernels in C."""

    name = C_LAYERS

    def __init__(self, lean: LeanPass) -> None:
        self._lean = lean

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason: the weights were replaced; or None."""
        return REPLACED if self._lean.decoder.stale else None

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass."""
        logits, hidden = self._lean(
            batch.plan,
            batch.tokens,
            batch.cache,
            method=batch.method,
            want_logits=batch.want_logits,
            hidden_layers=batch.hidden_layers,
            vectors=batch.vectors,
        )
        return PassOutput(logits, None if hidden is None else batch.plan.unpack(hidden), self.name)
