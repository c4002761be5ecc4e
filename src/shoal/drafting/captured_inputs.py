"""The inputs of a captured round: the rows, their places in both caches, and uploaded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from shoal.models.cache import Plan
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.draft_functions import Style
from shoal.models.compiled.transfer import Numbers
from shoal.types.requests import Row


class Uniforms(Protocol):
    """Returns the uniforms of a round of the rows, on the host, [rows, positions, ...] float64."""

    def __call__(self, positions: int, later: int = 0, /) -> Tensor:
        """Returns those of the next `positions` positions, in the round `later` rounds from now."""
        ...


class DraftRound(NamedTuple):
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

    def later(self, step: int) -> Plan:
        """Returns the plan of the drafter's pass `step`; pass 1 is the one after the first."""
        first = self.first
        assert first is not None
        starts = [length + step - 1 for length in first.lengths]
        return Plan(first.slots, starts, [1] * first.rows, first.device, prefixes=first.prefixes)


def fill_drafting(round_: CapturedRound, work: DraftRound, noise: Tensor, vocab_size: int) -> None:
    """Puts the inputs of the drafter's steps and of all draws into place, on the host.

    Args:
        round_: the captured round.
        work: the round to compute.
        noise: the uniforms of the rows, [rows, positions, numbers] float64.
        vocab_size: the size of the drafter's vocabulary.
    """
    functions, rows = round_.functions, len(work.rows)
    inputs, columns = functions.inputs, round_.kind.pending
    temperatures = inputs.reals_on_host("temperatures")
    temperatures[:rows] = [row.request.sampling.temperature for row in work.rows]
    temperatures[rows:] = 1.0
    uniforms = inputs.reals_on_host("uniforms").reshape(functions.uniforms.shape)
    uniforms.fill(0.5)
    uniforms[:rows, : noise.shape[1]] = noise.numpy()
    if work.first is not None:
        functions.place("first", work.first)
        functions.place("later", work.later(1))
        tokens = [[*own, *[0] * (columns - len(own))] for own in work.pending]
        _put(inputs.on_host("pending").reshape(-1, columns), tokens, vocab_size - 1)


def fill_target(round_: CapturedRound, work: DraftRound, vocab_size: int) -> None:
    """Puts the other inputs of the target's pass and of the decision into place, on the host.

    Args:
        round_: the captured round.
        work: the round to compute.
        vocab_size: the size of the target's vocabulary.
    """
    inputs = round_.functions.inputs
    round_.functions.place_target(work.plan, round_.columns(max(work.lengths)))
    _put(inputs.on_host("last"), [row.tokens[-1] for row in work.rows], vocab_size - 1)
    _put(inputs.on_host("lengths"), work.lengths)


def _put(
    part: Numbers, values: Sequence[int] | Sequence[Sequence[int]], most: int | None = None
) -> None:
    """Writes the values of the real rows, at most `most`, and zeros for the rows that pad them."""
    part[: len(values)] = values
    part[len(values) :] = 0
    if most is not None:
        np.minimum(part, most, out=part)
