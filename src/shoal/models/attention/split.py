"""The method BASS-SPLIT: one call per row over exactly its own keys.

No padding is read, at the price of more calls.
"""

from __future__ import annotations

from torch import Tensor

from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.masks import additive
from shoal.models.attention.pad import attend_folded


def split(inputs: AttentionInputs) -> Tensor:
    """Attends row by row at exact lengths.

    Returns:
        [rows, q, heads, value dim]; unused query columns are zero.
    """
    if inputs.shared_key is not None:
        return bifurcated(inputs)
    plan = inputs.plan
    out = inputs.query.new_zeros(plan.rows, plan.q, inputs.query.shape[1], inputs.value.shape[-1])
    for b, (count, length) in enumerate(zip(plan.counts, plan.lengths, strict=True)):
        query = inputs.query[b : b + 1, :, :count]
        key, value = inputs.key[b : b + 1, :, :length], inputs.value[b : b + 1, :, :length]
        out[b, :count] = attend_folded(query, key, value, _row_bias(inputs, b), inputs)[0]
    return out


def _row_bias(inputs: AttentionInputs, row: int) -> Tensor | None:
    """Returns the additive mask over one row's own tokens and keys, [1, 1, group * count, length].

    Returns None when every key is seen. The row must not have a prefix.
    """
    count, length, window = inputs.plan.counts[row], inputs.plan.lengths[row], inputs.window
    if window is not None and window >= length:
        window = None
    if count == 1 and window is None:
        return None

    def made() -> Tensor:
        seen = inputs.masks.visible(window, length, slice(row, row + 1))
        return additive(seen[:, :count], inputs.query.dtype, inputs.group)

    return inputs.masks.once(("row", row, inputs.query.dtype, window, inputs.group), made)
