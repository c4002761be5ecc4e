"""What flows from stage to stage within one round; plain data.

Shapes: `rows` active rows, `k` the longest draft of the round, `vocab` the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.types.requests import Row
from shoal.types.samples import Sample


@dataclass(frozen=True)
class Fault:
    """Why the target has no distribution for a row at a draft position: if the row comes that far, it ends there. At padding no row
    comes that far, but what the pass wrote there must be removed.

    By plain decoding it would end there too, but for one case: a draft that makes NaN of its own keys or values. Those hidden from
    a position count with weight 0, and 0 * NaN is NaN, so that all positions of the row in that pass fail, and the row ends before
    a draft that might have been rejected. Neither its committed tokens nor other rows are reached.
    """

    position: int
    error: ShoalError


Faults = dict[Row, Fault]
"""The first fault of each row that has one."""


@dataclass(frozen=True)
class Proposal:
    """What the drafter proposes.

    Attributes:
        tokens: [rows, k] int64; columns from a row's own length on are padding.
        lengths: draft length of each row, [rows] int64.
        q: the distribution each draft was really drawn from, [rows, k, vocab]; None when k = 0.
        drafts: the same tokens without padding, one list per row.
        steps: positions the drafter looked at; more than k if it looked and stopped.
    """

    tokens: Tensor
    lengths: Tensor
    q: Tensor | None
    drafts: list[list[int]]
    steps: int = 0

    @property
    def k(self) -> int:
        return self.tokens.shape[1]

    @staticmethod
    def empty(rows: int, device: torch.device, steps: int = 0) -> Proposal:
        """Nothing proposed: the round is a step of plain decoding."""
        tokens = torch.empty(rows, 0, dtype=torch.long, device=device)
        lengths = torch.zeros(rows, dtype=torch.long, device=device)
        return Proposal(tokens, lengths, None, [[] for _ in range(rows)], steps)


@dataclass(frozen=True)
class Scores:
    """What the target says of a proposal, for the k + 1 positions after each row's last committed token.

    Attributes:
        logits: raw, [rows, k + 1, vocab]. p: the declared distribution, same shape.
        normaliser: log of the sum of exp(logits), [rows, k + 1].
        faults: rows that p does not exist for, some of it on paths that may be rejected.
    """

    logits: Tensor
    p: Tensor
    normaliser: Tensor
    faults: Faults = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a round decided.

    Attributes:
        accepted: drafts kept, [rows] int64, 0 <= accepted <= draft length of the row.
        token: the replacement or bonus that follows them, [rows] int64.
    """

    accepted: Tensor
    token: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a draft length controller hears of a round.

    Attributes:
        drafted, accepted: tokens per row; replacement and bonus not counted.
        steps: positions the drafter looked at. seconds: of the whole round. seconds_drafting: of them, for the proposal.
    """

    drafted: list[int]
    accepted: list[int]
    steps: int
    seconds: float
    seconds_drafting: float


@dataclass(frozen=True)
class Commit:
    """What a round added to one row: `tokens` are committed for good, the first `accepted` of them were drafted.

    `tokens` counts what the round appended before a stop string cut the row's end. `text` is the new text that may be shown
    (streaming only). `sample` is set when the row ended.
    """

    row: Row
    tokens: list[int]
    accepted: int
    text: str = ""
    sample: Sample | None = None
