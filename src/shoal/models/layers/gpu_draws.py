"""The distributions and draws of a round on a GPU, two launches each instead of seven and thirty.

The draws equal the draws of `shoal.sampling.drawing`: a token may differ only where sums in another
order round across a uniform. `feed` passes the drawn tokens on in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.models.attention.fused import available
from shoal.sampling import drawing
from shoal.sampling.uniforms import BUCKETS

SIZE = 256
"""The number of weights of a block, whose sum decides whether the token is one of them."""
DEPTH = 64
"""The number of tokens of each bucket that a program sums."""
PART = 2048
"""The number of logits of a program of `softmax`."""
MOST_TOKENS = 1 << 18
"""The largest vocabulary for which a program searches the sums of all blocks, or a bucket."""

Draw = Callable[[Tensor, Tensor], Tensor]


def on_device(draw: Draw, weights: Tensor) -> Draw:
    """Returns the draw by kernels, or `draw` itself where there are none.

    There may be no kernels for this draw, or for weights like these.

    Args:
        weights: [rows, vocabulary].
    """
    kernel = KERNELS.get(draw)
    fits = (
        weights.dtype == torch.float32
        and weights.shape[1] <= MOST_TOKENS
        and weights.is_contiguous()
    )
    return kernel if kernel is not None and fits and available(weights) else draw


def inverse_transform(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws by inverse transform, as `shoal.sampling.drawing.inverse_transform` does.

    Args:
        weights: [rows, vocabulary].
        uniforms: [rows, ...] float64.

    Returns:
        Tokens [rows] int64.
    """
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
            weights=weights,
            sums=sums,
            uniforms=uniforms,
            tokens=tokens,
            vocabulary=vocabulary,
            uniform_stride=uniforms.stride(0),
            SIZE=SIZE,
            BLOCKS=_power(blocks),
            num_warps=4,
        )
    return tokens


def exponential_race(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws by an exponential race, as `shoal.sampling.drawing.exponential_race` does.

    Args:
        weights: [rows, vocabulary].
        uniforms: [rows, 1 + BUCKETS] float64.

    Returns:
        Tokens [rows] int64.
    """
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
            weights=weights,
            sums=sums,
            uniforms=uniforms,
            tokens=tokens,
            vocabulary=vocabulary,
            parts=parts,
            uniform_stride=uniforms.stride(0),
            PARTS=_power(parts),
            BUCKETS=BUCKETS,
            MEMBERS=_power(members),
            num_warps=16,
        )
    return tokens


class Softmax(NamedTuple):
    """The softmax of logits, and the place of their highest.

    Attributes:
        probs: [rows, vocabulary] float32; None if not asked for.
        best: the token of the highest logit, the lowest of equal ones, [rows] int64.
        sound: True where the highest logit is finite and none is NaN, [rows] bool; elsewhere all
            tokens have the same probability.
    """

    probs: Tensor | None
    best: Tensor
    sound: Tensor


def softmax_runs(logits: Tensor) -> bool:
    """Returns True if `softmax` computes such logits."""
    fits = logits.shape[-1] <= MOST_TOKENS and logits.stride(-1) == 1
    return fits and logits.dtype != torch.float64 and available(logits)


def softmax(
    logits: Tensor, temperatures: Tensor | None, vocabulary: int, *, want_probs: bool = True
) -> Softmax:
    """Computes the softmax of logits in two launches; a function of tensors.

    Args:
        logits: [rows, known], the last stride 1.
        temperatures: the divisors of the logits, [rows] float32, contiguous; None = 1.
        vocabulary: the number of tokens; logits beyond it are not read, and tokens without a logit
            have no probability.
        want_probs: False if only the highest logits matter.
    """
    from shoal.models.layers import draw_kernels as kernels

    rows, known = len(logits), min(logits.shape[1], vocabulary)
    parts = -(-known // PART)
    tops = logits.new_empty(rows, parts, dtype=torch.float32)
    totals, places = torch.empty_like(tops), torch.empty_like(tops, dtype=torch.int32)
    probs = logits.new_empty(rows, vocabulary, dtype=torch.float32) if want_probs else None
    best = tops.new_empty(rows, dtype=torch.long)
    sound = tops.new_empty(rows, dtype=torch.bool)
    stride = logits.stride(0)
    with torch.cuda.device_of(logits):
        kernels.parts_of_softmax[(rows, parts)](
            logits=logits,
            temperatures=temperatures,
            tops=tops,
            places=places,
            totals=totals,
            known=known,
            row_stride=stride,
            SIZE=PART,
            num_warps=4,
        )
        kernels.softmax[(rows, -(-vocabulary // PART) if want_probs else 1)](
            logits=logits,
            temperatures=temperatures,
            tops=tops,
            places=places,
            totals=totals,
            probs=probs,
            best=best,
            sound=sound,
            known=known,
            vocabulary=vocabulary,
            row_stride=stride,
            parts=parts,
            PARTS=_power(parts),
            SIZE=PART,
            num_warps=4,
        )
    return Softmax(probs, best, sound)


KERNELS: dict[Draw, Draw] = {
    drawing.inverse_transform: inverse_transform,
    drawing.exponential_race: exponential_race,
}


def feed(
    drawn: Tensor,
    tokens: Tensor,
    kept: Tensor | None,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    """Writes drawn tokens [rows] into a block of one column, [rows, 1], and to `kept` [rows].

    All are int64.

    Args:
        numbers: positions [rows, 1], cells, starts and counts [rows] of the block, contiguous, if
            the block moves on by its counts.
    """
    from shoal.models.layers import draw_kernels as kernels

    positions, cells, starts, counts = numbers or (None, None, None, None)
    with torch.cuda.device_of(drawn):
        kernels.feed[(len(drawn),)](
            drawn=drawn,
            tokens=tokens,
            kept=kept,
            kept_stride=0 if kept is None else kept.stride(0),
            positions=positions,
            cells=cells,
            starts=starts,
            counts=counts,
            num_warps=1,
        )


def _power(size: int) -> int:
    """Returns the smallest power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()
