"""The Triton kernels of `shoal.models.layers`.

Only that module imports them, and only when they run, because Triton is optional. Each kernel
makes one step of a decoder layer out of some half a dozen operations of the model's modules. The
kernels round where the modules do: sums and angles are float32, a normalised row is rounded before
it is multiplied by the weight, an activation before the product.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import os

import triton
import triton.language as tl

# True if Triton's interpreter on the CPU runs the kernels.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def normed(row, weight, column, inside, width, eps):
    """Computes the RMS norm (Zhang and Sennrich 2019) of a row, times weight [width].

    The row is zero where not `inside`.
    """
    wide = row.to(tl.float32)
    norm = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (norm.to(row.dtype).to(tl.float32) * scale).to(row.dtype)


@triton.jit
def begin(
    tokens,
    positions,
    embedding,
    frequencies,
    weight,
    x,
    out,
    cos,
    sin,
    columns,
    row_stride,
    scaling,
    width,
    eps,
    HALF: tl.constexpr,
    ANGLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes a token's embedding, its RMS norm, and its rotary angles; grid (tokens,).

    The angles are the cosines and sines of the token's position (Su et al. 2021).

    tokens [rows, columns] int64, `row_stride` apart; positions [rows * columns] int64; embedding
    [vocabulary, width]; frequencies [HALF] float32 -> x, out [tokens, width]; cos, sin [tokens, 2 *
    HALF] float32, times `scaling`.
    """
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    entry = tl.load(tokens + token // columns * row_stride + token % columns)
    row = tl.load(embedding + entry * width + column, mask=inside, other=0.0)
    tl.store(x + token * width + column, row, mask=inside)
    tl.store(
        out + token * width + column, normed(row, weight, column, inside, width, eps), mask=inside
    )
    feature = tl.arange(0, ANGLES)
    there = feature < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(
        frequencies + feature, mask=there, other=0.0
    )
    place = token * 2 * HALF + feature
    c, s = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    tl.store(cos + place, c, mask=there)
    tl.store(cos + place + HALF, c, mask=there)
    tl.store(sin + place, s, mask=there)
    tl.store(sin + place + HALF, s, mask=there)


@triton.jit
def add_norm(
    x, other, scales, bias, weight, out, size, width, eps, SHARES: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes the RMS norm of a row, after the residual sum; grid (tokens,).

    x [tokens, width] += other [tokens, width], if there is one; out [tokens, width] = norm of x *
    weight [width]. With SHARES, `other` are the sums of a product by share [SHARES, tokens, width],
    `size` apart, which are joined first (`join`).
    """
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    place = token * width + column
    row = tl.load(x + place, mask=inside, other=0.0)
    if other is not None:
        if SHARES:
            added = joined(
                other, scales, bias, place, size=size, output=column, there=inside, SHARES=SHARES
            ).to(row.dtype)
        else:
            added = tl.load(other + place, mask=inside, other=0.0)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(row.dtype)
        tl.store(x + place, row, mask=inside)
    tl.store(out + place, normed(row, weight, column, inside, width, eps), mask=inside)


@triton.jit
def heads(
    states,
    cos,
    sin,
    query_weight,
    key_weight,
    query,
    keys,
    values,
    cells,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one head of one token, after the product for queries, keys and values.

    The grid is (tokens, heads + 2 kv heads). Queries and keys are normalised by head, if there are
    weights for it (Qwen3), and rotated (Su et al. 2021). Queries go to `query` [tokens, heads,
    dim], keys and values to the cell of the token in the stores [cells, kv heads, dim]. Attention
    follows.

    states [tokens, heads + 2 kv heads, dim]; cos and sin [tokens, rotary] float32, their halves
    alike; cells [tokens] int64.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < DIM
    source = states + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(source + feature, mask=inside, other=0.0)
    if head >= HEADS + KV_HEADS:
        place = tl.load(cells + token) * KV_HEADS + head - HEADS - KV_HEADS
        tl.store(values + place * DIM + feature, x, mask=inside)
    else:
        half = ROTARY // 2
        turned = feature < ROTARY
        partner = tl.where(
            turned, tl.where(feature < half, feature + half, feature - half), feature
        )
        y = tl.load(source + partner, mask=inside, other=0.0)
        if query_weight is not None:
            wide = x.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
            if head < HEADS:
                own = tl.load(query_weight + feature, mask=inside, other=0.0)
                other = tl.load(query_weight + partner, mask=inside, other=0.0)
            else:
                own = tl.load(key_weight + feature, mask=inside, other=0.0)
                other = tl.load(key_weight + partner, mask=inside, other=0.0)
            x = ((wide * factor).to(x.dtype).to(tl.float32) * own.to(tl.float32)).to(x.dtype)
            y = ((y.to(tl.float32) * factor).to(y.dtype).to(tl.float32) * other.to(tl.float32)).to(
                y.dtype
            )
        angle = token * ROTARY + feature
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
        s = tl.where(feature < half, -s, s)
        rotated = (x.to(tl.float32) * c + y.to(tl.float32) * s).to(x.dtype)
        if head < HEADS:
            tl.store(query + (token * HEADS + head) * DIM + feature, rotated, mask=inside)
        else:
            place = tl.load(cells + token) * KV_HEADS + head - HEADS
            tl.store(keys + place * DIM + feature, rotated, mask=inside)


@triton.jit
def silu_mul(both, out, width, BLOCK: tl.constexpr):
    """Computes silu(gate) * up; grid (tokens, blocks).

    both [tokens, gate and up of `width` each] -> out [tokens, width].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(both + token * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(both + token * 2 * width + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(
        out + token * width + column,
        (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype),
        mask=inside,
    )


@triton.jit
def scaled(total, scales, bias, output, there):
    """Computes total * scales + bias at the outputs, [..., outputs] float32, in one rounding."""
    scale = tl.load(scales + output, mask=there, other=0.0)
    if bias is None:
        total = total * scale
    else:
        shift = tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(total, tl.zeros_like(total) + scale, tl.zeros_like(total) + shift)
    return total


@triton.jit
def eight_bit_product(
    x,
    weight,
    scales,
    bias,
    out,
    tokens,
    inputs,
    outputs,
    share_inputs,
    SHARES: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes x Wᵀ * scales + bias for few tokens; grid (token blocks, output blocks, shares).

    The weights are read as bytes, and once, as the programs of the same outputs run at about the
    same time. The inputs are divided into shares of `share_inputs`, a multiple of BLOCK_K. A
    program sums its SHARES each for itself, then joins them in their order; so the sum is the same
    where each share has a program of its own (APART, SHARES = 1) and `join` follows.

    x [tokens, inputs], weight [outputs, inputs] int8 or float8_e4m3, scales [outputs] float32, out
    [tokens, outputs], APART sums [shares, tokens, outputs] float32 without scales and bias. A byte
    is exact in all formats of x, sums are float32.
    """
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there, real = output < outputs, token < tokens
    row = output.to(tl.int64)[None, :] * inputs
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for share in range(SHARES):
        begin = (tl.program_id(2) * SHARES + share) * share_inputs
        part = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(begin, tl.minimum(begin + share_inputs, inputs), BLOCK_K):
            feature = start + tl.arange(0, BLOCK_K)
            inside = feature < inputs
            left = tl.load(
                x + token[:, None] * inputs + feature[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            right = tl.load(
                weight + row + feature[:, None], mask=there[None, :] & inside[:, None], other=0.0
            )
            if INTERPRETED:  # its dot is wrong in bfloat16
                part += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
            else:
                part = tl.dot(left, right.to(left.dtype), part, input_precision="ieee")
        total += part
    place = token.to(tl.int64)[:, None] * outputs + output[None, :]
    if APART:
        place += tl.program_id(2).to(tl.int64) * tokens * outputs
    else:
        total = scaled(total, scales, bias, output[None, :], there[None, :])
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def joined(parts, scales, bias, place, size, output, there, SHARES: tl.constexpr):
    """Joins the sums of a product by share in the order of the inputs, and scales them.

    parts [SHARES, tokens, outputs] float32, `size` apart; place: in one of them.
    """
    total = tl.load(parts + place, mask=there, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(parts + share * size + place, mask=there, other=0.0)
    return scaled(total, scales, bias, output, there)


@triton.jit
def join(parts, scales, bias, out, size, outputs, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """Joins the sums of `eight_bit_product` by share; grid (tokens, blocks of outputs).

    parts [SHARES, tokens, outputs] float32, `size` apart -> out [tokens, outputs].
    """
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = output < outputs
    place = token * outputs + output
    total = joined(parts, scales, bias, place, size=size, output=output, there=there, SHARES=SHARES)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)
