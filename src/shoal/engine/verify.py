"""One target pass over the last committed token and the draft tree of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.engine.guide import Guide
from shoal.errors import BadLogits, ShoalError
from shoal.models.runner import Runner
from shoal.sampling.drawing import finite
from shoal.sampling.guidance import guided
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.trees import Block, DraftTree, Positions, Probes


def verify(
    target: Runner, rows: Sequence[Row], tree: DraftTree, guides: Sequence[Guide] = ()
) -> Scores:
    """Returns the target's scores of the m + 1 columns of every row.

    With an empty tree this is a step of plain decoding.

    Args:
        target: the target, with the engine's cache.
        rows: the rows of the round.
        tree: the drafts of the round.
        guides: the guide of rows with guidance, and the expert, if there is one; the scores of such
            rows are those of the guided target.
    """
    block, counts, parents = _block(target, rows, tree)
    logits = target.feed([row.slot for row in rows], block, counts, parents=parents)
    own = logits[:, : tree.m + 1]
    plain = (block, counts, parents)
    if guides and tree.probes is not None:
        plain = _block(target, rows, replace(tree, probes=None))
    said = [found for one in guides if (found := one.logits(rows, plain)) is not None]
    if said:
        own = guided(own, said[0], [row.request.sampling for row in rows], *said[1:])
    scores = scores_of(target, rows, tree, own)
    scores = replace(scores, hidden=target.hidden, columns=None if tree.probes is None else logits)
    if not all(finite(one[..., 0]) for one in (logits, *said)):
        # A state that is NaN makes NaN of every logit. What its column has left in the cache must
        # be found wherever it stands.
        scores.p()
        _note_probes(scores, logits, target)
    return scores


def _block(target: Runner, rows: Sequence[Row], tree: DraftTree) -> Block:
    if tree.probes is not None:
        return _with_probes(target, rows, tree, tree.probes)
    last = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)
    block = torch.cat([last, tree.tokens], dim=1) if tree.m else last
    counts = [1 + len(drafts) for drafts in tree.drafts]
    if min(counts) < max(counts):
        # Padding is the row's own token: hidden keys count with weight 0, but where they are NaN, 0
        # * NaN is NaN.
        own = (
            torch.arange(block.shape[1], device=block.device)
            < torch.tensor(counts, device=block.device)[:, None]
        )
        block = torch.where(own, block, last)
    return block, counts, tree.parents if tree.branches else None


def _with_probes(target: Runner, rows: Sequence[Row], tree: DraftTree, probes: Probes) -> Block:
    """Returns a block like `_block`, with each row's probes behind its nodes.

    The probes are leaves, apart from other probes that follow them, so no token sees them.
    """
    pairs = zip(rows, tree.drafts, probes.vectors, strict=True)
    own = [
        [row.tokens[-1], *draft, *(-1 - vector for vector in vectors)]
        for row, draft, vectors in pairs
    ]
    counts = [len(columns) for columns in own]
    padded = [columns + columns[:1] * (max(counts) - len(columns)) for columns in own]
    parents = [
        [*nodes, *(column - 1 for column in after)]
        for nodes, after in zip(tree.parents, probes.after, strict=True)
    ]
    return torch.tensor(padded, device=target.device), counts, parents


def _note_probes(scores: Scores, logits: Tensor, target: Runner) -> None:
    """Notes the columns behind all nodes that are not finite.

    No row's path reaches them, but their cells must be zeroed.
    """
    first = scores.logits.shape[1]
    for b, column in (~logits[:, first:, 0].isfinite()).nonzero().tolist():
        error = BadLogits(f"column {first + column}, which the drafter reads, is NaN or infinite")
        scores.faults.setdefault(scores.positions.rows[b], {})[first + column] = _named(
            error, target
        )


def scores_of(target: Runner, rows: Sequence[Row], tree: DraftTree, logits: Tensor) -> Scores:
    """Returns the target's scores of a draft tree, by logits [rows, m + 1, vocab]."""
    return Scores(logits, Positions.of(rows, tree), named=lambda error: _named(error, target))


def _named(error: ShoalError, target: Runner) -> ShoalError:
    """Returns the error with the user's name of the model, if the model is at fault."""
    if not isinstance(error, BadLogits):
        return error
    advice = f"the weights may be damaged, or {target.dtype} may overflow: try dtype='float32'"
    return BadLogits(f"{target.name} returned NaN or infinite logits: {error}; {advice}")
