"""The rule of typical acceptance: it accepts drafts that the target finds plausible enough.

The rule is lossy: the samples have another distribution than p. After Cai et al., "Medusa" (ICML
2024, arXiv 2401.10774), section 2.3.1: draft x is accepted if p(x) > min(epsilon, delta *
exp(-H(p))), with H the entropy of p in nats, and of a tree the longest path of accepted nodes;
epsilon 0.09 and delta 0.3 as in its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.config import LOSSY_RULES
from shoal.sampling.acceptance.one_sample import accepted_lengths, by_samples
from shoal.sampling.drawing import inverse_transform
from shoal.sampling.scores import Scores
from shoal.sampling.uniforms import round_uniforms
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


def plausible(p: Tensor, tokens: Tensor, epsilon: float, delta: float) -> Tensor:
    """Returns a mask [...] of the tokens [...] that are typical of distributions p [..., vocab].

    Only the token of a point mass is typical of it.
    """
    limit = (delta * torch.exp(-torch.special.entr(p.double()).sum(-1))).clamp_(max=epsilon)
    return p.gather(-1, tokens[..., None]).squeeze(-1) > limit


@dataclass(unsafe_hash=True)
class Typical:
    """The rule that accepts drafts whose probability under p is above a threshold.

    The threshold falls with p's entropy. The token that follows the accepted drafts is drawn from
    p. Greedy rows are exact: their p is a point mass.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    lossy: ClassVar[str] = LOSSY_RULES["typical"]
    numbers_rounds: ClassVar[bool] = True

    def uniforms(
        self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None
    ) -> Tensor:
        return torch.from_numpy(round_uniforms(seeds, firsts, width, rounds))

    draw = staticmethod(inverse_transform)

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        if scores.greedy or not tree.m:
            return by_samples(tree, scores, self.draw, uniforms)
        p = scores.p()
        # REPLACE first: TOKEN drew the draft of the same position.
        uniforms = tree.by_column(uniforms).flip(-1)
        said = self.draw(p.flatten(0, 1), uniforms.flatten(0, 1)).view(p.shape[:2])
        kept = plausible(_before(tree, p), tree.tokens, self.epsilon, self.delta)
        if not tree.branches:
            accepted = accepted_lengths(kept, tree.lengths)
            drafts = p[:, : tree.m].gather(-1, tree.tokens[..., None]).squeeze(-1)
            along = torch.nn.functional.pad(drafts, (0, 1))
            token = said.gather(1, accepted[:, None])
            drawn = p[torch.arange(len(p), device=p.device), accepted].gather(1, token)
            return Verdict(accepted, token.squeeze(1), along.scatter(1, accepted[:, None], drawn))
        paths = [
            _longest(parents, own) for parents, own in zip(tree.parents, kept.tolist(), strict=True)
        ]
        return _along(tree, paths, said, p)


def _before(tree: DraftTree, p: Tensor) -> Tensor:
    """Returns the distribution at the column that each node follows, [rows, m, vocab]."""
    if not tree.branches:
        return p[:, : tree.m]
    columns = [
        [parent + 1 for parent in parents] + [0] * (tree.m - len(parents))
        for parents in tree.parents
    ]
    index = torch.tensor(columns, device=p.device).view(len(columns), tree.m)
    return p[torch.arange(len(columns), device=p.device)[:, None], index]


def _longest(parents: Sequence[int], kept: Sequence[bool]) -> list[int]:
    """Returns the longest path of accepted nodes from the root; of several the first."""
    paths: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(parents):
        if kept[node] and parent in paths:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)


def _along(tree: DraftTree, paths: Sequence[list[int]], said: Tensor, p: Tensor) -> Verdict:
    """Makes the verdict on trees whose kept paths are given."""
    longest = max(map(len, paths))
    last = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=p.device)
    token = said.gather(1, last[:, None]).squeeze(1)
    probs = p.new_zeros(len(paths), longest + 1)
    for b, path in enumerate(paths):
        columns = [0, *(node + 1 for node in path)]
        tokens = [*(tree.drafts[b][node] for node in path), int(token[b])]
        probs[b, : len(columns)] = p[b, columns, tokens]
    padded = [path + [0] * (longest - len(path)) for path in paths]
    nodes = torch.tensor(padded, device=p.device, dtype=torch.long).view(len(paths), longest)
    return Verdict(torch.tensor(list(map(len, paths)), device=p.device), token, probs, nodes)
