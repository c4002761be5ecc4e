"""The layout of a ragged forward pass, and of the draft trees in its block.

The layout of trees has the depth of each column, and the columns that it sees. Column 0 of a
row is its last committed token, the root; column 1 + i is node i of its tree. A node's parent comes
before the node. A column sees itself and its ancestors: bit i of its word is 1 if it sees column i
(Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781, "tree attention").
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from operator import add, sub

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.config import MOST_NODES
from shoal.errors import InternalError, RequestError
from shoal.types.requests import Prefix

Parents = Sequence[Sequence[int]]
"""The parent node of each node of each row's tree; -1 is the root."""
Array = npt.NDArray[np.int64]


def branching(parents: Parents | None) -> bool:
    """Returns True if some row's tree is not a chain."""
    return parents is not None and any(
        tree != range(-1, len(tree) - 1) and list(tree) != list(range(-1, len(tree) - 1))
        for tree in parents
    )


def layout(parents: Parents, counts: Sequence[int]) -> tuple[Array, Array]:
    """Computes the depths and words of all columns, [rows, q] int64 each.

    Unused columns continue the row's last column as a chain.

    Args:
        parents: [rows][nodes].
        counts: columns of each row, 1 + nodes. q = max(counts).

    Raises:
        RequestError: more than `MOST_NODES` nodes.
        InternalError: counts that do not fit, or a parent that is not an earlier node.
    """
    if [len(tree) + 1 for tree in parents] != list(counts):
        raise InternalError(
            f"trees of {[len(tree) for tree in parents]} nodes in blocks of {list(counts)} columns"
        )
    rows, q = len(counts), max(counts)
    if q > 1 + MOST_NODES:
        raise RequestError(f"a draft tree may have at most {MOST_NODES} nodes, got {q - 1}")
    columns = np.tile(np.arange(-1, q - 1), (rows, 1))  # the parent of each column
    for row, tree in zip(columns, parents, strict=True):
        row[1 : len(tree) + 1] = np.asarray(tree, dtype=np.int64) + 1
    if (columns[:, 1:] < 0).any() or (columns >= np.arange(q)).any():
        raise InternalError("a draft tree has a node whose parent does not come before it")
    every = np.arange(rows)
    depths, words = np.zeros((rows, q), dtype=np.int64), np.tile(_own(q), (rows, 1))
    for column in range(1, q):
        parent = columns[:, column]
        depths[:, column] = depths[every, parent] + 1
        words[:, column] |= words[every, parent]
    return depths, words.view(np.int64)


def _own(q: int) -> npt.NDArray[np.uint64]:
    """Returns the bit of each column, [q]."""
    return np.left_shift(np.uint64(1), np.arange(q, dtype=np.uint64))


def chain_words(q: int) -> Array:
    """Returns the words of a chain's columns, [q] int64: the lower triangle."""
    return np.bitwise_or.accumulate(_own(q)).view(np.int64)


PACK_FROM = 1 / 8
"""The smallest share of unused columns for which a pass of Transformers' modules is packed.

Packing costs 5 % of a small pass.
"""
ALWAYS = -1.0
"""The share for which a pass of several rows is packed even where no column is unused."""


