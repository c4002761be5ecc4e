"""The controls that make scores of logits: biases, penalties, processors, constraints.

All controls are here except temperature and truncation, which come after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shoal.config import PARAMETERS, Grammar, Sampling
from shoal.constraints import estimates, masks
from shoal.constraints.filters import Filter
from shoal.errors import BadLogits, RequestError, ShoalError
from shoal.sampling import penalties
from shoal.sampling.drawing import finite
from shoal.types.requests import Row
from shoal.types.rounds import Faults
from shoal.types.trees import Positions

_numbers = attrgetter(*PARAMETERS)


def width(logits: Tensor) -> torch.dtype:
    """Returns the dtype of distributions: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def groups(rows: Sequence[Row]) -> list[tuple[Sampling, list[int]]]:
    """Groups rows that can be computed together: a `Sampling` and the rows' places for each."""
    common = rows[0].request.sampling
    if all(row.request.sampling is common for row in rows):
        return [(common, list(range(len(rows))))]
    by_key: dict[Any, tuple[Sampling, list[int]]] = {}
    keys: dict[int, Any] = {}
    for b, row in enumerate(rows):
        sampling = row.request.sampling
        key = keys.get(id(sampling))
        if key is None:
            key = keys[id(sampling)] = _key(sampling)
        by_key.setdefault(key, (sampling, []))[1].append(b)
    return list(by_key.values())


def _key(s: Sampling) -> tuple[Any, ...]:
    """Returns a key; settings with equal keys are computed alike.

    It has all fields except seed and grammar, and containers by identity.
    """
    bias, words = id(s.logit_bias) if s.logit_bias else 0, id(s.bad_words) if s.bad_words else 0
    return _numbers(s), bias, words, tuple(map(id, s.processors))


def control_all(logits: Tensor, positions: Positions, faults: Faults | None) -> Tensor:
    """Computes `control` for rows of any settings, [rows, q, vocab].

    Returns the logits themselves if no control changes them.
    """
    if not change(positions.rows):
        return logits
    mask_of_all = masks.allowed_tokens(positions, logits)
    rows = groups(positions.rows)
    if len(rows) == 1:
        return control(logits, rows[0][0], positions, mask_of_all, faults)
    scores = torch.empty(logits.shape, dtype=width(logits), device=logits.device)
    for sampling, members in rows:
        index = torch.tensor(members, device=logits.device)
        mask = None if mask_of_all is None else mask_of_all[index]
        scores[index] = control(
            logits[index], sampling, positions.of_rows(members), mask, faults
        ).to(scores.dtype)
    return scores


def change(rows: Sequence[Row]) -> bool:
    """Returns True if some control changes the logits of a row."""
    settings = {id(row.request.sampling): row.request.sampling for row in rows}
    return any(map(_changes, settings.values())) or any(
        row.constraints or row.beginning for row in rows
    )


def control(
    logits: Tensor,
    sampling: Sampling,
    positions: Positions,
    allowed: Tensor | None,
    faults: Faults | None,
) -> Tensor:
    """Computes scores [rows, q, vocab] of rows with the same `Sampling` except seed and grammar.

    All controls except temperature and truncation are applied. Returns the logits themselves, in
    their number format, if no control changes them.

    Args:
        allowed: see `shoal.constraints.masks`.
        faults: see `shoal.sampling.distributions.probabilities`.
    """
    if not _changes(sampling) and not any(
        row.constraints or row.beginning for row in positions.rows
    ):
        return logits
    scores = unbound(logits, sampling, positions, faults)
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    estimates.weigh(scores, sampling.temperature, positions)
    return scores


def unbound(
    logits: Tensor, sampling: Sampling, positions: Positions, faults: Faults | None
) -> Tensor:
    """Computes `control` without constraints and estimates, always as a copy."""
    scores = logits.to(width(logits), copy=True, memory_format=torch.contiguous_format)
    penalties.bias_and_penalise(scores, sampling, positions)
    if sampling.processors:
        # Checked before the processors as well: without a possible token a processor may fail in
        # its own words, or revive banned tokens.
        scores = possible(scores, logits, positions, faults)
        scores = penalties.process(scores, sampling.processors, positions, faults)
    return scores


def _changes(sampling: Sampling) -> bool:
    """Returns True if some control changes the logits themselves."""
    return sampling.reads_history or bool(sampling.logit_bias)


def possible(scores: Tensor, logits: Tensor, positions: Positions, faults: Faults | None) -> Tensor:
    """Returns `scores` with a finite highest score at every position.

    The scores of positions without one become uniform.

    Raises:
        RequestError: see `report`.
        BadLogits: see `report`.
    """
    top = scores.amax(-1)
    if finite(top):
        return scores
    impossible = ~top.isfinite()
    report(impossible, logits, positions, faults)
    return scores.masked_fill(impossible[..., None], 0.0)


def report(impossible: Tensor, logits: Tensor, positions: Positions, faults: Faults | None) -> None:
    """Reports the reasons for positions without a distribution.

    Args:
        impossible: the positions, [rows, q] bool.
        faults: a dict that receives the reasons; None to raise them.

    Raises:
        RequestError: the controls of a position that is not padding leave no token, without
            `faults`.
        BadLogits: the logits of a position that is not padding have no finite highest value,
            without `faults`.
    """
    rows, columns = impossible.nonzero(as_tuple=True)
    highest = logits[rows, columns].amax(-1).tolist()
    for b, j, top in zip(rows.tolist(), columns.tolist(), highest, strict=True):
        row, column = positions.rows[b], positions.first + j
        padding = column not in positions.columns(b)
        if padding and (faults is None or math.isfinite(top)):
            continue
        depth = column if padding else len(positions.path(b, column))
        failure = "" if padding else masks.why(positions, b, column, logits.shape[-1])
        reason = _reason(top, row, depth, failure)
        if faults is None:
            raise reason
        faults.setdefault(row, {}).setdefault(column, reason)


def _reason(top: float, row: Row, position: int, failure: str) -> ShoalError:
    """Returns the error that names the reason why no token is possible.

    Args:
        top: the highest logit.
        failure: the message of a constraint, or "".
    """
    sampling = row.request.sampling
    where = f"row {row.index} of request {row.group}, draft position {position}"
    if not math.isfinite(top):
        return BadLogits(f"{where}: expected a finite highest logit and no NaN, got {top}")
    controls = [
        "the grammar" if f.name == "grammar" else f"{f.name}={_short(getattr(sampling, f.name))}"
        for f in fields(sampling)
        if f.name != "seed" and getattr(sampling, f.name) != getattr(Sampling(), f.name)
    ]
    if failure:
        return RequestError(f"{where}: {failure}")
    if row.request.distinct:
        return RequestError(
            f"{where}: all texts that are possible have been drawn; ask for fewer than "
            f"{row.request.n} samples"
        )
    if row.request.constraints:
        controls.append(
            f"constraints={[_name(constraint) for constraint in row.request.constraints]}"
        )
    return RequestError(
        f"{where}: no token is left possible by {', '.join(controls)}; relax one of them"
    )


def _name(constraint: Any) -> str:
    """Returns a filter or grammar as it is written, another constraint by its class."""
    if isinstance(constraint, Filter | Grammar):
        return _short(constraint)
    return type(constraint).__name__


def _short(value: Any) -> str:
    """Returns a value as it is written, with a mark if it is cut."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
