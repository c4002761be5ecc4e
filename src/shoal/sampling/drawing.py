"""The draws of tokens from weights by given uniforms, and the highest scores of a vocabulary.

Scores are never sorted: the highest ones, and the last of them that a mass needs, are selected.

Draws are by inverse transform or by an exponential race.

A token of p given that it passes a check is drawn by adaptive weighted rejection sampling (`awrs`),
with its weight. The weight is an unbiased estimate of the probability to pass. Tokens are drawn
from p without replacement until one passes, which checks few tokens if most of p passes. Further
draws estimate how much of p passes (AWRS, COLM 2025, arXiv 2504.05410), by one of the paper's two
estimators; p alone decides between them. Both draw the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
        low: a lower bound of the key of the last needed token, [n, 1].
    """
    high = torch.nextafter(keys.amax(-1, keepdim=True), low.new_full((), torch.inf))
    # `above` is the weight of the keys from `high` on.
    above = torch.zeros(low.shape, dtype=torch.float64, device=low.device)
    unfinished = torch.ones_like(low, dtype=torch.bool)
    scratch = torch.empty_like(weights)
    for step in range(1, _MOST_HALVINGS + 1):
        middle = low + (high - low) / 2
        mass_above = row_sums(torch.ge(keys, middle, out=scratch).mul_(weights))
        up, down = unfinished & (mass_above >= mass), unfinished & (mass_above < mass)
        low = torch.where(up, middle, low)
        high = torch.where(down, middle, high)
        above = torch.where(down, mass_above, above)
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
    last_count = last + 1 - (values > limit).sum(-1, keepdim=True)
    # Keys that are too many to list are all equal: the weight of one gives the number needed.
    return limit, torch.where(
        count > _BETWEEN, ((mass - above) / weight.gather(-1, last)).ceil().long(), last_count
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


_BLOCK = 256
"""The number of tokens whose weights are summed before one of them is searched for."""
_ONE_LEVEL = 4096
"""The largest vocabulary that is searched in one level.

Its cumulative sums take less time than the further operations of a search in two levels.
"""


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one token per row by inverse transform, [rows] int64.

    The draw is in float64, so that no tail is lost to rounding. Cumulative sums over a large
    vocabulary would take most of the time, so there the search has two levels: a block of `_BLOCK`
    tokens by the blocks' sums, then a token inside it.

    Args:
        weights: non-negative, not all zero, need not sum to one; [rows, vocab].
        uniforms: in [0, 1), [rows] float64.

    Returns:
        The first index whose cumulative weight exceeds u times the total; its weight is never zero.
    """
    return _draw_tokens(weights, uniforms[:, None]).squeeze(1)


def inverse_transform(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Computes `draw` by the first uniform of each row, [rows, ...]."""
    return draw(weights, uniforms[:, 0])


def _draw_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Computes `draw` by uniforms [rows, 1]; the tokens are [rows, 1] int64."""
    # One unit below 1 the product may round up to the total.
    share = uniforms.clamp(max=1 - 2.0**-52)
    vocab = weights.shape[-1]
    if vocab <= _ONE_LEVEL:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(weights, cumulative, share * cumulative[:, -1:])
    sums = _block_sums(weights)
    ends = sums.cumsum(-1)
    threshold = share * ends[:, -1:]
    block = _first_above(sums, ends, threshold)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=vocab - 1))
    if vocab % _BLOCK:
        inside = torch.where(ids < vocab, inside, 0.0)
    within = _first_above(inside, inside.cumsum(-1, dtype=torch.float64), threshold - before)
    return (block * _BLOCK + within).clamp_(max=vocab - 1)


def highest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the highest score of each position [..., vocab] and the lowest id that has it.

    Both are tensors [...]. The highest score is NaN if a score is. A large vocabulary is searched
    by way of the highest scores of blocks: torch finds values many times faster than their indices.
    """
    vocab = scores.shape[-1]
    if vocab <= _ONE_LEVEL:
        values, ids = scores.max(-1)
        return values, ids
    whole = vocab // _BLOCK * _BLOCK
    tops = scores[..., :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < vocab:
        tops = torch.cat([tops, scores[..., whole:].amax(-1, keepdim=True)], dim=-1)
    values, block = tops.max(-1, keepdim=True)
    ids = (block * _BLOCK + torch.arange(_BLOCK, device=scores.device)).clamp_(max=vocab - 1)
    return values.squeeze(-1), ids.gather(
        -1, scores.gather(-1, ids).argmax(-1, keepdim=True)
    ).squeeze(-1)


def finite(values: Tensor) -> bool:
    """Returns True if no value is NaN or infinite.

    Then the sum of the values is not, either. It reads one value from the device.
    """
    return math.isfinite(float(values.sum(dtype=torch.float64)))


def _block_sums(weights: Tensor) -> Tensor:
    """Sums blocks of `_BLOCK` weights, and the rest as the last block, [rows, blocks] float64."""
    whole = weights.shape[-1] // _BLOCK * _BLOCK
    # Converted first: torch's sum into another dtype is not vectorised.
    sums = weights[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:]
    if rest.shape[-1]:
        return torch.cat([sums, rest.sum(-1, keepdim=True, dtype=torch.float64)], dim=-1)
    return sums


def _first_above(weights: Tensor, cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Returns the first index whose cumulative weight exceeds the row's threshold, [rows, 1] int64.

    If a device's sums are not monotone by rounding, or the threshold is not below the last of them,
    that may be an index without weight. The first index with a weight is taken instead: its sum is
    the first above 0, whatever the rounding. A row without any weight, such as the padding of a
    captured round, gets the last index.
    """
    last = weights.shape[-1] - 1
    index = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=last)
    first = torch.searchsorted(cumulative, torch.zeros_like(threshold), right=True).clamp_(max=last)
    return torch.where(weights.gather(-1, index) > 0, index, first)


def exponential_race(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one token per row, [rows] int64; similar distributions mostly give the same token.

    The same uniforms are used for both distributions. Token i belongs to bucket i modulo the number
    of buckets. The exponential race (the Gumbel-max trick) over the buckets' sums draws a bucket,
    and inverse transform draws a token of the bucket. The token has the distribution of the
    weights.

    Args:
        weights: non-negative, not all zero, need not sum to one; [rows, vocab].
        uniforms: [rows, 1 + buckets] float64 of `shoal.sampling.uniforms.race_uniforms`.
    """
    vocab, buckets = weights.shape[-1], uniforms.shape[-1] - 1
    padded = torch.nn.functional.pad(weights, (0, -vocab % buckets)) if vocab % buckets else weights
    speed = padded.unflatten(-1, (-1, buckets)).sum(dim=-2, dtype=torch.float64)
    bucket = (speed / uniforms[:, 1:]).argmax(dim=-1, keepdim=True)
    ids = bucket + torch.arange(0, vocab, buckets, device=weights.device)
    return (
        ids.gather(1, _draw_tokens(padded.gather(1, ids), uniforms[:, :1]))
        .squeeze(1)
        .clamp_(max=vocab - 1)
    )


PEAK = 2 / 3
"""The probability of the most probable token from which the geometric estimator is used.

That estimator then mostly draws a token that is known to pass, and checks no other.
"""

Following = Callable[[Tensor], int]
"""A function that draws a token from the rest of p, unnormalised."""
Phantoms = Callable[[float], int]
"""A function from the mass of the refused tokens to a number of draws.

That is the number of draws of refused tokens before one of another token, which is geometric.
"""


def awrs(
    p: Tensor,
    first: int,
    passes: Callable[[int], bool],
    following: Following,
    phantoms: Phantoms,
    *,
    weighs: bool = True,
) -> tuple[int | None, float]:
    """Draws a token and computes its weight.

    E[weight * f(token)] is the sum of p(y) f(y) over the tokens y that pass, for any f.

    Args:
        p: probabilities [vocab] float64, finite, sum 1.
        first: the first token, drawn from p.
        passes: the function that tells if a token may stand there.
        following: the function that draws further tokens.
        phantoms: the function that draws the numbers of draws of refused tokens.
        weighs: False if the weight is not needed, which spares the check of a token.

    Returns:
        The token, None if none passes, and its weight, 0..1.
    """
    left, token, shares, masses = p.clone(), first, list[float](), list[float]()
    while not passes(token):
        total = float(left.sum())
        shares.append(float(left[token]) / total)
        left[token] = 0.0
        if not float(left.sum()) > 0:
            return None, 0.0
        masses.append(float(p.sum() - left.sum()))
        token = following(left)
    if not weighs:
        return token, 1.0
    if float(p.max()) > PEAK:
        return token, _geometric(
            p, left, token, masses=masses, passes=passes, following=following, phantoms=phantoms
        )
    return token, _recursive(left, token, shares, passes, following)


def _recursive(
    left: Tensor,
    token: int,
    shares: list[float],
    passes: Callable[[int], bool],
    following: Following,
) -> float:
    """Computes the weight by one more token, drawn from the rest without the token that passed.

    Args:
        shares: the share of each refused token in the mass that was left before it was drawn.
    """
    weight, share = 1.0, float(left[token] / left.sum())
    for refused_share in shares:
        weight *= 1 - refused_share
    left[token] = 0.0
    if not float(left.sum()) > 0 or passes(following(left)):
        return weight
    return weight * share


def _geometric(
    p: Tensor,
    left: Tensor,
    token: int,
    masses: list[float],
    passes: Callable[[int], bool],
    following: Following,
    phantoms: Phantoms,
) -> float:
    """Computes the weight by drawing with replacement until a second token passes.

    The weight is 1 / (draws - 1). The draws of refused tokens are counted, not made.

    Args:
        masses: the mass of the tokens refused, before each draw except the first.
    """
    draws, refused_mass = 1 + len(masses), masses[-1] if masses else 0.0
    draws += sum(map(phantoms, masses))
    while True:
        draws += 1 + phantoms(refused_mass)
        other = following(left)
        if other == token or passes(other):
            return 1 / (draws - 1)
        left[other] = 0.0
        refused_mass = float(p.sum() - left.sum())
