"""One draft length for the whole batch, decided from counts alone.

Bass is Algorithm 1 of BASS, Heuristic that of Transformers. Qian et al. 2024, arXiv 2404.15778. The
paper's constants: l0 = 7, l_incre = 2, l_mod = 10, l_limit = 32. The *maximum* over rows triggers
growth, so the length drifts up with the batch; that suits an idle GPU and not a CPU.

The protocol is that of Fixed, Bass, Heuristic and simple own objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from shoal.errors import RequestError
from shoal.types.requests import Row
from shoal.types.rounds import Outcome

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


class Bass:
    """A draft length that grows when some row took its whole draft, and shrinks otherwise.

    It grows to l + 2, at most 32. It shrinks to l - ceil(l / 10) - s, but not below the accepted
    tokens of the best row; s = 1 from the second shrink in a row on. Rows near their end, whose
    drafts were shorter than l, do not count; if there are no other rows, l stays.
    """

    L0, INCREMENT, MODULUS, LIMIT = 7, 2, 10, 32

    def __init__(self) -> None:
        self.limit = self.LIMIT
        self._length = self.L0
        self._shrank = 0

    def next_length(self) -> int:
        return self._length

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        counted = [a for a, d in zip(accepted, drafted, strict=True) if d >= self._length]
        if not counted:
            return
        if max(counted) >= self._length:
            self._length = min(self._length + self.INCREMENT, self.LIMIT)
            self._shrank = 0
        else:
            shrunk = self._length - math.ceil(self._length / self.MODULUS) - self._shrank
            self._length = max(1, *counted, shrunk)
            self._shrank = 1


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


@runtime_checkable
class Lookahead(Protocol):
    """A controller that decides one draft length for the whole batch.

    A row near its end gets a shorter draft (`Row.max_draft_length`).
    """

    limit: int
    """The longest draft that the controller ever asks for; caches are sized for it."""

    def next_length(self) -> int:
        """Returns the draft length of the coming round; 0 = plain decoding."""
        ...

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns from a round.

        Args:
            drafted: the number of tokens that each row was asked to draft.
            accepted: the number of tokens accepted of them, without replacement and bonus.
        """
        ...


class Uniform:
    """A `Lookahead` as a `Controller`: one length for every row, and no draft is shortened.

    Attributes:
        steady: True if the length never changes.
    """

    adaptive = False
    shorten = None
    may_speculate = True

    def __init__(self, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self.limit = lookahead.limit
        self.steady = isinstance(lookahead, Fixed)
        self._asked: list[int] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Returns the next length for each row, at most `Row.max_draft_length`."""
        k = min(max(self.lookahead.next_length(), 0), self.limit)
        self._asked = [min(k, row.max_draft_length) for row in rows]
        return self._asked

    def learn(self, outcome: Outcome) -> None:
        """Passes the counts on to the `Lookahead`.

        If the drafter failed in the middle of a draft, the length that was asked for counts as
        drafted, as if the position had been rejected: lengths must not depend on rejected drafts
        (`adaptive` of `shoal.lookahead.controller.Controller`).
        """
        self.lookahead.update(self._asked if outcome.steps else outcome.drafted, outcome.accepted)
