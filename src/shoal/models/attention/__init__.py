"""Ragged attention behind Transformers' AttentionInterface.

One function is registered under the name "shoal"; models whose `attn_implementation` is that name call it in every layer, and
it calls the method of the forward pass under way. Because the mask interface does not know the name, models hand over no mask:
the `Plan` has it all.

    reference   explicit softmax, one row at a time, float32: the definition of correct
    pad         BASS-PAD: one padded batched call
    split       BASS-SPLIT: one call per row at its exact length
    fused       one Triton kernel, each row at its exact length, shared prompts included; CUDA (or Triton's interpreter)
    strict      bits that depend on the query's own row only; CPU (`shoal.models.strict`)
    bifurcated  tails padded, each shared prompt once for all its rows; what pad and split are where prompts are shared
    mixed       pad for most rows, split for the longest; how many those are is what costs least
    auto        fused where it runs on CUDA; else mixed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from shoal.errors import InternalError, RequestError
from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.fused import available, fused
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.masks import Masks
from shoal.models.attention.mixed import mixed
from shoal.models.attention.pad import pad
from shoal.models.attention.reference import reference
from shoal.models.attention.split import split
from shoal.models.attention.strict import KV_BLOCK, strict
from shoal.models.cache import SlotCache

__all__ = ["KV_BLOCKS", "METHODS", "NAME", "Method", "AttentionInputs", "method_named", "planned"]

Method = Callable[[AttentionInputs], Tensor]

NAME = "shoal"
"""The implementation name models are switched to."""


def auto(inputs: AttentionInputs) -> Tensor:
    """The kernel where there is a GPU; else as much padding as is cheaper than calls."""
    return fused(inputs) if inputs.query.is_cuda and available(inputs.query) else mixed(inputs)


METHODS: dict[str, Method] = {
    "auto": auto,
    "pad": pad,
    "split": split,
    "mixed": mixed,
    "bifurcated": bifurcated,
    "fused": fused,
    "reference": reference,
    "strict": strict,
}

KV_BLOCKS: dict[str, int] = {"strict": KV_BLOCK}
"""Methods that want whole blocks of that many keys."""


SHARING = METHODS.keys() - KV_BLOCKS.keys()
"""Methods that know prefixes."""


def method_named(name: str) -> Method:
    """Raises RequestError for a name that is not in `METHODS`."""
    if name not in METHODS:
        raise RequestError(f"attention must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def resolved(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The method that "auto" comes to there; any other name as it is."""
    if name != "auto":
        return name
    return "fused" if device.type == "cuda" and available(torch.empty(0, device=device, dtype=dtype)) else "mixed"


_current: ContextVar[tuple[SlotCache, Method, Masks] | None] = ContextVar("shoal_attention", default=None)


@contextmanager
def planned(cache: SlotCache, method: Method) -> Iterator[None]:
    """Within it, models switched to "shoal" attend by this method, and by the plan that the cache was told."""
    assert cache.plan is not None
    token = _current.set((cache, method, Masks(cache.plan)))
    try:
        yield
    finally:
        _current.reset(token)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The registered function. query [rows, heads, q, dim] or packed, [1, heads, tokens, dim]; key and value
    [rows, kv heads, kv, dim] as stored (not repeated); returns ([rows, q, heads, value dim] or packed, None). OPT passes a scaling
    of 1, MLA its own: use what is given. A window that is passed counts, None included; Qwen2-MoE passes nothing and notes it on
    the module."""
    current = _current.get()
    if current is None:
        raise InternalError("a model switched to shoal's attention ran outside of a planned forward pass")
    cache, method, masks = current
    plan = cache.plan
    assert plan is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = other["sliding_window"] if "sliding_window" in other else getattr(module, "sliding_window", None)
    query = plan.unpack(query.transpose(1, 2)).transpose(1, 2)
    return plan.pack(method(AttentionInputs(query, key, value, masks, scale, window, softcap, s_aux, *cache.shared()))), None


AttentionInterface.register(NAME, _attend)
