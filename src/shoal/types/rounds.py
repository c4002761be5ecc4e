"""What flows from stage to stage within one round; plain data.

Shapes: `rows` active rows, `m` the most nodes of a row's draft tree, `vocab` the target's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.types.requests import Row
from shoal.types.samples import Sample

Faults = dict[Row, dict[int, ShoalError]]
"""Why a model has no distribution for a row, by column of the pass. A row whose accepted path leads
to such a column ends there. What the pass wrote at a faulty column must be removed, also where no
row comes that far (padding, rejected drafts).

By plain decoding the row would end there too, but for one case: a draft that makes NaN of its own
keys or values. Those hidden from a position count with weight 0, and 0 * NaN is NaN, so that all
positions of the row in that pass fail, and the row ends before a draft that might have been
rejected. Neither its committed tokens nor other rows are reached.
"""


@dataclass(frozen=True)
class Verdict:
    """What a round decided.

    Attributes:
        accepted: drafts kept, [rows] int64: the depth that the row's accepted path reaches.
        token: the replacement or bonus that follows them, [rows] int64.
        probs: of the drafts kept under p, then of `token`, [rows, at least as many], padded.
        path: the nodes kept, from the root on, [rows, longest path] int64, padded; None where all
            trees are chains: the first `accepted` nodes.
        raw_logprobs: of the same tokens by the logits alone, natural logarithms, shaped like
            `probs`; None if unknown.
        check_weights: natural logs of the weights of the kept tokens and of `token`, by the place
            of rows whose checks are weighed (`shoal.sampling.awrs`).
    """

    accepted: Tensor
    token: Tensor
    probs: Tensor
    path: Tensor | None = None
    raw_logprobs: Tensor | None = None
    check_weights: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @cached_property
    def lists(self) -> tuple[list[Sequence[int]], list[int]]:
        """The nodes kept and the token that follows them, of each row; one transfer from the
        device."""
        if self.path is None:
            accepted, tokens = torch.stack([self.accepted, self.token]).tolist()
            return [range(count) for count in accepted], tokens
        table = torch.cat([self.accepted[:, None], self.token[:, None], self.path], dim=1).tolist()
        return [path[:count] for count, _, *path in table], [token for _, token, *_ in table]


@dataclass(frozen=True)
class Outcome:
    """What a draft length controller hears of a round.

    Attributes:
        drafted, accepted: tokens per row, of trees the depth; replacement and bonus not counted.
        steps: positions the drafter looked at.
        seconds: of the whole round.
        seconds_drafting: of them, for the proposal.
        seconds_preparing: beside the round, for what the drafter had to compute of prompts, and of
            what was decoded without it.
        seconds_between: of the drafting, from the first position looked at to the last: of all
            steps but one. None = unknown.
        nodes: of each row's tree; None = all are chains.
    """

    drafted: list[int]
    accepted: list[int]
    steps: int
    seconds: float
    seconds_drafting: float
    seconds_preparing: float = 0.0
    seconds_between: float | None = None
    nodes: list[int] | None = None


@dataclass(frozen=True)
class Commit:
    """What a round added to one row: `tokens` are committed for good, the first `accepted` of them
    were drafted.

    `tokens` counts what the round appended before a stop string cut the row's end. `text` is the
    new text that may be shown (streaming only). `sample` is set when the row ended. `drafts` are
    the ids of the row's draft tree, `drafters` the names of those who proposed them, and `path` the
    nodes that were kept.
    """

    row: Row
    tokens: list[int]
    accepted: int
    text: str = ""
    sample: Sample | None = None
    drafts: Sequence[int] = ()
    drafters: Sequence[str] = ()
    path: Sequence[int] = ()

    @property
    def rejected(self) -> list[tuple[int, str]]:
        """The drafts that were not kept, in the order of the tree's nodes: token id and drafter."""
        kept = set(self.path)
        nodes = enumerate(zip(self.drafts, self.drafters, strict=False))
        return [draft for node, draft in nodes if node not in kept]
