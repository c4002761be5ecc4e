"""The Triton kernels of `gpu_draws.py`.

Only `gpu_draws.py` imports them and only when it runs, because Triton is optional. All sums are
float64, as in `shoal.sampling.drawing`: no tail is lost to rounding. A parallel sum need not be
monotone, so a token without weight is never taken, whatever the sums say of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_above(weights, sums, threshold, count, COUNT: tl.constexpr):
    """Returns the first index that has weight and whose sum exceeds the threshold.

    If there is none, the last index with weight, or the last of all.
    """
    index = tl.arange(0, COUNT)
    above = tl.min(tl.where((sums > threshold) & (weights > 0), index, COUNT), 0)
    last = tl.max(tl.where(weights > 0, index, -1), 0)
    last = tl.where(last < 0, count - 1, last)
    return tl.where(above < COUNT, above, last)


@triton.jit
def parts_of_softmax(
    logits, temperatures, tops, places, totals, known, row_stride, SIZE: tl.constexpr
):
    """Computes the parts of a row's softmax, one for SIZE logits; grid (rows, parts).

    logits [rows, known], rows `row_stride` apart; temperatures [rows] float32, None = 1 -> the
    highest logit, infinite if one is NaN, its first place, and the sum of exp(logits / temperature)
    over that of the highest; [rows, parts] each.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * SIZE + tl.arange(0, SIZE)
    values = tl.load(logits + row * row_stride + token, mask=token < known, other=-float("inf"))
    values = values.to(tl.float32)
    temperature = 1.0
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
    broken = tl.max((values != values).to(tl.int32), 0)
    values = tl.where(values == values, values, -float("inf"))
    top = tl.max(values, 0)
    place = tl.min(tl.where(values == top, token, known), 0)
    origin = tl.where(top == -float("inf"), 0.0, top) / temperature
    at = row * tl.num_programs(1) + part
    tl.store(totals + at, tl.sum(tl.exp(values / temperature - origin), 0))
    tl.store(tops + at, tl.where(broken > 0, float("inf"), top))
    tl.store(places + at, place)


@triton.jit
def softmax(
    logits,
    temperatures,
    tops,
    places,
    totals,
    probs,
    best,
    sound,
    known,
    vocabulary,
    row_stride,
    parts,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Joins the parts of `parts_of_softmax`; grid (rows, blocks of SIZE tokens of the vocabulary).

    Writes probs [rows, vocabulary], unless None, and for each row the first token of the highest
    logit, and whether that logit is finite. A row whose highest logit is not gets equal
    probabilities.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, PARTS)
    there, at = part < parts, row * parts + part
    each = tl.load(tops + at, mask=there, other=-float("inf"))
    top = tl.max(each, 0)
    real = tl.abs(top) < float("inf")
    temperature = 1.0
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
    origin = tl.where(real, top, 0.0) / temperature
    shares = tl.where(each == -float("inf"), 0.0, tl.exp(each / temperature - origin))
    total = tl.sum(tl.load(totals + at, mask=there, other=0.0) * shares, 0)
    total = tl.where(real, total, vocabulary * 1.0)
    if probs is not None:
        token = block * SIZE + tl.arange(0, SIZE)
        score = tl.load(logits + row * row_stride + token, mask=token < known, other=-float("inf"))
        weight = tl.where(real, tl.exp(score.to(tl.float32) / temperature - origin), 1.0)
        tl.store(probs + row * vocabulary + token, weight / total, mask=token < vocabulary)
    if block == 0:
        place = tl.load(places + at, mask=there, other=known)
        first = tl.min(tl.where(each == top, place, known), 0)
        tl.store(best + row, tl.minimum(first, known - 1).to(tl.int64))
        tl.store(sound + row, real)


