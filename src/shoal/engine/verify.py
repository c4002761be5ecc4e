"""One target pass over [last committed, drafts...] of every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import BadLogits
from shoal.models.runner import Runner
from shoal.sampling.distributions import probabilities
from shoal.types.requests import Row
from shoal.types.rounds import Fault, Faults, Proposal, Scores


def verify(target: Runner, rows: Sequence[Row], proposal: Proposal) -> Scores:
    """Scores all k + 1 positions of every row at once; with an empty proposal this is a step of plain decoding."""
    last = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)
    block = torch.cat([last, proposal.tokens], dim=1)
    counts = [1 + len(drafts) for drafts in proposal.drafts]
    if min(counts) < max(counts):
        # Padding is the row's own token: hidden keys count with weight 0, but where they are NaN, 0 * NaN is NaN.
        own = torch.arange(block.shape[1], device=block.device) < torch.tensor(counts, device=block.device)[:, None]
        block = torch.where(own, block, last)
    logits = target.feed([row.slot for row in rows], block, counts)
    faults: Faults = {}
    p = probabilities(logits, rows, proposal.drafts, faults=faults)
    return Scores(logits, p, _normaliser(logits), {row: _named(fault, target) for row, fault in faults.items()})


def _named(fault: Fault, target: Runner) -> Fault:
    """With what the user knows the model by, if it is the model's."""
    if not isinstance(fault.error, BadLogits):
        return fault
    advice = f"the weights may be damaged, or {target.dtype} may overflow: try dtype='float32'"
    return Fault(fault.position, BadLogits(f"{target.name} returned NaN or infinite logits: {fault.error}; {advice}"))


def _normaliser(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(dim=-1)
