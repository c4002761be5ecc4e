"""The attention methods by name.

reference   explicit softmax, one row at a time, float32: the definition of correct
pad         BASS-PAD: one padded batched call
split       BASS-SPLIT: one call per row at its exact length
fused       one Triton kernel, each row at its exact length, shared prompts included; CUDA
            (or Triton's interpreter)
native      one kernel in C, each row at its exact length, shared prompts included; CPU with a
            C compiler; long prompts by split
strict      bits that depend on the query's own row only; CPU (`shoal.models.passes`)
bifurcated  tails padded, each shared prompt once for all its rows; pad and split call it where
            prompts are shared
auto        fused where it runs on CUDA; on a CPU native where there is a C compiler; else pad

The reference is slow, in float32 at least.

The bits of `strict` depend on the query's own row alone. A kernel's rounding depends on the shapes
it is given. So every call here has the same shapes: queries come in tiles of `TILE` positions moved
to the batch axis, and keys in whole blocks of `KV_BLOCK`, the unit in which the library's kernel
walks over keys. A block that is masked as a whole changes no bit of the kernel's running softmax.
So longer neighbours change no bit either.

A key's place in its block does change bits. So each query of a draft tree gets a copy of its row's
keys in which its path lies as it would in a chain: q times the memory traffic, which `strict`
accepts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from shoal.errors import InternalError, RequestError, UnsupportedModel
from shoal.models.attention import AttentionInputs, additive, seen_in_chains
from shoal.models.attention.fused import REFUSED, available, fits, fused
from shoal.models.attention.unfused import attend_folded, bifurcated, native, pad, split
from shoal.models.attention.unfused import available as native_available

TILE = 4
"""The number of query positions per tile.

1 is best for plain decoding, 8 for verifying; 4 costs both a little.
"""
KV_BLOCK = 512
"""The number of keys per block of torch's CPU kernel.

The length of cache views is a multiple of it (`Plan`).
"""


def strict(inputs: AttentionInputs) -> Tensor:
    """Attends by tiles: all tiles of a row, or one tile of all rows, per call.

    Of the two, the one that needs fewer calls is taken. Returns [rows, q, heads, value dim].
    """
    query, key, value, plan = inputs.query, inputs.key, inputs.value, inputs.plan
    if inputs.softcap is not None or inputs.sinks is not None or key.shape[-1] != value.shape[-1]:
        raise UnsupportedModel(
            "strict needs plain attention: no soft-capped scores, no sinks, values as wide as keys"
        )
    if plan.kv % KV_BLOCK or plan.shares:
        raise InternalError(f"strict attention got {plan.kv} keys, or a shared prompt")
    if plan.parents is not None:
        return torch.stack([_paths(inputs, row) for row in range(plan.rows)])
    tiles = -(-plan.q // TILE)
    fill = tiles * TILE - plan.q
    # The kernel rounds differently without a mask.
    bias = inputs.masks.explicit_bias(query.dtype, inputs.window)
    # [rows, tiles, 1, TILE, kv]
    bias = zero_pad(bias, (0, 0, 0, fill)).unflatten(2, (tiles, TILE)).transpose(1, 2)
    bias = bias.repeat(1, 1, 1, inputs.group, 1)
    # [rows, tiles, heads, TILE, dim]
    query = zero_pad(query, (0, 0, 0, fill)).unflatten(2, (tiles, TILE)).transpose(1, 2)
    if plan.rows <= tiles:
        spread = (tiles, -1, -1, -1)
        # The tensors of each row: [tiles, ...], its keys and values [1, ...].
        own = zip(query, key[:, None], value[:, None], bias, strict=True)
        out = torch.stack(
            [
                attend_folded(q, k.expand(spread), v.expand(spread), mask, inputs)
                for q, k, v, mask in own
            ]
        )
    else:
        out = torch.stack(
            [attend_folded(query[:, t], key, value, bias[:, t], inputs) for t in range(tiles)],
            dim=1,
        )
    return out.flatten(1, 2)[:, : plan.q]


def _paths(inputs: AttentionInputs, row: int) -> Tensor:
    """Attends with each column of one row in a tile of its own, over the keys of the column's path.

    Returns:
        [q, heads, value dim].
    """
    plan = inputs.plan
    # [q, heads, TILE, dim]
    query = zero_pad(inputs.query[row].transpose(0, 1)[:, :, None], (0, 0, 0, TILE - 1))
    # Each query's visible keys in the order of positions, then its hidden ones; [rows, q, kv].
    order = inputs.masks.once(
        "paths", lambda: (~inputs.masks.visible()).byte().argsort(dim=-1, stable=True)
    )
    key, value = (t[row][:, order[row]].transpose(0, 1) for t in (inputs.key, inputs.value))
    keys = torch.arange(plan.kv, device=plan.device)
    mask = seen_in_chains(keys, plan.places[row][:, None, None], inputs.window).expand(-1, TILE, -1)
    return attend_folded(query, key, value, additive(mask, query.dtype, inputs.group), inputs)[:, 0]


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
        return _launched(inputs) if available(inputs.query) and fits(inputs) else pad(inputs)
    return (
        native(inputs) if native_available(inputs.query.device, inputs.query.dtype) else pad(inputs)
    )


def _launched(inputs: AttentionInputs) -> Tensor:
    """Attends by the kernel, or by the padded call from a launch on that the card refuses.

    It refuses a launch where the compiler takes more shared memory than `Tiling.shared_bytes`
    counts.
    """
    try:
        return fused(inputs)
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which is optional
            raise
        key, value = inputs.key, inputs.value
        REFUSED.add((key.device, key.shape[-1], value.shape[-1], key.element_size()))
        warnings.warn(
            f"padded attention for heads of {key.shape[-1]} numbers: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return pad(inputs)


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
