"""The inputs of a captured round: the rows, their places in both caches, and uploaded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shoal.models.cache import Plan
from shoal.models.compiled.drafting import Style
from shoal.models.compiled.rounds import CapturedRound
from shoal.types.requests import Row


@dataclass(frozen=True)
class Round:
    """A round to compute.

    Attributes:
        rows: the rows.
        lengths: the number of drafts of each row that are verified; before they are drawn, the most
            that there may be.
        style: the way in which tokens are drawn.
        k: the number of drafts that are computed for each row, at least the longest length.
        plan: the plan of the target's pass.
        first: the plan of the drafter's first pass, which feeds `pending`; None if nothing is
            drafted.
        pending: for each row, the tokens that the drafter's cache lacks.
        held: the number of tokens of each row in the drafter's cache.
    """

    rows: Sequence[Row]
    lengths: Sequence[int]
    style: Style
    k: int
    plan: Plan
    first: Plan | None
    pending: Sequence[Sequence[int]]
    held: Sequence[int]

    def later(self, step: int, count: int = 1) -> Plan:
        """Returns the plan of the drafter's pass `step`; pass 1 is the one after the first."""
        first = self.first
        assert first is not None
        starts = [length + step - 1 for length in first.lengths]
        return Plan(
            first.slots, starts, [count] * first.rows, first.device, prefixes=first.prefixes
        )


def fill_drafting(round_: CapturedRound, work: Round, noise: Tensor, vocab_size: int) -> None:
    """Puts the inputs of the drafter's steps and of all draws into place, on the host.

    Args:
        round_: the captured round.
        work: the round to compute.
        noise: the uniforms of the rows, [rows, positions, numbers] float64.
        vocab_size: the size of the drafter's vocabulary.
    """
    functions, rows = round_.functions, len(work.rows)
    inputs, padded = functions.inputs, round_.kind.rows
    temperatures = np.ones(padded)
    temperatures[:rows] = [row.request.sampling.temperature for row in work.rows]
    inputs.put("temperatures", temperatures)
    uniforms = np.full(tuple(functions.uniforms.shape), 0.5)
    uniforms[:rows, : noise.shape[1]] = noise.numpy()
    inputs.put("uniforms", uniforms)
    if work.first is not None:
        functions.place("first", work.first)
        functions.place("later", work.later(1))
        columns = range(round_.kind.pending)
        tokens = [
            [min(own[i], vocab_size - 1) if i < len(own) else 0 for i in columns]
            for own in work.pending
        ]
        inputs.put("pending", _padded(tokens, padded))


def fill_target(round_: CapturedRound, work: Round, vocab_size: int) -> None:
    """Puts the other inputs of the target's pass and of the decision into place, on the host.

    Args:
        round_: the captured round.
        work: the round to compute.
        vocab_size: the size of the target's vocabulary.
    """
    inputs, rows = round_.functions.inputs, round_.kind.rows
    round_.functions.place_target(work.plan, round_.columns(max(work.lengths)))
    inputs.put("last", _padded([min(row.tokens[-1], vocab_size - 1) for row in work.rows], rows))
    inputs.put("lengths", _padded(work.lengths, rows))


def _padded(
    values: Sequence[int] | Sequence[Sequence[int]], rows: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the values of the real rows, followed by zeros up to `rows` rows."""
    own = np.array(values, dtype=np.int64)
    return np.concatenate([own, np.zeros((rows - len(own), *own.shape[1:]), dtype=np.int64)])
