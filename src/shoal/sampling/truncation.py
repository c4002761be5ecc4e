"""The controls that read one position's scores alone: top_k, top_p, min_p, typical_p.

The same tokens are kept as by Transformers' warpers, ties included. The work is done on each
position's highest-scoring candidates, sorted, instead of the whole vocabulary. If a mass decides
and the kept set does not provably end inside that list, the lowest score that is kept is found by
bisection; no vocabulary is sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.sampling.drawing import largest, last_needed, row_sums, weights_from

_FIRST = 64
"""The number of candidates that are tried first if a mass decides.

This number is enough for a peaked distribution, and costs little for a flat one.
"""
_TIES = 16
"""The number of candidates beyond top_k, so that a few ties with the k-th score suffice.

Without them such ties would force a wider list.
"""
_LISTED = 1024
"""The number of candidates of a list that cannot be widened by its results.

For a flat distribution 64 are often too few, and to select 1024 of a vocabulary costs little more.
"""
_WIDEN = 4
_TOGETHER = 1 << 19
"""The number of scores that are computed together on a CPU.

The temporaries of more scores do not fit its caches.
"""


def truncated_softmax(scores: Tensor, sampling: Sampling) -> Tensor:
    """Computes the softmax over the tokens that top_k, top_p, min_p and typical_p keep in turn.

    Other tokens get 0. Each step renormalises over the tokens that the one before kept.

    Sources and ties:
        top_k: keeps all scores equal to the k-th.
        top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"; takes the lower
            id first (Transformers leaves the choice to an unstable sort).
        min_p: Nguyen et al. 2024, "Turning Up the Heat".
        typical_p: Meister et al. 2022, "Locally Typical Sampling"; keeps all tokens as typical as
            the last one.

    Args:
        scores: [n, vocab] float, after temperature; each row's highest score is finite. Not
            modified.

    Returns:
        [n, vocab] probabilities, same dtype.
    """
    rows, vocab = scores.shape
    if sampling.top_k:
        return _truncate(scores, sampling, min(sampling.top_k, vocab) + _TIES)
    together = max(1, _TOGETHER // vocab)
    if rows > together and scores.device.type == "cpu":
        truncated = torch.empty_like(scores)
        for start in range(0, rows, together):
            truncated[start : start + together] = truncated_softmax(
                scores[start : start + together], sampling
            )
        return truncated
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        return _truncate(scores, sampling, _FIRST, probs)
    return _min_and_typical(probs, sampling, _FIRST)


def listed_softmax(scores: Tensor, sampling: Sampling, candidates: int) -> tuple[Tensor, Tensor]:
    """Computes `truncated_softmax` from a fixed number of highest scores of each row.

    The scores may not suffice: the work does not depend on them, so that it can be captured in a
    graph.

    Returns:
        Probabilities [n, vocab].
        A mask of the rows with the probabilities of `truncated_softmax`, [n] bool. The
        probabilities of the other rows are still a distribution, over candidates of the list.
    """
    if sampling.top_k or sampling.top_p < 1:
        values, ids, complete = largest(scores, candidates)
        if sampling.top_p < 1 and not complete:
            ids = _in_order(values, ids)
        peak = None if sampling.top_k else scores.softmax(-1).amax(-1, keepdim=True)
        probs, lowest = _of_list(values, ids, sampling, peak)
        enough = torch.ones_like(lowest, dtype=torch.bool) if complete else lowest > values[:, -1]
        return torch.zeros_like(scores).scatter_(-1, ids, probs), enough
    probs = _min_p(scores.softmax(-1), sampling.min_p)
    if sampling.typical_p == 1:
        return probs, torch.ones_like(probs[:, 0], dtype=torch.bool)
    nearness, _, limit, enough = _typical_limit(probs, sampling.typical_p, candidates)
    return _kept_typical(probs, nearness, limit), enough


def first_candidates(sampling: Sampling) -> int:
    """Returns the number of candidates that `listed_softmax` starts with.

    The number is at least twice top_k, as 16-bit logits have many ties.
    """
    return max(_LISTED, 2 * sampling.top_k)


def wider(candidates: int) -> int:
    """Returns the number of candidates to try after a number that did not suffice."""
    return _WIDEN * candidates


def _min_and_typical(probs: Tensor, sampling: Sampling, width: int) -> Tensor:
    """Computes probabilities [n, vocab] after min_p and typical_p."""
    probs = _min_p(probs, sampling.min_p)
    return _typical(probs, sampling.typical_p, width) if sampling.typical_p < 1 else probs


def _min_p(probs: Tensor, min_p: float) -> Tensor:
    if not min_p:
        return probs
    probs = weights_from(probs, min_p * probs.amax(-1, keepdim=True), probs)
    return probs.div_(row_sums(probs).to(probs.dtype))


def _truncate(
    scores: Tensor, sampling: Sampling, width: int, before: Tensor | None = None
) -> Tensor:
    """Computes `truncated_softmax` from the `width` highest scores of each row [n, vocab].

    More scores are used if these do not suffice.

    Args:
        before: the softmax of the scores; needed if top_p comes without top_k.
    """
    values, ids, complete = largest(scores, width)
    if sampling.top_p < 1 and not complete:
        ids = _lower_id_first(values, ids)
    listed, lowest = _of_list(
        values, ids, sampling, None if before is None else before.amax(-1, keepdim=True)
    )
    probs = torch.zeros_like(scores).scatter_(-1, ids, listed)
    # Outside the list no score is above the list's last. If the first cut kept the last one, it
    # may have ties outside.
    if complete or not bool((short := lowest <= values[:, -1]).any()):
        return probs
    rows = short.nonzero().squeeze(1)
    some = scores.index_select(0, rows)
    if before is None:
        return probs.index_copy_(0, rows, _truncate(some, sampling, wider(width)))
    nucleus = _nucleus(some, before.index_select(0, rows), sampling.top_p)
    return probs.index_copy_(0, rows, _min_and_typical(nucleus, sampling, width))


def _of_list(
    values: Tensor, ids: Tensor, sampling: Sampling, peak: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Applies top_k, top_p, min_p and typical_p to a descending list of scores [n, m].

    Returns probabilities [n, m], and the lowest score that the first of them keeps, [n].

    Args:
        peak: the highest probability [n, 1] of a softmax over the vocabulary; needed if top_p comes
            without top_k.
    """
    scores = end = _keep_top_k(values, sampling.top_k) if sampling.top_k else values
    if sampling.top_p < 1:
        # The highest probability is 1 / the sum of exp(score - highest score).
        scores = _keep_top_p(scores, None if peak is None else peak.reciprocal(), sampling.top_p)
        end = end if sampling.top_k else scores
    if sampling.min_p:
        scores = _keep_min_p(scores, sampling.min_p)
    if sampling.typical_p < 1:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(
            _typical(probs, sampling.typical_p, probs.shape[-1]) == 0, -torch.inf
        )
    return scores.softmax(-1), _lowest(end)