@triton.jit
def block_sums(weights, sums, vocabulary, blocks, SIZE: tl.constexpr):
    """Computes the sums of SIZE weights each; grid (rows, blocks).

    weights [rows, vocabulary] -> sums [rows, blocks] float64.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * SIZE + tl.arange(0, SIZE)
    values = tl.load(weights + row * vocabulary + token, mask=token < vocabulary, other=0.0)
    tl.store(sums + row * blocks + block, tl.sum(values.to(tl.float64), 0))


@triton.jit
def inverse_transform(
    weights,
    sums,
    uniforms,
    tokens,
    vocabulary,
    uniform_stride,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draws a token of each row by inverse transform; grid (rows,).

    A block is drawn by the blocks' sums, then a token inside it.

    weights [rows, vocabulary]; sums [rows, blocks] float64, of SIZE weights each; uniforms [rows]
    float64 -> tokens [rows] int64.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    blocks = (vocabulary + SIZE - 1) // SIZE
    sizes = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    ends = tl.cumsum(sizes, 0)
    threshold = tl.load(uniforms + row * uniform_stride) * tl.max(ends, 0)
    winner = first_above(sizes, ends, threshold, blocks, BLOCKS)
    before = tl.sum(tl.where(block == winner - 1, ends, 0.0), 0)
    token = winner * SIZE + tl.arange(0, SIZE)
    inside = tl.load(weights + row * vocabulary + token, mask=token < vocabulary, other=0.0).to(
        tl.float64
    )
    within = first_above(inside, tl.cumsum(inside, 0), threshold - before, SIZE, SIZE)
    tl.store(tokens + row, tl.minimum(winner * SIZE + within, vocabulary - 1).to(tl.int64))


@triton.jit
def bucket_sums(weights, sums, vocabulary, parts, DEPTH: tl.constexpr, BUCKETS: tl.constexpr):
    """Computes the sums by bucket, of DEPTH * BUCKETS weights each; grid (rows, parts).

    Token i is of bucket i modulo BUCKETS. weights [rows, vocabulary] -> sums [rows, parts, BUCKETS]
    float64.
    """
    row, part, bucket = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BUCKETS)
    token = (part * DEPTH + tl.arange(0, DEPTH))[:, None] * BUCKETS + bucket[None, :]
    values = tl.load(weights + row * vocabulary + token, mask=token < vocabulary, other=0.0)
    tl.store(sums + (row * parts + part) * BUCKETS + bucket, tl.sum(values.to(tl.float64), 0))


@triton.jit
def exponential_race(
    weights,
    sums,
    uniforms,
    tokens,
    vocabulary,
    parts,
    uniform_stride,
    PARTS: tl.constexpr,
    BUCKETS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Draws a token of each row by an exponential race; grid (rows,).

    Buckets race by their sums, then inverse transform draws a token inside the winner.

    weights [rows, vocabulary]; sums [rows, parts, BUCKETS] float64; uniforms [rows, 1 + BUCKETS]
    float64, the first in [0, 1), the others exponential -> tokens [rows] int64.
    """
    row, bucket, part = tl.program_id(0).to(tl.int64), tl.arange(0, BUCKETS), tl.arange(0, PARTS)
    place = (row * parts + part)[:, None] * BUCKETS + bucket[None, :]
    speed = tl.sum(tl.load(sums + place, mask=(part < parts)[:, None], other=0.0), 0)
    finish = speed / tl.load(uniforms + row * uniform_stride + 1 + bucket)
    winner = tl.min(tl.where(finish == tl.max(finish, 0), bucket, BUCKETS), 0)
    token = winner + BUCKETS * tl.arange(0, MEMBERS)
    inside = tl.load(weights + row * vocabulary + token, mask=token < vocabulary, other=0.0).to(
        tl.float64
    )
    ends = tl.cumsum(inside, 0)
    threshold = tl.load(uniforms + row * uniform_stride) * tl.max(ends, 0)
    within = first_above(inside, ends, threshold, (vocabulary + BUCKETS - 1) // BUCKETS, MEMBERS)
    tl.store(tokens + row, tl.minimum(winner + BUCKETS * within, vocabulary - 1).to(tl.int64))


@triton.jit
def feed(drawn, tokens, kept, kept_stride, positions, cells, starts, counts):
    """Puts drawn tokens into the next block of one column, and among the drafts; grid (rows,).

    drawn [rows] int64 -> tokens [rows], kept [rows], `kept_stride` apart. Unless it has no
    positions, the block moves on: positions, cells and starts grow by counts, [rows] int64 each.
    """
    row = tl.program_id(0)
    token = tl.load(drawn + row)
    tl.store(tokens + row, token)
    if kept is not None:
        tl.store(kept + row * kept_stride, token)
    if positions is not None:
        count = tl.load(counts + row)
        tl.store(positions + row, tl.load(positions + row) + count)
        tl.store(cells + row, tl.load(cells + row) + count)
        tl.store(starts + row, tl.load(starts + row) + count)
