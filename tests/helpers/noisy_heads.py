"""Drafters that are right now and then."""

from __future__ import annotations

import copy
from typing import Any

import torch


def noisy(target: Any, share: float) -> Any:
    """A copy of a model with noise on its head: so much of its standard deviation."""
    drafter = copy.deepcopy(target)
    head = drafter.get_output_embeddings().weight.data
    head.add_(share * float(head.std()) * torch.randn(head.shape, generator=torch.Generator().manual_seed(7)))
    return drafter
