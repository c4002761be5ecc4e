"""What the target says of a draft tree: its logits, and the declared distributions where a decision needs them.

Of k drafts the first rejected one ends the row, so the distributions behind it are never needed. Over a large vocabulary they cost
more than anything else outside the models: there the columns are computed one after the other, for the rows that have got so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.sampling import controls, distributions, native
from shoal.sampling.distributions import Draws, Sampler
from shoal.types.rounds import Faults, Verdict
from shoal.types.trees import DraftTree, Positions

_TOGETHER = 1 << 19
"""Scores up to which the columns of a block are computed together: below, an operation's own cost outweighs columns that turn out
not to be needed. Also on a device that computes all of them at once."""
_CACHED = 1 << 21
"""Scores up to which the rows of a block are: beyond, every temporary is mapped anew, and page faults take most of the time."""


@dataclass(frozen=True)
class Block:
    """Some columns of some rows of a pass.

    Attributes:
        columns: of the pass. rows: their places in the batch; None = all. index: the same as a tensor.
    """

    columns: range
    rows: Sequence[int] | None = None
    index: Tensor | None = None

    def of_rows(self, values: Tensor) -> Tensor:
        """What holds for each row of the batch, [all rows, ...], for those of the block."""
        return values if self.index is None else values.index_select(0, self.index)

    def of(self, values: Tensor) -> Tensor:
        """What holds for each column, [all rows, m + 1 or m, ...], for those of the block; none beyond the end of `values`."""
        return self.of_rows(values[:, self.columns.start : self.columns.stop])


@dataclass(frozen=True)
class Scores:
    """What the target says of a draft tree, by the m + 1 columns of the pass (`shoal.types.trees`).

    Distributions may be asked for until the round is committed, as they depend on the tokens before it.

    Attributes:
        logits: raw, [rows, m + 1, vocab]. positions: what the columns stand for.
        faults: columns that were asked for and have no distribution, some of them on paths that may be rejected.
        named: makes of a fault what users are told.
        hidden: the target's hidden states that the drafter reads, [rows, m + 1, layers * width]; None where it reads none.
        columns: logits of all columns of a pass with probes (`shoal.types.trees.Probes`), [rows, columns, vocab]; else None.
    """

    logits: Tensor
    positions: Positions
    faults: Faults = field(default_factory=dict)
    named: Callable[[ShoalError], ShoalError] = lambda error: error
    hidden: Tensor | None = None
    columns: Tensor | None = None

    @property
    def greedy(self) -> bool:
        """Whether all rows are, so that every distribution is a point mass."""
        return all(row.request.sampling.greedy for row in self.positions.rows)

    def everything(self) -> Block:
        """All columns of all rows; the only block of trees that branch."""
        return Block(range(self.logits.shape[1]))

    def blocks_pay(self) -> bool:
        """Whether to compute columns one after the other takes less time than all together."""
        return self.logits.numel() > _TOGETHER and self.logits.device.type == "cpu" and self.positions.parents is None

    def parts(self) -> list[Sequence[int]]:
        """The rows of the batch, as many at a time as are computed together."""
        rows, most = range(self.logits.shape[0]), max(1, _CACHED // self.logits.shape[-1])
        return [rows[start : start + most] for start in range(0, len(rows), most)]

    def block(self, rows: Sequence[int], first: int, end: int) -> Block:
        """The columns from `first` on that are computed together, before column `end`."""
        columns = range(first, min(end, first + max(1, _TOGETHER // (len(rows) * self.logits.shape[-1]))))
        whole = len(rows) == self.logits.shape[0]
        return Block(columns, *((None, None) if whole else (rows, torch.tensor(rows, device=self.logits.device))))

    def p(self, block: Block) -> Tensor:
        """The declared distributions of a block, [rows, columns, vocab] (`shoal.sampling.distributions.probabilities`)."""
        found: Faults = {}
        probs = distributions.probabilities(block.of(self.logits), self.positions_of(block), found)
        self._keep(found)
        return probs

    def draws(self, block: Block, sampler: Sampler, uniforms: Tensor) -> Draws:
        """Tokens drawn from the distributions of a block (`shoal.sampling.distributions.draws`).

        Args:
            uniforms: by column, [all rows, m + 1, ...].
        """
        found: Faults = {}
        drawn = distributions.draws(block.of(self.logits), self.positions_of(block), sampler, block.of(uniforms), found)
        self._keep(found)
        return drawn

    def verified(self, tree: DraftTree, sampler: Sampler, uniforms: Tensor, *, rejection: bool) -> Verdict | None:
        """The verdict on chains by the kernel in C; None where it does not compute these distributions, or where controls over a
        large vocabulary are better computed as far as drafts are accepted (`in_blocks`).

        Args:
            uniforms: by column, [rows, m + 1, ...]. rejection: rejection sampling of drafts whose q is known, else exact match.
        """
        samplings = [row.request.sampling for row in self.positions.rows]
        if tree.branches or sampler not in distributions.RACES or not native.takes(self.logits, samplings):
            return None
        if self.blocks_pay() and controls.change(self.positions.rows):
            return None
        faults: Faults = {}
        scores = controls.all_controlled(self.logits, self.positions, faults)
        found = native.verified(scores, samplings, tree, uniforms, race=distributions.RACES[sampler], rejection=rejection)
        if found.impossible:
            reached = torch.arange(tree.m + 1) == found.accepted[:, None]
            controls.report((found.token < 0)[:, None] & reached, self.logits, self.positions, faults)
            found.token.clamp_(min=0)
        self._keep(faults)
        raw = found.logprobs if scores is self.logits else None
        return Verdict(found.accepted, found.token, found.probs, raw_logprobs=raw)

    def positions_of(self, block: Block) -> Positions:
        positions = self.positions if block.rows is None else self.positions.of_rows(block.rows)
        return replace(positions, first=block.columns.start) if block.columns.start else positions

    def _keep(self, found: Faults) -> None:
        for row, columns in found.items():
            known = self.faults.setdefault(row, {})
            for column, error in columns.items():
                if column not in known:
                    known[column] = self.named(error)


def in_blocks(tree: DraftTree, scores: Scores, verdict_of: Callable[[Block], Verdict]) -> Verdict:
    """The verdict on chains, over large vocabularies by blocks of columns, each for the rows whose drafts were accepted so far.

    Args:
        verdict_of: how many drafts of a block's columns are accepted, the token that follows them if it is one of the block, and
            the probabilities of both.
    """
    if not scores.blocks_pay():
        return verdict_of(scores.everything())
    accepted, token = torch.zeros_like(tree.lengths), torch.zeros_like(tree.lengths)
    probs = torch.ones(len(accepted), tree.m + 1, dtype=torch.promote_types(scores.logits.dtype, torch.float32))
    for rows in scores.parts():
        first = 0
        while rows:
            block = scores.block(rows, first, 1 + max(len(tree.drafts[b]) for b in rows))
            found = verdict_of(block)
            where = slice(None) if block.index is None else block.index
            accepted[where], token[where] = first + found.accepted, found.token
            probs[where, first : block.columns.stop] = found.probs
            first, width = block.columns.stop, len(block.columns)
            rows = [row for row, run in zip(rows, found.accepted.tolist(), strict=True) if run == width]
    return Verdict(accepted, token, probs)
