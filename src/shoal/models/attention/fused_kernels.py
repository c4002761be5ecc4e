"""The Triton kernels of `fused.py`.

Only `fused.py` imports them and only when it runs, because Triton is optional.

`attend` is flash attention (Dao et al., arXiv 2205.14135) for a ragged block of queries over a slot
cache. A program takes one row, one KV head, one tile of that head's queries (its GQA group folded
into the query axis) and one share of the keys that these queries see ("flash-decoding": with few
rows the keys must be shared out, or most of the GPU idles). The keys lie in two ranges: the prompt
that the row's group shares, then the row's own slot. `combine` joins the shares.

Only the two ranges are loaded, so no garbage can reach a result. Only `bounds`, read on the device,
gives the lengths of rows: launches depend on shapes alone and may be captured in a CUDA graph.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import os

import triton
import triton.language as tl

# Softmax is taken to base 2, because exp2 is the instruction that GPUs have.
LOG2E = tl.constexpr(1.4426950408889634)
# True if Triton's interpreter on the CPU runs the kernels.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# The tokens of a row, a power of two, whose places are counted in 32 bits.
SPAN = tl.constexpr(1024)


@triton.jit
def _dot(a, b):
    if INTERPRETED:  # its dot is wrong in bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")  # float32 stays float32, not TF32


@triton.jit
def _over(
    best,
    total,
    mixed,
    query,
    position,
    word,
    start,
    key,
    value,
    first,
    last,
    key_cell,
    value_cell,
    scale,
    window,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Continues the online softmax over the keys of tokens first..last-1.

    `key` and `value` point at token 0. From `start` on, tokens are columns of the block; in a tree
    `word` gives the columns that a query sees.
    """
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for at in range(first, last, BLOCK_K):
        cell = at + tl.arange(0, BLOCK_K)
        there = cell < last
        # A long row of wide heads is longer than 32 bits count: 2^31 numbers are 87,382 tokens of
        # DeepSeek-V3. From the last multiple of `SPAN` tokens they suffice, in half the registers.
        base = at // SPAN * SPAN
        near, far = cell - base, base.to(tl.int64)
        keys = tl.load(
            key + far * key_cell + (near[None, :] * key_cell + dims[:, None]),
            mask=there[None, :] & (dims < DIM)[:, None],
            other=0.0,
        )
        values = tl.load(
            value + far * value_cell + (near[:, None] * value_cell + value_dims[None, :]),
            mask=there[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = _dot(query, keys) * scale
        if SOFTCAP is not None:  # softcap * tanh(scores / softcap)
            scores = SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1)
        recent = cell[None, :] > position[:, None] - window
        if word is None:
            seen = there[None, :] & (cell[None, :] <= position[:, None]) & recent
        else:
            column = tl.minimum(tl.maximum(cell - start, 0), 63)
            inside = ((word[:, None] >> column[None, :]) & 1) != 0
            seen = there[None, :] & tl.where(
                cell[None, :] < start, recent & (position[:, None] >= 0), inside
            )
        scores = tl.where(seen, scores * LOG2E, -float("inf"))

        higher = tl.maximum(best, tl.max(scores, 1))
        # Where no key was seen so far, inf - inf would be NaN.
        origin = tl.where(higher == -float("inf"), 0.0, higher)
        weights, decay = tl.exp2(scores - origin[:, None]), tl.exp2(best - origin)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None] + _dot(weights.to(values.dtype), values)
        best = higher
    return best, total, mixed


