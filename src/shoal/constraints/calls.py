"""Calls of constraints: an error that a constraint raises, or an answer in a wrong form, is a fault
of the rows that it was called for.

A `Failed` in the place of a state allows no token. So drafts that lead there are rejected, and a
row that reaches the state itself ends with the reason, while the other rows of the batch go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from shoal.constraints.protocol import Allowed, Constraint
from shoal.errors import RequestError

Result = TypeVar("Result")


class Failed(NamedTuple):
    """The replacement of a state that a constraint could not compute."""

    reason: str


def begun(row: Any, start: Callable[[Any], Result]) -> Result:
    """Returns the first state of a row.

    Raises:
        RequestError: the constraint or check raised an error.
    """
    try:
        return start(row)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(_reason(getattr(start, "__self__", start), error)) from error


def advanced(constraint: Constraint[Any], state: Any, token: int) -> Any:
    """Returns the state after one more token, or a `Failed`."""
    if isinstance(state, Failed):
        return state
    try:
        return constraint.advance(state, token)
    except Exception as error:
        return Failed(_reason(constraint, error))


def forced(
    constraint: Constraint[Any], state: Any, draft: Sequence[int]
) -> tuple[int, Sequence[int]]:
    """Returns the constraint's `forced`; nothing is certain if it fails or has failed."""
    if isinstance(state, Failed):
        return len(draft), ()
    try:
        return constraint.forced(state, draft)
    except Exception:
        return len(draft), ()


def is_free(constraint: Constraint[Any], state: Any) -> bool:
    """Returns the constraint's `is_free`; False if it fails or has failed: `mask` is called."""
    if isinstance(state, Failed):
        return False
    try:
        return bool(constraint.is_free(state))
    except Exception:
        return False


def mask(
    constraint: Constraint[Any], states: Sequence[Any], vocab_size: int, device: torch.device
) -> Allowed:
    """Returns the constraint's mask; nothing may follow a state for which the constraint fails.

    A constraint is called once for all states. If that call fails, it is called state by state.
    """
    if not any(isinstance(state, Failed) for state in states):
        try:
            return _checked(constraint, states, vocab_size, device)
        except Exception:
            pass  # it is asked again, to learn for which states
    tokens = torch.zeros(len(states), vocab_size, dtype=torch.bool, device=device)
    ends = torch.zeros(len(states), dtype=torch.bool, device=device)
    for i, state in enumerate(states):
        if not isinstance(state, Failed):
            try:
                own = _checked(constraint, [state], vocab_size, device)
            except Exception:
                continue  # `why` learns the reason where it matters
            tokens[i], ends[i] = own.tokens[0], own.ends[0]
    return Allowed(tokens, ends)


def why(constraint: Constraint[Any], state: Any, vocab_size: int) -> str:
    """Returns the reason why nothing may follow a state of the last call of `mask`.

    The text is empty if the constraint did not fail at this state.
    """
    if isinstance(state, Failed):
        return state.reason
    try:
        said = constraint.why(state)
        if not said and type(constraint).why is Constraint.why:  # others would have said
            _checked(constraint, [state], vocab_size, torch.device("cpu"))
        return said
    except Exception as error:
        return _reason(constraint, error)


def _checked(
    constraint: Constraint[Any], states: Sequence[Any], vocab_size: int, device: torch.device
) -> Allowed:
    """Returns the constraint's mask. Raises RequestError: the mask has another shape or dtype."""
    mask = constraint.mask(states, vocab_size, device)
    for name, values, shape in (
        ("tokens", mask.tokens, (len(states), vocab_size)),
        ("ends", mask.ends, (len(states),)),
    ):
        if values.dtype != torch.bool or values.shape != shape:
            raise RequestError(
                f"constraint {type(constraint).__name__} must return {name} of shape {shape} "
                f"and dtype torch.bool, got "
                f"{tuple(values.shape)} and {values.dtype}"
            )
    return mask


def _reason(constraint: Any, error: Exception) -> str:
    if isinstance(error, RequestError):
        return str(error)
    return f"constraint {type(constraint).__name__} failed: {error!r:.200}"
