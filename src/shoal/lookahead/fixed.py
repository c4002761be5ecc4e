"""One draft length for every round; 0 is plain decoding without any speculative work."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import RequestError

MAX_LENGTH = 64
"""The longest draft length: a longer verification is a prefill, and most likely a slip."""


class Fixed:
    """A controller with draft length k in every round.

    Raises:
        RequestError: k is not in 0..64.
    """

    def __init__(self, k: int) -> None:
        if not 0 <= k <= MAX_LENGTH:
            raise RequestError(f"draft length must be in 0..{MAX_LENGTH}, got {k}")
        self.limit = k

    def next_length(self) -> int:
        return self.limit

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Does nothing: the length is fixed."""
