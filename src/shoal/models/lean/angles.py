"""Cosines and sines of rotary positions, computed once per position by the model's own module."""

from __future__ import annotations

from typing import Any

import torch


class Angles:
    """Tables [positions, rotary] float32 of all positions so far asked for; they grow by doubling."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self.cos = self.sin = torch.empty(0, 0)

    def reach(self, positions: int) -> None:
        """Makes room for positions 0 .. positions - 1."""
        if len(self.cos) < positions:
            device, known = self._rotary.inv_freq.device, 1 << (positions - 1).bit_length()
            cos, sin = self._rotary(torch.empty(0, device=device), torch.arange(known, device=device)[None])
            self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
