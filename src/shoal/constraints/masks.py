"""Rows and their constraints: the states at the positions of a pass, and the conjunction of
masks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial, reduce
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from shoal.constraints import calls
from shoal.constraints.protocol import Constraint
from shoal.types.requests import Row
from shoal.types.trees import Positions


def begin(row: Row, constraints: Sequence[Constraint[Any]]) -> None:
    """Gives a row without new tokens its constraints. Raises RequestError: one of them fails."""
    row.constraints = [
        (constraint, calls.begun(row, constraint.begin)) for constraint in constraints
    ]


def advance(row: Row, token: int) -> None:
    """Moves the row's states past a committed token, which is no EOS id of the row.

    Constraints that are free after the token are dropped.
    """
    moved = [
        (constraint, calls.advanced(constraint, state, token))
        for constraint, state in row.constraints
    ]
    row.constraints = [
        (constraint, state) for constraint, state in moved if not calls.is_free(constraint, state)
    ]


def bound(row: Row, block: Sequence[int]) -> int:
    """Returns the number of tokens of the block that are under a constraint that is not free."""
    held = row.constraints
    for count, token in enumerate(block):
        held = [
            (constraint, state)
            for constraint, state in held
            if not calls.is_free(constraint, state)
        ]
        if not held:
            return count
        if token in row.eos:
            return count + 1
        held = [
            (constraint, calls.advanced(constraint, state, token)) for constraint, state in held
        ]
    return len(block)


def forced(row: Row, draft: Sequence[int], vocab_size: int) -> tuple[int, list[int]]:
    """Returns the tokens that will follow a draft of the row, if the text there is certain.

    Returns:
        The number of the first tokens of the draft that all constraints allow, at most up to a
        drafted EOS; and the tokens of the longest text that one of them forces behind these.
    """
    head = list(takewhile(lambda token: token not in row.eos, draft))
    found = [calls.forced(constraint, state, head) for constraint, state in row.constraints]
    kept = min((count for count, _ in found), default=len(head))
    if any(count > kept for count, _ in found):
        found = [calls.forced(each, state, head[:kept]) for each, state in row.constraints]
    run = max((tokens for _, tokens in found), key=len, default=())
    usual = takewhile(lambda token: token < vocab_size and token not in row.eos, run)
    return kept, list(usual)


def is_complete(row: Row, vocab_size: int) -> bool:
    """Returns True if the constraints of the row let its text end here, and let nothing follow.

    The row has at least one constraint.
    """
    cpu = torch.device("cpu")
    masks = [
        calls.mask(constraint, [state], vocab_size, cpu) for constraint, state in row.constraints
    ]
    tokens = torch.stack([mask.tokens.cpu() for mask in masks]).all(0)
    return all(bool(mask.ends) for mask in masks) and not bool(tokens.any())


def may_begin(row: Row, vocab_size: int) -> bool:
    """Returns True if the constraints of the row together let a token follow, or let the text end.

    It also returns True if a constraint fails, which the row will report. The row has at least one
    constraint.
    """
    found = [
        calls.mask(constraint, [state], vocab_size, torch.device("cpu"))
        for constraint, state in row.constraints
    ]
    if all(bool(mask.ends) for mask in found) or bool(
        torch.stack([mask.tokens.cpu() for mask in found]).all(0).any()
    ):
        return True
    return any(calls.why(constraint, state, vocab_size) for constraint, state in row.constraints)


def why(positions: Positions, row: int, column: int, vocab_size: int) -> str:
    """Returns the reason why a row has no mask at a column of the last call of `allowed`.

    The text is empty if all constraints have a mask.
    """
    path = positions.path(row, column)
    reasons = (
        calls.why(constraint, reduce(partial(calls.advanced, constraint), path, state), vocab_size)
        for constraint, state in positions.rows[row].constraints
    )
    return next(filter(None, reasons), "")


def allowed(positions: Positions, like: Tensor) -> Tensor | None:
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
    """Returns `allowed` for rows that all have constraints."""
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
        mask = calls.mask(constraint, states, vocab, device)
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
        states[column] = calls.advanced(constraint, before, positions.drafts[b][column - 1])
    return states


def _with_eos(tokens: Tensor, ends: Tensor, rows: Sequence[Row]) -> Tensor:
    """Returns `tokens` [rows, q, vocab] with `ends` [rows, q, 1] at each row's EOS ids."""
    vocab = tokens.shape[-1]
    is_eos = torch.zeros(len(rows) * vocab, dtype=torch.bool)
    is_eos[
        [b * vocab + token for b, row in enumerate(rows) for token in row.eos if token < vocab]
    ] = True
    return torch.where(is_eos.view(len(rows), 1, vocab).to(tokens.device), ends, tokens)
