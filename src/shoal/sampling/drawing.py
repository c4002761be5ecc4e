"""Tokens drawn from weights by given uniforms: by inverse transform, or by an exponential race."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inverse transform, [rows] int64, in float64 so that no tail is lost to rounding.

    Args:
        weights: non-negative, not all zero, need not sum to one; [rows, vocab].
        uniforms: in [0, 1), [rows] float64.

    Returns:
        The first index whose cumulative weight exceeds u times the total; its weight is never zero.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Two units below 1 the product cannot round up to the total, so the answer stays on a token that has weight.
    threshold = uniforms.clamp(max=1 - 2.0**-52)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def exponential_race(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row, such that similar distributions mostly give the same token for the same numbers; [...] int64.

    Token i belongs to bucket i modulo the number of buckets. The exponential race (the Gumbel-max trick) over the buckets' sums
    draws a bucket, and inverse transform a token of it. The token has the distribution of the weights.

    Args:
        weights: non-negative, not all zero, need not sum to one; [..., vocab].
        uniforms: [..., 1 + buckets] float64 of `shoal.sampling.uniforms.race_uniforms`.
    """
    buckets = uniforms.shape[-1] - 1
    dealt = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % buckets)).unflatten(-1, (-1, buckets))
    speed = dealt.sum(dim=-2, dtype=torch.float64)
    bucket = (speed / uniforms[..., 1:]).argmax(dim=-1)
    index = bucket[..., None, None].expand(*dealt.shape[:-1], 1)
    within = draw(dealt.gather(-1, index).flatten(0, -3).squeeze(-1), uniforms[..., 0].flatten())
    return within.view(bucket.shape) * buckets + bucket
