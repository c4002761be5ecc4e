"""An acceptance rate imposed on real compute.

With it, large shapes with random weights can be timed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.api import Shoal
from shoal.errors import RequestError
from shoal.lookahead.controller import PairCosts
from shoal.sampling.acceptance import Rejection, by_rejection, rejection_by_tensors
from shoal.sampling.distributions import Sampler
from shoal.sampling.scores import Scores
from shoal.sampling.uniforms import Purpose
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


@dataclass(unsafe_hash=True)
class Imposed(Rejection):
    """A rejection sampling in which each draft is accepted with probability `rate`.

    The rate holds for any p and q. The rule computes all that the real rule does, so that it costs
    the same; the text means nothing. The row's own uniforms decide.

    Raises:
        RequestError: the rate is outside of 0..1.
    """

    rate: float
    matches_greedy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise RequestError(f"an acceptance rate is in 0..1, got {self.rate}")

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        """Decides by the real rule, on uniforms that accept always or never."""
        biased = self._biased(uniforms)
        if tree.m and tree.q is None:  # greedy rows: point masses
            one_hot = scores.logits.new_zeros(*tree.tokens.shape, scores.logits.shape[-1]).scatter_(
                -1, tree.tokens[..., None], 1.0
            )
            tree = replace(tree, q=one_hot.unbind(1))
        greedy = any(row.request.sampling.greedy for row in scores.positions.rows)
        return (rejection_by_tensors if greedy else by_rejection)(tree, scores, biased)

    def decide_chains(
        self,
        drafts: Tensor,
        lengths: Tensor,
        q: Sequence[Tensor],
        p: Tensor,
        uniforms: Tensor,
        sampler: Sampler | None = None,
    ) -> Verdict:
        """Decides as a function of tensors."""
        return super().decide_chains(drafts, lengths, q, p, self._biased(uniforms), sampler)

    def _biased(self, uniforms: Tensor) -> Tensor:
        """Replaces the uniforms: u = -1 accepts every draft that q can draw, u = infinity none."""
        biased, column = uniforms.clone(), Purpose.ACCEPT - 1
        biased[..., column] = torch.where(uniforms[..., column] < self.rate, -1.0, torch.inf)
        return biased


def imposing(pair: Shoal, rate: float) -> Shoal:
    """Returns the same models under the imposed rule.

    The costs that `auto` measured under the real one are not carried over.
    """
    other = copy.copy(pair)
    other.rule = Imposed(rate)
    other.pair_costs = PairCosts(packed=pair.pair_costs.packed)
    return other
