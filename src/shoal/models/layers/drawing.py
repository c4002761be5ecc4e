"""Draws of a drafter's steps on a GPU, two launches each instead of thirty, and what follows them
in one.

The same functions as those of `shoal.sampling.drawing`: a token may differ only where sums in
another order round across a uniform.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.models.attention.fused import available
from shoal.sampling import drawing
from shoal.sampling.uniforms import BUCKETS

SIZE = 256
"""Weights of a block whose sum decides whether the token is one of them."""
DEPTH = 64
"""Tokens of each bucket that a program sums."""
MOST_TOKENS = 1 << 18
"""Vocabulary up to which a program searches the sums of all blocks, or a bucket."""

Draw = Callable[[Tensor, Tensor], Tensor]


def on_device(draw: Draw, weights: Tensor) -> Draw:
    """The same draw by kernels, where there are some for it and for weights like these, [rows,
    vocabulary]."""
    known = KERNELS.get(draw)
    fits = (
        weights.dtype == torch.float32
        and weights.shape[1] <= MOST_TOKENS
        and weights.is_contiguous()
    )
    return known if known is not None and fits and available(weights) else draw


def inverse_transform(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `shoal.sampling.drawing.inverse_transform`: weights [rows, vocabulary], uniforms [rows,
    ...] float64 -> [rows] int64."""
    from shoal.models.layers import draw_kernels as kernels

    rows, vocabulary = weights.shape
    blocks = -(-vocabulary // SIZE)
    sums = weights.new_empty(rows, blocks, dtype=torch.float64)
    tokens = weights.new_empty(rows, dtype=torch.long)
    with torch.cuda.device_of(weights):  # Triton launches on the current device
        kernels.block_sums[(rows, blocks)](
            weights, sums, vocabulary, blocks, SIZE=SIZE, num_warps=1
        )
        kernels.inverse_transform[(rows,)](
            weights,
            sums,
            uniforms,
            tokens,
            vocabulary,
            blocks,
            uniforms.stride(0),
            SIZE=SIZE,
            BLOCKS=_power(blocks),
            num_warps=4,
        )
    return tokens


def exponential_race(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `shoal.sampling.drawing.exponential_race`: weights [rows, vocabulary], uniforms [rows, 1 +
    BUCKETS] float64 -> [rows] int64."""
    from shoal.models.layers import draw_kernels as kernels

    rows, vocabulary = weights.shape
    members = -(-vocabulary // BUCKETS)
    parts = -(-members // DEPTH)
    sums = weights.new_empty(rows, parts, BUCKETS, dtype=torch.float64)
    tokens = weights.new_empty(rows, dtype=torch.long)
    with torch.cuda.device_of(weights):
        kernels.bucket_sums[(rows, parts)](
            weights, sums, vocabulary, parts, DEPTH=DEPTH, BUCKETS=BUCKETS, num_warps=4
        )
        kernels.exponential_race[(rows,)](
            weights,
            sums,
            uniforms,
            tokens,
            vocabulary,
            parts,
            uniforms.stride(0),
            PARTS=_power(parts),
            BUCKETS=BUCKETS,
            MEMBERS=_power(members),
            num_warps=16,
        )
    return tokens


KERNELS: dict[Draw, Draw] = {
    drawing.inverse_transform: inverse_transform, drawing.exponential_race: exponential_race
}  # fmt: skip


def feed(
    drawn: Tensor,
    tokens: Tensor,
    kept: Tensor | None,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    """Writes drawn tokens [rows] into a block of one column, [rows, 1], and to `kept` [rows]; all
    int64.

    Args:
        numbers: positions [rows, 1], cells, starts and counts [rows] of the block, contiguous, if
            it moves on by its counts.
    """
    from shoal.models.layers import draw_kernels as kernels

    positions, cells, starts, counts = numbers or (None, None, None, None)
    with torch.cuda.device_of(drawn):
        kernels.feed[(len(drawn),)](
            drawn,
            tokens,
            kept,
            0 if kept is None else kept.stride(0),
            positions,
            cells,
            starts,
            counts,
            ADVANCES=numbers is not None,
            num_warps=1,
        )


def _power(size: int) -> int:
    """The smallest power of two that holds `size`."""
    return 1 << (size - 1).bit_length()
