"""The steps between the products of a decoder layer, one launch each.

The steps ask nothing of the host and may be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.lean.decoder import Norm

MOST_WIDTH = 16384
"""The most features of a row that a program of `add_norm` holds in registers."""
COLUMNS = 1024
"""The number of features of a program of `silu_mul`."""


def begin(
    tokens: Tensor, positions: Tensor, embedding: Tensor, rotary: tuple[Tensor, float], norm: Norm
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Computes the embeddings of a pass's tokens, their norm, and the angles of their positions.

    Args:
        tokens: [rows, q] int64, rows contiguous.
        positions: [rows, q] int64, contiguous.
        embedding: [vocabulary, width], contiguous, at most `MOST_WIDTH` wide.
        rotary: frequencies [features / 2] float32, and the factor of cosines and sines.

    Returns:
        Embeddings and their norms [tokens, width]; cosines and sines [tokens, features] float32, as
        `heads` takes them.
    """
    from shoal.models.layers import layer_kernels

    (frequencies, scaling), width, count = rotary, embedding.shape[1], tokens.numel()
    x, half = embedding.new_empty(count, width), len(frequencies)
    out = torch.empty_like(x)
    cos = frequencies.new_empty(count, 2 * half)
    sin = torch.empty_like(cos)
    with torch.cuda.device_of(x):
        layer_kernels.begin[(count,)](
            tokens=tokens,
            positions=positions,
            embedding=embedding,
            frequencies=frequencies,
            weight=norm.weight,
            x=x,
            out=out,
            cos=cos,
            sin=sin,
            columns=tokens.shape[1],
            row_stride=tokens.stride(0),
            scaling=scaling,
            width=width,
            eps=norm.eps,
            HALF=half,
            ANGLES=_power(half),
            BLOCK=_power(width),
            num_warps=_warps(width),
        )
    return x, out, (cos, sin)


def add_norm(x: Tensor, other: Tensor | None, norm: Norm) -> Tensor:
    """Adds `other` to x in place, and returns x / rms(x) * weight.

    Args:
        x: [tokens, width], contiguous, at most `MOST_WIDTH` wide.
        other: [tokens, width], contiguous, or None = nothing to add.
    """
    from shoal.models.layers import layer_kernels

    tokens, width = x.shape
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        layer_kernels.add_norm[(tokens,)](
            x,
            other,
            norm.weight,
            out,
            width,
            norm.eps,
            BLOCK=_power(width),
            num_warps=_warps(width),
        )
    return out


def heads(
    states: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Norm, Norm] | None,
    stores: tuple[Tensor, Tensor],
    cells: Tensor,
) -> Tensor:
    """Normalises queries and keys by head, rotates them, and writes keys and values to the cache.

    Args:
        states: queries, keys and values of all heads, [tokens, (heads + 2 kv heads) * dim],
            contiguous.
        angles: cosines and sines [tokens, rotary] float32, contiguous; those of both halves of the
            rotary features.
        norms: norms of queries and of keys; None = not normalised.
        stores: stores of keys and of values, [slots, capacity, kv heads, dim], contiguous.
        cells: the cell of each token in the stores, [tokens] int64.

    Returns:
        Queries [tokens, heads, dim].
    """
    from shoal.models.layers import layer_kernels

    (cos, sin), (keys, values) = angles, stores
    kv_heads, dim = keys.shape[-2:]
    tokens = len(states)
    count = states.shape[1] // dim - 2 * kv_heads
    query = states.new_empty(tokens, count, dim)
    query_norm, key_norm = norms or (None, None)
    with torch.cuda.device_of(states):
        layer_kernels.heads[(tokens, count + 2 * kv_heads)](
            states=states,
            cos=cos,
            sin=sin,
            query_weight=None if query_norm is None else query_norm.weight,
            key_weight=None if key_norm is None else key_norm.weight,
            query=query,
            keys=keys,
            values=values,
            cells=cells,
            eps=0.0 if query_norm is None else query_norm.eps,
            HEADS=count,
            KV_HEADS=kv_heads,
            DIM=dim,
            ROTARY=cos.shape[-1],
            BLOCK=_power(dim),
            num_warps=1,
        )
    return query


def silu_mul(both: Tensor) -> Tensor:
    """Computes silu(gate) * up, [tokens, width].

    Args:
        both: gate and up side by side, [tokens, 2 * width], contiguous.
    """
    from shoal.models.layers import layer_kernels

    tokens, width = len(both), both.shape[1] // 2
    out = both.new_empty(tokens, width)
    with torch.cuda.device_of(both):
        layer_kernels.silu_mul[(tokens, -(-width // COLUMNS))](
            both, out, width, BLOCK=COLUMNS, num_warps=4
        )
    return out


def _power(size: int) -> int:
    """Returns the smallest power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()


def _warps(width: int) -> int:
    """Returns the number of warps such that a thread holds at most 16 numbers of a row."""
    return max(1, min(32, _power(width) // 512))