def _nucleus(scores: Tensor, probs: Tensor, top_p: float) -> Tensor:
    """Computes probabilities [n, vocab] of the highest scores until they hold `top_p`.

    Equal scores are taken with the lower id first. Other tokens get 0.
    """
    limit, tie_count = last_needed(
        scores, probs, top_p, scores.amax(-1, keepdim=True) + _needed_distance(probs, top_p)
    )
    nucleus = weights_from(scores, limit, probs)
    ties = torch.eq(scores, limit, out=torch.empty_like(scores))
    split = (row_sums(ties) > tie_count).squeeze(1).nonzero().squeeze(1)
    if len(split):
        tied = ties[split] > 0
        nucleus[split] *= ~tied | (tied.cumsum(-1) <= tie_count[split])
    return nucleus.div_(row_sums(nucleus).to(nucleus.dtype))


def _needed_distance(probs: Tensor, mass: float) -> Tensor:
    """Returns a distance of logarithms [n, 1] beyond which tokens are never needed.

    All tokens that are so much less probable than the first hold less than 1 - mass together.
    """
    least = max((1 - mass) / (2 * probs.shape[-1]), torch.finfo(probs.dtype).tiny)
    return (least / probs.amax(-1, keepdim=True)).log_()


def _typical(probs: Tensor, mass: float, width: int) -> Tensor:
    """Computes probabilities [n, m] of the tokens with a surprise nearest the entropy.

    Tokens are taken until they hold `mass`. Other tokens get 0.
    """
    nearness, entropy, limit, enough = _typical_limit(probs, mass, width)
    if 2 * width <= probs.shape[-1] and not bool(enough.all()):
        rows = enough.logical_not().nonzero().squeeze(1)
        some, own = probs.index_select(0, rows), entropy[rows]
        # Improbable tokens are the farthest from the entropy, except tokens whose surprise is
        # below it.
        far = torch.maximum(
            -_needed_distance(some, mass) - some.amax(-1, keepdim=True).log() - own, own
        )
        limit.index_copy_(0, rows, last_needed(nearness.index_select(0, rows), some, mass, -far)[0])
    return _kept_typical(probs, nearness, limit)


