"""A rule's uniforms, computed for many positions of a row at once.

The uniforms do not depend on any decision of a round. A round reads a few rows of a table, instead
of some twenty operations on arrays too small to be worth one each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.sampling.acceptance import Rule
from shoal.types.requests import Row

AHEAD = 64
"""The number of positions that are computed at once."""
NOWHERE = (0, -AHEAD)
"""The place of a row whose positions were never computed: they are long past."""


class UniformsAhead:
    """The uniforms of the rows of one engine, on the host.

    Args:
        rule: the rule that the uniforms are for.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._table = np.empty(0)  # [places * AHEAD, ...]
        # By the row's serial: its place in the table, and its first position there.
        self._places: dict[int, tuple[int, int]] = {}

    def of_round(self, rows: Sequence[Row], width: int, numbered: bool, later: int = 0) -> Tensor:
        """Returns the uniforms of the rows' next `width` positions, [rows, width, ...].

        The table holds the numbers that `Rule.uniforms` computes.

        Args:
            numbered: True gives every round numbers of its own, if the rule's numbers depend on
                rounds at all.
            later: the number of rounds from now on to the round.
        """
        firsts = [len(row.tokens) for row in rows]
        if width > AHEAD or (numbered and self._rule.numbers_rounds):
            rounds = [row.rounds + later for row in rows] if numbered else None
            return self._rule.uniforms([row.seed for row in rows], firsts, width, rounds)
        places = [self._places.get(row.serial, NOWHERE) for row in rows]
        used = [first - base for (_, base), first in zip(places, firsts, strict=True)]
        if max(used) > AHEAD - width:
            # Rows that need new positions soon are computed too, or each round would compute some.
            least = min(AHEAD - width + 1, AHEAD // 2)
            self._compute(
                [row for row, count in zip(rows, used, strict=True) if count >= least], rows
            )
            places = [self._places[row.serial] for row in rows]
            used = [first - base for (_, base), first in zip(places, firsts, strict=True)]
        starts = [AHEAD * place + count for (place, _), count in zip(places, used, strict=True)]
        return torch.from_numpy(self._table[np.add.outer(starts, np.arange(width))])

    def of_rounds(self, rows: Sequence[Row], rounds: int, numbered: bool) -> Tensor:
        """Returns the uniforms of the rows' next plain rounds, [rows, rounds, ...].

        Args:
            numbered: see `of_round`.
        """
        if not (numbered and self._rule.numbers_rounds):
            return self.of_round(rows, rounds, False)
        seeds = [row.seed for row in rows for _ in range(rounds)]
        firsts = [len(row.tokens) + later for row in rows for later in range(rounds)]
        numbers = [row.rounds + later for row in rows for later in range(rounds)]
        found = self._rule.uniforms(seeds, firsts, 1, numbers)
        return found.view(len(rows), rounds, *found.shape[2:])

    def _compute(self, wanted: Sequence[Row], rows: Sequence[Row]) -> None:
        """Computes the next positions of the rows that are `wanted`.

        They take places of their own in the table, or the places of rows that have left.
        """
        kept = {row.serial: self._places[row.serial] for row in rows if row.serial in self._places}
        taken = {place for place, _ in kept.values()}
        free = (place for place in range(len(rows)) if place not in taken)
        places = [kept[row.serial][0] if row.serial in kept else next(free) for row in wanted]
        firsts = [len(row.tokens) for row in wanted]
        found = self._rule.uniforms([row.seed for row in wanted], firsts, AHEAD, None).numpy()
        self._places = kept | {
            row.serial: both
            for row, both in zip(wanted, zip(places, firsts, strict=True), strict=True)
        }
        missing = AHEAD * (1 + max(place for place, _ in self._places.values())) - len(self._table)
        if missing > 0:
            empty = np.empty((missing, *found.shape[2:]), found.dtype)
            self._table = np.concatenate([self._table, empty]) if len(self._table) else empty
        self._table.reshape(-1, AHEAD, *found.shape[2:])[places] = found
