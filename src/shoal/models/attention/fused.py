"""The attention method "fused": one Triton kernel computes a whole ragged pass.

The kernel reads every row at its exact length, and the prompt that the row's group shares as a
second range of keys. `attend` works on plain tensors and asks nothing of the host, so that it may
be captured in a CUDA graph; `fused` is the method of `shoal.models.attention` on top of it. The
kernels are in `fused_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.models.attention.inputs import AttentionInputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel computes in; sums and softmax are always float32."""
TRITON = (3, 6)
"""The oldest release in whose language the kernels are written."""

STEP_BYTES = 32 * 1024
"""The bytes of keys and values of one step of a program.

Two or three steps in flight and the queries fit into 99 KiB, the shared memory that a program may
have on the smaller of today's GPUs.
"""
SHARE = 256
"""The smallest number of keys that is worth a program."""
MOST_SPLITS = 64
"""The largest number of shares of a query; one program joins them."""
PROGRAMS = 2
"""The number of programs per multiprocessor that shares of keys may make.

An H200 takes longer for two shares of 256 programs than for one of each.
"""
CAPABILITY = (8, 0)
"""The compute capability from which on the kernels run."""
EVERYTHING = 1 << 30
"""A window that hides nothing."""


@dataclass(frozen=True)
class Tiling:
    """The cut of the work into programs and steps, decided from shapes only.

    Attributes:
        queries: folded queries per program, a power of two, 16 at least.
        keys: keys per step, a power of two, 16 at least.
        splits: programs that share the keys of one tile of queries.
        warps: Triton's `num_warps`.
        stages: Triton's `num_stages`.
    """

    queries: int
    keys: int
    splits: int
    warps: int = 4
    stages: int = 2

    def tiles(self, query: Tensor, key: Tensor) -> int:
        """Returns the number of programs over the queries of one KV head."""
        folded = query.shape[1] // key.shape[1] * query.shape[2]
        return -(-folded // self.queries)


def available(query: Tensor) -> bool:
    """Returns True if the kernel runs well on the query's device, in its dtype."""
    return (
        query.dtype in DTYPES
        and ((query.is_cuda and _multiplies(query.device)) or _interpreted())
        and has_triton()
    )


def fused(inputs: AttentionInputs) -> Tensor:
    """Attends by the kernel.

    Returns:
        [rows, q, heads, value dim]; unused query columns are zero.

    Raises:
        RequestError: not on a CUDA device (nor in Triton's interpreter), without Triton, or in a
            dtype that the kernel does not have.
    """
    query = inputs.query
    if not available(query):
        raise RequestError(
            "attention='fused' needs Triton, a CUDA device of compute capability 8.0 or later "
            "(or TRITON_INTERPRET=1, slow) and "
            "float32, bfloat16 or float16; "
            f"got {query.device.type}, "
            f"{query.dtype}{'' if has_triton() else ', no Triton 3.6'}; attention='auto' runs "
            f"anywhere"
        )
    shared = None
    if inputs.shared_key is not None and inputs.shared_value is not None:
        shared = inputs.shared_key, inputs.shared_value
    return attend(
        query,
        inputs.key,
        inputs.value,
        inputs.masks.bounds,
        inputs.scale,
        shared=shared,
        tree=inputs.masks.tree(inputs.window),
        window=inputs.window,
        softcap=inputs.softcap,
        sinks=inputs.sinks,
    )


def tiling(query: Tensor, key: Tensor, value_dim: int, span: int, processors: int) -> Tiling:
    """Returns a cut with steps of about `STEP_BYTES`, and just enough splits to occupy the GPU.

    The number of splits is a power of two, so that few kernels are compiled. Tiles are as large as
    the registers of a program hold: with larger ones the compiler spills (tests/gpu/test_fused.py
    reads it off the machine code).

    Args:
        query: [rows, heads, q, dim].
        key: [rows, kv heads, kv, dim].
        span: most keys a row may have.
        processors: multiprocessors of the GPU.
    """
    rows, heads, q, dim = query.shape
    folded = heads // key.shape[1] * q
    single = query.element_size() > 2  # float32 is multiplied without tensor cores, from registers
    queries = min(16 if single else 64, _block(folded))
    keys = STEP_BYTES // ((_block(dim) + _block(value_dim)) * query.element_size())
    keys = max(16, min(64, 1 << (keys.bit_length() - 1)))
    wide = queries >= 32 and max(_block(dim), _block(value_dim)) >= 256
    cut = Tiling(
        queries, keys, splits=1, warps=8 if single or wide else 4, stages=3 if queries <= 32 else 2
    )
    programs = rows * key.shape[1] * cut.tiles(query, key)
    splits = max(1, min(PROGRAMS * processors // programs, span // SHARE, MOST_SPLITS))
    return replace(cut, splits=1 << (splits.bit_length() - 1))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    tree: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cut: Tiling | None = None,
) -> Tensor:
    """Computes ragged attention over a slot cache.

    Launches depend on shapes alone; lengths are read on the device.

    Column j < counts[b] of row b is the row's token starts[b] + j, and sees the tokens up to
    itself. With a tree the column stands at positions[b, j], and sees the tokens before starts[b]
    and the columns whose bits are set in words[b, j]. Token t of row b is cell bases[b] + t of the
    shared store if t < offsets[b], else key t - offsets[b] of row b.

    Args:
        query: [rows, heads, q, dim] float32, bfloat16 or float16.
        key: [rows, kv heads, kv, dim]; may be a view of a larger store.
        value: [rows, kv heads, kv, value dim]; may be a view of a larger store.
        bounds: starts, counts, offsets, bases; [4, rows] int32, contiguous, on the device.
        scale: multiplies the scores.
        shared: keys [cells, kv heads, dim] and values [cells, kv heads, value dim] of shared
            prompts; None = every offset is 0.
        tree: positions and words (restricted to the window), [rows, q] int64 each, contiguous; None
            = all rows are chains.
        window: number of most recent positions that a query sees, itself included; None = all.
        softcap: scores become softcap * tanh(scores / softcap); None = scores stay as they are.
        sinks: [heads], a logit each that takes probability and gives nothing; None = none.
        cut: the cut of the work; None = by `tiling`.

    Returns:
        [rows, q, heads, value dim] in the query's dtype; unused columns are zero.
    """
    from shoal.models.attention import fused_kernels

    query, key, value = _dense(query), _dense(key), _dense(value)
    prompts = [] if shared is None else [_dense(tensor) for tensor in shared]
    shared_key, shared_value = prompts or (None, None)
    query_row, query_head, query_column = query.stride()[:3]
    key_row, key_head, key_cell = key.stride()[:3]
    value_row, value_head, value_cell = value.stride()[:3]
    shared_key_cell, shared_key_head, shared_value_cell, shared_value_head = [
        stride for tensor in prompts for stride in tensor.stride()[:2]
    ] or [0] * 4
    (rows, heads, q, dim), kv_heads, value_dim = query.shape, key.shape[1], value.shape[-1]
    if cut is None:
        span = key.shape[2] + (0 if shared is None else shared[0].shape[0])
        cut = tiling(query, key, value_dim, span, _processors(query.device))
    out = query.new_empty(rows, q, heads, value_dim)
    parts = out if cut.splits == 1 else out.new_empty(cut.splits, *out.shape, dtype=torch.float32)
    positions, words = tree or (None, None)
    logs = None if cut.splits == 1 else parts.new_empty(parts.shape[:-1])
    with torch.cuda.device_of(query):  # Triton launches on the current device
        fused_kernels.attend[rows, kv_heads * cut.tiles(query, key), cut.splits](
            query=query,
            key=key,
            value=value,
            shared_key=shared_key,
            shared_value=shared_value,
            sinks=sinks,
            bounds=bounds,
            positions=positions,
            words=words,
            out=parts,
            logs=logs,
            columns=q,
            heads=heads,
            scale=scale,
            window=EVERYTHING if window is None else window,
            query_row=query_row,
            query_head=query_head,
            query_column=query_column,
            key_row=key_row,
            key_head=key_head,
            key_cell=key_cell,
            value_row=value_row,
            value_head=value_head,
            value_cell=value_cell,
            shared_key_cell=shared_key_cell,
            shared_key_head=shared_key_head,
            shared_value_cell=shared_value_cell,
            shared_value_head=shared_value_head,
            SOFTCAP=softcap,
            GROUP=heads // kv_heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=_block(dim),
            BLOCK_V=_block(value_dim),
            BLOCK_Q=cut.queries,
            BLOCK_K=cut.keys,
            SPLITS=cut.splits,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        if cut.splits > 1:
            places = rows * q * heads
            fused_kernels.combine[(places,)](
                parts,
                logs,
                out,
                places,
                VALUE_DIM=value_dim,
                BLOCK_V=_block(value_dim),
                SPLITS=cut.splits,
                BLOCK_S=_power(cut.splits),
                num_warps=joining_warps(cut.splits, value_dim),
            )
    return out


def joining_warps(splits: int, value_dim: int) -> int:
    """Returns the number of warps of the program that joins the shares of a query.

    A thread has at most 64 numbers.
    """
    return min(8, max(1, _power(splits) * _block(value_dim) // 2048))


def _power(size: int) -> int:
    """Returns the smallest power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()


def _block(size: int) -> int:
    """Returns the smallest power of two from `size` on, 16 at least: tensor cores take 16."""
    return max(16, _power(size))


def _dense(tensor: Tensor) -> Tensor:
    """Returns the tensor with a last stride of 1; the kernels take any other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@cache
def _processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 1 for the interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


@cache
def _multiplies(device: torch.device) -> bool:
    """Returns True if a GPU has the tensor cores that the kernels are compiled for.

    On older GPUs the kernels spill and crawl.
    """
    return torch.cuda.get_device_capability(device) >= CAPABILITY


@cache
def has_triton() -> bool:
    """Returns True if there is a Triton in whose language the kernels are written.

    Torch before 2.10 brings an older Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= TRITON


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
