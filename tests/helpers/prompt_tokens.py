"""Prompt tokens of PPD for scripted targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.drafting.ppd import PromptTokens

SHARES = ((0.6, 0.2, 0.1), (0.5, 0.2, 0.1), (0.4, 0.2, 0.1))


def scripted_tokens(vocab: int = 5, count: int = 3, shares: Sequence[Sequence[float]] = SHARES) -> PromptTokens:
    """Of a scripted target, whose embedding of an id is the id: ids that it does not have."""
    vectors = torch.arange(vocab, vocab + count, dtype=torch.float64)[:, None]
    return PromptTokens(vectors, tuple(map(tuple, shares[:count])))