def _typical_limit(probs: Tensor, mass: float, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the least nearness to the entropy that typical_p keeps.

    Returns:
        The nearness of each token's surprise to the entropy, highest for the nearest, [n, m].
        The entropy, [n, 1].
        The least nearness that is kept, found among the `width` nearest tokens, [n, 1].
        A mask of the rows for which these tokens suffice, [n].
    """
    logp = probs.log()
    entropy = (logp * probs).nansum(-1, keepdim=True).neg_()
    nearness = logp.add_(entropy).abs_().neg_()
    nearest, ids, complete = largest(nearness, width)
    cumulative = probs.gather(-1, ids).cumsum(-1)
    place = (cumulative < mass).sum(-1, keepdim=True).clamp_(max=nearest.shape[-1] - 1)
    enough = (
        torch.ones_like(place[:, 0], dtype=torch.bool) if complete else cumulative[:, -1] >= mass
    )
    return nearness, entropy, nearest.gather(-1, place), enough


def _kept_typical(probs: Tensor, nearness: Tensor, limit: Tensor) -> Tensor:
    typical_probs = weights_from(nearness, limit, probs)
    return typical_probs.div_(row_sums(typical_probs).to(typical_probs.dtype))


def _lower_id_first(values: Tensor, ids: Tensor) -> Tensor:
    """Returns the ids of a descending list [n, m], the ids of equal scores in ascending order."""
    return _in_order(values, ids) if bool((values[:, 1:] == values[:, :-1]).any()) else ids


def _in_order(values: Tensor, ids: Tensor) -> Tensor:
    """Computes `_lower_id_first` without the check that some scores are equal."""
    ids, order = ids.sort(dim=-1)
    return ids.gather(
        -1, values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    )


def _lowest(scores: Tensor) -> Tensor:
    """Returns the lowest score of each row of a list [n, m] that is not -inf: [n]."""
    return torch.where(scores == -torch.inf, torch.inf, scores).amin(-1)


def _keep_top_k(values: Tensor, k: int) -> Tensor:
    kth = values[:, min(k, values.shape[-1]) - 1, None]
    return values.masked_fill(values < kth, -torch.inf)


def _keep_top_p(values: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    """Keeps the shortest beginning of a descending list [n, m] that reaches top_p of the mass.

    The default is the mass of the list itself.
    """
    cumulative = (values - values[:, :1]).exp_().cumsum(-1)
    mass = cumulative[:, -1:] if mass is None else mass
    enough_before = torch.nn.functional.pad(cumulative[:, :-1] >= top_p * mass, (1, 0))
    return values.masked_fill(enough_before, -torch.inf)


def _keep_min_p(values: Tensor, min_p: float) -> Tensor:
    probs = values.softmax(-1)
    return values.masked_fill(probs < min_p * probs[:, :1], -torch.inf)
