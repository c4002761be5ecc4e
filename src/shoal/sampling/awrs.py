"""Adaptive weighted rejection sampling: a token of p given that it passes, and an unbiased estimate of the probability to pass.

Tokens are drawn from p without replacement until one passes, which asks about few tokens where most of p passes. One token more
says how much of p passes (AWRS, COLM 2025, arXiv 2504.05410, the recursive estimator).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def awrs(
    p: Tensor, first: int, passes: Callable[[int], bool], following: Callable[[Tensor], int], *, weighs: bool = True
) -> tuple[int | None, float]:  # fmt: skip
    """A token and its weight: E[weight * f(token)] is the sum of p(y) f(y) over the tokens y that pass, for any f.

    Args:
        p: probabilities [vocab] float64, finite, sum 1. first: drawn from p.
        passes: whether a token may stand there. following: draws a token from what is left of p, unnormalised.
        weighs: False = the weight is not asked for, which spares a token.

    Returns:
        The token, None if none passes, and its weight, 0..1.
    """
    left, weight, token = p.clone(), 1.0, first
    while True:
        share = float(left[token] / left.sum())
        left[token] = 0.0
        if passes(token):
            break
        weight *= 1 - share
        if not float(left.sum()) > 0:
            return None, 0.0
        token = following(left)
    if not weighs or not float(left.sum()) > 0 or passes(following(left)):
        return token, weight
    return token, weight * share
