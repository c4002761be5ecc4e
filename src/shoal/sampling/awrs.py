"""Adaptive weighted rejection sampling: a token of p given that it passes, and its weight.

The weight is an unbiased estimate of the probability to pass. Tokens are drawn from p without
replacement until one passes, which checks few tokens if most of p passes. Further draws estimate
how much of p passes (AWRS, COLM 2025, arXiv 2504.05410), by one of the paper's two estimators; p
alone decides between them. Both draw the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
    """Computes the weight by drawing with replacement until a second token passes.

    The weight is 1 / (draws - 1). The draws of refused tokens are counted, not made.

    Args:
        masses: the mass of the tokens refused, before each draw except the first.
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
