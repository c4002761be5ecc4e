"""Rejection sampling: the verification of drafts by the q that they were drawn from.

chains                                   rejection sampling      `reject_and_replace`
trees, siblings without replacement      recursive rejection     `accept_recursively`
trees, independent sequences             k-SEQ                   `accept_independent`
drafts without a q, greedy rows          one sample per node     `one_sample`

Of a chain, draft x is accepted with probability min(1, p(x)/q(x)); after Leviathan et al. 2023,
Theorem 1 and Algorithm 1, and Chen et al. 2023, Algorithm 2.

Of a tree, a walk goes from the root down (`walk`). Recursive rejection sampling is the method of
RSD (Jeon et al. 2024, arXiv 2402.14160), for trees in which each sibling was drawn from the rest of
q without its elders: RSD-C, RSD-S, DySpec. For an only child it is rejection sampling as of a
chain.

k-SEQ is the rule of SpecTr (Sun et al. 2023, arXiv 2310.15141), for trees made of k sequences drawn
independently. The number of sequences that agree with the accepted tokens so far changes from
position to position. For a single sequence it is rejection sampling as of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.sampling.acceptance.one_sample import accepted_lengths, by_samples
from shoal.sampling.acceptance.walk import walk
from shoal.sampling.distributions import Sampler, Scores, by_kernel
from shoal.sampling.drawing import inverse_transform
from shoal.sampling.uniforms import round_uniforms
from shoal.types.trees import DraftTree, Verdict


@dataclass(unsafe_hash=True)
class Rejection:
    """The rule of speculative rejection sampling: no rule accepts more drafts one by one.

    See Leviathan et al. 2023, section 3.2.
    """

    lossy: ClassVar[str] = ""
    numbers_rounds: ClassVar[bool] = True
    reads_q: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True

    def uniforms(
        self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None
    ) -> Tensor:
        return torch.from_numpy(round_uniforms(seeds, firsts, width, rounds))

    draw = staticmethod(inverse_transform)

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        if tree.siblings is not None and not scores.greedy:
            choice = accept_independent if tree.siblings.independent else accept_recursively
            return walk(tree, tree.siblings, scores, uniforms, choice)
        # A greedy row's p is a point mass: its token is accepted and any other token replaced by
        # it, for any q and uniforms.
        if tree.q is None or scores.greedy:
            return by_samples(tree, scores, self.draw, uniforms)
        return by_rejection(tree, scores, uniforms)

    def decide_chains(
        self,
        drafts: Tensor,
        lengths: Tensor,
        q: Sequence[Tensor],
        p: Tensor,
        uniforms: Tensor,
        sampler: Sampler | None = None,
    ) -> Verdict:
        return decide_chains(drafts, lengths, q, p, uniforms, sampler or self.draw)


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
    """Decides by `reject_and_replace` on chains with q; `uniforms` are [rows, m + 1, 3]."""
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


def accept_recursively(
    p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor, sampled: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accepts draw x with probability min(1, p(x)/q(x)), one draw after the other.

    After a rejection p becomes norm(max(p - q, 0)), q loses x, and the next draw is tried. The last
    p is the distribution of the replacement. The function is a
    `shoal.sampling.acceptance.walk.Choice`.

    Draws behind the first `sampled` of a row are point masses: their q is 1 at their token,
    independently of earlier draws.

    One uniform serves all draws: after a rejection it is uniform in [a, 1), a being the probability
    of acceptance, and is spread over [0, 1) again.
    """
    choice = torch.full_like(tokens[:, 0], -1)
    for j, token in enumerate(tokens.unbind(dim=1)):
        is_open = (choice < 0) & (token >= 0)
        x = token.clamp(min=0)[:, None]
        own = (
            q
            if sampled is None
            else torch.where((j < sampled)[:, None], q, torch.zeros_like(q).scatter(1, x, 1.0))
        )
        p_x, q_x = p.gather(1, x).squeeze(1), own.gather(1, x).squeeze(1)
        accepted = is_open & acceptance_mask(p_x, q_x, uniforms)
        choice = torch.where(accepted, j, choice)
        rejected = is_open & ~accepted
        uniforms = torch.where(rejected, _spread(uniforms, p_x.double() / q_x.double()), uniforms)
        p = torch.where(rejected[:, None], residual(p, own), p)
        q = torch.where(rejected[:, None], without(q, x), q)
    return choice, p


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """Returns q without one token per row, renormalised; [rows, vocab].

    A row is zeros if no other token has a probability.

    Args:
        tokens: [rows, 1].
    """
    rest = q.scatter(1, tokens, 0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return rest / torch.where(mass > 0, mass, 1.0)


def _spread(uniforms: Tensor, start: Tensor) -> Tensor:
    """Spreads uniforms in [start, 1) over [0, 1)."""
    return ((uniforms - start) / (1 - start)).clamp(0.0, 1 - 2.0**-53)


HALVINGS = 40
"""The number of halvings of the interval that gamma lies in: each doubles its precision."""


def accept_independent(
    p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts the first draw x for which u < p(x) / (gamma q(x)), with a u for each.

    In a greedy row, whose p is a point mass, it accepts the draw that is its token. The function is
    a `shoal.sampling.acceptance.walk.Choice`.

    One uniform serves all draws, spread again after each rejection
    (`accept_recursively`).
    """
    count = (tokens >= 0).sum(dim=1)
    scale = gamma(p, q, count)
    share = torch.minimum(q.double(), p.double() / scale[:, None])  # accepted of one draw, by token
    choice = torch.full_like(tokens[:, 0], -1)
    for j, token in enumerate(tokens.unbind(dim=1)):
        is_open = (choice < 0) & (token >= 0)
        x = token.clamp(min=0)[:, None]
        p_x = p.gather(1, x).squeeze(1).double()
        passes = (p_x / (scale * q.gather(1, x).squeeze(1).double())).clamp(max=1)
        passes = torch.where(p_x >= 1, 1.0, passes)
        accepted = is_open & (uniforms < passes)
        choice = torch.where(accepted, j, choice)
        uniforms = torch.where(is_open & ~accepted, _spread(uniforms, passes), uniforms)
    return choice, _rest(p, share, count)


def _rest(p: Tensor, share: Tensor, count: Tensor) -> Tensor:
    """Returns the weights of the replacement: p without the accepted part of `count` draws."""
    each = share.sum(dim=-1)
    some = -torch.expm1(count * torch.log1p(-each.clamp(max=1)))
    rest = (p.double() - share * (some / torch.where(each > 0, each, 1.0))[:, None]).clamp(min=0)
    nothing = rest.sum(dim=-1, keepdim=True) <= 0
    return torch.where(nothing, p.double(), rest).to(p.dtype)


def gamma(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """Computes the least gamma with which no token is accepted more often than p has it.

    The result is the least gamma in [1, k], up to rounding, with 1 - (1 - b)^k <= gamma b, where b
    = sum min(q, p / gamma). [rows] float64.

    Args:
        p: [rows, vocab].
        q: [rows, vocab].
        count: k, [rows] int64.
    """
    p, q, k = p.double(), q.double(), count.double()
    low, high = torch.ones_like(k), k.clone()
    for _ in range(HALVINGS if int(count.max()) > 1 else 0):
        middle = (low + high) / 2
        b = torch.minimum(q, p / middle[:, None]).sum(dim=-1).clamp(max=1)
        enough = -torch.expm1(k * torch.log1p(-b)) <= middle * b
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high
