"""The inputs of a captured round, the comparison of first rounds, and the round that is ahead.

The inputs are the rows, their places in both caches, and uploaded numbers.

First captured rounds are compared with ordinary passes, and with the rule on their logits. A replay
has been compared with its own function before (`shoal.models.compiled.captured_round`). This
comparison finds functions that are wrong themselves: the code of a model may treat the cache of
captured rounds otherwise than that of ordinary passes.

The caches are those from before the round; ordinary passes write the same cells again.

A device may go on with the next round while the host commits the one before (`RoundAhead`). It can
fill the inputs of the next round by the results of the last one (`NextRound.fill`) if the rows,
their settings and their draft lengths stay the same. So the next round is launched before the host
waits for the verdict: no device stands still while the host appends tokens, decodes text, learns
and streams.

A row that ends in the round before has its part of the launched round computed in vain. The results
of the other rows hold, whatever became of it: no row depends on another. Rows therefore keep their
slots until the launched round is over, and no row joins before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.drafting.model import ModelDrafter
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.captured_round import CapturedRound, Launched
from shoal.models.compiled.captures import compare
from shoal.models.compiled.draft_functions import Style, check
from shoal.models.compiled.round_functions import RoundFunctions
from shoal.models.compiled.transfer import Numbers, RoundResults
from shoal.models.runner import Runner
from shoal.types.requests import Row


class Uniforms(Protocol):
    """A function of the uniforms of a round's rows, on the host, [rows, positions, ...] float64."""

    def __call__(self, positions: int, later: int = 0, /) -> Tensor:
        """Returns the uniforms of the next `positions` positions, `later` rounds from now."""
        ...


class DraftRound(NamedTuple):
    """A round to compute.

    Attributes:
        rows: the rows.
        lengths: the number of drafts of each row that are verified.
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
    round_.functions.place("target", work.plan)
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


SCALES = (1.0, 1 - 2.0**-18, 1 + 2.0**-18)
"""The factors of uniforms by which a verdict may be the rule's.

Kernels and the rule round sums of probabilities differently. A uniform that lies between two such
sums draws neighbouring tokens.
"""
APART = 0.5
"""The largest distance of two keys or values that rounding explains, as a share of their length.

Bfloat16 shows a few hundredths. Keys of another token, or of none, are about 1 apart.
"""


def check_drafts(round_: CapturedRound, work: DraftRound, drafter: Runner) -> None:
    """Compares the drafter's steps with ordinary passes.

    Runs before the target's pass, whose function may overwrite the results of the steps.

    Raises:
        ArithmeticError: the steps differ from the ordinary passes.
    """
    functions, first = round_.functions, work.first
    assert first is not None
    steps, tokens = functions.steps, functions.tokens[: len(work.rows)]
    pending = [[own[min(i, len(own) - 1)] for i in range(first.q)] for own in work.pending]
    fed = torch.tensor(pending, device=tokens.device)
    plans = [work.later(j) if j else first for j in range(len(steps))]
    # Unused columns of an ordinary pass write where the next pass will.
    cells = [_written(drafter, plan) for plan in plans]
    for j, (step, plan, ours) in enumerate(zip(steps, plans, cells, strict=True)):
        every = drafter.ordinary(plan, fed)
        last = torch.tensor([count - 1 for count in plan.counts], device=tokens.device)
        right = every[torch.arange(len(work.rows), device=tokens.device), last]
        check(step, right, work.style, functions.temperatures)
        _compare_cells(ours, _written(drafter, plan))
        fed = tokens[:, j + 1 : j + 2]
    round_.checked("draft")


def check_verdict(
    round_: CapturedRound, work: DraftRound, results: RoundResults, target: Runner
) -> None:
    """Compares the target's pass and the verdict with an ordinary pass and the rule.

    Runs after the target's pass.

    Raises:
        ArithmeticError: the pass differs from an ordinary pass on the same drafts, or the verdict
            from the rule's.
    """
    functions, rows, plan = round_.functions, len(work.rows), work.plan
    assert round_.logits is not None
    logits = results.logits.clone()
    require_verdict(functions, round_.logits, results)
    ours = _written(target, plan)
    right = target.ordinary(plan, functions.tokens[:rows, : plan.q].clone())
    real = torch.arange(plan.q) < torch.tensor(plan.counts)[:, None]
    compare(*(block[:, : plan.q][real.to(block.device)] for block in (logits, right)))
    _compare_cells(ours, _written(target, plan))
    round_.checked("verify")


def require_verdict(functions: RoundFunctions, logits: Tensor, results: RoundResults) -> None:
    """Raises ArithmeticError if the rule decides something else, by uniforms scaled by `SCALES`.

    Args:
        functions: the functions of the round.
        logits: the target's logits, [rows, k + 1, vocab].
        results: the results of the real rows.
    """
    same = np.zeros(len(results.accepted), dtype=bool)
    for scale in SCALES:
        verdict = functions.decided(logits, scale)
        both = torch.stack([verdict.accepted, verdict.token])[:, : len(same)].tolist()
        same |= (np.array(both) == [results.accepted, results.tokens]).all(axis=0)
        if same.all():
            return
    raise ArithmeticError("a captured round does not decide what its rule decides")


def _written(runner: Runner, plan: Plan) -> list[Tensor]:
    """Returns the keys and the values in the plan's cells, of each layer [cells, numbers]."""
    cache = runner.cache
    firsts = (
        slot * cache.capacity + start - offset
        for slot, start, offset in zip(plan.slots, plan.starts, plan.offsets, strict=True)
    )
    of_rows = [range(first, first + n) for first, n in zip(firsts, plan.counts, strict=True)]
    cells = torch.tensor([cell for row in of_rows for cell in row], device=runner.device)
    return [
        store.flatten(0, 1)[cells].flatten(1) for stores in cache.stores() for store in stores[:2]
    ]


