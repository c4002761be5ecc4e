"""The acceptance rules: pure functions on tensors.

Glossary, used in every module, log line and figure:

    p               the target's declared distribution at a position, after all of the row's sampling controls
    q               the drafter's distribution the draft token was really drawn from
    draft           a token proposed for a position
    accepted        a draft token that is kept
    replacement     the token drawn from norm(max(p - q, 0)) at the first rejected position
    bonus           the token drawn from p after all drafts of the row were accepted (with no drafts: plain decoding)
    committed       part of the row for good: the accepted drafts, then one replacement or bonus

Rejection sampling (Leviathan et al. 2023, Theorem 1 and Algorithm 1; Chen et al. 2023, Algorithm 2): accept draft x with
probability min(1, p(x)/q(x)). The committed tokens then have exactly the law of tokens drawn from p one by one. A greedy row
is the same rule with one-hot p: its argmax is accepted, and anything else replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.sampling.distributions import Sampler
from shoal.sampling.drawing import draw, exponential_race, inverse_transform
from shoal.sampling.scores import Block, Scores, in_blocks
from shoal.sampling.uniforms import race_uniforms, round_uniforms
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


def accepted_lengths(passes: Tensor, draft_lengths: Tensor) -> Tensor:
    """Length of each row's leading run of passing drafts, no longer than its own draft length; [rows] int64."""
    inside = torch.arange(passes.shape[1], device=passes.device) < draft_lengths[:, None]
    return (passes & inside).long().cumprod(dim=1).sum(dim=1)


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
    drafts: Tensor, draft_lengths: Tensor, q: Tensor | None, p: Tensor, u_accept: Tensor, u_next: Tensor
) -> Verdict:
    """Speculative rejection sampling for a ragged batch.

    Args:
        drafts: draft tokens, [rows, k] int64; columns beyond a row's own draft length are padding.
        draft_lengths: [rows] int64; more than k where further drafts are verified later.
        q: drafter distributions, [rows, k, vocab]; None when k = 0.
        p: target distributions, [rows, k + 1, vocab]; or [rows, k, vocab], and a row whose k drafts are all accepted gets no token:
            0 stands there.
        u_accept: [rows, k] float64. u_next: [rows, at least as many as p, 2] float64: for the token after j accepted drafts, the
            uniform for a replacement ([..., 0]) and for a bonus ([..., 1]).
    """
    k = drafts.shape[1]
    if q is None or k == 0:
        token = draw(p[:, 0], u_next[:, 0, 1])
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
    token = draw(residual(p_next, q_next), u_next[rows, at, (~rejected).long()])
    prob = p_next.gather(1, token[:, None])
    if everything:
        return Verdict(accepted, token, torch.nn.functional.pad(p_draft, (0, 1)).scatter_(1, at[:, None], prob))
    p_draft[rows, at] = prob.squeeze(1)
    return Verdict(accepted, torch.zeros_like(accepted).index_copy_(0, rows, token), p_draft)


def exact_match(tree: DraftTree, said: Tensor, probs: Tensor) -> Verdict:
    """Follows from the root the nodes that are what the target says itself, as far as there are any.

    One sample per node (Leviathan et al. 2023 for a point mass q; trees: SpecInfer, Miao et al. 2024, arXiv 2305.09781): whatever
    proposed the tree, what is committed is what plain decoding draws by the same uniforms, so nothing has to be known of q.

    Args:
        said: the token that follows each column of the pass, drawn from p there, [rows, m + 1] int64. probs: of it, same shape.
    """
    if not tree.branches:
        accepted = accepted_lengths(said[:, : tree.m] == tree.tokens, tree.lengths)
        return Verdict(accepted, said.gather(1, accepted[:, None]).squeeze(1), probs)
    paths = [_followed(*row) for row in zip(tree.drafts, tree.parents, said.tolist(), strict=True)]
    longest = max(map(len, paths))
    path = torch.tensor([nodes + [0] * (longest - len(nodes)) for nodes in paths], device=said.device, dtype=torch.long)
    path = path.view(len(paths), longest)
    accepted = torch.tensor([len(nodes) for nodes in paths], device=said.device)
    last = torch.tensor([nodes[-1] + 1 if nodes else 0 for nodes in paths], device=said.device)
    along = probs.gather(1, torch.nn.functional.pad(path + 1, (1, 0)))
    return Verdict(accepted, said.gather(1, last[:, None]).squeeze(1), along, path)


