"""The same draft length every round; 0 is plain decoding with no speculative work at all."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import RequestError

MAX_LENGTH = 64
"""Beyond this a verify pass is a prefill; asking for more is a slip."""


class Fixed:
    """Draft length k in every round.

    Raises:
        RequestError: unless 0 <= k <= 64.
    """

    def __init__(self, k: int) -> None:
        if not 0 <= k <= MAX_LENGTH:
            raise RequestError(f"draft length must be in 0..{MAX_LENGTH}, got {k}")
        self.limit = k

    def next_length(self) -> int:
        return self.limit

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing to learn."""
