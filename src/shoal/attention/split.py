"""BASS-SPLIT: one call per row over exactly its own keys; no padding is read, at the price of more calls."""

from __future__ import annotations

from torch import Tensor

from shoal.attention.bifurcated import bifurcated
from shoal.attention.pad import attend_folded
from shoal.attention.problem import Problem


def split(problem: Problem) -> Tensor:
    """Per-row calls at exact lengths; returns [rows, q, heads, value dim]; unused query columns come back zero."""
    if problem.shared_key is not None:
        return bifurcated(problem)
    plan = problem.plan
    bias = plan.bias(problem.query.dtype, problem.window)  # [rows, 1, q, kv]; sliced per row, then folded
    out = problem.query.new_zeros(plan.rows, plan.q, problem.query.shape[1], problem.value.shape[-1])
    for b, (length, count) in enumerate(zip(plan.lengths, plan.counts, strict=True)):
        own = None if bias is None else bias[b : b + 1, :, :count, :length].repeat(1, 1, problem.group, 1)
        query = problem.query[b : b + 1, :, :count]
        key, value = problem.key[b : b + 1, :, :length], problem.value[b : b + 1, :, :length]
        out[b : b + 1, :count] = attend_folded(query, key, value, own, problem)
    return out