class PassRows:
    """The rows of a ragged forward pass: the numbers of each, on the host.

    Args:
        prefixes: the prefix of each row, or None for a row that has all its tokens in its slot;
            None = no row has a prefix.
        parents: the tree of each row's tokens, of counts[b] - 1 nodes; None = all are chains.
        gaps: number of tokens that each row's slot leaves out; None = none.

    Attributes:
        slots: cache slot of each row.
        starts: number of tokens each row has already, without its gap.
        counts: tokens fed per row.
        lengths: starts + counts.
        q: max(counts).
        offsets: length of each row's prefix, 0 without; the position of the first token in its
            slot.
        tails: lengths - offsets: keys in the slot that the row's last query sees.
        final: True if no token of the pass is removed later; the caller of the pass sets it.
        parents: None where no row's tree branches.
        depths: depths of the columns, [rows, q] int64 on the host; None without parents.
        tree_words: words of the columns, [rows, q] int64 on the host; None without parents.

    Raises:
        RequestError, InternalError: see `shoal.models.cache.pass_plan.layout`.
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        prefixes: Sequence[Prefix | None] | None = None,
        parents: Parents | None = None,
        gaps: Sequence[int] | None = None,
    ) -> None:
        self.slots, self.starts, self.counts = list(slots), list(starts), list(counts)
        self.prefixes = [None] * len(self.starts) if prefixes is None else list(prefixes)
        self.final = False
        self.gaps = list(gaps) if gaps is not None and any(gaps) else None
        self.q = max(self.counts)
        self.lengths = list(map(add, self.starts, self.counts))
        self.offsets = [0 if prefix is None else prefix.length for prefix in self.prefixes]
        self.tails = list(map(sub, self.lengths, self.offsets))
        self.parents = parents if branching(parents) else None
        self.depths: Array | None = None
        self.tree_words: Array | None = None
        if self.parents is not None:
            self.depths, self.tree_words = layout(self.parents, self.counts)

    @property
    def rows(self) -> int:
        return len(self.starts)

    @cached_property
    def first_slot(self) -> int | None:
        consecutive = bool(self.slots) and self.slots == list(
            range(self.slots[0], self.slots[0] + self.rows)
        )
        return self.slots[0] if consecutive else None

    @property
    def shares(self) -> bool:
        """True if some row has a prefix."""
        return any(self.offsets)

    @property
    def reach(self) -> int:
        """The furthest position of a column, padding included, plus one."""
        return (
            max(
                self.starts
                if self.gaps is None
                else map(sum, zip(self.starts, self.gaps, strict=True))
            )
            + self.q
        )

    @property
    def bases(self) -> list[int]:
        """The first cell of each row's prefix in the shared store; 0 without a prefix."""
        return [0 if prefix is None else prefix.base for prefix in self.prefixes]

    @property
    def common_keys(self) -> int:
        """The number of first keys of its slot that each query sees; 0 if rows feed more tokens."""
        return min(self.tails) if self.q == 1 else 0


