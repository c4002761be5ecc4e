"""Which exit of a target drafts, and how many tokens: DEL (Zarch et al., COLM 2025, arXiv 2504.05598), for all rows at once.

Costs are counted in layers: a draft at exit l takes l and the head, a verification all layers and the head. If each draft is
accepted with probability a, a round of g drafts brings 1 + a + ... + a^g tokens. The pair (l, g) that brings most per layer is
taken, or none where plain decoding does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FIRST, EVERY = 4, 16
"""Rounds in which exits are compared: the first so many, then one of so many."""
KEPT = 0.9
"""Of what was known before, in each round that compares."""


def tokens_per_layer(acceptance: float, exit: int, length: int, layers: int, head: float = 0.0) -> float:
    """Tokens that a round of so many drafts brings, over the layers that it computes.

    Args:
        acceptance: of a draft, if those before it were accepted. head: its cost in layers.
    """
    return sum(acceptance**i for i in range(length + 1)) / (length * (exit + head) + layers + head)


def best(acceptances: Mapping[int, float], layers: int, most: int, head: float = 0.0) -> tuple[int, int]:
    """The exit and the number of drafts, at most `most`, that bring most tokens per layer; (0, 0) where no drafts do."""

    def worth(option: tuple[int, int]) -> float:
        exit, length = option
        return tokens_per_layer(acceptances.get(exit, 0.0), exit, length, layers, head)

    return max([(0, 0), *((exit, length) for exit in acceptances for length in range(1, most + 1))], key=worth)


class ExitChoice:
    """The choice of one engine.

    Args:
        exits: that are compared. layers: of the target. head: its cost in layers.
    """

    def __init__(self, exits: Sequence[int], layers: int, head: float) -> None:
        self.exits, self._layers, self._head = list(exits), layers, head
        self._agreed = dict.fromkeys(self.exits, 0.0)
        self._columns = 0.0
        self._rounds = 0

    def due(self) -> bool:
        """Whether the coming round is to compare exits; asked once per round."""
        self._rounds += 1
        return self._rounds <= FIRST or self._rounds % EVERY == 0

    def learn(self, agreed: Sequence[float], columns: int) -> None:
        """What would have been accepted of each exit's drafts, in so many columns."""
        self._columns = KEPT * self._columns + columns
        for exit, found in zip(self.exits, agreed, strict=True):
            self._agreed[exit] = KEPT * self._agreed[exit] + found

    @property
    def acceptances(self) -> dict[int, float]:
        """By exit; nothing before any round has compared them."""
        return {exit: found / self._columns for exit, found in self._agreed.items()} if self._columns else {}

    def best(self, most: int) -> tuple[int, int]:
        """The exit that drafts, and at most how many tokens; (0, 0) where nothing is known, or pays."""
        return best(self.acceptances, self._layers, most, self._head)
