"""What a rule is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from shoal.sampling.distributions import Sampler
from shoal.sampling.scores import Scores
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


class Rule(Protocol):
    """How drafts are drawn and verified. `uniforms` is the row's own: [rows, width, ...] float64,
    one slice per position.

    Attributes:
        numbers_rounds: whether its uniforms depend on the number of a row's round where that is
            given.
        lossy: "" if what it commits has the distribution p; else what every output says of it.
    """

    @property
    def numbers_rounds(self) -> bool: ...

    @property
    def lossy(self) -> str: ...

    def uniforms(
        self, seeds: Sequence[int], firsts: Sequence[int], width: int, rounds: Sequence[int] | None
    ) -> Tensor:
        """Noise of a round for `width` positions from each row's first open one; `rounds`: see
        `shoal.sampling.uniforms.round_uniforms`."""
        ...

    def draw(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """One token per row from weights [rows, vocab] by one position's uniforms [rows, ...];
        [rows] int64. Greedy rows give the token of weight 1."""
        ...

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        """What is accepted of a draft tree; uniforms: by position, [rows, depth of the tree + 1,
        ...]."""
        ...


@runtime_checkable
class ChainRule(Protocol):
    """A rule that also decides on chains as a function of tensors that looks at no value, so that
    it can be captured. Equal rules decide alike.

    Attributes:
        reads_q: whether it needs q of drafts that have one.
        matches_greedy: whether drafts of a greedy row are accepted exactly where they are what the
            target says.
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
        """The verdict on drafts [rows, k] int64, `lengths` [rows] of each row.

        Args:
            q: of each of the k drafts, [rows, vocab]; empty where `reads_q` is false.
            p: [rows, k + 1, vocab].
            uniforms: by position, [rows, k + 1, ...].
            sampler: draws what `draw` does, by kernels of a GPU; None = `draw`.
        """
        ...


def decides_chains(rule: Rule) -> bool:
    """Whether what a rule decides on chains is known as a function of tensors: not where only
    `decide` was replaced."""
    owner = next((kind for kind in type(rule).__mro__ if "decide" in vars(kind)), object)
    return (
        isinstance(rule, ChainRule)
        and "decide_chains" in vars(owner)
        and "decide" not in vars(rule)
    )
