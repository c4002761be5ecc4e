"""The Check protocol: a constraint that is asked about single tokens, never about a vocabulary.

The law of a token is p given that the token passes, where p is the declared distribution after all
other controls. The engine draws from p as always, checks what it drew, and where that is refused
draws anew from p without the tokens refused, by numbers of their own. With Z the probability that a
token passes, a token y that passes is committed with probability p(y) + (1 - Z) p(y) / Z = p(y) /
Z, whatever was drafted, because the verdict on drafts draws its token from p exactly. Where no
token with p > 0 passes (greedy rows, truncation) it is the token of the highest score that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from shoal.types.requests import Row

State = TypeVar("State")


@runtime_checkable
class Check(Protocol[State]):
    """Says of a token whether it may follow. All methods are called on the engine's thread; states
    are never changed."""

    def start(self, row: Row) -> State:
        """The state before the row's first new token."""
        ...

    def after(self, state: State, token: int) -> State | None:
        """The state after one more token, which is no EOS id of the row; None: the token may not
        follow."""
        ...

    def may_end(self, state: State) -> bool:
        """Whether the text may end here."""
        ...


@runtime_checkable
class Cutting(Check[Any], Protocol):
    """A check that knows where a text that did not end by itself may be cut, inside a token too."""

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """The best place at which the text may end: characters before it and how many tokens wrote
        them.

        Args:
            tokens: the new tokens of a row, no EOS among them.
            scores: of the place before them, and of the places within or behind each of them; one
                more than tokens. Of equal scores the latest place counts.
            most: characters before the place at most.

        Returns:
            None if the text may end nowhere.
        """
        ...
