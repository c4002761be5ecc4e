"""The highest scores of a large vocabulary, and the last of them that a mass needs.

The vocabulary is not sorted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALVINGS = 10
"""The number of steps of a bisection before its bounds are checked.

After them a few hundred tokens of a vocabulary of 150,000 are left between the bounds.
"""
_MOST_HALVINGS = 200
"""The largest number of steps of a bisection.

After them the bounds are neighbouring numbers, between which only equal keys are left.
"""
_BETWEEN = 1024
"""The number of tokens that may be left between the bounds of a bisection, to be sorted."""
_SUMMED = 256
"""The number of weights that are summed at a time.

The order of the sum, and so the rounding, must not depend on the other rows.
"""


def largest(scores: Tensor, width: int) -> tuple[Tensor, Tensor, bool]:
    """Returns the `width` highest scores of each row [n, vocab] and their ids, highest first.

    Returns all scores, and True, if width is near vocab. Equal scores have the lowest id first in a
    full list, and are in any order in a short one.
    """
    if 2 * width > scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids, True
    return *_largest(scores, width), False


def _largest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Computes torch.topk for a long last dimension, in two levels.

    The `width` highest of the maxima of disjoint columns hold the `width` highest scores, and both
    selections are much shorter than one over the vocabulary.
    """
    n, vocab = scores.shape
    depth = 1 << round(0.5 * math.log2(vocab / width))
    if depth < 4:
        values, ids = scores.topk(width, dim=-1)
        return values, ids
    stride = vocab // depth
    columns = (
        scores[:, : depth * stride]
        .reshape(n, depth, stride)
        .amax(1)
        .topk(width, dim=-1, sorted=False)
        .indices
    )
    ids = (
        columns[:, None] + torch.arange(0, depth * stride, stride, device=scores.device)[:, None]
    ).flatten(1)
    rest = torch.arange(depth * stride, vocab, device=scores.device)
    ids = torch.cat([ids, rest.expand(n, -1)], dim=-1)
    values, order = scores.gather(-1, ids).topk(width, dim=-1)
    return values, ids.gather(-1, order)


def last_needed(keys: Tensor, weights: Tensor, mass: float, low: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the key of the last token that is needed until the weights hold `mass`.

    Tokens are taken in descending order of their keys [n, vocab]. Also returns the number of tokens
    of that very key that are needed; each is [n, 1]. The search is a bisection, without sorting.
    The result for a row does not depend on other rows.

    Args:
        low: keys of which at least one is below all that are needed, or one of them; [n, 1].
    """
    high = torch.nextafter(keys.amax(-1, keepdim=True), low.new_full((), torch.inf))
    # `above` is the weight of the keys from `high` on.
    above = torch.zeros(low.shape, dtype=torch.float64, device=low.device)
    unfinished = torch.ones_like(low, dtype=torch.bool)
    scratch = torch.empty_like(weights)
    for step in range(1, _MOST_HALVINGS + 1):
        middle = low + (high - low) / 2
        held = row_sums(torch.ge(keys, middle, out=scratch).mul_(weights))
        up, down = unfinished & (held >= mass), unfinished & (held < mass)
        low, high, above = (
            torch.where(up, middle, low),
            torch.where(down, middle, high),
            torch.where(down, held, above),
        )
        if step >= _HALVINGS:
            counts = [row_sums(torch.ge(keys, bound, out=scratch)).long() for bound in (low, high)]
            count = counts[0] - counts[1]
            unfinished = (count > _BETWEEN) & (torch.nextafter(low, high) < high)
            if not bool(unfinished.any()):
                break
    below = torch.ge(keys, high, out=scratch).mul_(torch.finfo(keys.dtype).min / 4).add_(keys)
    listed = count.clamp(min=1, max=_BETWEEN)
    values, ids, _ = largest(below, int(listed.max()))
    weight = weights.gather(-1, ids)
    cumulative = above + weight.cumsum(-1, dtype=torch.float64)
    last = torch.minimum((cumulative < mass).sum(-1, keepdim=True), listed - 1)
    limit = values.gather(-1, last)
    taken = last + 1 - (values > limit).sum(-1, keepdim=True)
    # Keys that are too many to list are all equal: the weight of one gives the number needed.
    return limit, torch.where(
        count > _BETWEEN, ((mass - above) / weight.gather(-1, last)).ceil().long(), taken
    )


def weights_from(keys: Tensor, limit: Tensor, weights: Tensor) -> Tensor:
    """Returns the weights [n, vocab] whose keys are not below the row's limit [n, 1], else 0.

    Products of numbers take a fifth of the time of a selection by truth values.
    """
    return torch.ge(keys, limit, out=torch.empty_like(weights)).mul_(weights)


def row_sums(weights: Tensor) -> Tensor:
    """Sums the rows of [n, vocab]; [n, 1] float64."""
    whole = weights.shape[-1] // _SUMMED * _SUMMED
    sums = (
        weights[:, :whole]
        .unflatten(-1, (-1, _SUMMED))
        .sum(-1)
        .sum(-1, keepdim=True, dtype=torch.float64)
    )
    return sums + weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
