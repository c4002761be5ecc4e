"""The steps that read one position's scores alone: top_k, top_p, min_p, typical_p.

Which tokens stay is decided as Transformers' warpers decide it, ties included. The work is done on each position's
highest-scoring candidates, sorted, instead of the whole vocabulary: the list is widened only for the positions whose
kept set does not provably end inside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.config import Sampling

_FIRST = 64
"""Candidates tried first where a mass decides: enough for a peaked distribution, cheap when they are not."""
_TIES = 16
"""Candidates beyond top_k, so that a few ties with the k-th score do not force a wider list."""
_WIDEN = 4


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
    vocab = scores.shape[-1]
    if sampling.top_k:
        return _truncate(scores, sampling, vocab if whole else min(sampling.top_k, vocab) + _TIES)
    if sampling.top_p < 1:
        mass = (scores - scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True)
        return _truncate(scores, sampling, vocab if whole else _FIRST, mass)
    probs = scores.softmax(-1)
    if sampling.min_p:
        probs = torch.where(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0, probs)
        probs = probs.div_(probs.sum(-1, keepdim=True))
    return _typical(probs, sampling.typical_p, vocab if whole else _FIRST) if sampling.typical_p < 1 else probs


def _truncate(scores: Tensor, sampling: Sampling, width: int, mass: Tensor | None = None) -> Tensor:
    """`truncated_softmax` from the `width` highest scores of each row [n, vocab], wider where they do not suffice.

    mass: [n, 1], sum of exp(score - highest score) over the row; needed when top_p comes without top_k.
    """
    values, ids, complete = _highest(scores, width)
    kept = end = _keep_top_k(values, sampling.top_k) if sampling.top_k else values
    if sampling.top_p < 1:
        if not complete:
            ids = _lower_id_first(values, ids)
        kept = _keep_top_p(kept, mass, sampling.top_p)
        end = end if sampling.top_k else kept
    if sampling.min_p:
        kept = _keep_min_p(kept, sampling.min_p)
    if sampling.typical_p < 1:
        probs = kept.softmax(-1)
        kept = kept.masked_fill(_typical(probs, sampling.typical_p, probs.shape[-1]) == 0, -torch.inf)
    probs = torch.zeros_like(scores).scatter_(-1, ids, kept.softmax(-1))
    # Outside the list no score is above the list's last; where the first cut kept that one, it may have ties out there.
    if not complete and bool((short := _lowest(end) <= values[:, -1]).any()):
        probs[short] = _truncate(scores[short], sampling, _WIDEN * width, None if mass is None else mass[short])
    return probs


def _typical(probs: Tensor, mass: float, width: int) -> Tensor:
    """Probabilities [n, m] of the tokens whose surprise is nearest the entropy, until they hold `mass`; 0 elsewhere."""
    logp = probs.log()
    distance = (logp - (logp * probs).nansum(-1, keepdim=True)).abs()
    nearest, ids, complete = _highest(-distance, width)
    cumulative = probs.gather(-1, ids).cumsum(-1)
    needed = (cumulative < mass).sum(-1, keepdim=True).clamp_(max=nearest.shape[-1] - 1)
    limit = nearest.gather(-1, needed)
    kept = torch.where(-distance < limit, 0.0, probs)
    kept = kept.div_(kept.sum(-1, keepdim=True))
    if not complete and bool((short := cumulative[:, -1] < mass).any()):
        kept[short] = _typical(probs[short], mass, _WIDEN * width)
    return kept


def _highest(scores: Tensor, width: int) -> tuple[Tensor, Tensor, bool]:
    """The `width` highest scores of each row [n, vocab] and their ids, highest first; or all, and True, if width is near
    vocab. Equal scores: lowest id first in a full list, in any order in a short one."""
    if 2 * width > scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids, True
    return *_largest(scores, width), False


def _largest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """torch.topk for a long last dimension, in two levels: the `width` highest of the maxima of disjoint columns hold the
    `width` highest scores, and both selections are much shorter than one over the vocabulary."""
    n, vocab = scores.shape
    depth = 1 << round(0.5 * math.log2(vocab / width))
    if depth < 4:
        values, ids = scores.topk(width, dim=-1)
        return values, ids
    stride = vocab // depth
    columns = scores[:, : depth * stride].reshape(n, depth, stride).amax(1).topk(width, dim=-1, sorted=False).indices
    ids = (columns[:, None] + torch.arange(0, depth * stride, stride, device=scores.device)[:, None]).flatten(1)
    rest = torch.arange(depth * stride, vocab, device=scores.device)
    ids = torch.cat([ids, rest.expand(n, -1)], dim=-1)
    values, order = scores.gather(-1, ids).topk(width, dim=-1)
    return values, ids.gather(-1, order)


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
    drop = torch.zeros_like(values, dtype=torch.bool)
    torch.ge(cumulative[:, :-1], top_p * mass, out=drop[:, 1:])
    return values.masked_fill(drop, -torch.inf)


def _keep_min_p(values: Tensor, min_p: float) -> Tensor:
    probs = values.softmax(-1)
    return values.masked_fill(probs < min_p * probs[:, :1], -torch.inf)
