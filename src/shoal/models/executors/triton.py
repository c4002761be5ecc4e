"""Passes of Llama-like models on CUDA by Triton kernels that are launched one by one: prompts."""

from __future__ import annotations

from shoal.models.bridge import Bridge
from shoal.models.executors.lean import REPLACED
from shoal.models.executors.protocol import Batch, Output
from shoal.models.lean.forward import known_tokens


class TritonLayers:
    """Computes prompts by the fused layers of a model (`shoal.models.layers`).

    Args:
        bridge: has the layers, if the model has any.
        known_ids: ids that the model can read.
        failure: the reason why static passes, and with them the layers, are no longer trusted; None while they are.
    """

    name = "Triton layers"

    def __init__(self, bridge: Bridge, known_ids: int, failure: str | None) -> None:
        self._bridge, self._known_ids, self._failure = bridge, known_ids, failure

    def refuses(self, batch: Batch) -> str | None:
        """Returns the reason: no layers, logits, or inputs and outputs that the layers do not have."""
        layers = self._bridge.layers
        if layers is None:
            return "the model has none"
        if batch.want_logits:
            return "they compute prompts"
        if self._failure is not None or batch.reads_model is not None:
            return self._failure or batch.reads_model
        return REPLACED if layers.stale else None

    def __call__(self, batch: Batch) -> Output:
        """Writes the keys and values of prompts."""
        layers, plan = self._bridge.layers, batch.plan
        assert layers is not None
        tokens = plan.pack(known_tokens(plan, batch.tokens, self._known_ids))
        return Output(layers.prompt(tokens, batch.cache, batch.method), None, self.name)
