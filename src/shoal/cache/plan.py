"""Where the tokens of one forward pass go and what they may see: the only place where positions and masks exist.

Rows have different lengths and no padding token is ever seen: row b feeds `counts[b]` tokens at positions starts[b],
starts[b] + 1, ... of its slot. Where counts differ the block [rows, q] has unused columns on the right; what they write lies
beyond the row's length, is never attended to and is overwritten by the row's next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Plan:
    """One ragged forward pass.

    Attributes:
        slots: cache slot of each row. first_slot: set when slots are consecutive, so that caches may return views.
        starts: tokens already in each row's slot. counts: tokens fed per row. q: max(counts).
        lengths: starts + counts: keys each row's last query sees. kv: keys spanned by the block, max(starts) + q.
        positions: absolute positions of the block, [rows, q] int64.
    """

    def __init__(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.slots, self.starts, self.counts = list(slots), list(starts), list(counts)
        self.q = max(self.counts)
        self.lengths = [s + c for s, c in zip(self.starts, self.counts, strict=True)]
        self.kv = max(self.starts) + self.q
        self.device = device
        consecutive = self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))
        self.first_slot = self.slots[0] if consecutive else None
        self._positions = np.array(self.starts)[:, None] + np.arange(self.q)  # small: NumPy is quicker than tensor calls
        self.positions = torch.from_numpy(self._positions).to(device)
        self._masks: dict[tuple[object, ...], Tensor | None] = {}

    @property
    def rows(self) -> int:
        return len(self.slots)

    def cells(self, capacity: int) -> Tensor:
        """Flat cache cells (slot * capacity + position) of the block, [rows * q] int64."""
        cells = np.array(self.slots)[:, None] * capacity + self._positions
        return torch.from_numpy(cells.reshape(-1)).to(self.device)

    def visible(self, window: int | None = None) -> Tensor:
        """Which keys each query sees: causal, within the sliding window if any; [rows, q, kv] bool.

        Args:
            window: number of most recent keys a query sees, itself included; None = all.
        """
        keys = torch.arange(self.kv, device=self.device)
        seen = keys <= self.positions[..., None]
        if window is not None:
            seen &= keys > self.positions[..., None] - window
        return seen

    def bias(self, dtype: torch.dtype, window: int | None = None, fold: int = 1) -> Tensor | None:
        """The additive mask, [rows, 1, fold * q, kv]: 0 where visible, the dtype's lowest elsewhere; made once per pass.

        Args:
            fold: query heads per KV head folded into the query axis (head-major), so the mask repeats that often.

        Returns:
            None when every query of every row sees every key (one token per row, equal lengths).
        """
        if window is not None and window >= self.kv:
            window = None
        key = (dtype, window, fold)
        if key not in self._masks:
            if self.q == 1 and window is None and min(self.starts) == max(self.starts):
                self._masks[key] = None
            else:
                hidden = ~self.visible(window).repeat(1, fold, 1)[:, None]
                zeros = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
                self._masks[key] = zeros.masked_fill_(hidden, torch.finfo(dtype).min)
        return self._masks[key]

    def zero_bias(self, dtype: torch.dtype) -> Tensor:
        """An additive mask that hides nothing, for models that build their own when given none; [rows, 1, q, kv]."""
        return torch.zeros(self.rows, 1, self.q, self.kv, dtype=dtype, device=self.device)
