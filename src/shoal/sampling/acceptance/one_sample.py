"""The rules by one sample per node: exact match, the coupled rule, and typical acceptance.

The target draws a token at every column, and equal drafts are accepted. This is exact for any
drafter whose tree does not depend on these draws. By the coupled rule it is exact even for a tree
that does, because the rule draws the tokens of plain decoding.

`Typical` accepts drafts that the target finds plausible enough, and takes the sample of the column
behind them. It is lossy: the samples have another distribution than p. After Cai et al., "Medusa"
(ICML 2024, arXiv 2401.10774), section 2.3.1: draft x is accepted if p(x) > min(epsilon, delta *
exp(-H(p))), with H the entropy of p in nats, and of a tree the longest path of accepted nodes;
epsilon 0.09 and delta 0.3 as in its code.

The protocols of all acceptance rules are here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.config import LOSSY_RULES
from shoal.sampling.distributions import Sampler, Scores, by_kernel
from shoal.sampling.drawing import exponential_race, inverse_transform
from shoal.sampling.uniforms import race_uniforms, round_uniforms
from shoal.types.trees import DraftTree, Verdict


class Rule(Protocol):
    """A rule that draws and verifies drafts.

    Its methods take `uniforms` of its own: [rows, width, ...] float64, one slice per position.

    Attributes:
        numbers_rounds: True if its uniforms depend on the number of a row's round when that is
            given.
        lossy: "" if the committed tokens have the distribution p; else the text that every output
            shows about the difference.
    """

    @property
    def numbers_rounds(self) -> bool: ...

    @property
    def lossy(self) -> str: ...

    def uniforms(
        self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None
    ) -> Tensor:
        """Returns the noise of a round for `width` positions from each row's first open one.

        Args:
            rounds: see `shoal.sampling.uniforms.round_uniforms`.
        """

    def draw(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Draws one token per row, [rows] int64. Greedy rows give the token of weight 1.

        Args:
            weights: [rows, vocab].
            uniforms: the uniforms of one position, [rows, ...].
        """

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        """Decides on a draft tree.

        On a CPU one call of C decides on chains (`shoal.sampling.distributions.by_kernel`).

        Args:
            uniforms: by position, [rows, depth of the tree + 1, ...].
        """


@runtime_checkable
class ChainRule(Protocol):
    """A rule that also decides on chains as a function of tensors that looks at no value.

    Such a function can be captured. Equal rules decide alike.

    Attributes:
        reads_q: True if it needs the q of drafts that have one.
        matches_greedy: True if drafts of a greedy row are accepted exactly if they are the target's
            own tokens.
    """

    reads_q: bool
    matches_greedy: bool

    def decide_chains(
        self,
        drafts: Tensor,
        lengths: Tensor,
        q: Sequence[Tensor],
        p: Tensor,
        uniforms: Tensor,
        sampler: Sampler | None = None,
    ) -> Verdict:
        """Decides on drafts [rows, k] int64, `lengths` [rows] of each row.

        Args:
            q: the distribution of each of the k drafts, [rows, vocab]; empty if `reads_q` is false.
            p: [rows, k + 1, vocab].
            uniforms: by position, [rows, k + 1, ...].
            sampler: a sampler with the results of `draw`, by kernels of a GPU; None for `draw`.
        """


def decides_chains(rule: Rule) -> bool:
    """Returns True if a rule's decision on chains is known as a function of tensors.

    The decision is unknown if a subclass or an object replaces `decide` alone.
    """
    owner = next((kind for kind in type(rule).__mro__ if "decide" in vars(kind)), object)
    return (
        isinstance(rule, ChainRule)
        and "decide_chains" in vars(owner)
        and "decide" not in vars(rule)
    )


def accepted_lengths(passes: Tensor, draft_lengths: Tensor) -> Tensor:
    """Returns the length of each row's leading run of passing drafts, [rows] int64.

    The run is no longer than the row's own draft length.
    """
    inside = torch.arange(passes.shape[1], device=passes.device) < draft_lengths[:, None]
    return (passes & inside).long().cumprod(dim=1).sum(dim=1)


def exact_match(tree: DraftTree, samples: Tensor, probs: Tensor) -> Verdict:
    """Follows the nodes from the root that equal the target's own tokens, as far as there are any.

    One sample per node (Leviathan et al. 2023 for a point mass q; trees: SpecInfer, Miao et al.
    2024, arXiv 2305.09781): for any tree, the committed tokens are the tokens that plain decoding
    draws by the same uniforms, so q need not be known.

    Args:
        samples: the token that follows each column of the pass, drawn from p there, [rows, m + 1]
            int64.
        probs: the probability of that token, same shape.
    """
    if not tree.m:
        return Verdict(torch.zeros_like(tree.lengths), samples[:, 0], probs)
    if not tree.branches:
        accepted = accepted_lengths(samples[:, : tree.m] == tree.tokens, tree.lengths)
        return Verdict(accepted, samples.gather(1, accepted[:, None]).squeeze(1), probs)
    paths = [
        _agreeing_path(*row)
        for row in zip(tree.drafts, tree.parents, samples.tolist(), strict=True)
    ]
    longest = max(map(len, paths))
    path = torch.tensor(
        [nodes + [0] * (longest - len(nodes)) for nodes in paths],
        device=samples.device,
        dtype=torch.long,
    )
    path = path.view(len(paths), longest)
    accepted = torch.tensor([len(nodes) for nodes in paths], device=samples.device)
    last = torch.tensor([nodes[-1] + 1 if nodes else 0 for nodes in paths], device=samples.device)
    along = probs.gather(1, torch.nn.functional.pad(path + 1, (1, 0)))
    return Verdict(accepted, samples.gather(1, last[:, None]).squeeze(1), along, path)


