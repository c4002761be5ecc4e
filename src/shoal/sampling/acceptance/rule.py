"""The protocols of acceptance rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from shoal.sampling.distributions import Sampler
from shoal.sampling.scores import Scores
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree


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
        ...

    def draw(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Draws one token per row, [rows] int64. Greedy rows give the token of weight 1.

        Args:
            weights: [rows, vocab].
            uniforms: the uniforms of one position, [rows, ...].
        """
        ...

    def decide(self, tree: DraftTree, scores: Scores, uniforms: Tensor) -> Verdict:
        """Decides on a draft tree.

        Args:
            uniforms: by position, [rows, depth of the tree + 1, ...].
        """
        ...


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
        ...


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
