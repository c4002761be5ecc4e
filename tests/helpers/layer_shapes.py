"""Shapes of layers and their tensors, for the kernels of fused layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal.models import layers
from shoal.models.attention.fused import Card
from shoal.models.lean import Norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@dataclass(frozen=True)
class Case:
    """Shapes of a layer; normed: heads are normalised (Qwen3). rotary: features that are rotated."""

    tokens: int = 3
    width: int = 24
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    rotary: int = 16
    normed: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def random(self, *shape: int, scale: float = 1.0, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(31 * self.seed + salt)
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(self.dtype).to(DEVICE)

    def norm(self, width: int, salt: int) -> Norm:
        return Norm(1 + self.random(width, scale=0.3, salt=salt), 0.05)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The definition, in float64."""
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


MANY_PROCESSORS = 1 << 10


@contextmanager
def processors(count: int) -> Iterator[None]:
    """A card of so many multiprocessors: of many, each share of a product's inputs has a program of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "Card", type("", (), {"of": staticmethod(lambda device: Card(count, 1 << 20))}))
        yield
