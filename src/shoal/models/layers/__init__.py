"""The layers of passes on a GPU: products with weights of 8 bits, and the steps between products.

A decoder of the Llama family has nine kernels a layer (`triton_decoder`), and reads the weights of
an unmodified model. The weights of a product are int8 or fp8; where few tokens are computed, they
are read as bytes. Each step between products is one launch, reads no value from the host and may be
captured. The Triton kernels of both are `layer_kernels`. `gpu_draws` has the distributions and
draws of a round, by the kernels in `draw_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.attention.fused import PROGRAMS, Card
from shoal.models.lean import Norm

MOST_TOKENS = 256
"""The largest number of tokens whose product reads more than it computes.

Beyond it, weights are unpacked for the product, as for prompts.
"""
TOKENS = 64
"""The largest number of tokens of a program.

Of several such programs all but the first find the weights in the cache of the GPU.
"""
FEW = 16
"""The number of tokens up to which a product only waits for its weights."""


class ProductCut(NamedTuple):
    """The cut of a product into programs.

    Attributes:
        outputs: outputs of a program.
        inputs: inputs per step.
        stages: steps in flight.
    """

    outputs: int
    inputs: int
    stages: int


NARROW, MIDDLE, WIDE = (ProductCut(32, 128, 6), ProductCut(32, 128, 4), ProductCut(128, 64, 4))
"""The cuts for matrices of few outputs, of many, and of many with more than `FEW` tokens.

Chosen on an H200, where `benchmarks/gpu/products.py` times such products.
"""
SHARE = 512
"""The smallest number of inputs that is worth a program."""
MOST_SHARES = 8
"""The largest number of programs that share the inputs of an output."""
MOST_PROGRAMS = 256
"""The largest number of programs that shares of inputs may make."""
MANY = 16384
"""The number of outputs from which on a matrix has many, so that `WIDE` occupies a GPU."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The number formats of weights, with the largest weight of an output in each."""


class Sums(NamedTuple):
    """The sums of a product by share of its inputs, before they are joined.

    Attributes:
        parts: [shares, tokens, out] float32.
        scales: [out] float32.
        bias: [out] or None.
    """

    parts: Tensor
    scales: Tensor
    bias: Tensor | None


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x Wᵀ * scales + bias, [tokens, out] in the dtype of x.

    Args:
        x: [tokens, in], contiguous.
        weight: [out, in] of a format in `LARGEST`, contiguous.
        scales: [out] float32.
        bias: [out] or None.
    """
    sums = product_or_sums(x, weight, scales, bias)
    if isinstance(sums, Tensor):
        return sums
    from shoal.models.layers import layer_kernels

    shares, tokens, outputs = sums.parts.shape
    out = x.new_empty(tokens, outputs)
    with torch.cuda.device_of(x):
        layer_kernels.join[(tokens, -(-outputs // COLUMNS))](
            parts=sums.parts,
            scales=scales,
            bias=bias,
            out=out,
            size=out.numel(),
            outputs=outputs,
            SHARES=shares,
            BLOCK=COLUMNS,
            num_warps=4,
        )
    return out


def product_or_sums(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor | Sums:
    """Computes a product, or its sums by share where outputs alone occupy too little of a GPU.

    The shares follow from the shape of the matrix, and are joined in one order, whether each has a
    program or one program has all: so a token's result does not depend on the number of tokens.
    """
    (tokens, inputs), outputs = x.shape, len(weight)
    if tokens > MOST_TOKENS:
        return F.linear(x, weight.to(x.dtype).mul_(scales[:, None]), bias)
    from shoal.models.layers import layer_kernels

    cut, block = cut_of(tokens, outputs), token_block(tokens)
    shares, share_inputs = shares_of(inputs, outputs)
    rows, columns = -(-tokens // block), -(-outputs // cut.outputs)
    apart = shares > 1 and rows * columns < PROGRAMS * Card.of(x.device).processors
    shape = (shares, tokens, outputs) if apart else (tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if apart else x.dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        layer_kernels.eight_bit_product[(rows, columns, shares if apart else 1)](
            x=x,
            weight=weight,
            scales=scales,
            bias=bias,
            out=out,
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            share_inputs=share_inputs,
            SHARES=1 if apart else shares,
            APART=apart,
            BLOCK_T=block,
            BLOCK_N=cut.outputs,
            BLOCK_K=cut.inputs,
            num_warps=4,
            num_stages=cut.stages,
        )
    return Sums(out, scales, bias) if apart else out


def cut_of(tokens: int, outputs: int) -> ProductCut:
    """Returns the cut of a product."""
    if outputs < MANY:
        return NARROW if tokens <= FEW else MIDDLE
    return MIDDLE if tokens <= FEW else WIDE


def shares_of(inputs: int, outputs: int) -> tuple[int, int]:
    """Returns the shares that the inputs of a matrix are divided into, by its shape alone.

    Returns:
        The number of shares, and the inputs of each share, a multiple of the inputs of a step.
    """
    room = min(MOST_PROGRAMS // -(-outputs // NARROW.outputs), inputs // SHARE, MOST_SHARES)
    shares = 1 << (max(1, room).bit_length() - 1)
    each = -(-inputs // (shares * NARROW.inputs)) * NARROW.inputs
    return -(-inputs // each), each


def token_block(tokens: int) -> int:
    """Returns the tokens of a program: all up to `TOKENS`, in a power of two for tensor cores."""
    return min(TOKENS, max(16, 1 << (tokens - 1).bit_length()))


class WeightOnly8Bit(nn.Module):
    """A linear layer y = x Wᵀ + b with weights of 8 bits and a scale per output.

    Activations keep their dtype.

    Args:
        form: a format in `LARGEST`.

    Attributes:
        weight: [out, in] of that format.
        scales: [out] float32.
        bias: [out] or None.
    """

    def __init__(self, layer: nn.Linear, form: torch.dtype = torch.int8) -> None:
        super().__init__()
        wide = layer.weight.detach().float()
        scales = wide.abs().amax(dim=1).clamp(min=1e-12) / LARGEST[form]
        # A weight that overflows fp8 would be NaN.
        scaled = (wide / scales[:, None]).clamp(-LARGEST[form], LARGEST[form])
        self.weight = nn.Parameter(
            (scaled if form.is_floating_point else scaled.round()).to(form), requires_grad=False
        )
        self.scales, self.bias = nn.Parameter(scales, requires_grad=False), layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., in] -> [..., out], in the dtype of `x`."""
        y = product(x.reshape(-1, x.shape[-1]), self.weight, self.scales, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


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


def add_norm(x: Tensor, other: Tensor | Sums | None, norm: Norm) -> Tensor:
    """Adds `other` to x in place, and returns x / rms(x) * weight.

    Args:
        x: [tokens, width], contiguous, at most `MOST_WIDTH` wide.
        other: [tokens, width], contiguous, or sums of a product by share, or None = nothing to add.
    """
    from shoal.models.layers import layer_kernels

    tokens, width = x.shape
    out = torch.empty_like(x)
    added, scales, bias = other if isinstance(other, Sums) else (other, None, None)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        layer_kernels.add_norm[(tokens,)](
            x=x,
            other=added,
            scales=scales,
            bias=bias,
            weight=norm.weight,
            out=out,
            size=x.numel(),
            width=width,
            eps=norm.eps,
            SHARES=len(other.parts) if isinstance(other, Sums) else 0,
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
