"""The number of nodes of draft trees by depth: it decides the cost of a target's pass over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import Array

FADE = 0.98
"""The factor by which earlier trees of a depth fade, for each new tree of that depth."""


class TreeSizes:
    """The mean number of nodes by depth; the depth itself until a tree has branched.

    Args:
        limit: the greatest depth with a mean of its own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[int, list[float]] = {}  # depth -> [weight, nodes times weight]
        self._by_depth: Array | None = np.arange(limit + 1, dtype=float)

    def observe(self, depths: Sequence[int], nodes: Sequence[int] | None) -> None:
        """Adds the trees of a round.

        Args:
            depths: the depth of each row's tree.
            nodes: the nodes of each row's tree; None = all were chains.
        """
        if nodes is None and not self._seen:
            return
        for depth, count in zip(depths, depths if nodes is None else nodes, strict=True):
            if depth:
                weight, total = self._seen.get(min(depth, self._limit), [0.0, 0.0])
                self._seen[min(depth, self._limit)] = [FADE * weight + 1, FADE * total + count]
        self._by_depth = None

    @property
    def by_depth(self) -> Array:
        """The nodes of a tree of each depth 0..limit, [limit + 1].

        They are never fewer than the depth, nor than the nodes of a lower depth. Between observed
        depths the numbers lie on a straight line; beyond the deepest one each depth adds one node.
        """
        if self._by_depth is None:
            seen = sorted(self._seen)
            means = [self._seen[depth][1] / self._seen[depth][0] for depth in seen]
            depths = np.arange(self._limit + 1, dtype=float)
            found = np.interp(depths, [0, *seen], [0.0, *means]) + np.maximum(depths - seen[-1], 0)
            self._by_depth = np.maximum.accumulate(np.maximum(found, depths))
        return self._by_depth
