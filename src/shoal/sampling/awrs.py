"""Adaptive weighted rejection sampling: a token of p given that it passes, and an unbiased estimate
of the probability to pass.

Tokens are drawn from p without replacement until one passes, which asks about few tokens where most
of p passes. Further draws say how much of p passes (AWRS, COLM 2025, arXiv 2504.05410), by one of
its two estimators, which p alone decides on. Both draw the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

PEAK = 2 / 3
"""Probability of the most probable token from which the geometric estimator is used: it then mostly
draws a token that is known to pass, and asks about no other."""

Following = Callable[[Tensor], int]
"""Draws a token from what is left of p, unnormalised."""
Phantoms = Callable[[float], int]
"""How many draws of refused tokens come before one of another, where those have this mass: a
geometric number."""


def awrs(
    p: Tensor,
    first: int,
    passes: Callable[[int], bool],
    following: Following,
    phantoms: Phantoms,
    *,
    weighs: bool = True,
) -> tuple[int | None, float]:
    """A token and its weight: E[weight * f(token)] is the sum of p(y) f(y) over the tokens y that
    pass, for any f.

    Args:
        p: probabilities [vocab] float64, finite, sum 1.
        first: drawn from p.
        passes: whether a token may stand there.
        following, phantoms: what is drawn beside it.
        weighs: False = the weight is not asked for, which spares a token.

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
        return token, _geometric(p, left, token, masses, passes, following, phantoms)
    return token, _recursive(left, token, shares, passes, following)


def _recursive(
    left: Tensor,
    token: int,
    shares: list[float],
    passes: Callable[[int], bool],
    following: Following,
) -> float:
    """By one token more, drawn from what is left without the one that passed.

    Args:
        shares: of what was left, those of the tokens refused.
    """
    weight, share = 1.0, float(left[token] / left.sum())
    for refused in shares:
        weight *= 1 - refused
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
    """By drawing with replacement until a second token passes: 1 / (draws - 1), the draws of
    refused tokens counted, not made.

    Args:
        masses: of the tokens refused, before each draw but the first.
    """
    draws, refused = 1 + len(masses), masses[-1] if masses else 0.0
    draws += sum(map(phantoms, masses))
    while True:
        draws += 1 + phantoms(refused)
        other = following(left)
        if other == token or passes(other):
            return 1 / (draws - 1)
        left[other] = 0.0
        refused = float(p.sum() - left.sum())
