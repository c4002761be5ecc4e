"""Steps of rounds in one call each: pass, draw, and the next block, by the kernels in C.

A step feeds itself: it leaves the drawn tokens at the place where the next step reads them. No work
remains between two calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.models.attention.unfused import takes
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.draft_functions import DraftedStep
from shoal.models.executor import C_DECODER
from shoal.models.lean.whole import WholePass, require_done
from shoal.native import DraftStepStruct, DrawsStruct
from shoal.native.build import SUFFIXES, library
from shoal.sampling.native_draws import block_of, settings_of

if TYPE_CHECKING:
    from shoal.models.runner import Runner

BYTES_AT_ONCE = 1200 << 20
"""The bytes of weights that passes may read before Python looks at their tokens."""


@dataclass(frozen=True)
class Drawing:
    """The settings of the draws of a round's steps, and of their results.

    Attributes:
        vocab_size: the width of q, at most the drafter's own.
        samplings: the sampling settings of the rows.
        uniforms: [rows, at least the number of steps, ...] float64.
        race: True draws by an exponential race (`shoal.sampling.native_draws`).
        want_q: True if the steps return q beside the tokens.
        want_highest: True if the steps return the highest probabilities beside the tokens.
        logprobs: receives the natural logs of the tokens' probabilities by the logits alone,
            [steps, rows] float32; None = they are not computed.
    """

    vocab_size: int
    samplings: Sequence[Sampling]
    uniforms: Tensor
    race: bool
    want_q: bool
    want_highest: bool
    logprobs: Tensor | None = None


class LeanSteps:
    """The steps of one round.

    Args:
        whole: the passes of the drafter.
        pending: the tokens of the first pass, [rows, q] int64.
        most: the largest number of steps.
    """

    def __init__(
        self,
        whole: WholePass,
        cache: SlotCache,
        plan: Plan,
        pending: Tensor,
        most: int,
        drawing: Drawing,
    ) -> None:
        vocab_size = drawing.vocab_size
        rows = plan.rows
        logits = torch.empty(rows, 1, whole.decoder.head.shape[0], dtype=whole.decoder.dtype)
        self._tokens = torch.empty(most, rows, dtype=torch.long)
        self._probs = torch.empty(most, rows)
        self._highest = torch.empty(most, rows) if drawing.want_highest else None
        self._q = torch.empty(most, rows, vocab_size) if drawing.want_q else None
        work = whole.prepared(plan, pending, cache, logits, ahead=most)
        work.pass_.last_only = 1
        block, drawn_from = block_of(
            logits[..., :vocab_size], settings_of(drawing.samplings), drawing.uniforms, drawing.race
        )
        addresses = (
            None if tensor is None else tensor.data_ptr()
            for tensor in (self._highest, self._q, drawing.logprobs)
        )
        draws = DrawsStruct(block, self._tokens.data_ptr(), self._probs.data_ptr(), *addresses)
        self._step = DraftStepStruct(
            work.pass_, draws, work.bounds.buffer_info()[0], work.pass_.tree_positions
        )
        # The step has the addresses of these objects.
        self._owners = work.owners, work.bounds, drawn_from, drawing.logprobs
        self._draft: Any = getattr(library(), f"draft_{SUFFIXES[whole.decoder.dtype]}")
        self._cache, self._slots, self._counts, self._number = cache, plan.slots, plan.counts, 0

    def __call__(self) -> DraftedStep | None:
        """Computes the next step; returns None if a row has no distribution. Raises MemoryError."""
        result = self._draft(ctypes.byref(self._step))
        require_done(max(0, -result))
        for slot, count in zip(self._slots, self._counts, strict=True):
            self._cache.lengths[slot] += count
        self._counts = [1] * len(self._slots)
        if result:
            return None
        j, self._number = self._number, self._number + 1
        confidence = self._probs if self._highest is None else self._highest
        return DraftedStep(None if self._q is None else self._q[j], self._tokens[j], confidence[j])


def rounds_at_once(runner: Runner) -> int:
    """Returns the most plain rounds that `lean_steps` may compute before Python looks at them.

    These passes together read at most `BYTES_AT_ONCE` of weights, which takes some thirty
    milliseconds.
    """
    whole = None if runner.captures is not None or runner.lean is None else runner.lean.whole
    return 1 if whole is None or runner.ordinary_only else BYTES_AT_ONCE // whole.weight_bytes


def lean_steps(
    runner: Runner,
    slots: Sequence[int],
    pending: Tensor,
    counts: Sequence[int],
    most: int,
    drawing: Drawing,
) -> Callable[[], DraftedStep | None] | None:
    """Returns the steps of a round over a runner's cache; None if lean passes cannot compute them.

    A step returns None if it failed; then the rows must go back to their earlier lengths.

    Args:
        runner: the model that drafts, or that decodes plainly.
        slots: one slot per row.
        pending: the tokens of the first pass, [rows, q] int64.
        counts: the number of tokens of each row in it.
        most: the largest number of steps.
        drawing: the settings of the draws.
    """
    lean = runner.lean
    if runner.captures is not None or lean is None or lean.decoder.stale:
        return None
    if lean.whole is None or runner.vocab_size < drawing.vocab_size:
        return None
    plan = runner.plan(slots, counts, packed=runner.packs)
    if not takes(plan) or plan.kv + most - 1 > runner.cache.capacity:
        return None
    steps = LeanSteps(lean.whole, runner.cache, plan, pending, most, drawing)

    def step() -> DraftedStep | None:
        with runner.counts.timed(runner.name):
            result = steps()
            runner.counts.executors[C_DECODER] += 1
            return result

    return step
