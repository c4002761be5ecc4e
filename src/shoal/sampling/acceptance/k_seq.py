"""The rule k-SEQ, for candidates drawn independently of each other.

After SpecTr: Sun et al. 2023, arXiv 2310.15141. The rule takes trees whose q is known
(`shoal.types.trees`) made of k sequences drawn independently. The number of sequences that agree
with the accepted tokens so far changes from position to position. For a single sequence it is
rejection sampling as of a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVINGS = 40
"""The number of halvings of the interval that gamma lies in: each doubles its precision."""


def accept_independent(
    p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts the first draw x for which u < p(x) / (gamma q(x)), with a u for each.

    In a greedy row, whose p is a point mass, it accepts the draw that is its token. The function is
    a `shoal.sampling.acceptance.tree_walk.Choice`.

    One uniform serves all draws, spread again after each rejection
    (`shoal.sampling.acceptance.recursive`).
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
