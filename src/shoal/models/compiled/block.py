"""The buffers of a captured pass: all its inputs that change from round to round."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.models.cache import Plan
from shoal.models.cache.pass_plan import Array, chain_words
from shoal.models.compiled.buckets import Bucket

MOST_LAYOUTS = 64
"""The number of layouts that a block keeps."""


class Block:
    """The buffers of a pass, of fixed address and shape, refilled from the host before each round.

    Padding (rows beyond the real ones, columns beyond a row's count) stands at a valid position,
    sees valid keys and writes to the scratch cell, which no real row reads.

    Args:
        scratch: the cell that padding writes to.
        numbers: a buffer for all but the tokens, [`size`] int64; None = one of its own.

    Attributes:
        q: columns of the bucket.
        kv: keys of the bucket.
        scratch: the cell that padding writes to.
        tokens: [rows, q] int64.
        positions: [rows, q] int64.
        cells: flat cells of the cache to write to, [rows * q] int64.
        words: the columns of the block that each column sees (`shoal.models.cache.pass_plan`),
            [rows, q] int64, in a chain the lower triangle; None for a block of one column.
        bounds: starts, counts, offsets and bases of the rows, [4, rows] int64.
    """

    def __init__(
        self, bucket: Bucket, scratch: int, device: torch.device, numbers: Tensor | None = None
    ) -> None:
        self.bucket, self.scratch = bucket, scratch
        self.q, self.kv, self.common_keys = bucket.q, bucket.keys, 0
        block, rows = bucket.rows * bucket.q, bucket.rows
        self._chain = chain_words(bucket.q)
        # Constants of `move`: the columns, the words of a chain, the numbers of the rows.
        self._columns = torch.arange(bucket.q, device=device)
        self._words_of_chain = torch.from_numpy(self._chain).to(device)
        self._rows = torch.arange(rows, device=device)
        self._whole: Tensor | None = None
        # By the counts, offsets and bases of the rows, which few rounds change.
        self._layouts: dict[tuple[Any, ...], tuple[Array, Array]] = {}
        if numbers is None:
            self._whole = torch.zeros(self.size(bucket) + block, dtype=torch.long, device=device)
            self._numbers = self._whole[: self.size(bucket)]
            # The building of a pass then writes to the scratch cell only.
            self._numbers.copy_(torch.from_numpy(self.empty()))
            self.tokens = self._whole[self.size(bucket) :].view(rows, bucket.q)
        else:
            self._numbers, self.tokens = (
                numbers,
                torch.zeros(rows, bucket.q, dtype=torch.long, device=device),
            )
        positions, words, self.cells, bounds = self._numbers.split([block, block, block, 4 * rows])
        self.positions, self.bounds = positions.view(rows, bucket.q), bounds.view(4, rows)
        self.words = words.view(rows, bucket.q) if bucket.q > 1 else None

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Returns the number of a block's numbers, the tokens aside."""
        return (3 * bucket.q + 4) * bucket.rows

    def empty(self) -> Array:
        """Returns the numbers of a block without rows, [`size`] int64 on the host.

        All columns are unused.
        """
        block, rows = self.bucket.rows * self.bucket.q, self.bucket.rows
        return np.repeat([0, 1, self.scratch, 0], [block, block, block, 4 * rows])

    @property
    def inputs(self) -> Tensor:
        """The inputs of a pass: the block's numbers and then its tokens, [numbers] int64.

        They are one buffer where the block has a buffer of its own, else a copy.
        """
        return (
            torch.cat([self._numbers, self.tokens.flatten()])
            if self._whole is None
            else self._whole
        )

    @property
    def firsts(self) -> Tensor:
        """The index of each row's column 0 in its slot, [rows] int64 (`Layout.firsts`)."""
        return self.bounds[0] - self.bounds[2]

    @property
    def places(self) -> Tensor:
        """The positions minus the rows' offsets, [rows, q] int64 (`Layout.places`)."""
        return self.positions - self.bounds[2][:, None]

    def placed(self, plan: Plan, capacity: int) -> Array:
        """Returns the numbers of a block whose rows, all of them chains, are where the plan says.

        Returns:
            [`size`] int64 on the host.
        """
        widths = (tuple(plan.counts), tuple(plan.offsets), tuple(plan.bases), capacity)
        if widths not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[widths] = self._layout(plan, capacity)
        numbers, row_of = self._layouts[widths]
        starts = np.zeros(self.bucket.rows + 1, dtype=np.int64)
        starts[: plan.rows] = plan.starts
        return numbers + starts[row_of]

    def _layout(self, plan: Plan, capacity: int) -> tuple[Array, Array]:
        """Returns the part of `placed` that does not depend on the rows' starts.

        Returns:
            The numbers of rows that start at 0; and for each number the row whose start is added to
            it, or the number of rows where none is. Both have the shape [`size`].
        """
        rows, q = self.bucket.rows, self.bucket.q
        bounds = np.zeros((4, rows), dtype=np.int64)
        bounds[1:, : plan.rows] = [plan.counts, plan.offsets, plan.bases]
        counts, offsets = (bound[:, None] for bound in bounds[1:3])
        columns, row = np.arange(q), np.arange(rows)[:, None]
        # Unused columns repeat the row's last column.
        last, real = np.minimum(columns, np.maximum(counts - 1, 0)), columns < counts
        cells = np.where(real, row * capacity - offsets + columns, self.scratch)
        moving = [row + 0 * columns, np.full((rows, q), rows), np.where(real, row, rows)]
        still = np.full((3, rows), rows)
        return (
            np.concatenate([last, self._chain[last], cells, bounds], axis=None),
            np.concatenate([*moving, row, still], axis=None),
        )

    def move(self, starts: Tensor, counts: Tensor, capacity: int) -> None:
        """Puts the rows, all of them chains, elsewhere in their slots, on the device.

        The block then holds the numbers that `placed` computes on the host.

        Args:
            starts: the position of each row's first column, [rows] int64; 0 for unused rows.
            counts: the columns of each row, [rows] int64; 0 for unused rows.
            capacity: the cells of a slot.
        """
        last = torch.minimum(self._columns, (counts - 1).clamp(min=0)[:, None])
        torch.add(starts[:, None], last, out=self.positions)
        if self.words is not None:
            self.words.copy_(self._words_of_chain[last])
        firsts = self._rows * capacity - self.bounds[2] + starts
        cells = torch.where(
            self._columns < counts[:, None], firsts[:, None] + self._columns, self.scratch
        )
        self.cells.copy_(cells.flatten())
        self.bounds[0].copy_(starts)
        self.bounds[1].copy_(counts)

    @property
    def moving(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The positions, cells, starts and counts of a block of one column.

        The first three grow by the counts where the block moves on.
        """
        return self.positions, self.cells, self.bounds[0], self.bounds[1]

    def advance(self) -> None:
        """Moves the real rows of a block of one column on by a token, on the device."""
        positions, cells, starts, counts = self.moving
        positions.add_(counts[:, None])
        cells.add_(counts)
        starts.add_(counts)
