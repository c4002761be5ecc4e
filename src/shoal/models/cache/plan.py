"""Where the tokens of one forward pass go and what they may see: the only place where positions and masks exist.

Rows have different lengths and no padding token is ever seen: row b feeds `counts[b]` tokens at positions starts[b],
starts[b] + 1, ... of its slot. Where counts differ the block [rows, q] has unused columns on the right. A *packed* pass leaves
them out: the model sees one sequence of sum(counts) tokens, so that its linear layers pay for real tokens only. In a padded pass
what they write lies beyond the row's length, is never attended to and is overwritten by the row's next tokens.

A row may have a *prefix*: its first tokens, kept once for all rows of its group in the cache's shared store. Its slot then only
holds the tail, the tokens from position `offset` on.

The tokens a row feeds may be a draft *tree* (`shoal.models.cache.tree`): keys are still written one column after another, but a
token's position is the row's start plus its depth, and in the block it sees its ancestors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shoal.models.cache.tree import Array, Parents, branching, layout, seen_by_words, within
from shoal.types.prefix import Prefix

PACK_FROM = 1 / 8
"""A pass is packed if at least this share of its columns is unused; packing itself costs about 5 % of a small pass."""


@dataclass(frozen=True)
class Shared:
    """The part of one prompt that some query of its group sees: cells first..end-1 of the shared store, where position p is cell
    base + p; `rows` of the pass, as what indexes a tensor."""

    rows: slice | Tensor
    base: int
    first: int
    end: int


class Plan:
    """One ragged forward pass.

    Args:
        packed: leave out unused columns, if enough of them are (`PACK_FROM`).
        prefixes: of each row, or None for a row that has all its tokens in its slot; None = no row has one.
        into: set when the one row of the pass is a prompt on its way into the shared store; it has no slot.
        kv_block: `kv` is rounded up to a multiple of it.
        parents: the tree that each row's tokens are, of counts[b] - 1 nodes (`shoal.models.cache.tree`); None = all are chains.

    Attributes:
        slots: cache slot of each row. first_slot: set when slots are consecutive, so that caches may return views.
        starts: tokens each row has already. counts: tokens fed per row. lengths: starts + counts. q: max(counts).
        offsets: length of each row's prefix, 0 without; the position of the first token in its slot.
        tails: lengths - offsets: keys in the slot that the row's last query sees. kv: keys per slot that the pass spans.
        positions: absolute positions of the block, [rows, q] int64.
        parents: None where no row's tree branches. depths, words: of the columns, [rows, q] int64 on the host; None without
            parents.

    Raises:
        RequestError, InternalError: see `shoal.models.cache.tree.layout`.
    """

    def __init__(
        self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device, *, packed: bool = False,
        prefixes: Sequence[Prefix | None] | None = None, into: Prefix | None = None, kv_block: int = 1,
        parents: Parents | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.starts, self.counts = list(slots), list(starts), list(counts)
        self.prefixes = [None] * self.rows if prefixes is None else list(prefixes)
        self.into, self.device = into, device
        self.q = max(self.counts)
        self.lengths = [s + c for s, c in zip(self.starts, self.counts, strict=True)]
        self.offsets = [0 if prefix is None else prefix.length for prefix in self.prefixes]
        self.tails = [length - offset for length, offset in zip(self.lengths, self.offsets, strict=True)]
        self.packed = packed and PACK_FROM * self.rows * self.q <= self.rows * self.q - sum(self.counts)
        consecutive = bool(self.slots) and self.slots == list(range(self.slots[0], self.slots[0] + self.rows))
        self.first_slot = self.slots[0] if consecutive else None
        starts_, offsets = np.array(self.starts)[:, None], np.array(self.offsets)[:, None]
        written = starts_ + np.arange(self.q)  # small arrays: NumPy costs less than tensor calls
        self._cells = written - offsets
        # The unused columns of a padded pass must see at least themselves, or they would turn into NaN.
        kv = max(self.tails) if self.packed else int(self._cells[:, -1].max()) + 1
        self.kv = -(-kv // kv_block) * kv_block
        self.parents = parents if branching(parents) else None
        self.depths: Array | None = None
        self.words: Array | None = None
        if self.parents is not None:
            self.depths, self.words = layout(self.parents, self.counts)
        positions = written if self.depths is None else starts_ + self.depths
        self._places = positions - offsets
        self.positions = torch.from_numpy(positions).to(device)
        self._masks: dict[tuple[object, ...], Tensor | None] = {}
        self._groups: dict[int | None, list[Shared]] = {}
        self._apart: dict[int, tuple[list[int], int]] = {}
        self._trees: dict[int | None, tuple[Tensor, Tensor]] = {}

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def shares(self) -> bool:
        """Whether some row has a prefix."""
        return any(self.offsets)

    # ── packed and padded ───────────────────────────────────────────────────────────────────────────────────────────

    def pack(self, block: Tensor) -> Tensor:
        """[rows, q, ...] -> [1, sum(counts), ...], row after row; in a padded pass the block itself."""
        return block.flatten(0, 1).index_select(0, self._real)[None] if self.packed else block

    def unpack(self, sequence: Tensor) -> Tensor:
        """The inverse of `pack`: [1, sum(counts), ...] -> [rows, q, ...]; unused columns repeat the row's last token."""
        if not self.packed:
            return sequence
        columns = sequence[0].index_select(0, self._origin)
        return columns.view(self.rows, self.q, *columns.shape[1:])

    @cached_property
    def _real(self) -> Tensor:
        """Which of the rows * q columns are tokens, [sum(counts)] int64."""
        return torch.from_numpy(self._real_columns).to(self.device)

    @cached_property
    def _real_columns(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.flatnonzero(np.arange(self.q) < np.array(self.counts)[:, None])

    @cached_property
    def _origin(self) -> Tensor:
        """Which token of the packed sequence a column is, [rows * q] int64."""
        counts = np.array(self.counts)[:, None]
        origin = np.cumsum(self.counts)[:, None] - counts + np.minimum(np.arange(self.q), counts - 1)
        return torch.from_numpy(origin.reshape(-1)).to(self.device)

    # ── cells ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def cells(self, capacity: int) -> Tensor:
        """Flat cells that the pass writes, [tokens of the pass] int64: of the slots (slot * capacity + position - offset), or
        of the shared store if `into` is set (base + position)."""
        first = [slot * capacity for slot in self.slots] if self.into is None else [self.into.base]
        cells = (np.array(first)[:, None] + self._cells).reshape(-1)
        return torch.from_numpy(cells[self._real_columns] if self.packed else cells).to(self.device)

    def repeated(self, tail: Tensor, shared: Tensor) -> Tensor:
        """Keys or values with every row's prefix before its tail, as if nothing were shared.

        Args:
            tail: [rows, heads, kv, dim]. shared: [cells, heads, dim].

        Returns:
            [rows, heads, max(offsets) + kv, dim]: index i is position i; zeros beyond what a row has.
        """
        rows = tail.new_zeros(self.rows, tail.shape[1], max(self.offsets) + self.kv, tail.shape[3])
        for row, own, prefix, offset in zip(rows, tail, self.prefixes, self.offsets, strict=True):
            if prefix is not None:
                row[:, :offset] = shared[prefix.base : prefix.base + offset].transpose(0, 1)
            row[:, offset : offset + self.kv] = own
        return rows

    # ── masks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def places(self) -> Tensor:
        """positions - offsets, [rows, q] int64: without trees the index of each query's own key in its slot."""
        return torch.from_numpy(self._places).to(self.device) if self.shares else self.positions

    @cached_property
    def bounds(self) -> Tensor:
        """Where each row is, for kernels that ask nothing of the host: starts, counts, offsets, bases; [4, rows] int32."""
        bases = [0 if prefix is None else prefix.base for prefix in self.prefixes]
        return torch.tensor([self.starts, self.counts, self.offsets, bases], dtype=torch.int32, device=self.device)

    def tree(self, window: int | None = None) -> tuple[Tensor, Tensor] | None:
        """For kernels: positions, and words restricted to the window, [rows, q] int64 each; None where no row's tree branches."""
        if self.words is None:
            return None
        if window not in self._trees:
            words = torch.from_numpy(self.words).to(self.device)
            self._trees[window] = self.positions, within(words, self.positions, window)
        return self._trees[window]

    @cached_property
    def _firsts(self) -> Tensor:
        """Index in its slot of each row's first column, [rows] int64."""
        return torch.from_numpy(self._cells[:, 0].copy()).to(self.device)

    def visible(self, window: int | None = None, width: int | None = None) -> Tensor:
        """Which keys of its slot each query sees: causal or by its tree, within the sliding window if any; [rows, q, width] bool.

        Args:
            window: number of most recent positions a query sees, its own included; None = all. width: None = `kv`.
        """
        keys = torch.arange(self.kv if width is None else width, device=self.device)
        block = self.tree(window)
        if block is None:
            return seen_keys(keys, self.places[..., None], window)
        return seen_by_words(keys, self.places, self._firsts, block[1], window)

    @cached_property
    def path_order(self) -> Tensor:
        """Of each query the indices of its row's keys, those that it sees first, by position; [rows, q, kv] int64."""
        return (~self.visible()).byte().argsort(dim=-1, stable=True)

    def bias(self, dtype: torch.dtype, window: int | None = None, fold: int = 1, width: int | None = None) -> Tensor | None:
        """The additive mask over slots, [rows, 1, fold * q, width]: 0 where visible, the dtype's lowest elsewhere; made once per
        pass.

        Args:
            fold: query heads per KV head folded into the query axis (head-major), so the mask repeats that often.
            width: None = `kv`.

        Returns:
            None when every query of every row sees every key (one token per row, none shorter than `width`).
        """
        width = self.kv if width is None else width
        if window is not None and window >= self.kv:
            window = None
        key = (dtype, window, fold, width)
        if key not in self._masks:
            all_seen = self.q == 1 and window is None and min(self.tails) >= width
            self._masks[key] = None if all_seen else additive(self.visible(window, width), dtype, fold)
        return self._masks[key]

    def row_bias(self, row: int, dtype: torch.dtype, window: int | None = None, fold: int = 1) -> Tensor | None:
        """The same over one row's own tokens and keys, [1, 1, fold * count, length]; None when all are seen. Not for rows with
        a prefix."""
        count, length = self.counts[row], self.lengths[row]
        if window is not None and window >= length:
            window = None
        if count == 1 and window is None:
            return None
        key = ("row", row, dtype, window, fold)
        if key not in self._masks:
            self._masks[key] = additive(self._seen_by(row, window), dtype, fold)
        return self._masks[key]

    def _seen_by(self, row: int, window: int | None) -> Tensor:
        """`visible` of one row without a prefix, over its own tokens and keys: [1, count, length] bool."""
        count = self.counts[row]
        keys = torch.arange(self.lengths[row], device=self.device)
        block = self.tree(window)
        if block is None:
            return seen_keys(keys, keys[-count:, None], window)[None]
        rows = slice(row, row + 1)
        return seen_by_words(keys, self.places[rows, :count], self._firsts[rows], block[1][rows, :count], window)

    def apart(self, call: int) -> tuple[list[int], int]:
        """How to attend most cheaply if a call takes as long as reading `call` keys of a row; decided once per pass.

        Returns:
            The rows to attend alone, the longest ones, and the width of one padded call that is enough for all others.
        """
        if call not in self._apart:
            ends = self.tails if self.packed else self._cells[:, -1] + 1
            longest = np.argsort(-np.array(ends), kind="stable")
            widths = np.array(ends)[longest]
            alone = np.cumsum(np.array(self.tails)[longest] + call)
            costs = np.concatenate([[0], alone]) + np.append(self.rows * widths + call, 0)
            many = int(costs.argmin())
            width = self.kv if many == 0 else int(widths[many]) if many < self.rows else 0
            self._apart[call] = sorted(longest[:many].tolist()), width
        return self._apart[call]

    def zero_bias(self, dtype: torch.dtype) -> Tensor:
        """An additive mask that hides nothing, for models that build their own when given none; [rows, 1, q, kv]."""
        return torch.zeros(self.rows, 1, self.q, self.kv, dtype=dtype, device=self.device)

    # ── shared prompts ──────────────────────────────────────────────────────────────────────────────────────────────

    def groups(self, window: int | None = None) -> list[Shared]:
        """The prompts of the pass, each with its rows; made once per pass. A prompt that all queries have left behind a sliding
        window is missing."""
        if window not in self._groups:
            of: dict[Prefix, list[int]] = {}
            for row, prefix in enumerate(self.prefixes):
                if prefix is not None:
                    of.setdefault(prefix, []).append(row)
            found = [self._shared(prefix, rows, window) for prefix, rows in of.items()]
            self._groups[window] = [shared for shared in found if shared.first < shared.end]
        return self._groups[window]

    def _shared(self, prefix: Prefix, rows: list[int], window: int | None) -> Shared:
        oldest = 0 if window is None else max(0, min(self.starts[row] for row in rows) - window + 1)
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        index = slice(rows[0], rows[-1] + 1) if side_by_side else torch.tensor(rows, device=self.device)
        return Shared(index, prefix.base, prefix.base + oldest, prefix.base + prefix.length)

    def prompt_bias(self, shared: Shared, dtype: torch.dtype, window: int | None, fold: int) -> Tensor | None:
        """The additive mask over a prompt for all queries of its group, [1, 1, rows * fold * q, end - first]: 0 where visible.

        Returns:
            None when every query sees all of it: without a window always.
        """
        if window is None:
            return None
        key = (shared.first, dtype, window, fold)
        if key not in self._masks:
            positions = self.positions[shared.rows]  # [rows, q]
            keys = torch.arange(shared.first - shared.base, shared.end - shared.base, device=self.device)
            seen = keys > positions[..., None] - window
            together = seen.repeat(1, fold, 1).flatten(0, 1)[None]
            self._masks[key] = None if bool(seen.all()) else additive(together, dtype)
        return self._masks[key]


def seen_keys(keys: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Which keys a query at each place sees."""
    seen = keys <= places
    return seen if window is None else seen & (keys > places - window)


def additive(seen: Tensor, dtype: torch.dtype, fold: int = 1) -> Tensor:
    """[rows, q, kv] bool -> [rows, 1, fold * q, kv]: 0 where seen, the dtype's lowest elsewhere."""
    hidden = ~seen.repeat(1, fold, 1)[:, None]
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)
