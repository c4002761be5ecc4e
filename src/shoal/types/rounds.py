"""The data that the stages of one round pass on; plain data.

Shapes: `rows` active rows, `m` the most nodes of a row's draft tree, `vocab` the target's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.types.requests import Row
from shoal.types.samples import Sample

Faults = dict[Row, dict[int, ShoalError]]
"""The reasons why a model has no distribution for a row, by column of the pass. A row whose
accepted path leads to such a column ends there. The engine must remove the keys and values that the
pass wrote at a faulty column, also if no row reaches it (padding, rejected drafts).

Plain decoding would end the row at the same token, with one exception. If a draft writes NaN into
its own key or value, every position of that row fails in this pass: a masked key has weight 0, and
0 * NaN is NaN. The row then ends even if that draft would have been rejected. Committed tokens and
other rows are not affected.
"""


@dataclass(frozen=True)
class Verdict:
    """The decision of a round.

    Attributes:
        accepted: the number of drafts kept, [rows] int64: the depth that the row's accepted path
            reaches.
        token: the replacement or bonus that follows the kept drafts, [rows] int64.
        probs: the probabilities of the kept drafts under p, then that of `token`, [rows, at least
            as many], padded.
        path: the nodes kept, from the root on, [rows, longest path] int64, padded; None if all
            trees are chains: the first `accepted` nodes.
        raw_logprobs: the natural logs of the probabilities of the same tokens by the logits alone,
            shaped like `probs`; None if unknown.
        check_weights: natural logs of the weights of the kept tokens and of `token`, by the place
            of rows whose checks are weighed (`shoal.sampling.drawing`).
    """

    accepted: Tensor
    token: Tensor
    probs: Tensor
    path: Tensor | None = None
    raw_logprobs: Tensor | None = None
    check_weights: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @cached_property
    def lists(self) -> tuple[list[Sequence[int]], list[int]]:
        """The kept nodes of each row and the token that follows; one transfer from the device."""
        if self.path is None:
            accepted, tokens = torch.stack([self.accepted, self.token]).tolist()
            return list(map(range, accepted)), tokens
        table = torch.cat([self.accepted[:, None], self.token[:, None], self.path], dim=1).tolist()
        return [path[:count] for count, _, *path in table], [token for _, token, *_ in table]

    def columns(self, tokens: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Returns the columns that predict each row's committed tokens, which follow its path."""
        paths, _ = self.lists
        return [
            range(len(own))
            if isinstance(path, range)
            else [0, *(node + 1 for node in path)][: len(own)]
            for path, own in zip(paths, tokens, strict=True)
        ]


@dataclass(frozen=True)
class Outcome:
    """The measurements of a round that a draft length controller gets.

    Attributes:
        drafted: drafted tokens per row; the depth of a tree.
        accepted: accepted tokens per row, without replacement and bonus.
        steps: the number of positions that the drafter looked at.
        seconds: the duration of the whole round without its planning.
        seconds_drafting: the part of `seconds` spent on the proposal.
        seconds_preparing: time beside the round in which the drafter computed prompts, and tokens
            that were decoded without it.
        seconds_between: the part of `seconds_drafting` from the first position looked at to the
            last: the time of all steps but one. None = unknown.
        nodes: the number of nodes of each row's tree; None = all are chains.
        forced: the number of further tokens of each row, which a grammar forces; None = none. Their
            acceptance is in no other field.
        seconds_planning: the time in which draft lengths and uniforms were computed, beside
            `seconds`. Most rounds keep the plan of an earlier one.
        rounds: the number of rounds, each as described; more than one only if all were plain
            (`shoal.engine.multi_step`).
        riding: the prompt tokens of another row in the target's pass.
    """

    drafted: list[int]
    accepted: list[int]
    steps: int
    seconds: float
    seconds_drafting: float
    seconds_preparing: float = 0.0
    seconds_between: float | None = None
    nodes: list[int] | None = None
    forced: list[int] | None = None
    seconds_planning: float = 0.0
    rounds: int = 1
    riding: int = 0


class Commit(NamedTuple):
    """The tokens that a round added to one row.

    Attributes:
        tokens: the tokens that the round appended, before a stop string cut the row's end; they are
            committed for good.
        accepted: the number of `tokens`, the first ones, that were drafted.
        text: the new text that may be shown (streaming only).
        sample: the sample, if the row ended.
        drafts: the ids of the row's draft tree.
        drafters: the names of the drafters that proposed them.
        path: the nodes that were kept.
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
        """The rejected drafts, in the order of the tree's nodes: token id and drafter."""
        kept = set(self.path)
        nodes = enumerate(zip(self.drafts, self.drafters, strict=False))
        return [draft for node, draft in nodes if node not in kept]
