"""BASS-SPLIT: one call per row over exactly its own keys; no padding is read, at the price of more calls."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.pad import attend_folded
from shoal.models.attention.problem import Problem


def split(problem: Problem) -> Tensor:
    """Per-row calls at exact lengths; returns [rows, q, heads, value dim]; unused query columns come back zero."""
    if problem.shared_key is not None:
        return bifurcated(problem)
    plan = problem.plan
    out = problem.query.new_zeros(plan.rows, plan.q, problem.query.shape[1], problem.value.shape[-1])
    attend_alone(problem, range(plan.rows), out)
    return out


def attend_alone(problem: Problem, rows: Iterable[int], out: Tensor) -> None:
    """Writes what these rows' own tokens see to `out`, [rows, q, heads, value dim]."""
    plan = problem.plan
    for b in rows:
        count, length = plan.counts[b], plan.lengths[b]
        query = problem.query[b : b + 1, :, :count]
        key, value = problem.key[b : b + 1, :, :length], problem.value[b : b + 1, :, :length]
        bias = plan.row_bias(b, query.dtype, problem.window, problem.group)
        out[b, :count] = attend_folded(query, key, value, bias, problem)[0]
