"""The draws of draft tree nodes from a drafter's q, for rules that verify by q; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Siblings:
    """The draws of the children of every column of a round's trees (`shoal.types.trees`).

    The decision to make another draw may depend on everything known before its token is drawn,
    never on the token itself.

    Attributes:
        q: the distributions that children were drawn from, [contexts, vocab]; each sums to 1.
        contexts: for each row, the place in `q` of each column's children; -1 = the column has
            none.
        draws: for each row, the children (nodes) of each column in the order drawn.
        independent: True if all were drawn from q itself, so that a node may stand in `draws`
            repeatedly. False if each was drawn from q without its elder siblings, renormalised.
        sampled: for each row, the number of draws of each column that are from q, the first ones;
            the draws behind them are point masses: tokens chosen by information known before. None
            = all are from q.
    """

    q: Tensor
    contexts: Sequence[Sequence[int]]
    draws: Sequence[Sequence[Sequence[int]]]
    independent: bool = False
    sampled: Sequence[Sequence[int]] | None = None
