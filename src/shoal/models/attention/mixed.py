"""BASS-PAD for most rows and BASS-SPLIT for the longest: a pass costs keys read and calls made, and both are known before."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shoal.models.attention.bifurcated import bifurcated
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.pad import pad
from shoal.models.attention.split import attend_rows, split
from shoal.models.cache.plan import Plan

CALL_BYTES = {"cpu": 2**20}
"""Reading so many bytes of keys and values takes as long as a call does, by type of device. `python benchmarks/ragged.py` finds
half of it for long rows; keys of short ones come faster, from the processor's cache."""

ELSEWHERE = 2**25
"""The same where nobody has measured it: memory is fast there, and calls are launches."""


def mixed(inputs: AttentionInputs) -> Tensor:
    """One padded call no wider than most rows need, then one call for each longer row; returns [rows, q, heads, value dim]."""
    if inputs.shared_key is not None:
        return bifurcated(inputs)
    call = _call_keys(inputs)
    rows, width = inputs.masks.once(("split rows", call), lambda: split_rows(inputs.plan, call))
    if len(rows) == inputs.plan.rows:
        return split(inputs)
    out = pad(inputs, width)
    attend_rows(inputs, rows, out)
    return out


def split_rows(plan: Plan, call: int) -> tuple[list[int], int]:
    """How to attend most cheaply if a call takes as long as reading `call` keys of a row.

    Returns:
        The rows to attend by a call each, the longest ones, and the width of one padded call that is enough for all others.
    """
    ends = np.array(plan.ends)
    longest = np.argsort(-ends, kind="stable")
    widths = ends[longest]
    split_cost = np.cumsum(np.array(plan.tails)[longest] + call)
    costs = np.concatenate([[0], split_cost]) + np.append(plan.rows * widths + call, 0)
    many = int(costs.argmin())
    width = plan.kv if many == 0 else int(widths[many]) if many < plan.rows else 0
    return sorted(longest[:many].tolist()), width


def _call_keys(inputs: AttentionInputs) -> int:
    """Keys of a row whose reading takes as long as a call."""
    kv_heads, _, dim = inputs.key.shape[1:]
    each = kv_heads * (dim + inputs.value.shape[-1]) * inputs.key.element_size()
    return CALL_BYTES.get(inputs.query.device.type, ELSEWHERE) // each
