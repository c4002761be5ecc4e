"""The Constraint protocol: the tokens that may follow, as a function of the new tokens before.

A mask is part of the declared distribution p like any other control. The engine asks for it at
every position that is drafted or verified, also on paths that are rejected later, so a constraint
has one state per position and never changes a state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from shoal.types.requests import Row

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
        """Returns the reason why `mask` failed in its last call for this state.

        The text is empty if the call did not fail at this state.
        """
        return ""

    def is_free(self, state: State) -> bool:
        """Returns True if nothing is excluded after this state and all states that follow it.

        A row drops such a constraint.
        """
        return False

    @property
    def batch_key(self) -> Hashable:
        """A key; constraints with equal keys are of one class.

        `mask` of any of these constraints takes the states of all.
        """
        return id(self)
