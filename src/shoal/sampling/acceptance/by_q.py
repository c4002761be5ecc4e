"""The verification by the q that drafts were drawn from, for all kinds of drafts.

chains                                   rejection sampling      `rejection`
trees, siblings without replacement      recursive rejection     `accept_recursively`
trees, independent sequences             k-SEQ                   `accept_independent`
drafts without a q, greedy rows          one sample per node     `one_sample`

Of a tree, a walk goes from the root down. Recursive rejection sampling is that of RSD (Jeon et al.
2024, arXiv 2402.14160), for trees in which each sibling was drawn from the rest of q without its
elders: RSD-C, RSD-S, DySpec. For an only child it is rejection sampling as of a chain.

k-SEQ is the rule of SpecTr (Sun et al. 2023, arXiv 2310.15141), for trees made of k sequences drawn
independently. The number of sequences that agree with the accepted tokens so far changes from
position to position. For a single sequence it is rejection sampling as of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.sampling.acceptance.one_sample import by_samples
from shoal.sampling.acceptance.rejection import (
    acceptance_mask,
    by_rejection,
    decide_chains,
    residual,
)
from shoal.sampling.distributions import Sampler
from shoal.sampling.drawing import draw, inverse_transform
from shoal.sampling.scores import Scores
from shoal.sampling.uniforms import round_uniforms
from shoal.types.trees import DraftTree, Siblings, Verdict


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


Choice = Callable[..., tuple[Tensor, Tensor]]
"""A function that decides at one column of each row.

Args:
    p: the target's distributions at the columns, [rows, vocab].
    q: the drafter's distributions at the columns, [rows, vocab].
    tokens: the drawn tokens, [rows, draws] int64, -1 after the last.
    uniforms: [rows] float64 in [0, 1).
    sampled: the number of each row's draws that are not point masses, [rows]; only if some are.

Returns:
    The number of the accepted draw, [rows] int64, -1 for none.
    The weights that the replacement is drawn from if none is accepted, [rows, vocab].
