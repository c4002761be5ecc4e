"""The Check protocol: a constraint that judges single tokens, never a vocabulary.

The distribution is p given that the token passes, where p is the declared distribution after all
other controls. The engine draws from p as always and checks the drawn token. If the check refuses
it, the engine draws anew from p without the refused tokens, by numbers of their own. With Z the
probability that a token passes, a token y that passes is committed with probability p(y) + (1 - Z)
p(y) / Z = p(y) / Z, whatever was drafted, because the verdict on drafts draws its token from p
exactly. If no token with p > 0 passes (greedy rows, truncation), the engine takes the token of the
highest score that passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from shoal.types.requests import Row

State = TypeVar("State")


@runtime_checkable
class Check(Protocol[State]):
    """A judge of single tokens: it says whether a token may follow.

    All methods are called on the engine's thread; states are never changed.
    """

    def start(self, row: Row) -> State:
        """Returns the state before the row's first new token."""
        ...

    def after(self, state: State, token: int) -> State | None:
        """Returns the state after one more token, which is no EOS id of the row.

        None: the token may not follow.
        """
        ...

    def may_end(self, state: State) -> bool:
        """Returns True if the text may end after this state."""
        ...


@runtime_checkable
class Cutting(Check[Any], Protocol):
    """A check that knows where an unfinished text may be cut, also inside a token."""

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """Returns the best place at which the text may end.

        Args:
            tokens: the new tokens of a row, no EOS among them.
            scores: the score of the place before the tokens, and of the places within or behind
                each of them; one more than tokens. Of equal scores the latest place counts.
            most: the most characters before the place.

        Returns:
            The number of characters before the place, and the number of tokens that wrote them;
                None if the text may end nowhere.
        """
        ...
