"""The Constraint protocol: which tokens may follow, as a function of the new tokens before a
position.

A mask is part of the declared distribution p like any other control. It is asked for at every
position that is drafted or verified, also on paths that are rejected later, so a constraint has one
state per position and never changes a state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from shoal.types.requests import Row

State = TypeVar("State")


class Allowed(NamedTuple):
    """What may follow.

    Attributes:
        tokens: [states, vocab] bool. The columns of the row's EOS ids are not read: `ends` stands
            for them.
        ends: whether the text may end here, [states] bool.
    """

    tokens: Tensor
    ends: Tensor


@runtime_checkable
class Constraint(Protocol[State]):
    """Says which tokens may follow. A class that inherits from this one need only define `begin`,
    `advance` and `mask`.

    All methods are called on the engine's thread.
    """

    def begin(self, row: Row) -> State:
        """The state before the row's first new token."""
        ...

    def advance(self, state: State, token: int) -> State:
        """The state after one more token, which is never an EOS id of the row; `state` itself stays
        as it is.

        Drafts may hold tokens that the mask excludes. They are rejected, so what is said of the
        states after them has no effect.
        """
        ...

    def mask(self, states: Sequence[State], vocab_size: int, device: torch.device) -> Allowed:
        """What may follow each of the states, which may be of several rows; the tensors on any
        device, best on `device`."""
        ...

    def why(self, state: State) -> str:
        """Why nothing may follow a state that the last call of `mask` was asked about, if it failed
        there; else an empty text."""
        return ""

    def is_free(self, state: State) -> bool:
        """Whether nothing is excluded after this state, nor after any that follows it. A row lets
        go of such a constraint."""
        return False

    @property
    def batch_key(self) -> Hashable:
        """Constraints with equal keys are of one class, and `mask` of any of them takes the states
        of all."""
        return id(self)
