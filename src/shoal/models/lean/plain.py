"""The operations of a lean pass by PyTorch: where there is no C compiler."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.masks import Masks
from shoal.models.attention.methods import Method
from shoal.models.cache import Plan, SlotCache
from shoal.models.lean.angles import Angles
from shoal.models.lean.decoder import Decoder, Norm


class PlainKernels:
    """Operations for one decoder; a call begins a pass."""

    operations = "torch"

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.angles = decoder, Angles(decoder.rotary)

    def of(self, decoder: Decoder) -> PlainKernels:
        """The same for some of the same layers."""
        other = copy.copy(self)
        other.decoder = decoder
        return other

    def __call__(self, plan: Plan, cache: SlotCache, method: Method) -> PlainPass:
        return PlainPass(self, plan, cache, method)


class PlainPass:
    """The operations of one pass."""

    def __init__(self, kernels: PlainKernels, plan: Plan, cache: SlotCache, method: Method) -> None:
        self.decoder, self.plan, self.cache, self.method = kernels.decoder, plan, cache, method
        tables = kernels.angles.reach(plan.reach)
        positions = plan.pack(plan.positions).flatten()
        self._cos, self._sin = (table.index_select(0, positions)[:, None] for table in tables)
        self._masks = Masks(plan)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)

    def attend(self, states: Tensor, index: int) -> Tensor:
        decoder = self.decoder
        layer, heads, kv_heads = decoder.layers[index], decoder.heads, decoder.kv_heads
        query, key, value = states.view(len(states), -1, decoder.dim).split([heads, kv_heads, kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self.norm(query, layer.query_norm), self.norm(key, layer.key_norm)
        query, key = self._rotated(query), self._rotated(key)
        if index >= len(self.cache):
            self.cache.make_layers(index + 1, key[None].transpose(1, 2))
        self.cache.write(index, key, value)
        return attended(self.method, self.cache, self._masks, decoder, index, query)

    def _rotated(self, x: Tensor) -> Tensor:
        """x cos + rotate_half(x) sin, [tokens, heads, dim] (Su et al. 2021)."""
        wide = x.float()
        half = self._cos.shape[-1] // 2
        turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
        turned = turned * self._cos + torch.cat([-turned[..., half:], turned[..., :half]], dim=-1) * self._sin
        return torch.cat([turned, rest], dim=-1).to(x.dtype)


def attended(method: Method, cache: SlotCache, masks: Masks, decoder: Decoder, index: int, query: Tensor) -> Tensor:
    """Attention of layer `index` by a method, over what its cache holds, the pass's own keys included.

    Args:
        query: [tokens, heads, dim], rotated.

    Returns:
        [tokens, heads * dim].
    """
    plan = cache.plan
    assert plan is not None
    rows = plan.unpack(query[None]) if plan.packed else query.view(plan.rows, plan.q, *query.shape[1:])
    key, value = cache.rows(index)
    inputs = AttentionInputs(
        rows.transpose(1, 2), key, value, masks, decoder.scale, decoder.layers[index].window, None, None, *cache.shared()
    )
    return plan.pack(method(inputs)).reshape(len(query), -1)
