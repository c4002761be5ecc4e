"""Rows and their constraints: the states at the positions of a pass, and the conjunction of masks.

An error that a constraint raises, or an answer in a wrong form, is a fault of the rows that it was
called for. A `Failed` in the place of a state allows no token. So drafts that lead there are
rejected, and a row that reaches the state itself ends with the reason, while the other rows of the
batch go on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from itertools import chain, takewhile
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shoal.constraints.protocol import Allowed, Constraint
from shoal.errors import RequestError
from shoal.types.requests import Row
from shoal.types.trees import Positions


def begin(row: Row, constraints: Sequence[Constraint[Any]]) -> None:
    """Gives a row without new tokens its constraints. Raises RequestError: one of them fails."""
    row.constraints = [
        (constraint, first_state(row, constraint.begin)) for constraint in constraints
    ]


def advance(row: Row, token: int) -> None:
    """Moves the row's states past a committed token, which is no EOS id of the row.

    Constraints that are free after the token are dropped.
    """
    moved = [
        (constraint, _next_state(constraint, state, token)) for constraint, state in row.constraints
    ]
    row.constraints = [
        (constraint, state) for constraint, state in moved if not _is_free(constraint, state)
    ]


def bound_tokens(row: Row, block: Sequence[int]) -> int:
    """Returns the number of tokens of the block that are under a constraint that is not free."""
    held = row.constraints
    for count, token in enumerate(block):
        held = [
            (constraint, state) for constraint, state in held if not _is_free(constraint, state)
        ]
        if not held:
            return count
        if token in row.eos:
            return count + 1
        held = [(constraint, _next_state(constraint, state, token)) for constraint, state in held]
    return len(block)


def certain_tokens(row: Row, draft: Sequence[int], vocab_size: int) -> tuple[int, list[int]]:
    """Returns the tokens that will follow a draft of the row, if the text there is certain.

    Returns:
        The number of the first tokens of the draft that all constraints allow, at most up to a
        drafted EOS; and the tokens of the longest text that one of them forces behind these.
    """
    head = list(takewhile(lambda token: token not in row.eos, draft))
    forced_tokens = [_forced_by(constraint, state, head) for constraint, state in row.constraints]
    kept = min((count for count, _ in forced_tokens), default=len(head))
    if any(count > kept for count, _ in forced_tokens):
        forced_tokens = [_forced_by(each, state, head[:kept]) for each, state in row.constraints]
    run = max((tokens for _, tokens in forced_tokens), key=len, default=())
    usual = takewhile(lambda token: token < vocab_size and token not in row.eos, run)
    return kept, list(usual)


def is_complete(row: Row, vocab_size: int) -> bool:
    """Returns True if the row's constraints, one at least, let its text end and nothing follow."""
    cpu = torch.device("cpu")
    masks = [
        _mask_of(constraint, [state], vocab_size, cpu) for constraint, state in row.constraints
    ]
    tokens = torch.stack([mask.tokens.cpu() for mask in masks]).all(0)
    return all(bool(mask.ends) for mask in masks) and not bool(tokens.any())


def may_begin(row: Row, vocab_size: int) -> bool:
    """Returns True if the constraints of the row together let a token follow, or let the text end.

    It also returns True if a constraint fails, which the row will report. The row has at least one
    constraint.
    """
    masks = [
        _mask_of(constraint, [state], vocab_size, torch.device("cpu"))
        for constraint, state in row.constraints
    ]
    if all(bool(mask.ends) for mask in masks) or bool(
        torch.stack([mask.tokens.cpu() for mask in masks]).all(0).any()
    ):
        return True
    return any(_reason_at(constraint, state, vocab_size) for constraint, state in row.constraints)


def why(positions: Positions, row: int, column: int, vocab_size: int) -> str:
    """Returns the reason why a row has no mask at a column of the last call of `allowed_tokens`.

    The text is empty if all constraints have a mask.
    """
    path = positions.path(row, column)
    reasons = (
        _reason_at(constraint, reduce(partial(_next_state, constraint), path, state), vocab_size)
        for constraint, state in positions.rows[row].constraints
    )
    return next(filter(None, reasons), "")


def allowed_tokens(positions: Positions, like: Tensor) -> Tensor | None:
    """Returns the tokens that the rows' constraints allow; None if no row has a constraint.

    The mask of a column is that of its path from the root. Nothing is possible at padding and after
    a drafted EOS.

    Args:
        like: [rows, q, vocab], for shape and device.

    Returns:
        [rows, q, vocab] bool; all True for rows without constraints.
    """
    held = [b for b, row in enumerate(positions.rows) if row.constraints]
    if not held:
        return None
    own = _conjunction(positions.of_rows(held), like)
    if len(held) == len(positions.rows):
        return own
    every = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    every[held] = own
    return every


def _conjunction(positions: Positions, like: Tensor) -> Tensor:
    """Returns `allowed_tokens` for rows that all have constraints."""
    rows, (q, vocab), device = len(positions.rows), like.shape[1:], like.device
    columns = [
        [column for column in positions.columns(b) if 0 <= column - positions.first < q]
        for b in range(rows)
    ]
    places = [
        [b * q + column - positions.first for column in inside] for b, inside in enumerate(columns)
    ]
    own = torch.tensor(list(chain(*places)), dtype=torch.long, device=device)
    tokens = torch.zeros(rows * q, vocab, dtype=torch.bool, device=device)
    ends = torch.zeros(rows * q, dtype=torch.bool, device=device)
    tokens[own], ends[own] = True, True
    for constraint, states, members in _batches(positions, columns):
        mask = _mask_of(constraint, states, vocab, device)
        index = torch.tensor([place for b in members for place in places[b]], device=device)
        tokens[index] &= mask.tokens.to(device)
        ends[index] &= mask.ends.to(device)
    return _with_eos(tokens.view(rows, q, vocab), ends.view(rows, q, 1), positions.rows)


