"""Drafters: whatever proposes tokens. A drafter is a class with two methods.

`propose` may use anything it likes, as long as the q it reports is the distribution the drafts were really drawn from; the
output is then exactly the target's, however bad the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from shoal.drafting.model import ModelDrafter
from shoal.types.requests import Row
from shoal.types.rounds import Proposal

__all__ = ["Drafter", "ModelDrafter"]


class Drafter(Protocol):
    """Proposes, and hears what became of it."""

    def propose(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        luck: Tensor,
        draw: Callable[[Tensor, Tensor], Tensor],
        shorten: Callable[[int, Sequence[float]], Sequence[int]] | None = None,
    ) -> Proposal:
        """Drafts up to lengths[b] tokens to follow rows[b].tokens; max(lengths) >= 1.

        Args:
            luck: noise by position, [rows, >= max(lengths), ...] float64. draw: (q [rows, vocab], one position's luck) -> tokens.
            shorten: asked before each position is drawn, with the drafter's highest probability there, one per row: how long
                each row's draft may still become. A token once drawn is proposed: dropping it for what it is would bias the law.
        """  # fmt: skip
        ...

    def observe(self, rows: Sequence[Row]) -> None:
        """Called after the commit, when `row.tokens` are what they will be: forget what was rejected."""
        ...
