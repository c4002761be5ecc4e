"""One target pass over [last committed, drafts...] of every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.distributions import probabilities
from shoal.errors import BadLogits
from shoal.request import Row
from shoal.round import Proposal, Scores
from shoal.runner import Runner


def verify(target: Runner, rows: Sequence[Row], proposal: Proposal) -> Scores:
    """Scores all k + 1 positions of every row at once; with an empty proposal this is a step of plain decoding.

    Raises:
        BadLogits: NaN or +inf in a row's own positions.
    """
    last = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)
    block = torch.cat([last, proposal.tokens], dim=1)
    counts = [1 + len(drafts) for drafts in proposal.drafts]
    logits = target.feed([row.slot for row in rows], block, counts)
    try:
        p = probabilities(logits, rows, proposal.drafts)
    except BadLogits as error:
        advice = f"the weights may be damaged, or {target.dtype} may overflow: try dtype='float32'"
        raise BadLogits(f"{target.name} returned NaN or infinite logits: {error}; {advice}") from error
    return Scores(logits, p, _normaliser(logits))


def _normaliser(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(dim=-1)
