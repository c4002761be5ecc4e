"""BASS-PAD for most rows and BASS-SPLIT for the longest: a pass costs keys read and calls made, and both are known before."""

from __future__ import annotations

from torch import Tensor

from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.pad import pad
from shoal.models.attention.split import attend_alone, split

CALL_BYTES = {"cpu": 2**20}
"""Reading so many bytes of keys and values takes as long as a call does, by type of device. `python benchmarks/ragged.py` finds
half of it for long rows; keys of short ones come faster, from the processor's cache."""

ELSEWHERE = 2**25
"""The same where nobody has measured it: memory is fast there, and calls are launches."""


def mixed(inputs: AttentionInputs) -> Tensor:
    """One padded call no wider than most rows need, then one call for each longer row; returns [rows, q, heads, value dim]."""
    if inputs.shared_key is not None:
        return bifurcated(inputs)
    alone, width = inputs.plan.apart(_call(inputs))
    if len(alone) == inputs.plan.rows:
        return split(inputs)
    out = pad(inputs, width)
    attend_alone(inputs, alone, out)
    return out


def _call(inputs: AttentionInputs) -> int:
    """Keys of a row whose reading takes as long as a call."""
    kv_heads, _, dim = inputs.key.shape[1:]
    each = kv_heads * (dim + inputs.value.shape[-1]) * inputs.key.element_size()
    return CALL_BYTES.get(inputs.query.device.type, ELSEWHERE) // each
