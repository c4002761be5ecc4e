"""Draft trees, the positions that a pass over them scores, and verdicts on them; plain data.

Shapes: `rows` active rows, `m` the most nodes of a row's tree, `vocab` the target's vocabulary.

A pass over a tree has m + 1 columns: column 0 is the row's last committed token, the root, and
column 1 + i is node i. A chain, the draft of a single sequence, is the tree in which node j follows
node j - 1.

The draws of nodes from a drafter's q are for rules that verify by q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import MOST_NODES
from shoal.errors import InternalError
from shoal.types.requests import Row


@dataclass(frozen=True)
class Siblings:
    """The draws of the children of every column of a round's trees (`shoal.types.trees`).

    The decision to make another draw may depend on everything known before its token is drawn,
    never on the token itself.

    Attributes:
        q: the distributions that children were drawn from, [contexts, vocab]; each sums to 1.
        contexts: for each row, the place in `q` of each column's children; -1 = the column has
            none.
        draws: for each row, the children (nodes) of each column in the order drawn.
        independent: True if all were drawn from q itself, so that a node may stand in `draws`
            repeatedly. False if each was drawn from q without its elder siblings, renormalised.
        sampled: for each row, the number of draws of each column that are from q, the first ones;
            the draws behind them are point masses: tokens chosen by information known before. None
            = all are from q.
    """

    q: Tensor
    contexts: Sequence[Sequence[int]]
    draws: Sequence[Sequence[Sequence[int]]]
    independent: bool = False
    sampled: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True)
class Probes:
    """The columns of a pass that only the drafter reads, behind the nodes of a tree.

    A probe's input is no token but a vector of the drafter (`shoal.models.runner.Runner.vectors`).
    No node sees a probe, and no probe stays in the cache.

    Attributes:
        vectors: for each row, the vector numbers of its probes.
        after: for each row, the column that each probe follows: 0 is the root, 1 + i node i of n, 1
            + n + j its probe j. A column comes before the columns that follow it.
    """

    vectors: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]


Block = tuple[Tensor, list[int], Sequence[Sequence[int]] | None]
"""The columns of a pass: the tokens [rows, q], the number of each row without padding, and the tree
that they form (None for chains)."""


@dataclass(frozen=True)
class DraftTree:
    """The proposal of a drafter for every row.

    Attributes:
        tokens: the nodes' tokens, [rows, m] int64; columns from a row's own length on are padding.
        lengths: the number of nodes of each row, [rows] int64.
        q: for each of the m nodes of a chain the distributions that its tokens were drawn from,
            [rows, vocab]; None without `siblings` = point masses: tokens were chosen without a
            distribution, and verification is by exact match.
        drafts: the same tokens without padding, one list per row.
        parents: for each row's nodes, the node before it; -1 is the root. Parents come before their
            children. A chain's are `range(-1, n - 1)`.
        steps: the number of positions that the drafter looked at; more than the deepest node if it
            looked and stopped.
        siblings: the draws of the nodes of all rows, if trees may branch and their q is known.
        drafters: for each row's nodes, the names of the drafters that proposed them; None = the
            engine's drafter proposed all.
        forced: for each row, the number of its nodes that a grammar forces, the last ones
            (`shoal.drafting.grafting`); None = none.
        probes: columns that the drafter adds to the pass for itself; None = none.
    """

    tokens: Tensor
    lengths: Tensor
    q: Sequence[Tensor] | None
    drafts: Sequence[list[int]]
    parents: Sequence[Sequence[int]]
    steps: int = 0
    siblings: Siblings | None = None
    drafters: Sequence[Sequence[str]] | None = None
    forced: Sequence[int] | None = None
    probes: Probes | None = None

    @staticmethod
    def of(
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
        *,
        device: torch.device | None = None,
        steps: int = 0,
    ) -> DraftTree:
        """Returns a tree of point masses from lists, one per row.

        Args:
            drafts: the tokens of the nodes.
            parents: the parents of the nodes; None = every row has a chain.
            device: the target's; None = the CPU.
            steps: the number of positions that the drafter looked at.

        Raises:
            InternalError: a parent does not come before its child, or a tree that branches has more
                than `MOST_NODES` nodes.
        """
        lists = [list(draft) for draft in drafts]
        above = (
            [_checked(p, len(d)) for p, d in zip(parents, lists, strict=True)]
            if parents
            else chains(lists)
        )
        m = max(map(len, lists))
        padded = [draft + [0] * (m - len(draft)) for draft in lists]
        tokens = torch.tensor(padded, dtype=torch.long, device=device).view(len(lists), m)
        return DraftTree(
            tokens,
            torch.tensor([len(draft) for draft in lists], device=device),
            None,
            lists,
            above,
            steps,
        )

    @staticmethod
    def empty(rows: int, device: torch.device, steps: int = 0) -> DraftTree:
        """Returns an empty proposal, for a step of plain decoding. Cached by its arguments."""
        return _empty(rows, device, steps)

    @property
    def m(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def branches(self) -> bool:
        """True if some row's tree is no chain."""
        return list(self.parents) != [range(-1, len(parents) - 1) for parents in self.parents]

    @cached_property
    def depths(self) -> list[list[int]]:
        """The depths of each row's columns: 0 for the root, else one more than the parent's."""
        return [_depths(parents) for parents in self.parents]

    def by_column(self, values: Tensor) -> Tensor:
        """Returns the values of each column, [rows, m + 1, ...], from the values of each depth.

        Args:
            values: the values for each position after the last committed token, [rows, depths,
                ...].
        """
        if not self.branches:
            return values[:, : self.m + 1]
        padded = [depths + [0] * (self.m + 1 - len(depths)) for depths in self.depths]
        index = torch.tensor(padded, device=values.device)
        return values[torch.arange(len(padded), device=values.device)[:, None], index]


