"""The target's scores of a draft tree: logits, and declared distributions for a decision.

The distributions are computed only if a decision needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.sampling import controls, distributions, native_draws
from shoal.sampling.distributions import Draws, Sampler
from shoal.sampling.guidance import ClassOdds
from shoal.types.rounds import Faults, Verdict
from shoal.types.trees import DraftTree, Positions


@dataclass(frozen=True)
class Scores:
    """The scores of the m + 1 columns of a pass (`shoal.types.trees`).

    Distributions may be asked for until the round is committed, as they depend on the tokens before
    it.

    Attributes:
        logits: the raw logits, [rows, m + 1, vocab].
        positions: the positions that the columns score.
        faults: the columns that were asked for and have no distribution, some of them on paths that
            may be rejected.
        named: the function that makes the error that users see of a fault.
        hidden: the target's hidden states that the drafter reads, [rows, m + 1, layers * width];
            None if it reads none.
        columns: the logits of all columns of a pass with probes (`shoal.types.trees.Probes`),
            [rows, columns, vocab]; None for other passes.
        odds: the odds of the classes of rows with a posterior; None if there are none.
    """

    logits: Tensor
    positions: Positions
    faults: Faults = field(default_factory=dict)
    named: Callable[[ShoalError], ShoalError] = lambda error: error
    hidden: Tensor | None = None
    columns: Tensor | None = None
    odds: ClassOdds | None = None

    @property
    def greedy(self) -> bool:
        """True if all rows are greedy, so that every distribution is a point mass."""
        return all(row.request.sampling.greedy for row in self.positions.rows)

    def of_row(self, b: int) -> Scores:
        """Returns the scores of one row, [1, m + 1, vocab], with the faults of all."""
        return replace(self, logits=self.logits[b : b + 1], positions=self.positions.of_rows([b]))

    def note(self, faults: Faults) -> None:
        """Keeps the first fault of each column."""
        for row, columns in faults.items():
            own = self.faults.setdefault(row, {})
            own.update(
                {
                    column: self.named(error)
                    for column, error in columns.items()
                    if column not in own
                }
            )

    def p(self) -> Tensor:
        """Returns the declared distributions, [rows, m + 1, vocab].

        See `shoal.sampling.distributions.probabilities`.
        """
        faults: Faults = {}
        probs = distributions.probabilities(self.logits, self.positions, faults)
        self.note(faults)
        return probs


def drawn(scores: Scores, sampler: Sampler, uniforms: Tensor) -> Draws:
    """Draws a token of each column (`shoal.sampling.distributions.draws`).

    Args:
        uniforms: [rows, m + 1, ...].
    """
    faults: Faults = {}
    found = distributions.draws(scores.logits, scores.positions, sampler, uniforms, faults)
    scores.note(faults)
    return found


def by_kernel(
    tree: DraftTree, scores: Scores, sampler: Sampler, uniforms: Tensor, *, rejection: bool
) -> Verdict | None:
    """Decides on chains by the kernel in C, which stops at a row's first rejection.

    Args:
        tree: the chains.
        scores: the scores of the target.
        sampler: the sampler of the tokens behind the accepted ones.
        uniforms: by column, [rows, m + 1, ...].
        rejection: True for rejection sampling of drafts whose q is known; False for exact match.

    Returns:
        The verdict; None for trees, and for distributions that the kernel does not compute.
    """
    samplings = [row.request.sampling for row in scores.positions.rows]
    if (
        tree.branches
        or sampler not in distributions.RACES
        or not native_draws.takes(scores.logits, samplings)
    ):
        return None
    faults: Faults = {}
    controlled = controls.all_controlled(scores.logits, scores.positions, faults)
    race = distributions.RACES[sampler]
    found = native_draws.verified(
        controlled, samplings, tree, uniforms, race=race, rejection=rejection
    )
    if found.impossible:
        reached = torch.arange(tree.m + 1) == found.accepted[:, None]
        controls.report(
            (found.token < 0)[:, None] & reached, scores.logits, scores.positions, faults
        )
        found.token.clamp_(min=0)
    scores.note(faults)
    raw = found.logprobs if controlled is scores.logits else None
    return Verdict(found.accepted, found.token, found.probs, raw_logprobs=raw)
