"""The Constraint protocol: the tokens that may follow, as a function of the new tokens before.

A mask is part of the declared distribution p like any other control. The engine asks for it at
every position that is drafted or verified, also on paths that are rejected later, so a constraint
has one state per position and never changes a state.

A `Check` is a constraint that judges single tokens, never a vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from shoal.types.requests import Row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

State = TypeVar("State")


class Allowed(NamedTuple):
    """The tokens that may follow.

    Attributes:
        tokens: [states, vocab] bool. The columns of the row's EOS ids are not read: `ends` stands
            for them.
        ends: [states] bool, True if the text may end here.
    """

    tokens: Tensor
    ends: Tensor


@runtime_checkable
class Constraint(Protocol[State]):
    """A rule that says which tokens may follow.

    A class that inherits from this one need only define `begin`, `advance` and `mask`. All methods
    are called on the engine's thread.
    """

    def begin(self, row: Row) -> State:
        """Returns the state before the row's first new token."""
        ...

    def advance(self, state: State, token: int) -> State:
        """Returns the state after one more token, which is never an EOS id of the row.

        `state` itself stays unchanged. Drafts may hold tokens that the mask excludes. They are
        rejected, so the masks of the states after them have no effect.
        """
        ...

    def mask(self, states: Sequence[State], vocab_size: int, device: torch.device) -> Allowed:
        """Returns the tokens that may follow each of the states, which may be of several rows.

        The tensors may be on any device; `device` is best.
        """
        ...

    def forced(self, state: State, draft: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Returns the tokens that will follow a draft, if the text there is certain.

        They are drafted, and verified as any draft: a wrong answer costs time alone.

        Args:
            draft: tokens that may follow the state.

        Returns:
            The number of the first tokens of the draft that the constraint allows, and the tokens
            of the text that must follow these.
        """
        return len(draft), ()

    def why(self, state: State) -> str:
        """Returns the reason why the last call of `mask` failed for this state; "" = it did not."""
        return ""

    def is_free(self, state: State) -> bool:
        """Returns True if nothing is excluded after this state and all states that follow it.

        A row drops such a constraint.
        """
        return False

    @property
    def batch_key(self) -> Hashable:
        """A key; constraints with equal keys are of one class.

        The `mask` of any of these constraints takes the states of all of them.
        """
        return id(self)


@runtime_checkable
class Check(Protocol[State]):
    """A judge of single tokens: it says whether a token may follow.

    All methods are called on the engine's thread; states are never changed.
    """

    def start(self, row: Row) -> State:
        """Returns the state before the row's first new token."""
        ...

    def after(self, state: State, token: int) -> State | None:
        """Returns the state after a token that is no EOS id of the row; None: it may not follow."""
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
