"""The steps that read one position's scores alone: top_k, top_p, min_p, typical_p.

Which tokens stay is decided as Transformers' warpers decide it, ties included. The work is done on each position's
highest-scoring candidates, sorted, instead of the whole vocabulary. Where a mass decides and the kept set does not provably end
inside that list, the lowest score that is kept is found by bisection; no vocabulary is sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.sampling.selection import largest, last_needed, row_sums, weights_from

_FIRST = 64
"""Candidates tried first where a mass decides: enough for a peaked distribution, cheap when they are not."""
_TIES = 16
"""Candidates beyond top_k, so that a few ties with the k-th score do not force a wider list."""
_WIDEN = 4
_TOGETHER = 1 << 19
"""Scores computed together on a CPU: the temporaries of more leave its caches."""


def truncates(sampling: Sampling) -> bool:
    """True when some of top_k, top_p, min_p, typical_p is on."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.typical_p < 1)


def truncated_softmax(scores: Tensor, sampling: Sampling, whole: bool = False) -> Tensor:
    """Softmax over the tokens that top_k, top_p, min_p and typical_p keep, in this order; 0 elsewhere.

    top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". min_p: Nguyen et al. 2024, "Turning Up
    the Heat". typical_p: Meister et al. 2022, "Locally Typical Sampling". Each step renormalises over what the one
    before kept. Ties: top_k keeps all scores equal to the k-th; top_p takes the lower id first (Transformers leaves the
    choice to an unstable sort); typical_p keeps all tokens as typical as the last one.

    Args:
        scores: [n, vocab] float, after temperature; each row's highest score is finite. Not modified.
        whole: sort the whole vocabulary at once. Slower on a CPU, but the work does not depend on the scores, so that it can be
            captured in a graph.

    Returns:
        [n, vocab] probabilities, same dtype.
    """
    rows, vocab = scores.shape
    if sampling.top_k:
        return _truncate(scores, sampling, vocab if whole else min(sampling.top_k, vocab) + _TIES)
    together = max(1, _TOGETHER // vocab)
    if rows > together and not whole and scores.device.type == "cpu":
        truncated = torch.empty_like(scores)
        for start in range(0, rows, together):
            truncated[start : start + together] = truncated_softmax(scores[start : start + together], sampling)
        return truncated
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        return _truncate(scores, sampling, vocab if whole else _FIRST, probs)
    return _min_and_typical(probs, sampling, vocab if whole else _FIRST)


def _min_and_typical(probs: Tensor, sampling: Sampling, width: int) -> Tensor:
    """Probabilities [n, vocab] after min_p and typical_p."""
    if sampling.min_p:
        probs = weights_from(probs, sampling.min_p * probs.amax(-1, keepdim=True), probs)
        probs = probs.div_(row_sums(probs).to(probs.dtype))
    return _typical(probs, sampling.typical_p, width) if sampling.typical_p < 1 else probs


def _truncate(scores: Tensor, sampling: Sampling, width: int, before: Tensor | None = None) -> Tensor:
    """`truncated_softmax` from the `width` highest scores of each row [n, vocab], from more where they do not suffice.

    before: softmax of the scores; needed when top_p comes without top_k.
    """
    values, ids, complete = largest(scores, width)
    kept = end = _keep_top_k(values, sampling.top_k) if sampling.top_k else values
    if sampling.top_p < 1:
        if not complete:
            ids = _lower_id_first(values, ids)
        # The highest probability is 1 / the sum of exp(score - highest score).
        kept = _keep_top_p(kept, None if before is None else before.amax(-1, keepdim=True).reciprocal(), sampling.top_p)
        end = end if sampling.top_k else kept
    if sampling.min_p:
        kept = _keep_min_p(kept, sampling.min_p)
    if sampling.typical_p < 1:
        probs = kept.softmax(-1)
        kept = kept.masked_fill(_typical(probs, sampling.typical_p, probs.shape[-1]) == 0, -torch.inf)
    probs = torch.zeros_like(scores).scatter_(-1, ids, kept.softmax(-1))
    # Outside the list no score is above the list's last; where the first cut kept that one, it may have ties out there.
    if complete or not bool((short := _lowest(end) <= values[:, -1]).any()):
        return probs
    rows = short.nonzero().squeeze(1)
    some = scores.index_select(0, rows)
    if before is None:
        return probs.index_copy_(0, rows, _truncate(some, sampling, _WIDEN * width))
    kept = _nucleus(some, before.index_select(0, rows), sampling.top_p)
    return probs.index_copy_(0, rows, _min_and_typical(kept, sampling, width))


def _nucleus(scores: Tensor, probs: Tensor, top_p: float) -> Tensor:
    """Probabilities [n, vocab] of the highest scores until they hold `top_p`, the lower id first of equal ones; 0 elsewhere."""
    limit, taken = last_needed(scores, probs, top_p, scores.amax(-1, keepdim=True) + _never_needed(probs, top_p))
    kept = weights_from(scores, limit, probs)
    ties = torch.eq(scores, limit, out=torch.empty_like(scores))
    split = (row_sums(ties) > taken).squeeze(1).nonzero().squeeze(1)
    if len(split):
        tied = ties[split] > 0
        kept[split] *= ~tied | (tied.cumsum(-1) <= taken[split])
    return kept.div_(row_sums(kept).to(kept.dtype))


def _never_needed(probs: Tensor, mass: float) -> Tensor:
    """A logarithm [n, 1]: all tokens that are so much less probable than the first hold less than 1 - mass together."""
    least = max((1 - mass) / (2 * probs.shape[-1]), torch.finfo(probs.dtype).tiny)
    return (least / probs.amax(-1, keepdim=True)).log_()


def _typical(probs: Tensor, mass: float, width: int) -> Tensor:
    """Probabilities [n, m] of the tokens whose surprise is nearest the entropy, until they hold `mass`; 0 elsewhere."""
    logp = probs.log()
    entropy = (logp * probs).nansum(-1, keepdim=True).neg_()
    nearness = logp.add_(entropy).abs_().neg_()
    nearest, ids, complete = largest(nearness, width)
    cumulative = probs.gather(-1, ids).cumsum(-1)
    needed = (cumulative < mass).sum(-1, keepdim=True).clamp_(max=nearest.shape[-1] - 1)
    limit = nearest.gather(-1, needed)
    if not complete and bool((short := cumulative[:, -1] < mass).any()):
        rows = short.nonzero().squeeze(1)
        some, own = probs.index_select(0, rows), entropy[rows]
        # Improbable tokens are the farthest from the entropy, but for those that are more probable than it.
        far = torch.maximum(-_never_needed(some, mass) - some.amax(-1, keepdim=True).log() - own, own)
        limit.index_copy_(0, rows, last_needed(nearness.index_select(0, rows), some, mass, -far)[0])
    kept = weights_from(nearness, limit, probs)
    return kept.div_(row_sums(kept).to(kept.dtype))


def _lower_id_first(values: Tensor, ids: Tensor) -> Tensor:
    """The ids of a descending list [n, m], those of equal scores in ascending order."""
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return ids
    ids, order = ids.sort(dim=-1)
    return ids.gather(-1, values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)


def _lowest(kept: Tensor) -> Tensor:
    """The lowest score of each row of a list [n, m] that is not -inf: [n]."""
    return torch.where(kept == -torch.inf, torch.inf, kept).amin(-1)


def _keep_top_k(values: Tensor, k: int) -> Tensor:
    kth = values[:, min(k, values.shape[-1]) - 1, None]
    return values.masked_fill(values < kth, -torch.inf)


def _keep_top_p(values: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    """Keeps the shortest beginning of a descending list [n, m] that reaches top_p of the mass; by default, of its own."""
    cumulative = (values - values[:, :1]).exp_().cumsum(-1)
    mass = cumulative[:, -1:] if mass is None else mass
    enough_before = torch.nn.functional.pad(cumulative[:, :-1] >= top_p * mass, (1, 0))
    return values.masked_fill(enough_before, -torch.inf)


def _keep_min_p(values: Tensor, min_p: float) -> Tensor:
    probs = values.softmax(-1)
    return values.masked_fill(probs < min_p * probs[:, :1], -torch.inf)
