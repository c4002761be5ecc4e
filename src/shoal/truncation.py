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

_NUCLEUS = 64
"""Candidates tried first for a plain top_p: enough for a peaked distribution, cheap when they are not."""
_TIES = 16
"""Candidates beyond top_k, so that a few ties with the k-th score do not force a wider list."""
_WIDEN = 16


def truncates(sampling: Sampling) -> bool:
    """True when some of top_k, top_p, min_p, typical_p is on."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.typical_p < 1)


def truncated_softmax(scores: Tensor, sampling: Sampling) -> Tensor:
    """Softmax over the tokens that top_k, top_p, min_p and typical_p keep, in this order; 0 elsewhere.

    top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". min_p: Nguyen et al. 2024, "Turning Up
    the Heat". typical_p: Meister et al. 2022, "Locally Typical Sampling". Each step renormalises over what the one
    before kept. Ties: top_k keeps all scores equal to the k-th; top_p takes the lower id first (Transformers leaves the
    choice to an unstable sort); typical_p keeps all tokens as typical as the last one.

    Args:
        scores: [n, vocab] float, after temperature; each row's highest score is finite. Not modified.

    Returns:
        [n, vocab] probabilities, same dtype.
    """
    if not (sampling.top_k or sampling.top_p < 1 or sampling.typical_p < 1):
        return _min_p_softmax(scores, sampling.min_p)
    vocab = scores.shape[-1]
    if sampling.top_k:
        return _truncate(scores, sampling, min(sampling.top_k, vocab) + _TIES)
    # Typicality orders tokens by surprise, not by score, so without another cut every token is a candidate.
    return _truncate(scores, sampling, _NUCLEUS if sampling.top_p < 1 else vocab)


def _min_p_softmax(scores: Tensor, min_p: float) -> Tensor:
    probs = scores.softmax(-1)
    probs = torch.where(probs < min_p * probs.amax(-1, keepdim=True), 0.0, probs)
    return probs / probs.sum(-1, keepdim=True)


def _truncate(scores: Tensor, sampling: Sampling, width: int) -> Tensor:
    """`truncated_softmax` from the `width` highest scores of each row [n, vocab], wider where they do not suffice."""
    vocab = scores.shape[-1]
    complete = 2 * width > vocab
    values, ids = scores.sort(dim=-1, descending=True, stable=True) if complete else _largest(scores, width)
    if not complete and sampling.top_p < 1:
        values, ids = _lower_id_first(values, ids)
    kept = end = _keep_top_k(values, sampling.top_k) if sampling.top_k else values
    if sampling.top_p < 1:
        mass = kept if complete or sampling.top_k else scores
        kept = _keep_top_p(kept, mass.logsumexp(-1, keepdim=True), sampling.top_p)
        end = end if sampling.top_k else kept
    if sampling.min_p:
        kept = _keep_min_p(kept, sampling.min_p)
    if sampling.typical_p < 1:
        kept = _keep_typical(kept, sampling.typical_p)
    probs = torch.zeros_like(scores).scatter_(-1, ids, kept.softmax(-1))
    # Outside the list no score is above the list's last; where the first cut kept that one, it may have ties out there.
    if not complete and bool((short := _lowest(end) <= values[:, -1]).any()):
        probs[short] = _truncate(scores[short], sampling, _WIDEN * width)
    return probs


def _largest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` highest scores of each row [n, vocab] and their ids, highest first; ties in any order.

    In two levels: the `width` highest of the maxima of disjoint columns hold the `width` highest scores, and both
    selections are much shorter than one over the vocabulary.
    """
    n, vocab = scores.shape
    depth = 1 << round(0.5 * math.log2(vocab / width))
    if depth < 4:
        return scores.topk(width, dim=-1)
    stride = vocab // depth
    columns = scores[:, : depth * stride].reshape(n, depth, stride).amax(1).topk(width, dim=-1, sorted=False).indices
    ids = (columns[:, None] + torch.arange(0, depth * stride, stride, device=scores.device)[:, None]).flatten(1)
    rest = torch.arange(depth * stride, vocab, device=scores.device)
    ids = torch.cat([ids, rest.expand(n, -1)], dim=-1)
    values, order = scores.gather(-1, ids).topk(width, dim=-1)
    return values, ids.gather(-1, order)


def _lower_id_first(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Orders equal scores of a descending list [n, m] by id."""
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return values, ids
    ids, order = ids.sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _lowest(kept: Tensor) -> Tensor:
    """The lowest score of each row of a list [n, m] that is not -inf: [n]."""
    return torch.where(kept == -torch.inf, torch.inf, kept).amin(-1)


def _keep_top_k(values: Tensor, k: int) -> Tensor:
    kth = values[:, min(k, values.shape[-1]) - 1, None]
    return values.masked_fill(values < kth, -torch.inf)


def _keep_top_p(values: Tensor, log_mass: Tensor, top_p: float) -> Tensor:
    """Keeps the shortest beginning of a descending list [n, m] that reaches top_p of a total mass exp(log_mass) [n, 1]."""
    cumulative = (values - log_mass).exp().cumsum(-1)
    drop = torch.zeros_like(values, dtype=torch.bool)
    torch.ge(cumulative[:, :-1], top_p, out=drop[:, 1:])
    return values.masked_fill(drop, -torch.inf)


def _keep_min_p(values: Tensor, min_p: float) -> Tensor:
    probs = values.softmax(-1)
    return values.masked_fill(probs < min_p * probs[:, :1], -torch.inf)


def _keep_typical(values: Tensor, mass: float) -> Tensor:
    """Keeps the tokens of a list [n, m] whose surprise is nearest the entropy, until they hold `mass`."""
    logp = values.log_softmax(-1)
    probs = logp.exp()
    entropy = -(logp * probs).nansum(-1, keepdim=True)
    distance, order = (-logp - entropy).abs().sort(dim=-1, stable=True)
    needed = (probs.gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True).clamp_(max=values.shape[-1] - 1)
    return values.masked_fill((-logp - entropy).abs() > distance.gather(-1, needed), -torch.inf)