def _compare_cells(ours: list[Tensor], right: list[Tensor]) -> None:
    """Raises ArithmeticError if a key or a value is not that of an ordinary pass."""
    for one, other in zip(ours, right, strict=True):
        apart = torch.linalg.vector_norm((one - other).float(), dim=1)
        if not bool((apart <= APART * torch.linalg.vector_norm(other.float(), dim=1)).all()):
            raise ArithmeticError("keys or values are not those of an ordinary pass")


class RoundAhead(NamedTuple):
    """A round that was launched while the round before it was under way.

    Attributes:
        round: the functions of both rounds.
        work: the round before, whose rows, settings and draft lengths this one has.
        launched: the target's pass.
        caches: the caches that the round writes to.
        stores: the keys of the first layer of each cache, as they were.
        lengths: the length of each row in the target's cache that the round begins at; empty until
            the verdict of the round before is known.
    """

    round: CapturedRound
    work: DraftRound
    launched: Launched
    caches: Sequence[SlotCache]
    stores: Sequence[Tensor]
    lengths: Sequence[int] = ()

    def places(self, running: Sequence[Row]) -> list[int]:
        """Returns the places of the rows that still run; none if the round is not valid.

        It does not hold if a row has other tokens or another slot than the round was launched with,
        or if a cache has changed its size.

        Args:
            running: the rows in slots.
        """
        rows, now, lengths = self.work.rows, self.caches[0].lengths, self.lengths
        for cache, keys in zip(self.caches, self.stores, strict=True):
            if cache.stores_of(0)[0] is not keys:
                return []
        for row in running:
            place = row.slot
            known = 0 <= place < len(rows) and rows[place] is row
            if not known or now[place] != lengths[place]:
                return []
        return sorted([row.slot for row in running])

    def narrowed(
        self, places: Sequence[int], target: Runner, drafter: ModelDrafter | None
    ) -> DraftRound:
        """Returns the round of the rows at these places, by the caches as they are now."""
        work = self.work
        rows, lengths = [work.rows[b] for b in places], [work.lengths[b] for b in places]
        plan = target.plan([row.slot for row in rows], [1 + length for length in lengths])
        if work.first is None or drafter is None:
            return work._replace(rows=rows, lengths=lengths, plan=plan)
        slots, cache = drafter.slots(rows), drafter.runner.cache
        held = [cache.lengths[slot] for slot in slots]
        pending = [drafter.read_as(row).tokens[own:] for row, own in zip(rows, held, strict=True)]
        first = drafter.runner.plan(slots, [len(tokens) for tokens in pending])
        return work._replace(
            rows=rows, lengths=lengths, plan=plan, first=first, pending=pending, held=held
        )


def may_follow(
    round_: CapturedRound, work: DraftRound, target: Runner, drafter: ModelDrafter | None
) -> bool:
    """Returns True if a round like this one can be launched before the verdict is known.

    All rows must be drafted for alike, in both rounds whatever is accepted; both caches must have
    the room; and all functions must have been checked.
    """
    kind, k, rows = round_.kind, work.k, len(work.rows)
    if not round_.can_advance:
        return False
    room = min(target.cache.capacity, kind.target_keys) - max(work.plan.tails)
    if work.first is not None and drafter is not None:
        if type(drafter).observe is not ModelDrafter.observe:
            return False  # it may read the logits, which the next round writes over
        keys = min(drafter.runner.cache.capacity, kind.draft_keys)
        room = min(room, keys - (max(work.first.tails) + k - 1))
    if room <= k or work.plan.slots != list(range(rows)) or list(work.lengths) != [k] * rows:
        return False
    # K drafts fit behind those of this round, if all of these are accepted.
    for row in work.rows:
        reach = row.draft_context - len(row.tokens) + 1
        if row.remaining < 2 * (k + 1) or (k and reach < 2 * k + 1):
            return False
    return True
