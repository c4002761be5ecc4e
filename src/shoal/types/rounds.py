"""What flows from stage to stage within one round; plain data.

Shapes: `rows` active rows, `m` the most nodes of a row's draft tree, `vocab` the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.types.requests import Row
from shoal.types.samples import Sample

Faults = dict[Row, dict[int, ShoalError]]
"""Why a model has no distribution for a row, by column of the pass. A row whose accepted path leads to such a column ends there.
What the pass wrote at a faulty column must be removed, also where no row comes that far (padding, rejected drafts).

By plain decoding the row would end there too, but for one case: a draft that makes NaN of its own keys or values. Those hidden from
a position count with weight 0, and 0 * NaN is NaN, so that all positions of the row in that pass fail, and the row ends before
a draft that might have been rejected. Neither its committed tokens nor other rows are reached.
"""


@dataclass(frozen=True)
class Scores:
    """What the target says of a draft tree, by the m + 1 columns of the pass (`shoal.types.trees`).

    Attributes:
        logits: raw, [rows, m + 1, vocab]. p: the declared distribution, same shape.
        normaliser: log of the sum of exp(logits), [rows, m + 1].
        faults: columns that p does not exist for, some of them on paths that may be rejected.
    """

    logits: Tensor
    p: Tensor
    normaliser: Tensor
    faults: Faults = field(default_factory=dict)

    def along(self, verdict: Verdict) -> Scores:
        """The scores of the positions on each row's accepted path, in their order; the same where trees are chains."""
        if verdict.path is None:
            return self
        columns = torch.nn.functional.pad(verdict.path + 1, (1, 0))
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        logits, p, normaliser = (values[rows, columns] for values in (self.logits, self.p, self.normaliser))
        return Scores(logits, p, normaliser, self.faults)


@dataclass(frozen=True)
class Verdict:
    """What a round decided.

    Attributes:
        accepted: drafts kept, [rows] int64: the depth that the row's accepted path reaches.
        token: the replacement or bonus that follows them, [rows] int64.
        path: the nodes kept, from the root on, [rows, longest path] int64, padded; None where all trees are chains: the first
            `accepted` nodes.
    """

    accepted: Tensor
    token: Tensor
    path: Tensor | None = None

    @cached_property
    def lists(self) -> tuple[list[Sequence[int]], list[int]]:
        """The nodes kept and the token that follows them, of each row; one transfer from the device."""
        if self.path is None:
            accepted, tokens = torch.stack([self.accepted, self.token]).tolist()
            return [range(count) for count in accepted], tokens
        table = torch.cat([self.accepted[:, None], self.token[:, None], self.path], dim=1).tolist()
        return [path[:count] for count, _, *path in table], [token for _, token, *_ in table]


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
