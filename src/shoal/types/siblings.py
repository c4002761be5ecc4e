"""How the nodes of draft trees were drawn from a drafter's q, for rules that verify them by it;
plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Siblings:
    """The children of every column of the trees of a round (`shoal.types.trees`): from what, and in
    which order, they were drawn.

    Whether there is a next draw may depend on all that is known before its token is, never on the
    token itself.

    Attributes:
        q: what children were drawn from, [contexts, vocab]; each sums to 1.
        contexts: of each row, the place in `q` of each column's children; -1 = it has none.
        draws: of each row, the children of each column in the order drawn: nodes.
        independent: all were drawn from q itself, so that a node may stand in `draws` repeatedly.
            Else each was drawn from what its elder siblings left, renormalised.
        sampled: of each row, how many draws of each column are from q, the first ones; those behind
            are point masses, tokens that were chosen by what was known before. None = all are from
            q.
    """

    q: Tensor
    contexts: Sequence[Sequence[int]]
    draws: Sequence[Sequence[Sequence[int]]]
    independent: bool = False
    sampled: Sequence[Sequence[int]] | None = None
