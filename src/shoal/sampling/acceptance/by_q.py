"""The verification by the q that drafts were drawn from, for all kinds of drafts.

The modules lie in `shoal.sampling.acceptance`:

chains                                   rejection sampling      `rejection`
trees, siblings without replacement      recursive rejection     `recursive`
trees, independent sequences             k-SEQ                   `k_seq`
drafts without a q, greedy rows          one sample per node     `one_sample`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.sampling.acceptance.k_seq import accept_independent
from shoal.sampling.acceptance.one_sample import by_samples
from shoal.sampling.acceptance.recursive import accept_recursively
from shoal.sampling.acceptance.rejection import by_rejection, decide_chains
from shoal.sampling.acceptance.tree_walk import walk
from shoal.sampling.distributions import Sampler
from shoal.sampling.drawing import inverse_transform
from shoal.sampling.scores import Scores
from shoal.sampling.uniforms import round_uniforms
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


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