def _followed(tokens: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> list[int]:
    """The path from the root on whose every node is what was said after its parent. Of siblings with the same token the first is
    taken, whatever was said after them: a choice by later draws would bend the distribution."""
    path, last = [], -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last and token == said[last + 1]:
            path.append(node)
            last = node
    return path


def by_samples(tree: DraftTree, scores: Scores, sampler: Sampler, uniforms: Tensor) -> Verdict:
    """`exact_match` of a sample per column, drawn from p there by the uniforms of its depth: [rows, depth of the tree + 1, ...]."""
    uniforms = tree.by_column(uniforms)
    verified = scores.verified(tree, sampler, uniforms, rejection=False)
    if verified is not None:
        return verified
    if tree.branches:
        return exact_match(tree, *scores.draws(scores.everything(), sampler, uniforms)[:2])

    def verdict_of(block: Block) -> Verdict:
        said, probs, *_ = scores.draws(block, sampler, uniforms)
        if not tree.m:
            return Verdict(block.of_rows(tree.lengths), said[:, 0], probs)
        drafts = block.of(tree.tokens)
        accepted = accepted_lengths(said[:, : drafts.shape[1]] == drafts, _lengths(tree, block))
        return Verdict(accepted, said.gather(1, accepted.clamp(max=said.shape[1] - 1)[:, None]).squeeze(1), probs)

    return in_blocks(tree, scores, verdict_of)


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
        lengths = _lengths(tree, block)
        return reject_and_replace(drafts, lengths, q, scores.p(block), own[:, : drafts.shape[1], 1], own[..., 0::2].flip(-1))

    return in_blocks(tree, scores, verdict_of)


def _lengths(tree: DraftTree, block: Block) -> Tensor:
    """Drafts of each row of a block from its first column on."""
    lengths = block.of_rows(tree.lengths)
    return lengths - block.columns.start if block.columns.start else lengths


class Rule(Protocol):
    """How drafts are drawn and verified. `uniforms` is the row's own: [rows, width, ...] float64, one slice per position.

    Attributes:
        numbers_rounds: whether its uniforms depend on the number of a row's round where that is given.
    """

    @property
    def numbers_rounds(self) -> bool: ...

    def uniforms(self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None) -> Tensor:
        """Noise of a round for `width` positions from each row's first open one; `rounds`: see
        `shoal.sampling.uniforms.round_uniforms`."""
        ...

    def draw(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """One token per row from weights [rows, vocab] by one position's uniforms [rows, ...]; [rows] int64. Greedy rows give the
        token of weight 1."""
        ...

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        """What is accepted of a draft tree; uniforms: by position, [rows, depth of the tree + 1, ...]."""
        ...


@runtime_checkable
class ChainRule(Protocol):
    """A rule that also decides on chains as a function of tensors that looks at no value, so that it can be captured. Equal rules
    decide alike.

    Attributes:
        reads_q: whether it needs q of drafts that have one.
        matches_greedy: whether drafts of a greedy row are accepted exactly where they are what the target says.
    """

    reads_q: bool
    matches_greedy: bool

    def decide_chains(
        self, drafts: Tensor, lengths: Tensor, q: Sequence[Tensor], p: Tensor, uniforms: Tensor
    ) -> Verdict:  # fmt: skip
        """The verdict on drafts [rows, k] int64, `lengths` [rows] of each row.

        Args:
            q: of each of the k drafts, [rows, vocab]; empty where `reads_q` is false. p: [rows, k + 1, vocab].
            uniforms: by position, [rows, k + 1, ...].
        """
        ...


def decides_chains(rule: Rule) -> bool:
    """Whether what a rule decides on chains is known as a function of tensors: not where only `decide` was replaced."""
    owner = next((kind for kind in type(rule).__mro__ if "decide" in vars(kind)), object)
    return isinstance(rule, ChainRule) and "decide_chains" in vars(owner) and "decide" not in vars(rule)


def match_samples(drafts: Tensor, lengths: Tensor, p: Tensor, sampler: Sampler, uniforms: Tensor) -> Verdict:
    """Accepts the drafts that are what the target says: a sample from p of each column."""
    said = sampler(p.flatten(0, 1), uniforms.flatten(0, 1)).view(p.shape[:2])
    accepted = accepted_lengths(said[:, : drafts.shape[1]] == drafts, lengths)
    return Verdict(accepted, said.gather(1, accepted[:, None]).squeeze(1), p.gather(-1, said[..., None]).squeeze(-1))


@dataclass(unsafe_hash=True)
class Rejection:
    """Speculative rejection sampling: no rule accepts more drafts one by one (Leviathan et al. 2023, section 3.2). Drafts without a
    distribution are verified by exact match."""

    numbers_rounds: ClassVar[bool] = True
    reads_q: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True

    def uniforms(self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None) -> Tensor:
        return torch.from_numpy(round_uniforms(seeds, firsts, width, rounds))

    draw = staticmethod(inverse_transform)

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        # A greedy row's p is a point mass: its token is accepted and anything else replaced by it, whatever q and the uniforms are.
        if tree.q is None or scores.greedy:
            return by_samples(tree, scores, self.draw, uniforms)
        return by_rejection(tree, scores, uniforms)

    def decide_chains(
        self, drafts: Tensor, lengths: Tensor, q: Sequence[Tensor], p: Tensor, uniforms: Tensor
    ) -> Verdict:  # fmt: skip
        k = drafts.shape[1]
        stacked = torch.stack(list(q), dim=1) if q else None
        return reject_and_replace(drafts, lengths, stacked, p, uniforms[:, :k, 1], uniforms[..., 0::2].flip(-1))


@dataclass(unsafe_hash=True)
class Coupled:
    """Draws what plain decoding would draw by the same uniforms, and accepts the drafts that are just that.

    Whatever drafter, draft lengths or batch: the same seed gives the same tokens, as long as p does not move by rounding. The
    price is a lower acceptance than the 1 - d of rejection sampling, d being the total variation of p and q.

    An exponential race over all tokens accepts at least (1 - d) / (1 + d) (Daliri et al. 2024, arXiv 2408.07978), at the cost of a
    random number per token. Here the race is over buckets of tokens: the buckets agree at least that often for the d of their sums.
    Inside the bucket the token is drawn by inverse transform, for which there is no bound: distributions in one bucket may never
    agree. On the bundled pair the difference to a race over all tokens is within counting errors (docs/measurements/numerics.md).
    """

    numbers_rounds: ClassVar[bool] = False
    reads_q: ClassVar[bool] = False
    matches_greedy: ClassVar[bool] = True

    def uniforms(self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None) -> Tensor:
        return torch.from_numpy(race_uniforms(seeds, firsts, width))

    draw = staticmethod(exponential_race)

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        return by_samples(tree, scores, self.draw, uniforms)

    def decide_chains(
        self, drafts: Tensor, lengths: Tensor, q: Sequence[Tensor], p: Tensor, uniforms: Tensor
    ) -> Verdict:  # fmt: skip
        return match_samples(drafts, lengths, p, self.draw, uniforms)


RULES: dict[str, Callable[[], Rule]] = {"rejection": Rejection, "coupled": Coupled}
