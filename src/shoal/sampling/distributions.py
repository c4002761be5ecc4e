"""From logits to the declared distribution: one function for target, drafter and plain decoding.

Speculative sampling returns samples of the target's declared distribution p whatever the drafter's q is, provided that p
at a position depends on nothing but the position's logits and history. So every control is applied here, to both models,
at each drafted position with the history that the position would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.constraints import masks
from shoal.errors import BadLogits, RequestError, ShoalError
from shoal.sampling import penalties, truncation
from shoal.sampling.drawing import finite, highest
from shoal.types.requests import Row
from shoal.types.rounds import Faults
from shoal.types.trees import Positions

Sampler = Callable[[Tensor, Tensor], Tensor]
"""Weights [n, vocab] and the uniforms of a position each [n, ...] -> one token per row, [n] int64."""


def probabilities(logits: Tensor, positions: Positions, faults: Faults | None = None) -> Tensor:
    """The declared distribution of each (row, position), by the row's own `Sampling` in the order it documents.

    Padding gets finite numbers that mean nothing. A greedy row is one-hot at its highest score, lowest id on a tie.

    Args:
        logits: [rows, q, vocab], any float dtype; -inf is allowed. Not modified.
        positions: the history of each (row, column), and which columns are padding.
        faults: receives the reason where there is no distribution, instead of an error being raised; for padding only where the
            logits themselves are at fault. Such a position then counts as padding.

    Returns:
        [rows, q, vocab] float32, or float64 for float64 logits. Rows sum to 1 and hold no NaN.

    Raises:
        RequestError: if a row's controls leave no token possible, or name ids outside the vocabulary.
        BadLogits: if the logits themselves do (NaN, +inf, or -inf everywhere).
    """
    groups = _groups(positions.rows)
    allowed = masks.allowed(positions, logits)
    if len(groups) == 1:
        return _of_group(logits, groups[0][0], positions, allowed, faults)
    probs = torch.empty(logits.shape, dtype=_dtype(logits), device=logits.device)
    for sampling, members in groups:
        index = torch.tensor(members, device=logits.device)
        mask = None if allowed is None else allowed[index]
        probs[index] = _of_group(logits[index], sampling, positions.of_rows(members), mask, faults)
    return probs


class Draws(NamedTuple):
    """Tokens [rows, q] int64, and their probabilities [rows, q]."""

    tokens: Tensor
    probs: Tensor


def draws(logits: Tensor, positions: Positions, sampler: Sampler, uniforms: Tensor, faults: Faults | None = None) -> Draws:
    """Tokens drawn from the `probabilities` of each (row, position), which greedy rows need no row of the vocabulary for.

    Args:
        sampler: never asked for greedy rows, whose distribution is a point mass. uniforms: [rows, q, ...].
    """
    groups = _groups(positions.rows)
    allowed = masks.allowed(positions, logits)
    if len(groups) == 1:
        return _draws_of_group(logits, groups[0][0], positions, sampler, uniforms, allowed, faults)
    tokens = torch.empty(logits.shape[:2], dtype=torch.long, device=logits.device)
    probs = torch.empty(logits.shape[:2], dtype=_dtype(logits), device=logits.device)
    for sampling, members in groups:
        index = torch.tensor(members, device=logits.device)
        mask = None if allowed is None else allowed[index]
        some = positions.of_rows(members)
        tokens[index], probs[index] = _draws_of_group(logits[index], sampling, some, sampler, uniforms[index], mask, faults)
    return Draws(tokens, probs)


def pure_probabilities(logits: Tensor, temperature: Tensor, cut: Sampling, greedy: bool | None) -> Tensor:
    """`probabilities` of one position as a function of tensors that looks at no value: it can be compiled and captured.

    Args:
        logits: [rows, vocab]; rows without a finite highest logit give nonsense. temperature: [rows], 0 = greedy, else not tiny.
        cut: its top_k, top_p, min_p and typical_p hold for all rows; nothing else of it is read.
        greedy: whether all rows are; None = some.

    Returns:
        [rows, vocab] float32, or float64 for float64 logits.
    """
    scores = logits.to(_dtype(logits))
    one_hot = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    if greedy:
        return one_hot
    heat = torch.where(temperature > 0, temperature, 1.0).to(scores.dtype)
    scores = scores / heat[:, None]
    probs = truncation.truncated_softmax(scores, cut, whole=True) if truncation.truncates(cut) else scores.softmax(-1)
    return probs if greedy is False else torch.where(temperature[:, None] > 0, probs, one_hot)


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _groups(rows: Sequence[Row]) -> list[tuple[Sampling, list[int]]]:
    """Rows that can be computed together: one `Sampling` of theirs, and their places."""
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
    """Equal for settings that are computed alike: all fields but seed and grammar, containers by identity."""
    return (
        s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p, s.repetition_penalty, s.presence_penalty,
        s.frequency_penalty, s.min_new_tokens, s.no_repeat_ngram, id(s.logit_bias) if s.logit_bias else 0,
        id(s.bad_words) if s.bad_words else 0, tuple(map(id, s.processors)),
    )  # fmt: skip


def _of_group(
    logits: Tensor, sampling: Sampling, positions: Positions, allowed: Tensor | None, faults: Faults | None
) -> Tensor:
    """`probabilities` of rows that share one `Sampling` but for seed and grammar; `allowed`: see `shoal.constraints.masks`."""
    if sampling.greedy:
        tokens = _best(logits, sampling, positions, allowed, faults)
        probs = torch.zeros(logits.shape, dtype=_dtype(logits), device=logits.device)
        return probs.scatter_(-1, tokens[..., None], 1.0)
    scores = _controlled(logits, sampling, positions, allowed, faults)
    truncates = truncation.truncates(sampling)
    if not truncates:
        probs = scores.softmax(-1)
        if finite(probs[..., 0]):  # one impossible position makes NaN of all its probabilities
            return probs
    scores = _possible(scores, logits, sampling, positions, faults)
    return (
        truncation.truncated_softmax(scores.flatten(0, 1), sampling).view(scores.shape) if truncates else scores.softmax(-1)
    )


def _draws_of_group(
    logits: Tensor, sampling: Sampling, positions: Positions, sampler: Sampler, uniforms: Tensor, allowed: Tensor | None,
    faults: Faults | None,
) -> Draws:  # fmt: skip
    """`draws` of rows that share one `Sampling` but for seed and grammar."""
    if sampling.greedy:
        tokens = _best(logits, sampling, positions, allowed, faults)
        return Draws(tokens, torch.ones(tokens.shape, dtype=_dtype(logits), device=logits.device))
    probs = _of_group(logits, sampling, positions, allowed, faults)
    tokens = sampler(probs.flatten(0, 1), uniforms.flatten(0, 1)).view(logits.shape[:2])
    return Draws(tokens, probs.gather(-1, tokens[..., None]).squeeze(-1))


def _best(
    logits: Tensor, sampling: Sampling, positions: Positions, allowed: Tensor | None, faults: Faults | None
) -> Tensor:  # fmt: skip
    """The token of the highest score at each position, the lowest id on a tie, of greedy rows: [rows, q] int64."""
    scores = _controlled(logits, sampling, positions, allowed, faults)
    values, tokens = highest(scores)
    if finite(values):
        return tokens
    return highest(_possible(scores, logits, sampling, positions, faults))[1]


def _controlled(
    logits: Tensor, sampling: Sampling, positions: Positions, allowed: Tensor | None, faults: Faults | None
) -> Tensor:
    """Scores [rows, q, vocab] after all controls but truncation: what reads the history, processors, constraints, temperature."""
    own = sampling.reads_history or bool(sampling.logit_bias) or allowed is not None
    if sampling.greedy and not own:
        return logits  # in whatever number format: the order is the same
    scores = logits.to(_dtype(logits), copy=own, memory_format=torch.contiguous_format if own else torch.preserve_format)
    if own:
        penalties.bias_and_penalise(scores, sampling, positions)
    if sampling.processors:
        # Checked before as well: a processor given no possible token may fail in its own words, or revive banned ones.
        scores = _possible(scores, logits, sampling, positions, faults)
        scores = penalties.process(scores, sampling.processors, positions)
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    return scores if sampling.greedy else _at_temperature(scores, sampling.temperature)


def _at_temperature(scores: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return scores
    limits = torch.finfo(scores.dtype)
    if temperature < 1e-6:
        # Dividing by so little overflows; relative to the highest score, only scores that do not matter can.
        scores = scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    return scores / min(max(temperature, limits.tiny), limits.max)


def _possible(scores: Tensor, logits: Tensor, sampling: Sampling, positions: Positions, faults: Faults | None) -> Tensor:
    """`scores`, every position of which has a finite highest score; those that had none are made uniform.

    Raises:
        RequestError, BadLogits: for a position that is not padding, unless `faults` takes them.
    """
    top = scores.amax(-1)
    if finite(top):
        return scores
    impossible = ~top.isfinite()
    for b, j in impossible.nonzero().tolist():
        row, column = positions.rows[b], positions.first + j
        padding = column not in positions.columns(b)
        if padding and (faults is None or bool(logits[b, j].amax().isfinite())):
            continue
        depth, failure = (column, "") if padding else (len(positions.path(b, column)), masks.why(positions, b, column))
        reason = _reason(logits[b, j], sampling, row, depth, failure)
        if faults is None:
            raise reason
        faults.setdefault(row, {}).setdefault(column, reason)
    return scores.masked_fill(impossible[..., None], 0.0)


def _reason(logits: Tensor, sampling: Sampling, row: Row, position: int, failure: str) -> ShoalError:
    """Why no token is possible at a position with these logits [vocab]; `failure`: of a constraint."""
    where = f"row {row.index} of request {row.group}, draft position {position}"
    if not bool(logits.amax().isfinite()):
        return BadLogits(f"{where}: expected a finite highest logit and no NaN, got {logits.amax().item()}")
    controls = [
        f"{f.name}={getattr(sampling, f.name)!r:.80}"
        for f in fields(sampling)
        if f.name != "seed" and getattr(sampling, f.name) != getattr(Sampling(), f.name)
    ]
    if failure:
        return RequestError(f"{where}: {failure}")
    if row.request.constraints:
        controls.append(f"constraints={[type(constraint).__name__ for constraint in row.request.constraints]}")
    return RequestError(f"{where}: no token is left possible by {', '.join(controls)}; relax one of them")
