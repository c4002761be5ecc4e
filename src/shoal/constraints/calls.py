"""Calls of constraints: what one of them raises, or answers in a wrong form, is a fault of the rows
that it was asked for.

A state in whose place stands a `Failed` has nothing that may follow. So drafts that lead there are
rejected, and a row that comes there itself ends with the reason, while the other rows of the batch
go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from shoal.constraints.protocol import Allowed, Constraint
from shoal.errors import RequestError

Result = TypeVar("Result")


class Failed(NamedTuple):
    """Stands in the place of a state that a constraint could not compute."""

    reason: str


def begun(row: Any, start: Callable[[Any], Result]) -> Result:
    """The state that a constraint or check starts a row with. Raises RequestError: it raised
    something."""
    try:
        return start(row)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(_reason(getattr(start, "__self__", start), error)) from error


def advanced(constraint: Constraint[Any], state: Any, token: int) -> Any:
    """The state after one more token, or a `Failed`."""
    if isinstance(state, Failed):
        return state
    try:
        return constraint.advance(state, token)
    except Exception as error:
        return Failed(_reason(constraint, error))


def is_free(constraint: Constraint[Any], state: Any) -> bool:
    """As the constraint's own; False where it fails, or has failed: `mask` is then asked."""
    if isinstance(state, Failed):
        return False
    try:
        return bool(constraint.is_free(state))
    except Exception:
        return False


def mask(
    constraint: Constraint[Any], states: Sequence[Any], vocab_size: int, device: torch.device
) -> Allowed:
    """The constraint's mask; nothing is possible after states for which it fails.

    Constraints are asked once for all states. Where that fails they are asked state by state.
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
    """Why nothing may follow a state that `mask` was last asked about, if the constraint failed
    there; else an empty text."""
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
    """The constraint's mask. Raises RequestError: it has another shape or dtype."""
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
