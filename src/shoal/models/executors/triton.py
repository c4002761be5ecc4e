"""Passes of Llama-like models on CUDA by Triton kernels that are launched one by one."""

from __future__ import annotations

from shoal.models.bridge import Bridge
from shoal.models.executors.lean import REPLACED
from shoal.models.executors.protocol import Batch, Output
from shoal.models.lean.forward import known_tokens

TRITON_LAYERS = "Triton layers"


class TritonLayers:
    """Computes prompts, blocks and draft trees by the fused layers of a model (`shoal.models.layers`).

    Args:
        bridge: has the layers.
        known_ids: number of ids that the model can read.
    """

    name = TRITON_LAYERS

    def __init__(self, bridge: Bridge, known_ids: int) -> None:
        self._bridge, self._known_ids = bridge, known_ids

    def refuses(self, batch: Batch) -> str | None:
        """Returns the reason: inputs and outputs that the layers do not have, or replaced weights."""
        layers = self._bridge.layers
        if layers is None or batch.reads_model is not None:
            return batch.reads_model or "the model has none"
        return REPLACED if layers.stale else None

    def __call__(self, batch: Batch) -> Output:
        """Computes a pass."""
        layers, plan = self._bridge.layers, batch.plan
        assert layers is not None
        tokens = plan.pack(known_tokens(plan, batch.tokens, self._known_ids))
        logits = layers.ordinary(tokens, batch.cache, batch.method, batch.want_logits)
        return Output(plan.unpack(logits) if batch.want_logits else logits, None, self.name)
