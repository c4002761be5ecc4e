"""BASS-SPLIT: one call per row over exactly its own keys; no padding is read, at the price of more calls."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.pad import attend_folded


def split(inputs: AttentionInputs) -> Tensor:
    """Per-row calls at exact lengths; returns [rows, q, heads, value dim]; unused query columns come back zero."""
    if inputs.shared_key is not None:
        return bifurcated(inputs)
    plan = inputs.plan
    out = inputs.query.new_zeros(plan.rows, plan.q, inputs.query.shape[1], inputs.value.shape[-1])
    attend_alone(inputs, range(plan.rows), out)
    return out


def attend_alone(inputs: AttentionInputs, rows: Iterable[int], out: Tensor) -> None:
    """Writes what these rows' own tokens see to `out`, [rows, q, heads, value dim]."""
    plan = inputs.plan
    for b in rows:
        count, length = plan.counts[b], plan.lengths[b]
        query = inputs.query[b : b + 1, :, :count]
        key, value = inputs.key[b : b + 1, :, :length], inputs.value[b : b + 1, :, :length]
        bias = plan.row_bias(b, query.dtype, inputs.window, inputs.group)
        out[b, :count] = attend_folded(query, key, value, bias, inputs)[0]