"""


def walk(
    tree: DraftTree, siblings: Siblings, scores: Scores, uniforms: Tensor, choice: Choice
) -> Verdict:
    """Goes from the root to the accepted child, as long as there is one.

    Then the replacement is drawn, or the bonus at a leaf. Uniforms of all purposes are those of the
    position, as for chains: a row comes to each position once.

    Args:
        siblings: the siblings of the tree.
        uniforms: by position, [rows, depth of the tree + 1, 3] (TOKEN, ACCEPT, REPLACE).
        choice: a function with the property that the accepted draw, or the token drawn in its
            place, has the distribution p.
    """
    p = scores.p()
    paths: list[list[int]] = [[] for _ in tree.drafts]
    token, prob = torch.zeros_like(tree.lengths), p.new_zeros(len(paths))
    probs: list[list[Tensor]] = [[] for _ in paths]
    active, depth = list(range(len(paths))), 0
    while active:
        columns = [paths[b][-1] + 1 if paths[b] else 0 for b in active]
        rows = torch.tensor(active, device=p.device)
        p_here = p[rows, torch.tensor(columns, device=p.device)]
        chosen, rest = _chosen(
            tree,
            siblings,
            active,
            columns=columns,
            p=p_here,
            uniforms=uniforms[rows, depth, 1],
            choice=choice,
        )
        following = []
        for place, (b, column, pick) in enumerate(zip(active, columns, chosen, strict=True)):
            if pick >= 0:
                node = siblings.draws[b][column][pick]
                paths[b].append(node)
                probs[b].append(p_here[place, tree.drafts[b][node]])
                following.append(b)
        ended = [place for place, pick in enumerate(chosen) if pick < 0]
        if ended:
            own = torch.tensor(ended, device=p.device)
            drafted = [bool(siblings.draws[active[place]][columns[place]]) for place in ended]
            kinds = torch.tensor([2 if was else 0 for was in drafted], device=p.device)
            drawn = draw(rest[own], uniforms[rows[own], depth, kinds])
            token[rows[own]] = drawn
            prob[rows[own]] = p_here[own, drawn]
        active, depth = following, depth + 1
    return _verdict(paths, token, prob, probs)


def _chosen(
    tree: DraftTree,
    siblings: Siblings,
    rows: Sequence[int],
    columns: Sequence[int],
    p: Tensor,
    uniforms: Tensor,
    choice: Choice,
) -> tuple[list[int], Tensor]:
    """Returns the number of the accepted draw of each row's column, -1 for none.

    Also returns the weights of the token that follows if none is accepted.
    """
    chosen, rest = [-1] * len(rows), p
    places = [
        place
        for place, (b, column) in enumerate(zip(rows, columns, strict=True))
        if siblings.draws[b][column]
    ]
    if not places:
        return chosen, rest
    draws = [
        [tree.drafts[rows[i]][node] for node in siblings.draws[rows[i]][columns[i]]] for i in places
    ]
    width = max(map(len, draws))
    tokens = torch.tensor([own + [-1] * (width - len(own)) for own in draws], device=p.device)
    index = torch.tensor(places, device=p.device)
    contexts = torch.tensor(
        [siblings.contexts[rows[i]][columns[i]] for i in places], device=p.device
    )
    known = [p[index], siblings.q[contexts].to(p.dtype), tokens, uniforms[index]]
    if siblings.sampled is not None:
        known.append(
            torch.tensor([siblings.sampled[rows[i]][columns[i]] for i in places], device=p.device)
        )
    picked, left = choice(*known)
    for place, pick in zip(places, picked.tolist(), strict=True):
        chosen[place] = pick
    return chosen, p.index_copy(0, index, left)


def _verdict(
    paths: Sequence[list[int]], token: Tensor, prob: Tensor, probs: Sequence[list[Tensor]]
) -> Verdict:
    """Makes the verdict of paths of any lengths."""
    longest = max(map(len, paths))
    path = torch.tensor(
        [own + [0] * (longest - len(own)) for own in paths], dtype=torch.long, device=token.device
    )
    nothing = torch.zeros_like(prob[0])
    along = torch.stack(
        [
            torch.stack([*own, prob[b], *[nothing] * (longest - len(own))])
            for b, own in enumerate(probs)
        ]
    )
    accepted = torch.tensor([len(own) for own in paths], device=token.device)
    return Verdict(accepted, token, along, path.view(len(paths), longest))


def accept_recursively(
    p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor, sampled: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accepts draw x with probability min(1, p(x)/q(x)), one draw after the other.

    After a rejection p becomes norm(max(p - q, 0)), q loses x, and the next draw is tried. The last
    p is that of the replacement. The function is a `shoal.sampling.acceptance.by_q.Choice`.

    Draws behind the first `sampled` of a row are point masses, whose q is 1 at their token,
    whatever was drawn before.

    One uniform serves all draws: after a rejection it is uniform in [a, 1), a being the probability
    of acceptance, and is spread over [0, 1) again.
    """
    chosen = torch.full_like(tokens[:, 0], -1)
    for j, token in enumerate(tokens.unbind(dim=1)):
        tried = (chosen < 0) & (token >= 0)
        x = token.clamp(min=0)[:, None]
        own = (
            q
            if sampled is None
            else torch.where((j < sampled)[:, None], q, torch.zeros_like(q).scatter(1, x, 1.0))
        )
        p_x, q_x = p.gather(1, x).squeeze(1), own.gather(1, x).squeeze(1)
        accepted = tried & acceptance_mask(p_x, q_x, uniforms)
        chosen = torch.where(accepted, j, chosen)
        rejected = tried & ~accepted
        uniforms = torch.where(rejected, _spread(uniforms, p_x.double() / q_x.double()), uniforms)
        p = torch.where(rejected[:, None], residual(p, own), p)
        q = torch.where(rejected[:, None], without(q, x), q)
    return chosen, p


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
    a `shoal.sampling.acceptance.by_q.Choice`.

    One uniform serves all draws, spread again after each rejection
    (`shoal.sampling.acceptance.by_q`).
    """
    count = (tokens >= 0).sum(dim=1)
    scale = gamma(p, q, count)
    share = torch.minimum(q.double(), p.double() / scale[:, None])  # accepted of one draw, by token
    chosen = torch.full_like(tokens[:, 0], -1)
    for j, token in enumerate(tokens.unbind(dim=1)):
        tried = (chosen < 0) & (token >= 0)
        x = token.clamp(min=0)[:, None]
        p_x = p.gather(1, x).squeeze(1).double()
        passes = (p_x / (scale * q.gather(1, x).squeeze(1).double())).clamp(max=1)
        passes = torch.where(p_x >= 1, 1.0, passes)
        accepted = tried & (uniforms < passes)
        chosen = torch.where(accepted, j, chosen)
        spread = ((uniforms - passes) / (1 - passes)).clamp(0.0, 1 - 2.0**-53)
        uniforms = torch.where(tried & ~accepted, spread, uniforms)
    return chosen, _rest(p, share, count)


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
