"""The attention method "native": one call of the C kernel computes a whole ragged pass on a CPU.

The kernel reads every row at its exact length.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.pad import split
from shoal.models.cache.pass_plan import Plan
from shoal.native.build import SUFFIXES, library, missing
from shoal.native.structs import AttentionStruct

MOST_COLUMNS = 64
"""The largest number of tokens per row that the kernel takes.

For prompts, products of whole matrices are faster.
"""


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if the kernels run on the device, in the dtype."""
    return device.type == "cpu" and dtype in SUFFIXES and not missing()


def takes(plan: Plan) -> bool:
    """Returns True if the kernel attends in this pass; False for long prompts."""
    return plan.q <= MOST_COLUMNS


def native(inputs: AttentionInputs) -> Tensor:
    """Attends by the kernel, or by `split` where the kernel does not take the pass.

    Returns:
        [rows, q, heads, value dim]; unused query columns are zero.

    Raises:
        RequestError: not on a CPU, no C compiler, or a dtype that the kernel does not have.
    """
    query, plan = inputs.query, inputs.plan
    _require_available(query)
    if not takes(plan):
        return split(inputs)
    rows, heads, q, dim = query.shape
    query = query.transpose(1, 2).contiguous()
    key, value = _dense(inputs.key), _dense(inputs.value)
    tree = inputs.masks.tree(inputs.window)
    sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
    out = query.new_zeros(rows, q, heads, value.shape[-1])
    # The name keeps the arrays for as long as the kernel runs.
    starts = [np.arange(rows) * step for step in (q, key.stride(0), value.stride(0))]
    shared_key, shared_value = _shared(inputs, key, value)
    attention = AttentionStruct(
        rows=rows,
        heads=heads,
        kv_heads=key.shape[1],
        dim=dim,
        value_dim=value.shape[-1],
        threads=torch.get_num_threads(),
        scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        window=inputs.window or 0,
        bounds=plan.bounds.data_ptr(),
        query_rows=starts[0].ctypes.data,
        key_rows=starts[1].ctypes.data,
        value_rows=starts[2].ctypes.data,
        positions=None if tree is None else tree[0].data_ptr(),
        words=None if tree is None else tree[1].data_ptr(),
        columns=q,
        sinks=None if sinks is None else sinks.data_ptr(),
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        shared_key=shared_key.data_ptr(),
        shared_value=shared_value.data_ptr(),
        query_token=heads * dim,
        query_head=dim,
        key_token=key.stride(2),
        key_head=key.stride(1),
        value_token=value.stride(2),
        value_head=value.stride(1),
        shared_key_token=shared_key.stride(0),
        shared_key_head=shared_key.stride(1),
        shared_value_token=shared_value.stride(0),
        shared_value_head=shared_value.stride(1),
        out=out.data_ptr(),
    )
    attend(query.dtype, attention)
    return out


def _require_available(query: Tensor) -> None:
    """Raises RequestError if the kernel does not run for this query."""
    if not available(query.device, query.dtype):
        raise RequestError(
            "attention='native' needs a CPU, a C compiler and float32 or bfloat16; got "
            f"{query.device.type}, {query.dtype}{', ' * bool(missing())}{missing()}; "
            f"attention='auto' runs anywhere"
        )


def attend(dtype: torch.dtype, attention: AttentionStruct) -> None:
    """Calls the kernel; raises MemoryError if there is no memory for the scores."""
    if getattr(library(), f"attend_{SUFFIXES[dtype]}")(ctypes.byref(attention)):
        raise MemoryError("no memory for the scores of attention")


def _shared(inputs: AttentionInputs, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values of shared prompts, or stand-ins that no row reads."""
    if inputs.shared_key is None or inputs.shared_value is None:
        return key[0].transpose(0, 1), value[0].transpose(0, 1)  # every offset is 0
    return inputs.shared_key, inputs.shared_value


def _dense(tensor: Tensor) -> Tensor:
    """Returns the tensor with a last stride of 1; the kernel takes any other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
