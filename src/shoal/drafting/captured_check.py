"""The comparison of first captured rounds with ordinary passes, and with the rule on their logits.

A replay has been compared with its own function before (`shoal.models.compiled.replays`). This
comparison finds functions that are wrong themselves: the code of a model may treat the cache of
captured rounds otherwise than that of ordinary passes.

The caches are those from before the round; ordinary passes write the same cells again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.drafting.captured_inputs import DraftRound
from shoal.models.cache import Plan
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.captures import compare
from shoal.models.compiled.draft_functions import check
from shoal.models.compiled.results import Found
from shoal.models.runner import Runner

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
    steps, tokens = functions.steps[: work.k], functions.tokens[: len(work.rows)]
    pending = [[own[min(i, len(own) - 1)] for i in range(first.q)] for own in work.pending]
    fed = torch.tensor(pending, device=tokens.device)
    plans = [work.later(j) if j else first for j in range(len(steps))]
    # Unused columns of an ordinary pass write where the next pass will.
    cells = [_written(drafter, plan) for plan in plans]
    for j, (step, plan, ours) in enumerate(zip(steps, plans, cells, strict=True)):
        assert step is not None
        every = drafter.ordinary(plan, fed)
        last = torch.tensor([count - 1 for count in plan.counts], device=tokens.device)
        right = every[torch.arange(len(work.rows), device=tokens.device), last]
        check(step, right, work.style, functions.temperatures)
        _compare_cells(ours, _written(drafter, plan))
        fed = tokens[:, j + 1 : j + 2]
    round_.checked("draft")


def check_verdict(round_: CapturedRound, work: DraftRound, found: Found, target: Runner) -> None:
    """Compares the target's pass and the verdict with an ordinary pass and the rule.

    Runs after the target's pass.

    Raises:
        ArithmeticError: the pass differs from an ordinary pass on the same drafts, or the verdict
            from the rule's.
    """
    functions, rows, plan = round_.functions, len(work.rows), work.plan
    assert round_.logits is not None
    logits = found.logits.clone()
    verdict = functions.decided(round_.logits)
    decided = torch.stack([verdict.accepted, verdict.token])[:, :rows].tolist()
    if decided != [found.accepted.tolist(), found.tokens.tolist()]:
        raise ArithmeticError("a captured round does not decide what its rule decides")
    ours = _written(target, plan)
    right = target.ordinary(plan, functions.tokens[:rows, : plan.q].clone())
    real = torch.arange(plan.q) < torch.tensor(plan.counts)[:, None]
    compare(*(block[:, : plan.q][real.to(block.device)] for block in (logits, right)))
    _compare_cells(ours, _written(target, plan))
    round_.checked("verify")


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
