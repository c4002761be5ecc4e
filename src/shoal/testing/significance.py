"""The tests of counts by Pearson's chi-square: fit to a distribution, and independence."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(counts: Tensor, expected: Tensor, least: float = 5.0) -> float:
    """Computes the p-value of Pearson's test that `counts` come from `expected`.

    Args:
        counts: the observed counts, any shape.
        expected: probabilities of the same shape, sum 1.
        least: cells expected less often than this are pooled into one.

    Returns:
        The p-value; 0.0 if something impossible was observed.
    """
    counts, expected = counts.flatten().double(), expected.flatten().double() * counts.sum()
    if bool(((expected == 0) & (counts > 0)).any()):
        return 0.0
    small = expected < least
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return _tail(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1)


def independence(table: Tensor, least: float = 5.0) -> float:
    """Computes the p-value of Pearson's test that the indices of a table [a, b] are independent.

    Args:
        least: every cell expects at least this many, because values too rare for that are pooled
            into one.

    Raises:
        ValueError: one index has a single value left, so that nothing is tested.
    """
    rare = (least * float(table.sum())) ** 0.5
    table = _pooled(_pooled(table.double(), rare).T, rare)
    if min(table.shape) < 2:
        raise ValueError(
            f"nothing to test: {table.shape[0]} x {table.shape[1]} values are frequent enough"
        )
    expected = table.sum(dim=1, keepdim=True) * table.sum(dim=0, keepdim=True) / table.sum()
    return _tail(
        ((table - expected) ** 2 / expected).sum(), (table.shape[0] - 1) * (table.shape[1] - 1)
    )


def _pooled(table: Tensor, rare: float) -> Tensor:
    """Sums rows with a sum below `rare` into one.

    That row joins the smallest other row if it is still rare.
    """
    small = table.sum(dim=1) < rare
    if not bool(small.any()):
        return table
    rest, kept = table[small].sum(dim=0, keepdim=True), table[~small]
    if float(rest.sum()) >= rare or not len(kept):
        return torch.cat([kept, rest])
    kept = kept.clone()
    kept[kept.sum(dim=1).argmin()] += rest[0]
    return kept


def _tail(statistic: Tensor, freedom: int) -> float:
    """Computes the probability that chi-square with `freedom` degrees exceeds the statistic."""
    if freedom < 1:
        return 1.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
