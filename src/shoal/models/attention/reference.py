"""Ragged attention as one would write it on a blackboard; slow, float32 at least, the definition of correct."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.attention.problem import Problem


def reference(problem: Problem) -> Tensor:
    """softmax(q k^T * scale + mask) v for each row alone; returns [rows, q, heads, value dim] in the query's dtype."""
    problem = problem.repeated()
    query, key, value = (
        t.to(torch.promote_types(t.dtype, torch.float32)) for t in (problem.query, problem.key, problem.value)
    )
    visible = problem.plan.visible(problem.window)
    rows = []
    for b in range(query.shape[0]):
        k = key[b].repeat_interleave(problem.group, dim=0)  # [heads, kv, dim]
        v = value[b].repeat_interleave(problem.group, dim=0)
        scores = query[b] @ k.transpose(-1, -2) * problem.scale  # [heads, q, kv]
        if problem.softcap is not None:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        scores = scores.masked_fill(~visible[b], -torch.inf)
        if problem.sinks is not None:
            sink = problem.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[1]]
        rows.append((weights @ v).transpose(0, 1))
    return torch.stack(rows).to(problem.query.dtype)
