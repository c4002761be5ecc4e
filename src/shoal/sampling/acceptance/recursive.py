"""Recursive rejection sampling, for siblings drawn without replacement.

After RSD: Jeon et al. 2024, arXiv 2402.14160. The rule takes trees whose q is known
(`shoal.types.trees`), each sibling drawn from the rest of q without its elders: RSD-C, RSD-S,
DySpec. For an only child it is rejection sampling as of a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sampling.acceptance.rejection import acceptance_mask, residual


def accept_recursively(
    p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor, sampled: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accepts draw x with probability min(1, p(x)/q(x)), one draw after the other.

    After a rejection p becomes norm(max(p - q, 0)), q loses x, and the next draw is tried. The last
    p is that of the replacement. The function is a `shoal.sampling.acceptance.tree_walk.Choice`.

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