def _batches(
    positions: Positions, columns: Sequence[Sequence[int]]
) -> list[tuple[Constraint[Any], list[Any], list[int]]]:
    """Returns the batches of calls: a constraint, the states at the rows' columns, and the rows.

    Each row is at most once in a batch.
    """
    batches: dict[tuple[int, Hashable], tuple[Constraint[Any], list[Any], list[int]]] = {}
    for b, row in enumerate(positions.rows):
        for turn, (constraint, state) in enumerate(row.constraints if columns[b] else ()):
            at = _states(positions, b, constraint, state)
            _, states, members = batches.setdefault(
                (turn, constraint.batch_key), (constraint, [], [])
            )
            states += [at[column] for column in columns[b]]
            members.append(b)
    return list(batches.values())


def _states(
    positions: Positions, b: int, constraint: Constraint[Any], state: Any
) -> dict[int, Any]:
    """Returns the state after the path to each column of a row that can matter."""
    states = {0: state}
    for column in positions.columns(b)[1:]:
        before = states[positions.parent(b, column)]
        states[column] = _next_state(constraint, before, positions.drafts[b][column - 1])
    return states


def _with_eos(tokens: Tensor, ends: Tensor, rows: Sequence[Row]) -> Tensor:
    """Returns `tokens` [rows, q, vocab] with `ends` [rows, q, 1] at each row's EOS ids."""
    vocab = tokens.shape[-1]
    is_eos = torch.zeros(len(rows) * vocab, dtype=torch.bool)
    is_eos[
        [b * vocab + token for b, row in enumerate(rows) for token in row.eos if token < vocab]
    ] = True
    return torch.where(is_eos.view(len(rows), 1, vocab).to(tokens.device), ends, tokens)


Result = TypeVar("Result")


class Failed(NamedTuple):
    """The replacement of a state that a constraint could not compute."""

    reason: str


def first_state(row: Any, start: Callable[[Any], Result]) -> Result:
    """Returns the first state of a row; raises RequestError if the constraint or check fails."""
    try:
        return start(row)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(_reason(getattr(start, "__self__", start), error)) from error


def _next_state(constraint: Constraint[Any], state: Any, token: int) -> Any:
    """Returns the state after one more token, or a `Failed`."""
    if isinstance(state, Failed):
        return state
    try:
        return constraint.advance(state, token)
    except Exception as error:
        return Failed(_reason(constraint, error))


def _forced_by(
    constraint: Constraint[Any], state: Any, draft: Sequence[int]
) -> tuple[int, Sequence[int]]:
    """Returns the constraint's `forced`; nothing is certain if it fails or has failed."""
    if isinstance(state, Failed):
        return len(draft), ()
    try:
        return constraint.forced(state, draft)
    except Exception:
        return len(draft), ()


def _is_free(constraint: Constraint[Any], state: Any) -> bool:
    """Returns the constraint's `is_free`; False if it fails or has failed: `mask` is called."""
    if isinstance(state, Failed):
        return False
    try:
        return bool(constraint.is_free(state))
    except Exception:
        return False


def _mask_of(
    constraint: Constraint[Any], states: Sequence[Any], vocab_size: int, device: torch.device
) -> Allowed:
    """Returns the constraint's mask; nothing may follow a state for which the constraint fails.

    A constraint is called once for all states. If that call fails, it is called state by state.
    """
    if not any(isinstance(state, Failed) for state in states):
        try:
            return _require_mask(constraint, states, vocab_size, device)
        except Exception:
            pass  # it is asked again, to learn for which states
    tokens = torch.zeros(len(states), vocab_size, dtype=torch.bool, device=device)
    ends = torch.zeros(len(states), dtype=torch.bool, device=device)
    for i, state in enumerate(states):
        if not isinstance(state, Failed):
            try:
                own = _require_mask(constraint, [state], vocab_size, device)
            except Exception:
                continue  # `_reason_at` learns the reason where it matters
            tokens[i], ends[i] = own.tokens[0], own.ends[0]
    return Allowed(tokens, ends)


def _reason_at(constraint: Constraint[Any], state: Any, vocab_size: int) -> str:
    """Returns the reason why nothing may follow a state of the last call of `mask`.

    The text is empty if the constraint did not fail at this state.
    """
    if isinstance(state, Failed):
        return state.reason
    try:
        said = constraint.why(state)
        if not said and type(constraint).why is Constraint.why:  # others would have said
            _require_mask(constraint, [state], vocab_size, torch.device("cpu"))
        return said
    except Exception as error:
        return _reason(constraint, error)


def _require_mask(
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
                f"constraint {type(constraint).__name__} must return {name} of shape {shape} and "
                f"dtype torch.bool, got {tuple(values.shape)} and {values.dtype}"
            )
    return mask


def _reason(constraint: Any, error: Exception) -> str:
    if isinstance(error, RequestError):
        return str(error)
    return f"constraint {type(constraint).__name__} failed: {error!r:.200}"
