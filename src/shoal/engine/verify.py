"""One target pass over the last committed token and the draft tree of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.errors import BadLogits, ShoalError
from shoal.models.runner import Runner
from shoal.sampling.drawing import finite
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.trees import DraftTree, Positions


def verify(target: Runner, rows: Sequence[Row], tree: DraftTree) -> Scores:
    """Scores the m + 1 columns of every row at once; with an empty tree this is a step of plain decoding."""
    last = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)
    block = torch.cat([last, tree.tokens], dim=1) if tree.m else last
    counts = [1 + len(drafts) for drafts in tree.drafts]
    if min(counts) < max(counts):
        # Padding is the row's own token: hidden keys count with weight 0, but where they are NaN, 0 * NaN is NaN.
        own = torch.arange(block.shape[1], device=block.device) < torch.tensor(counts, device=block.device)[:, None]
        block = torch.where(own, block, last)
    logits = target.feed([row.slot for row in rows], block, counts, parents=tree.parents if tree.branches else None)
    scores = replace(scores_of(target, rows, tree, logits), hidden=target.hidden)
    if not finite(logits[..., 0]):
        # A state that is NaN makes NaN of every logit. What its column has left in the cache must be found wherever it stands.
        scores.p(scores.everything())
    return scores


def scores_of(target: Runner, rows: Sequence[Row], tree: DraftTree, logits: Tensor) -> Scores:
    """What the target says of a draft tree, by logits [rows, m + 1, vocab]."""
    return Scores(logits, Positions.of(rows, tree), named=lambda error: _named(error, target))


def _named(error: ShoalError, target: Runner) -> ShoalError:
    """With the name that the user gave the model, if the model is at fault."""
    if not isinstance(error, BadLogits):
        return error
    advice = f"the weights may be damaged, or {target.dtype} may overflow: try dtype='float32'"
    return BadLogits(f"{target.name} returned NaN or infinite logits: {error}; {advice}")
