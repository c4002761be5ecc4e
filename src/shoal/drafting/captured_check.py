"""First runs of captured rounds, compared with ordinary passes and with the rule on the same
logits.

The caches are those before the round; ordinary passes write to them what the captured ones wrote.
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
    """Before the target's pass, whose function may write over what steps have returned.

    Raises:
        ArithmeticError: the steps are not what ordinary passes make of them.
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
    """After the target's pass.

    Raises:
        ArithmeticError: it is not what an ordinary pass and the rule make of the same drafts.
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
