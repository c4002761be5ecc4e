"""The passes by the model's own modules, through Transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from shoal.models.bridge import Bridge
from shoal.models.executors.executor import PassBatch, PassOutput
from shoal.models.lean.forward import known_tokens

MODULES = "modules"


class Modules:
    """The executor that computes any batch by a model's modules, with shoal's attention.

    Attributes:
        forward_context: entered for the length of each pass (`shoal.models.fixed_shapes`).
    """

    name = MODULES

    def __init__(
        self,
        bridge: Bridge,
        known_ids: int,
        forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._bridge, self._known_ids, self.forward_context = bridge, known_ids, forward_context

    def refuses(self, batch: PassBatch) -> None:
        """Returns None: the modules compute every batch."""

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass.

        Raises:
            UnsupportedModel: the model does not return its hidden states.
        """
        plan = batch.plan
        logits, hidden = self._bridge.ordinary(
            plan.pack(known_tokens(plan, batch.tokens, self._known_ids)),
            batch.cache,
            batch.method,
            forward_context=self.forward_context(),
            want_logits=batch.want_logits,
            hidden_layers=batch.hidden_layers,
            vectors=batch.vectors,
        )
        hidden = None if hidden is None else plan.unpack(hidden)
        return PassOutput(plan.unpack(logits) if batch.want_logits else logits, hidden, self.name)
