"""The inputs of a pass that are not tokens: id -1 - i of a block stands for vector i.

A pass takes the vector in place of the embedding of a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedModel


def embedded(ids: Tensor, table: Callable[[Tensor], Tensor], vectors: Tensor | None) -> Tensor:
    """Returns the embeddings [..., width] of ids [...] int64, some of which are vectors.

    Args:
        table: the function from ids of tokens [...] to embeddings [..., width].
        vectors: [count, width]; None if all ids are tokens.
    """
    if vectors is None:
        return table(ids)
    others = vectors[(-1 - ids).clamp(min=0)]
    return torch.where((ids < 0)[..., None], others, table(ids.clamp(min=0)))


def require_vectors(hf: Any, name: str) -> None:
    """Raises UnsupportedModel if the model takes ids alone."""
    if "inputs_embeds" not in inspect.signature(hf.forward).parameters:
        raise UnsupportedModel(
            f"{name} takes ids of tokens alone, and this drafter feeds vectors of its own: take "
            f"another one"
        )