@triton.jit(do_not_specialize=["columns", "window"])
def attend(
    query,
    key,
    value,
    shared_key,
    shared_value,
    sinks,
    bounds,
    positions,
    words,
    out,
    logs,
    columns,
    heads,
    scale,
    window,
    query_row,
    query_head,
    query_column,
    key_row,
    key_head,
    key_cell,
    value_row,
    value_head,
    value_cell,
    shared_key_cell,
    shared_key_head,
    shared_value_cell,
    shared_value_head,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Computes one share of the attention of one tile of queries (`fused.attend`).

    The grid is (rows, kv heads * tiles, splits). Writes out[split, row, column, head, :] and, where
    there are several splits, logs[split, row, column, head]: the logarithm (base 2) of the
    softmax's denominator over this share. Columns that are not real see nothing and come back zero.
    """
    # Offsets into large caches need 64 bits.
    row, split, rows = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(0)
    tiles = tl.cdiv(columns * GROUP, BLOCK_Q)
    kv_head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    start, count = tl.load(bounds + row), tl.load(bounds + rows + row)
    offset, base = tl.load(bounds + 2 * rows + row), tl.load(bounds + 3 * rows + row).to(tl.int64)

    # The group's heads of column 0, of column 1, ...
    folded = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    column, head = folded // GROUP, kv_head * GROUP + folded % GROUP
    real = column < count
    position = tl.where(real, start + column, -1)
    first_column = tile * BLOCK_Q // GROUP
    oldest = start + first_column
    word = None
    if words is not None:
        place = row * columns + column
        position = tl.load(positions + place, mask=real, other=-1).to(tl.int32)
        word = tl.load(words + place, mask=real, other=0)
        oldest = tl.min(tl.where(real, position, start + count), 0)
    dims = tl.arange(0, BLOCK_D)
    queries = tl.load(
        query
        + row * query_row
        + head[:, None] * query_head
        + column[:, None] * query_column
        + dims[None, :],
        mask=real[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )

    # Tokens that some query of this tile sees: low..high-1, cut at `offset` into the shared prompt
    # and the row's own slot.
    low = tl.maximum(oldest - window + 1, 0)
    high = start + tl.minimum(count, (tile * BLOCK_Q + BLOCK_Q - 1) // GROUP + 1)
    high = tl.where(first_column < count, high, low)
    shared_low, shared_high = tl.minimum(low, offset), tl.minimum(high, offset)
    own_low, own_high = tl.maximum(low, offset), tl.maximum(high, offset)
    shared_blocks = tl.cdiv(shared_high - shared_low, BLOCK_K)
    own_blocks = tl.cdiv(own_high - own_low, BLOCK_K)
    each = tl.cdiv(shared_blocks + own_blocks, SPLITS)
    begin, end = split * each, (split + 1) * each  # this share, in blocks over both ranges

    best = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mixed = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    if sinks is not None:  # keys without a value, counted by the first share
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        best, total = tl.where(split == 0, sink, best), tl.where(split == 0, 1.0, total)
    if shared_key is not None:
        best, total, mixed = _over(
            best=best,
            total=total,
            mixed=mixed,
            query=queries,
            position=position,
            word=word,
            start=start,
            key=shared_key + base * shared_key_cell + kv_head * shared_key_head,
            value=shared_value + base * shared_value_cell + kv_head * shared_value_head,
            first=shared_low + begin * BLOCK_K,
            last=tl.minimum(shared_low + end * BLOCK_K, shared_high),
            key_cell=shared_key_cell,
            value_cell=shared_value_cell,
            scale=scale,
            window=window,
            SOFTCAP=SOFTCAP,
            DIM=DIM,
            VALUE_DIM=VALUE_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_V=BLOCK_V,
            BLOCK_K=BLOCK_K,
        )
    begin, end = tl.maximum(begin - shared_blocks, 0), tl.maximum(end - shared_blocks, 0)
    best, total, mixed = _over(
        best=best,
        total=total,
        mixed=mixed,
        query=queries,
        position=position,
        word=word,
        start=start,
        key=key + row * key_row + kv_head * key_head - offset.to(tl.int64) * key_cell,
        value=value + row * value_row + kv_head * value_head - offset.to(tl.int64) * value_cell,
        first=own_low + begin * BLOCK_K,
        last=tl.minimum(own_low + end * BLOCK_K, own_high),
        key_cell=key_cell,
        value_cell=value_cell,
        scale=scale,
        window=window,
        SOFTCAP=SOFTCAP,
        DIM=DIM,
        VALUE_DIM=VALUE_DIM,
        BLOCK_D=BLOCK_D,
        BLOCK_V=BLOCK_V,
        BLOCK_K=BLOCK_K,
    )

    denominator = tl.where(total > 0, total, 1.0)  # an empty share, an unused column
    value_dims = tl.arange(0, BLOCK_V)
    place = ((split * rows + row) * columns + column) * heads + head
    inside = column < columns
    tl.store(
        out + place[:, None] * VALUE_DIM + value_dims[None, :],
        (mixed / denominator[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    if SPLITS > 1:
        tl.store(
            logs + place,
            tl.where(total > 0, best + tl.log2(denominator), -float("inf")),
            mask=inside,
        )


@triton.jit
def combine(
    parts,
    logs,
    out,
    places,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Joins the shares of one query of one head.

    The grid is (places,): parts [splits, places, value dim] -> out [places, value dim].
    """
    place = tl.program_id(0).to(tl.int64)
    splits, value_dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    share = splits.to(tl.int64) * places + place
    log = tl.load(logs + share, mask=splits < SPLITS, other=-float("inf"))
    best = tl.max(log, 0)
    weights = tl.exp2(log - tl.where(best == -float("inf"), 0.0, best))
    inside = value_dims < VALUE_DIM
    part = tl.load(
        parts + share[:, None] * VALUE_DIM + value_dims[None, :],
        mask=(splits < SPLITS)[:, None] & inside[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    mixed = tl.sum(weights[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * VALUE_DIM + value_dims, mixed.to(out.dtype.element_ty), mask=inside)