class Plan(PassRows):
    """The layout of one ragged forward pass: its rows, and tensors for those who compute it.

    Args:
        pack_from: leave out unused columns, if there are any and at least this share of all columns
            is unused; None = leave none out. `PassRows` has the other arguments.

    Attributes:
        into: set when the one row of the pass is a prompt on its way into the shared store; the
            prompt has no slot.
        packed: True if unused columns are left out.
        kv_block: `kv` is rounded up to a multiple of it; set by who feeds the tokens.
        kv: keys per slot that the pass spans.
        positions: absolute positions of the block, [rows, q] int64.
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        device: torch.device,
        *,
        pack_from: float | None = None,
        prefixes: Sequence[Prefix | None] | None = None,
        parents: Parents | None = None,
        gaps: Sequence[int] | None = None,
    ) -> None:
        super().__init__(slots, starts, counts, prefixes=prefixes, parents=parents, gaps=gaps)
        self.device, self.kv_block = device, 1
        self.into: Prefix | None = None
        columns = len(self.starts) * self.q
        unused = columns - sum(self.counts)
        partly = pack_from is not None and unused > 0 and unused >= pack_from * columns
        self.packed = partly or (pack_from == ALWAYS and self.rows > 1)

    @staticmethod
    def of_prompt(prefix: Prefix, start: int, count: int, device: torch.device) -> Plan:
        """Makes the plan of a pass that appends a piece of a prompt to the shared store.

        Args:
            prefix: the place of the prompt in the store.
            start: the position of the first token.
        """
        plan = Plan([], [start], [count], device)
        plan.into = prefix
        return plan

    def without_prefixes(self) -> Plan:
        """Returns the layout of the same rows with all their tokens in their slots."""
        pack_from = 0.0 if self.packed else None
        rows = self.slots, self.starts, self.counts
        return Plan(*rows, self.device, pack_from=pack_from, parents=self.parents)

    @cached_property
    def kv(self) -> int:
        return -(-max(self.ends) // self.kv_block) * self.kv_block

    @cached_property
    def positions(self) -> Tensor:
        columns = self._column(self.starts) + self._columns
        return torch.from_numpy(
            columns if self.gaps is None else columns + self._column(self.gaps)
        ).to(self.device)

    @cached_property
    def _columns(self) -> Array:
        """The distance of each column from its row's start: [q], with trees [rows, q]."""
        return np.arange(self.q) if self.depths is None else self.depths

    @cached_property
    def _cells(self) -> Array:
        """The index in its slot that each column is written to, [rows, q]."""
        return self._column(self.starts) - self._column(self.offsets) + np.arange(self.q)

    @staticmethod
    def _column(values: Sequence[int]) -> Array:
        return np.array(values, dtype=np.int64)[:, None]

    def both_ways(self) -> Plan:
        """Returns the layout in which a column also sees the columns of its row behind it."""
        other = copy.copy(self)
        other.__dict__.pop("words", None)
        every = np.bitwise_or.reduce(_own(self.q))
        other.tree_words = np.full((self.rows, self.q), every).view(np.int64)
        return other

    # ── packed and padded ─────────────────────────────────────────────────────────────────────────

    def pack(self, block: Tensor) -> Tensor:
        """Packs [rows, q, ...] into [1, sum(counts), ...]; a padded pass's block stays as it is."""
        return block.flatten(0, 1).index_select(0, self._real)[None] if self.packed else block

    def unpack(self, sequence: Tensor) -> Tensor:
        """Unpacks [1, sum(counts), ...] to [rows, q, ...]; unused columns repeat the last token."""
        return self.spread(sequence[0]) if self.packed else sequence

    def spread(self, tokens: Tensor) -> Tensor:
        """Converts [sum(counts), ...] to [rows, q, ...]; unused columns repeat the last token."""
        columns = tokens.index_select(0, self._origin)
        return columns.view(self.rows, self.q, *columns.shape[1:])

    @cached_property
    def _real(self) -> Tensor:
        """The indices of the real tokens among the rows * q columns, [sum(counts)] int64."""
        return torch.from_numpy(self._real_columns).to(self.device)

    @cached_property
    def _real_columns(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.flatnonzero(np.arange(self.q) < np.array(self.counts)[:, None])

    @cached_property
    def _origin(self) -> Tensor:
        """The index in the packed sequence of each column's token, [rows * q] int64."""
        counts = np.array(self.counts)[:, None]
        origin = (
            np.cumsum(self.counts)[:, None] - counts + np.minimum(np.arange(self.q), counts - 1)
        )
        return torch.from_numpy(origin.reshape(-1)).to(self.device)

    # ── cells ─────────────────────────────────────────────────────────────────────────────────────

    def cells(self, capacity: int) -> Tensor:
        """Returns the flat cells that the pass writes, [tokens of the pass] int64.

        The cells are cells of the slots (slot * capacity + position - offset), or of the shared
        store if `into` is set (base + position).
        """
        first = [slot * capacity for slot in self.slots] if self.into is None else [self.into.base]
        cells = (np.array(first)[:, None] + self._cells).reshape(-1)
        return torch.from_numpy(cells[self._real_columns] if self.packed else cells).to(self.device)

    def repeated(self, tail: Tensor, shared: Tensor) -> Tensor:
        """Returns keys or values with every row's prefix before its tail, as if without sharing.

        Args:
            tail: [rows, heads, kv, dim].
            shared: [cells, heads, dim].

        Returns:
            [rows, heads, max(offsets) + kv, dim]: index i is position i; zeros beyond a row's
            tokens.
        """
        rows = tail.new_zeros(self.rows, tail.shape[1], max(self.offsets) + self.kv, tail.shape[3])
        for row, own, prefix, offset in zip(rows, tail, self.prefixes, self.offsets, strict=True):
            if prefix is not None:
                row[:, :offset] = shared[prefix.base : prefix.base + offset].transpose(0, 1)
            row[:, offset : offset + self.kv] = own
        return rows

    # ── for masks and kernels ─────────────────────────────────────────────────────────────────────

    @cached_property
    def places(self) -> Tensor:
        """The positions - offsets - gaps, [rows, q] int64.

        Without trees, a query's place is the index of its own key in its slot.
        """
        before = (
            self.offsets
            if self.gaps is None
            else list(map(sum, zip(self.offsets, self.gaps, strict=True)))
        )
        if any(before):
            return self.positions - torch.tensor(before, device=self.device)[:, None]
        return self.positions

    @cached_property
    def firsts(self) -> Tensor:
        """The index in its slot of each row's first column, [rows] int64."""
        firsts = [start - offset for start, offset in zip(self.starts, self.offsets, strict=True)]
        return torch.tensor(firsts, device=self.device)

    @cached_property
    def words(self) -> Tensor | None:
        """The columns of its block that a column sees, [rows, q] int64; None = no tree branches."""
        return (
            None if self.tree_words is None else torch.from_numpy(self.tree_words).to(self.device)
        )

    @cached_property
    def bounds(self) -> Tensor:
        """The starts, counts, offsets and bases, [4, rows] int32.

        They are for kernels that read no value from the host.
        """
        return torch.tensor(
            [self.starts, self.counts, self.offsets, self.bases],
            dtype=torch.int32,
            device=self.device,
        )

    @cached_property
    def ends(self) -> list[int]:
        """The end of each row's columns in its slot, padding included.

        The unused columns of a padded pass must see at least themselves, or they would turn into
        NaN.
        """
        if self.packed:
            return self.tails
        return [
            start - offset + self.q for start, offset in zip(self.starts, self.offsets, strict=True)
        ]
