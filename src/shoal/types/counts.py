"""Counts: occurrences of each token in a row, and accepted and rejected drafts by drafter."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class DraftCounts:
    """The number of tokens that a drafter proposed, and the number of these that were accepted."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted - other.drafted, self.accepted - other.accepted)


def total_by_drafter(counts: Iterable[Mapping[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """Returns the sums of the counts by drafter."""
    total: dict[str, DraftCounts] = {}
    for one in counts:
        for name, more in one.items():
            total[name] = total.get(name, DraftCounts()) + more
    return total


def as_dicts(counts: Mapping[str, DraftCounts]) -> dict[str, dict[str, int]]:
    """Returns the counts by drafter, ready for JSON."""
    return {name: asdict(one) for name, one in counts.items()}


class TokenCounts:
    """The running counts over a list of tokens that only grows.

    Attributes:
        ids: the tokens that occur, each once.
        counts: the number of occurrences of each token, in the order of `ids`.
        read: the length of the list when it was last counted.
    """

    def __init__(self, start: int = 0) -> None:
        self.ids, self.counts, self.read = array("q"), array("q"), start
        self._index: dict[int, int] = {}  # of each token in `ids`

    def upto(self, tokens: Sequence[int]) -> TokenCounts:
        """Counts the tokens that were appended since the last call; returns this object."""
        for i in range(self.read, len(tokens)):
            self._count(tokens[i])
        self.read = max(self.read, len(tokens))
        return self

    def of(self, token: int) -> int:
        """Returns the number of occurrences of a token."""
        index = self._index.get(token)
        return 0 if index is None else self.counts[index]

    def _count(self, token: int) -> None:
        index = self._index.setdefault(token, len(self.ids))
        if index == len(self.ids):
            self.ids.append(token)
            self.counts.append(0)
        self.counts[index] += 1
