"""Transformers' heuristic for one sequence, applied to a batch.

The length grows by two after a full acceptance, and shrinks by one otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence


class Heuristic:
    """A draft length that starts at 5 and never leaves 1..20.

    A batch counts as fully accepted if at least half of its rows were: by its best row, as in
    Algorithm 1 of BASS, lengths would drift up with the batch; by its worst row they would sink to
    1. Rows without drafts do not count.
    """

    START, GROWTH, SHRINKAGE, LIMIT = 5, 2, 1, 20

    def __init__(self) -> None:
        self.limit = self.LIMIT
        self._length = self.START

    def next_length(self) -> int:
        return self._length

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        taken = [a == d for a, d in zip(accepted, drafted, strict=True) if d]
        if not taken:
            return
        grows = 2 * sum(taken) >= len(taken)
        self._length = min(
            max(self._length + (self.GROWTH if grows else -self.SHRINKAGE), 1), self.limit
        )
