"""The attention methods by name.

reference   explicit softmax, one row at a time, float32: the definition of correct
pad         BASS-PAD: one padded batched call
split       BASS-SPLIT: one call per row at its exact length
fused       one Triton kernel, each row at its exact length, shared prompts included; CUDA
            (or Triton's interpreter)
native      one kernel in C, each row at its exact length, shared prompts included; CPU with a
            C compiler; long prompts by split
strict      bits that depend on the query's own row only; CPU (`shoal.models.fixed_shapes`)
bifurcated  tails padded, each shared prompt once for all its rows; pad and split call it where
            prompts are shared
auto        fused where it runs on CUDA; on a CPU native where there is a C compiler; else pad

The reference is slow, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.fused import available, fused
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.native import available as native_available
from shoal.models.attention.native import native
from shoal.models.attention.pad import pad, split
from shoal.models.attention.strict import KV_BLOCK, strict


def reference(inputs: AttentionInputs) -> Tensor:
    """Computes softmax(q k^T * scale + mask) v row by row.

    Returns:
        [rows, q, heads, value dim] in the query's dtype.
    """
    inputs = inputs.repeated()
    query, key, value = (
        t.to(torch.promote_types(t.dtype, torch.float32))
        for t in (inputs.query, inputs.key, inputs.value)
    )
    visible = inputs.masks.visible(inputs.window)
    rows = []
    for b in range(query.shape[0]):
        k = key[b].repeat_interleave(inputs.group, dim=0)  # [heads, kv, dim]
        v = value[b].repeat_interleave(inputs.group, dim=0)
        scores = query[b] @ k.transpose(-1, -2) * inputs.scale  # [heads, q, kv]
        if inputs.softcap is not None:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        scores = scores.masked_fill(~visible[b], -torch.inf)
        if inputs.sinks is not None:
            sink = inputs.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[1]]
        rows.append((weights @ v).transpose(0, 1))
    return torch.stack(rows).to(inputs.query.dtype)


Method = Callable[[AttentionInputs], Tensor]


def auto(inputs: AttentionInputs) -> Tensor:
    """Attends by a kernel where there is one, else by the padded call."""
    if inputs.query.is_cuda:
        return fused(inputs) if available(inputs.query) else pad(inputs)
    return (
        native(inputs) if native_available(inputs.query.device, inputs.query.dtype) else pad(inputs)
    )


METHODS: dict[str, Method] = {
    "auto": auto,
    "pad": pad,
    "split": split,
    "bifurcated": bifurcated,
    "fused": fused,
    "native": native,
    "reference": reference,
    "strict": strict,
}

KV_BLOCKS: dict[str, int] = {"strict": KV_BLOCK}
"""The methods that need whole blocks of that many keys."""

KERNELS = ("fused", "native")
"""The methods that are one call, with shared prompts or without."""

SHARING = METHODS.keys() - KV_BLOCKS.keys()
"""The methods that take rows with a prefix."""


def method_named(name: str, masked: str = "") -> Method:
    """Returns the method of a name.

    Args:
        name: the name.
        masked: the name of a model that attends by its own code under a mask; "" for others.

    Raises:
        RequestError: the name is not in `METHODS`, or the method is none for such a model.
    """
    if name not in METHODS:
        raise RequestError(f"attention must be one of {', '.join(METHODS)}, got {name!r}")
    if masked and name not in ("auto", "pad"):
        raise RequestError(
            f"{masked} attends by its own eager code under a mask: attention must be 'auto' or "
            f"'pad', got {name!r}"
        )
    return METHODS[name]


def resolved(name: str, device: torch.device, dtype: torch.dtype, static: bool = False) -> str:
    """Returns the name of the method that "auto" means on a device; any other name as it is.

    Args:
        static: True in captured passes, which `native` cannot be part of.
    """
    if name != "auto":
        return name
    if device.type == "cuda" and available(torch.empty(0, device=device, dtype=dtype)):
        return "fused"
    return "native" if not static and native_available(device, dtype) else "pad"
