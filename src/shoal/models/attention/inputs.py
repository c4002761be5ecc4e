"""The inputs of every attention method: the tensors of one layer and the masks of the pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shoal.errors import InternalError
from shoal.models.attention.visible_keys import Masks
from shoal.models.cache.pass_plan import Plan


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer's ragged attention.

    Index i of row b's keys and values is the token at position plan.offsets[b] + i (in a draft
    tree: of column i - plan.firsts[b]). The keys of row b before plan.offsets[b] lie in the cells
    of plan.prefixes[b] in the shared store.

    Attributes:
        query: [rows, heads, q, dim].
        key: [rows, kv heads, kv, dim].
        value: [rows, kv heads, kv, value dim].
        masks: the keys that each query sees.
        scale: multiplies the scores.
        window: sliding window in tokens, or None.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2), or None.
        sinks: one extra logit per head that takes probability and gives nothing (GPT-OSS), [heads],
            or None.
        shared_key: keys of the shared store, [cells, kv heads, dim]; None when no row has a prefix.
        shared_value: values of the shared store, [cells, kv heads, value dim]; None when no row has
            a prefix.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    shared_key: Tensor | None = None
    shared_value: Tensor | None = None

    def repeated(self) -> AttentionInputs:
        """Returns the inputs without a shared store: every row has all its keys."""
        if self.shared_key is None or self.shared_value is None:
            return self
        plan = self.plan
        whole = Plan(
            plan.slots,
            plan.starts,
            plan.counts,
            plan.device,
            packed=plan.packed,
            parents=plan.parents,
        )
        pairs = (self.key, self.shared_key), (self.value, self.shared_value)
        key, value = (plan.repeated(tail, shared)[:, :, : whole.kv] for tail, shared in pairs)
        return replace(
            self, key=key, value=value, masks=Masks(whole), shared_key=None, shared_value=None
        )

    @property
    def plan(self) -> Plan:
        """The layout of an ordinary pass, with its numbers on the host.

        Raises:
            InternalError: in a captured pass, which has no plan.
        """
        if not isinstance(self.masks.layout, Plan):
            raise InternalError("this attention method does not work in captured passes")
        return self.masks.layout

    @property
    def group(self) -> int:
        """The number of query heads per KV head: 1 = MHA, heads = MQA."""
        return self.query.shape[1] // self.key.shape[1]
