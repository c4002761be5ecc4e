"""The cosines and sines of rotary positions, which the model's module computes once each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Angles:
    """The tables [positions, rotary] float32 of all positions that callers have asked for.

    The tables grow by doubling.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._tables = torch.empty(0, 0), torch.empty(0, 0)

    def reach(self, positions: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of positions 0 .. positions - 1, or more.

        The returned tables never change: another thread gets larger ones.
        """
        tables = self._tables
        if len(tables[0]) < positions:
            device, known = self._rotary.inv_freq.device, 1 << (positions - 1).bit_length()
            cos, sin = self._rotary(
                torch.empty(0, device=device), torch.arange(known, device=device)[None]
            )
            self._tables = tables = cos[0].contiguous(), sin[0].contiguous()
        return tables
