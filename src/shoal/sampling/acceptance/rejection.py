"""Rejection sampling of chains (Leviathan et al. 2023, Theorem 1 and Algorithm 1; Chen et al. 2023, Algorithm 2).

Draft x is accepted with probability min(1, p(x)/q(x)). Takes chains drawn from a q that is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sampling.acceptance.one_sample import accepted_lengths, lengths_from
from shoal.sampling.distributions import Sampler
from shoal.sampling.drawing import inverse_transform
from shoal.sampling.scores import Block, Scores, in_blocks
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


def acceptance_mask(p_draft: Tensor, q_draft: Tensor, uniforms: Tensor) -> Tensor:
    """Which drafts pass on their own: u < p(x)/q(x), written without the division so that q(x) = 0 is safe.

    Args:
        p_draft, q_draft: probabilities of the draft tokens, [rows, k] float.
        uniforms: in [0, 1), [rows, k] float64.

    Returns:
        [rows, k] bool. A draft with p(x) = 0 never passes, not even at u = 0.
    """
    return uniforms * q_draft.double() < p_draft.double()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), [..., vocab]: what is left of p once the drafter's share is taken.

    Where rounding leaves nothing (p = q up to the last bit, so a rejection has probability 0 in exact arithmetic) the
    answer is p itself, never 0/0.
    """
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    nothing = mass <= 0
    # A product, as selecting values by truth values takes many times as long.
    return rest.addcmul_(p, nothing.to(p.dtype)).div_(torch.where(nothing, 1.0, mass))


def reject_and_replace(
    drafts: Tensor, draft_lengths: Tensor, q: Tensor | None, p: Tensor, u_accept: Tensor, u_next: Tensor,
    sampler: Sampler = inverse_transform,
) -> Verdict:  # fmt: skip
    """Speculative rejection sampling for a ragged batch.

    Args:
        drafts: draft tokens, [rows, k] int64; columns beyond a row's own draft length are padding.
        draft_lengths: [rows] int64; more than k where further drafts are verified later.
        q: drafter distributions, [rows, k, vocab]; None when k = 0.
        p: target distributions, [rows, k + 1, vocab]; or [rows, k, vocab], and a row whose k drafts are all accepted gets no token:
            0 stands there.
        u_accept: [rows, k] float64. u_next: [rows, at least as many as p, 2] float64: for the token after j accepted drafts, the
            uniform for a replacement ([..., 0]) and for a bonus ([..., 1]).
        sampler: `inverse_transform`, by whatever computes it.
    """
    k = drafts.shape[1]
    if q is None or k == 0:
        token = sampler(p[:, 0], u_next[:, 0, 1:2])
        return Verdict(torch.zeros_like(draft_lengths), token, p[:, 0].gather(1, token[:, None]))
    index = drafts[..., None]
    p_draft, q_draft = p[:, :k].gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)
    accepted = accepted_lengths(acceptance_mask(p_draft, q_draft, u_accept), draft_lengths)
    everything = p.shape[1] > k
    rows = torch.arange(len(p), device=p.device) if everything else (accepted < k).nonzero().squeeze(1)
    at, own = (accepted, draft_lengths) if everything else (accepted[rows], draft_lengths[rows])
    rejected = at < own
    # Nothing was drafted where the bonus goes: there q counts as zero, and the residual is p.
    p_next = p.flatten(0, 1).index_select(0, rows * p.shape[1] + at)
    q_next = q.flatten(0, 1).index_select(0, rows * k + at.clamp(max=k - 1)).mul_(rejected[:, None].to(q.dtype))
    token = sampler(residual(p_next, q_next), u_next[rows, at, (~rejected).long()][:, None])
    prob = p_next.gather(1, token[:, None])
    if everything:
        return Verdict(accepted, token, torch.nn.functional.pad(p_draft, (0, 1)).scatter_(1, at[:, None], prob))
    p_draft[rows, at] = prob.squeeze(1)
    return Verdict(accepted, torch.zeros_like(accepted).index_copy_(0, rows, token), p_draft)


def by_rejection(tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
    """`reject_and_replace` of chains whose q is known; uniforms: [rows, m + 1, 3]."""
    verified = scores.verified(tree, inverse_transform, uniforms, rejection=True)
    return rejection_by_tensors(tree, scores, uniforms) if verified is None else verified


def rejection_by_tensors(tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
    """`by_rejection` without the kernel, which takes no uniforms for greedy rows."""

    def verdict_of(block: Block) -> Verdict:
        drafts, asked = block.of(tree.tokens), (tree.q or ())[block.columns.start : block.columns.stop]
        q = torch.stack([block.of_rows(values) for values in asked], dim=1) if len(asked) > 1 else None
        if len(asked) == 1:  # no copy
            q = block.of_rows(asked[0])[:, None]
        own = block.of(uniforms)
        lengths = lengths_from(tree, block)
        return reject_and_replace(drafts, lengths, q, scores.p(block), own[:, : drafts.shape[1], 1], own[..., 0::2].flip(-1))

    return in_blocks(tree, scores, verdict_of)