@lru_cache(maxsize=1024)
def _empty(rows: int, device: torch.device, steps: int) -> DraftTree:
    return DraftTree.of([[] for _ in range(rows)], device=device, steps=steps)


def chains(drafts: Sequence[Sequence[int]]) -> list[range]:
    """Returns the parents of rows whose drafts are single sequences."""
    return [range(-1, len(draft) - 1) for draft in drafts]


def _checked(parents: Sequence[int], nodes: int) -> Sequence[int]:
    """Returns the checked parents; a chain's as a range."""
    if len(parents) != nodes or any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise InternalError(
            f"{nodes} nodes need a parent each that comes before it, or -1, got {list(parents)}"
        )
    if list(parents) == list(range(-1, nodes - 1)):
        return range(-1, nodes - 1)
    if nodes > MOST_NODES:
        raise InternalError(f"a draft tree has at most {MOST_NODES} nodes per row, got {nodes}")
    return parents


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths


@dataclass(frozen=True)
class Positions:
    """The positions that a block of logits [rows, q, vocab] scores, by the tokens before them.

    Args:
        rows: one per row of the block.
        drafts: the tokens of each row's nodes.
        parents: the parents of the nodes, as in `DraftTree`; None = chains.
        first: the column of the pass that the block begins with; not 0 only for chains.
    """

    rows: Sequence[Row]
    drafts: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]] | None = None
    first: int = 0

    @staticmethod
    def of(rows: Sequence[Row], tree: DraftTree) -> Positions:
        """Returns the positions of a verification pass."""
        return Positions(rows, tree.drafts, tree.parents if tree.branches else None)

    def parent(self, row: int, column: int) -> int:
        """Returns the column before a column of the pass; -1 before the root."""
        return (
            column - 1 if self.parents is None or not column else self.parents[row][column - 1] + 1
        )

    def path(self, row: int, column: int) -> list[int]:
        """Returns the drafted tokens after the last committed one to a column, its own included."""
        draft = self.drafts[row]
        if self.parents is None:
            return list(draft[:column])
        path = []
        while column:
            path.append(draft[column - 1])
            column = self.parent(row, column)
        return path[::-1]

    def paths(self, row: int, q: int) -> list[tuple[int, Sequence[int]]]:
        """Returns the columns of the block [rows, q] that can matter, with the drafts before."""
        if self.parents is None:
            first, draft = self.first, self.drafts[row]
            return [
                (column - first, draft[:column]) for column in self.columns(row)[first : first + q]
            ]
        return [(column, self.path(row, column)) for column in self.columns(row)]

    def history(self, row: int, column: int) -> list[int]:
        """Returns all tokens before the position that a column scores."""
        return [*self.rows[row].tokens, *self.path(row, column)]

    def of_rows(self, rows: Sequence[int]) -> Positions:
        """Returns the positions of some of the rows."""
        parents = None if self.parents is None else [self.parents[b] for b in rows]
        return Positions(
            [self.rows[b] for b in rows], [self.drafts[b] for b in rows], parents, self.first
        )

    def columns(self, row: int) -> list[int]:
        """Returns the columns of the pass whose distribution can matter.

        Padding is left out, and so are the columns after a drafted EOS, where the row ends.
        """
        eos, draft = self.rows[row].eos, self.drafts[row]
        if self.parents is None:
            return list(
                range(1 + next((i for i, token in enumerate(draft) if token in eos), len(draft)))
            )
        columns_of_row = {0}
        for column, token in enumerate(draft, start=1):
            if token not in eos and self.parent(row, column) in columns_of_row:
                columns_of_row.add(column)
        return sorted(columns_of_row)


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


class PlainRun(NamedTuple):
    """The draws of a run, by row and round.

    Attributes:
        raw: the natural logs of the tokens' probabilities by the logits alone.
        processed: the natural logs of the tokens' probabilities under p.
    """

    tokens: list[list[int]]
    raw: list[list[float]]
    processed: list[list[float]]

    @property
    def rounds(self) -> int:
        return len(self.tokens[0])

    @property
    def verdict(self) -> Verdict:
        """The decision of the last round."""
        last = torch.tensor([own[-1] for own in self.tokens])
        return Verdict(torch.zeros_like(last), last, torch.tensor(self.processed)[:, -1:].exp())

    @property
    def no_logits(self) -> Tensor:
        """Logits of no token, [rows, 1, 0]: those of a run are not kept."""
        return torch.empty(len(self.tokens), 1, 0)
