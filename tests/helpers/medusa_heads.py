"""Medusa heads that guess the next tokens of a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.drafting.medusa import MedusaHeads

V, HEADS = 5, 3


def guessing(width: int, vocab: int) -> Callable[[Tensor], Tensor]:
    """Heads of random matrices."""
    matrices = torch.randn(HEADS, width, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return lambda x: torch.stack([x @ matrix.to(x.dtype) for matrix in matrices])


def knowing(vocab: int) -> Callable[[Tensor], Tensor]:
    """Heads on `ahead`: head i says what the target says i + 2 positions on."""
    return lambda x: torch.stack([x[..., vocab * (i + 1) : vocab * (i + 2)] for i in range(HEADS)])


def save_medusa(directory: Path, width: int = 32, vocab: int | None = 260, layers: int = 1, **config: Any) -> Path:
    """Random heads in the published layout; without a vocabulary they share the target's head."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    made = MedusaHeads(HEADS, layers, width, vocab or 0, None if vocab else torch.nn.Identity())
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_file(
        {name: tensor.contiguous() for name, tensor in made.state_dict().items()}, directory / "medusa_lm_head.safetensors"
    )
    known = {"medusa_num_heads": HEADS, "medusa_num_layers": layers, "base_model_name_or_path": "x"}
    (directory / "config.json").write_text(json.dumps(known | config))
    return directory
