"""An acceptance rate imposed on real compute, so that large shapes with random weights can be timed."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from shoal.api import Shoal
from shoal.errors import RequestError
from shoal.lookahead.controller import PairCosts
from shoal.sampling.acceptance import Rejection
from shoal.sampling.uniforms import Purpose
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


class Imposed(Rejection):
    """Rejection sampling with loaded dice: each draft passes with probability `rate`, whatever p and q say.

    Every operation of the real rule is made; what is generated means nothing. The dice are the row's own keyed uniforms.

    Raises:
        RequestError: for a rate outside of 0..1.
    """

    def __init__(self, rate: float) -> None:
        if not 0 <= rate <= 1:
            raise RequestError(f"an acceptance rate is in 0..1, got {rate}")
        self.rate = rate

    def decide(self, tree: DraftTree, p: Tensor, luck: Tensor) -> Verdict:
        """The real decision by dice that always or never pass."""
        loaded = luck.clone()  # u = -1 passes every draft that q can draw, u = infinity none
        column = Purpose.ACCEPT - 1
        loaded[..., column] = torch.where(luck[..., column] < self.rate, -1.0, torch.inf)
        return super().decide(tree, p, loaded)


def imposing(pair: Shoal, rate: float) -> Shoal:
    """The same models under the imposed rule; what `auto` knows of the real one is not carried over."""
    other = copy.copy(pair)
    other.rule = Imposed(rate)
    other.pair_costs = PairCosts(packed=pair.pair_costs.packed)
    return other
