"""The rejection sampling of chains.

After Leviathan et al. 2023, Theorem 1 and Algorithm 1; Chen et al. 2023, Algorithm 2. Draft x is
accepted with probability min(1, p(x)/q(x)). The chains must be drawn from a q that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.sampling.acceptance.one_sample import accepted_lengths
from shoal.sampling.distributions import Sampler
from shoal.sampling.drawing import inverse_transform
from shoal.sampling.scores import Scores, by_kernel
from shoal.types.trees import DraftTree, Verdict


def acceptance_mask(p_draft: Tensor, q_draft: Tensor, uniforms: Tensor) -> Tensor:
    """Returns a mask of the drafts that pass on their own: u < p(x)/q(x).

    The comparison is computed without the division so that q(x) = 0 is safe.

    Args:
        p_draft: the target's probabilities of the draft tokens, [rows, k] float.
        q_draft: the drafter's probabilities of the draft tokens, [rows, k] float.
        uniforms: in [0, 1), [rows, k] float64.

    Returns:
        [rows, k] bool. A draft with p(x) = 0 never passes, not even at u = 0.
    """
    return uniforms * q_draft.double() < p_draft.double()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Computes norm(max(p - q, 0)), [..., vocab]: the rest of p without the drafter's share.

    If rounding leaves nothing (p = q up to the last bit, so a rejection has probability 0 in exact
    arithmetic) the result is p itself, never 0/0.
    """
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    nothing = mass <= 0
    # A product: a selection of values by truth values takes many times as long.
    return rest.addcmul_(p, nothing.to(p.dtype)).div_(torch.where(nothing, 1.0, mass))


def reject_and_replace(
    drafts: Tensor,
    draft_lengths: Tensor,
    q: Tensor | None,
    p: Tensor,
    u_accept: Tensor,
    u_next: Tensor,
    sampler: Sampler = inverse_transform,
) -> Verdict:
    """Decides on a ragged batch by speculative rejection sampling.

    Args:
        drafts: draft tokens, [rows, k] int64; columns beyond a row's own draft length are padding.
        draft_lengths: [rows] int64, at most k.
        q: drafter distributions, [rows, k, vocab]; None if k = 0.
        p: target distributions, [rows, k + 1, vocab].
        u_accept: [rows, k] float64.
        u_next: [rows, k + 1, 2] float64: for the token after j accepted drafts, the uniform for a
            replacement ([..., 0]) and for a bonus ([..., 1]).
        sampler: `inverse_transform`, by whatever computes it.
    """
    k = drafts.shape[1]
    if q is None or k == 0:
        token = sampler(p[:, 0], u_next[:, 0, 1:2])
        return Verdict(torch.zeros_like(draft_lengths), token, p[:, 0].gather(1, token[:, None]))
    index = drafts[..., None]
    p_draft, q_draft = p[:, :k].gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)
    accepted = accepted_lengths(acceptance_mask(p_draft, q_draft, u_accept), draft_lengths)
    rows, rejected = torch.arange(len(p), device=p.device), accepted < draft_lengths
    # No token was drafted at the place of the bonus: q counts as zero, and the residual is p.
    p_next = p.flatten(0, 1).index_select(0, rows * p.shape[1] + accepted)
    q_next = (
        q.flatten(0, 1)
        .index_select(0, rows * k + accepted.clamp(max=k - 1))
        .mul_(rejected[:, None].to(q.dtype))
    )
    token = sampler(residual(p_next, q_next), u_next[rows, accepted, (~rejected).long()][:, None])
    prob = p_next.gather(1, token[:, None])
    return Verdict(
        accepted,
        token,
        torch.nn.functional.pad(p_draft, (0, 1)).scatter_(1, accepted[:, None], prob),
    )


def by_rejection(tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
    """Decides by `reject_and_replace` on chains whose q is known.

    Args:
        uniforms: [rows, m + 1, 3].
    """
    verdict = by_kernel(tree, scores, inverse_transform, uniforms, rejection=True)
    return rejection_by_tensors(tree, scores, uniforms) if verdict is None else verdict


def rejection_by_tensors(tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
    """Decides like `by_rejection` without the kernel, which takes no uniforms for greedy rows."""
    return decide_chains(tree.tokens, tree.lengths, tree.q or (), scores.p(), uniforms)


def decide_chains(
    drafts: Tensor,
    lengths: Tensor,
    q: Sequence[Tensor],
    p: Tensor,
    uniforms: Tensor,
    sampler: Sampler = inverse_transform,
) -> Verdict:
    """Decides by `reject_and_replace` with a round's uniforms.

    Args:
        q: the distribution of each column, [rows, vocab].
        uniforms: [rows, k + 1, 3].
    """
    k = drafts.shape[1]
    # A single q is not copied.
    stacked = q[0][:, None] if len(q) == 1 else torch.stack(list(q), dim=1) if q else None
    u_accept, u_next = uniforms[:, :k, 1], uniforms[..., 0::2].flip(-1)
    return reject_and_replace(
        drafts, lengths, stacked, p=p, u_accept=u_accept, u_next=u_next, sampler=sampler
    )
