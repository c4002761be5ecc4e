"""The ragged attention by explicit softmax: slow, float32 at least, the definition of correct."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.attention.inputs import AttentionInputs


def reference(inputs: AttentionInputs) -> Tensor:
    """Computes softmax(q k^T * scale + mask) v row by row.

    Returns:
        [rows, q, heads, value dim] in the query's dtype.
    """
    inputs = inputs.repeated()
    query, key, value = (
        t.to(torch.promote_types(t.dtype, torch.float32))
        for t in (inputs.query, inputs.key, inputs.value)
    )
    visible = inputs.masks.visible(inputs.window)
    rows = []
    for b in range(query.shape[0]):
        k = key[b].repeat_interleave(inputs.group, dim=0)  # [heads, kv, dim]
        v = value[b].repeat_interleave(inputs.group, dim=0)
        scores = query[b] @ k.transpose(-1, -2) * inputs.scale  # [heads, q, kv]
        if inputs.softcap is not None:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        scores = scores.masked_fill(~visible[b], -torch.inf)
        if inputs.sinks is not None:
            sink = inputs.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[1]]
        rows.append((weights @ v).transpose(0, 1))
    return torch.stack(rows).to(inputs.query.dtype)