def _agreeing_path(
    tokens: Sequence[int], parents: Sequence[int], samples: Sequence[int]
) -> list[int]:
    """Returns the path from the root on which every node is the target's token after its parent.

    Of siblings with the same token the first is taken. A choice by the target's draws after them
    would bend the distribution.
    """
    path, last = [], -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last and token == samples[last + 1]:
            path.append(node)
            last = node
    return path


def by_samples(tree: DraftTree, scores: Scores, sampler: Sampler, uniforms: Tensor) -> Verdict:
    """Decides by `exact_match` of a sample per column, drawn from p there.

    Args:
        uniforms: by depth, [rows, depth of the tree + 1, ...].
    """
    uniforms = tree.by_column(uniforms)
    verdict = by_kernel(tree, scores, sampler, uniforms, rejection=False)
    return exact_match(tree, *scores.draw(sampler, uniforms)[:2]) if verdict is None else verdict


def match_samples(
    drafts: Tensor, lengths: Tensor, p: Tensor, sampler: Sampler, uniforms: Tensor
) -> Verdict:
    """Accepts the drafts that equal the target's own tokens: a sample from p of each column."""
    samples = sampler(p.flatten(0, 1), uniforms.flatten(0, 1)).view(p.shape[:2])
    accepted = accepted_lengths(samples[:, : drafts.shape[1]] == drafts, lengths)
    return Verdict(
        accepted,
        samples.gather(1, accepted[:, None]).squeeze(1),
        p.gather(-1, samples[..., None]).squeeze(-1),
    )


@dataclass(unsafe_hash=True)
class Coupled:
    """The rule that draws like plain decoding by the same uniforms, and accepts equal drafts.

    The same seed gives the same tokens for every drafter, draft length and batch, as long as p does
    not move by rounding. The price is a lower acceptance than the 1 - d of rejection sampling, d
    being the total variation of p and q.

    An exponential race over all tokens accepts at least (1 - d) / (1 + d) (Daliri et al. 2024,
    arXiv 2408.07978), at the cost of a random number per token. Here the race is over buckets of
    tokens: the buckets agree at least that often for the d of their sums. Inside the bucket the
    token is drawn by inverse transform, for which there is no bound: distributions in one bucket
    may never agree. On the bundled pair the difference to a race over all tokens is within counting
    errors (docs/measurements/numerics.md).
    """

    lossy: ClassVar[str] = ""
    numbers_rounds: ClassVar[bool] = False
    reads_q: ClassVar[bool] = False
    matches_greedy: ClassVar[bool] = True

    def uniforms(
        self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None
    ) -> Tensor:
        return torch.from_numpy(race_uniforms(seeds, firsts, width))

    draw = staticmethod(exponential_race)

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        return by_samples(tree, scores, self.draw, uniforms)

    def decide_chains(
        self,
        drafts: Tensor,
        lengths: Tensor,
        q: Sequence[Tensor],
        p: Tensor,
        uniforms: Tensor,
        sampler: Sampler | None = None,
    ) -> Verdict:
        return match_samples(drafts, lengths, p, sampler or self.draw, uniforms)


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
        samples = self.draw(p.flatten(0, 1), uniforms.flatten(0, 1)).view(p.shape[:2])
        mask = plausible(_before(tree, p), tree.tokens, self.epsilon, self.delta)
        if not tree.branches:
            accepted = accepted_lengths(mask, tree.lengths)
            drafts = p[:, : tree.m].gather(-1, tree.tokens[..., None]).squeeze(-1)
            along = torch.nn.functional.pad(drafts, (0, 1))
            token = samples.gather(1, accepted[:, None])
            last = p[torch.arange(len(p), device=p.device), accepted].gather(1, token)
            return Verdict(accepted, token.squeeze(1), along.scatter(1, accepted[:, None], last))
        paths = [
            _longest(parents, own) for parents, own in zip(tree.parents, mask.tolist(), strict=True)
        ]
        return _along(tree, paths, samples, p)


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


def _longest(parents: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """Returns the longest path of accepted nodes from the root; of several the first."""
    paths: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(parents):
        if mask[node] and parent in paths:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)


def _along(tree: DraftTree, paths: Sequence[list[int]], samples: Tensor, p: Tensor) -> Verdict:
    """Makes the verdict on trees whose kept paths are given."""
    longest = max(map(len, paths))
    last = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=p.device)
    token = samples.gather(1, last[:, None]).squeeze(1)
    probs = p.new_zeros(len(paths), longest + 1)
    for b, path in enumerate(paths):
        columns = [0, *(node + 1 for node in path)]
        tokens = [*(tree.drafts[b][node] for node in path), int(token[b])]
        probs[b, : len(columns)] = p[b, columns, tokens]
    padded = [path + [0] * (longest - len(path)) for path in paths]
    nodes = torch.tensor(padded, device=p.device, dtype=torch.long).view(len(paths), longest)
    return Verdict(torch.tensor(list(map(len, paths)), device=p.device), token, probs, nodes)
