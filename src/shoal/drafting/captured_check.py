"""The comparison of first captured rounds with ordinary passes, and with the rule on their logits.

The caches are those from before the round; ordinary passes write the same cells again.
"""

from __future__ import annotations

import torch

from shoal.drafting.captured_inputs import Round
from shoal.models.compiled.captures import compare
from shoal.models.compiled.drafting import check
from shoal.models.compiled.results import Found
from shoal.models.compiled.rounds import CapturedRound
from shoal.models.runner import Runner


def check_drafts(round_: CapturedRound, work: Round, drafter: Runner) -> None:
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
    for j, step in enumerate(steps):
        assert step is not None
        plan = work.later(j) if j else first
        every = drafter.ordinary(plan, fed)
        last = torch.tensor([count - 1 for count in plan.counts], device=tokens.device)
        right = every[torch.arange(len(work.rows), device=tokens.device), last]
        check(step, right, work.style, functions.temperatures)
        fed = tokens[:, j + 1 : j + 2]
    round_.checked("draft")


def check_verdict(round_: CapturedRound, work: Round, found: Found, target: Runner) -> None:
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
    right = target.ordinary(plan, functions.tokens[:rows, : plan.q].clone())
    real = torch.arange(plan.q) < torch.tensor(plan.counts)[:, None]
    compare(*(block[:, : plan.q][real.to(block.device)] for block in (logits, right)))
    round_.checked("verify")
