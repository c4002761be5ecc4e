"""How many nodes draft trees have by their depth: what a pass of the target over them costs is a
matter of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import Array

FADE = 0.98
"""Weight kept of earlier trees of a depth, by tree of that depth."""


class TreeSizes:
    """Mean numbers of nodes by depth; chains as long as no tree has branched.

    Args:
        limit: the deepest that is kept apart.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[int, list[float]] = {}  # depth -> [weight, nodes times weight]
        self._by_depth: Array | None = np.arange(limit + 1, dtype=float)

    def observe(self, depths: Sequence[int], nodes: Sequence[int] | None) -> None:
        """The trees of a round. nodes: of each row; None = all were chains."""
        if nodes is None and not self._seen:
            return
        for depth, count in zip(depths, depths if nodes is None else nodes, strict=True):
            if depth:
                weight, total = self._seen.get(min(depth, self._limit), [0.0, 0.0])
                self._seen[min(depth, self._limit)] = [FADE * weight + 1, FADE * total + count]
        self._by_depth = None

    @property
    def by_depth(self) -> Array:
        """Nodes of a tree of each depth 0..limit: never fewer than its depth, nor than one of a
        lower depth has. Between depths that were seen a straight line; beyond the deepest one each
        depth is one node more."""
        if self._by_depth is None:
            seen = sorted(self._seen)
            means = [self._seen[depth][1] / self._seen[depth][0] for depth in seen]
            depths = np.arange(self._limit + 1, dtype=float)
            found = np.interp(depths, [0, *seen], [0.0, *means]) + np.maximum(depths - seen[-1], 0)
            self._by_depth = np.maximum.accumulate(np.maximum(found, depths))
        return self._by_depth
