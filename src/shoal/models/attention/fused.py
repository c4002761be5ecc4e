"""The attention method "fused": one Triton kernel computes a whole ragged pass.

The kernel reads every row at its exact length, and the prompt that the row's group shares as a
second range of keys. `attend` reads no value from the host, so that it may be captured in a CUDA
graph; `fused` is the method of `shoal.models.attention` on top of it. The kernels are in
`fused_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.models.attention import AttentionInputs

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
LEAST_SHARED = 99 * 1024
"""The shared memory that a program may have on the smaller cards from compute capability 8.0 on."""
SLACK = 1024
"""The bytes of shared memory that the compiler may add to what `Tiling.shared_bytes` counts."""
FROM_SHARED_MEMORY = 200 * 1024
"""The shared memory of cards that multiply tiles of 64 queries out of it (compute capability 9.0
and 10.0): they hold one more step of keys and values there."""
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

    def shared_bytes(self, dim: int, value_dim: int, itemsize: int, most: int) -> int:
        """Returns the bytes of shared memory of a program; tests hold it to the compiled code.

        Args:
            dim: features of a query and a key.
            value_dim: features of a value.
            itemsize: bytes of a number.
            most: bytes that a program of the card may have.
        """
        steps = self.stages - (self.queries < 64 or most < FROM_SHARED_MEMORY)
        step = self.keys * (_block(dim) + _block(value_dim))
        elements = self.queries * (_block(dim) + self.keys) + steps * step
        return elements * itemsize + SLACK


@dataclass(frozen=True)
class Card:
    """The limits of a GPU that a cut depends on.

    Attributes:
        processors: its multiprocessors.
        shared: the bytes of shared memory that a program may have.
    """

    processors: int
    shared: int

    def holds(self, dim: int, value_dim: int, itemsize: int) -> bool:
        """Returns True if the smallest cut for heads of these sizes fits into shared memory."""
        return SMALLEST.shared_bytes(dim, value_dim, itemsize, self.shared) <= self.shared

    @staticmethod
    @cache
    def of(device: torch.device) -> Card:
        """Returns the limits of a device; the interpreter has one processor, and any memory."""
        if device.type != "cuda":
            return Card(1, 1 << 40)
        properties = torch.cuda.get_device_properties(device)
        return Card(properties.multi_processor_count, _of_launches(device) or _of_torch(properties))


def _of_launches(device: torch.device) -> int:
    """Returns the shared memory that Triton holds launches to, in bytes; 0 where it does not say.

    A launch that takes more is refused, whatever torch says of the card.
    """
    try:
        from triton.runtime import driver

        index = torch.cuda.current_device() if device.index is None else device.index
        return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    except Exception:  # no Triton, or one that keeps this elsewhere
        return 0


def _of_torch(properties: Any) -> int:
    """Returns the bytes of shared memory by torch's property; those of every card without it."""
    return max(LEAST_SHARED, getattr(properties, "shared_memory_per_block_optin", 0))


SMALLEST = Tiling(queries=16, keys=16, splits=1, warps=8)


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
        RequestError: not on a CUDA device (nor in Triton's interpreter), without Triton, in a
            dtype that the kernel does not have, or with heads too wide for the card.
    """
    query = inputs.query
    if not available(query):
        raise RequestError(
            "attention='fused' needs Triton, a CUDA device of compute capability 8.0 or later (or "
            f"TRITON_INTERPRET=1, slow) and float32, bfloat16 or float16; got {query.device.type}, "
            f"{query.dtype}{'' if has_triton() else ', no Triton 3.6'}; attention='auto' runs "
            "anywhere"
        )
    if not fits(inputs):
        raise RequestError(
            f"attention='fused' has no room for heads of {inputs.key.shape[-1]} numbers in "
            f"{query.dtype}: {Card.of(query.device).shared // 1024} KiB of shared memory are too "
            f"few; attention='auto' runs anywhere"
        )
    return attend(inputs)


def fits(inputs: AttentionInputs) -> bool:
    """Returns True if the heads are not too wide for the shared memory of the device."""
    return holds(inputs.key, inputs.value)


def holds(key: Tensor, value: Tensor) -> bool:
    """Returns True if heads of keys and values [..., dim] fit into a card, and none was refused."""
    heads = key.shape[-1], value.shape[-1], key.element_size()
    return (key.device, *heads) not in REFUSED and Card.of(key.device).holds(*heads)


REFUSED: set[tuple[torch.device, int, int, int]] = set()
"""The heads for which a launch was refused: the device, and the arguments of `Card.holds`."""


def tiling(query: Tensor, key: Tensor, value_dim: int, span: int, card: Card) -> Tiling:
    """Returns a cut with steps of about `STEP_BYTES`, and just enough splits to occupy the GPU.

    Where that is more than the card's shared memory, as with the latents of 576 features, fewer
    steps are in flight, then a program has fewer queries.

    The number of splits is a power of two, so that few kernels are compiled. Tiles are as large as
    the registers of a program hold: with larger ones the compiler spills (tests/gpu/test_fused.py
    reads it off the machine code).

    Args:
        query: [rows, heads, q, dim].
        key: [rows, kv heads, kv, dim].
        span: most keys a row may have.
        card: the limits of the GPU.
    """
    rows, heads, q, dim = query.shape
    folded = heads // key.shape[1] * q
    single = query.element_size() > 2  # float32 is multiplied without tensor cores, from registers
    queries = min(16 if single else 64, _block(folded))
    keys = STEP_BYTES // ((_block(dim) + _block(value_dim)) * query.element_size())
    keys = max(16, min(64, 1 << (keys.bit_length() - 1)))
    widest = max(_block(dim), _block(value_dim))
    wide = (queries >= 32 and widest >= 256) or widest >= 1024
    cut = Tiling(
        queries, keys, splits=1, warps=8 if single or wide else 4, stages=3 if queries <= 32 else 2
    )
    sizes = dim, value_dim, query.element_size(), card.shared
    while cut.shared_bytes(*sizes) > card.shared and (cut.stages > 2 or cut.queries > 16):
        fewer = {"stages": 2} if cut.stages > 2 else {"queries": cut.queries // 2}
        cut = replace(cut, **fewer)
    programs = rows * key.shape[1] * cut.tiles(query, key)
    splits = max(1, min(PROGRAMS * card.processors // programs, span // SHARE, MOST_SPLITS))
    return replace(cut, splits=1 << (splits.bit_length() - 1))


def attend(inputs: AttentionInputs, cut: Tiling | None = None) -> Tensor:
    """Computes ragged attention over a slot cache.

    Launches depend on shapes alone; lengths are read on the device.

    Column j < counts[b] of row b is the row's token starts[b] + j, and sees the tokens up to
    itself. With a tree the column stands at positions[b, j], and sees the tokens before starts[b]
    and the columns whose bits are set in words[b, j]. Token t of row b is cell bases[b] + t of the
    shared store if t < offsets[b], else key t - offsets[b] of row b.

    Args:
        inputs: float32, bfloat16 or float16; keys and values may be views of larger stores.
        cut: the cut of the work; None = by `tiling`.

    Returns:
        [rows, q, heads, value dim] in the query's dtype; unused columns are zero.
    """
    from shoal.models.attention import fused_kernels

    query, key, value = _dense(inputs.query), _dense(inputs.key), _dense(inputs.value)
    shared_key, shared_value = _shared(inputs)
    (rows, heads, q, dim), kv_heads, value_dim = query.shape, key.shape[1], value.shape[-1]
    if cut is None:
        span = key.shape[2] + (0 if shared_key is None else shared_key.shape[0])
        cut = tiling(query, key, value_dim, span, Card.of(query.device))
    out = query.new_empty(rows, q, heads, value_dim)
    parts = out if cut.splits == 1 else out.new_empty(cut.splits, *out.shape, dtype=torch.float32)
    logs = None if cut.splits == 1 else parts.new_empty(parts.shape[:-1])
    positions, words = inputs.masks.tree(inputs.window) or (None, None)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        fused_kernels.attend[rows, kv_heads * cut.tiles(query, key), cut.splits](
            query=query,
            key=key,
            value=value,
            shared_key=shared_key,
            shared_value=shared_value,
            sinks=inputs.sinks,
            bounds=inputs.masks.bounds,
            positions=positions,
            words=words,
            out=parts,
            logs=logs,
            columns=q,
            heads=heads,
            scale=inputs.scale,
            window=EVERYTHING if inputs.window is None else inputs.window,
            **_strides("query", query, "row", "head", "column"),
            **_strides("key", key, "row", "head", "cell"),
            **_strides("value", value, "row", "head", "cell"),
            **_strides("shared_key", shared_key, "cell", "head"),
            **_strides("shared_value", shared_value, "cell", "head"),
            SOFTCAP=inputs.softcap,
            **_blocks(cut, inputs.group, dim, value_dim),
        )
        if logs is not None:
            _join(parts, logs, out, cut.splits)
    return out


def _shared(inputs: AttentionInputs) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns keys and values of the shared store for the kernel; None if no row has a prefix."""
    if inputs.shared_key is None or inputs.shared_value is None:
        return None, None
    return _dense(inputs.shared_key), _dense(inputs.shared_value)


def _strides(name: str, tensor: Tensor | None, *axes: str) -> dict[str, int]:
    """Returns the strides of a tensor's first axes by the kernel's names; 0 without a tensor."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_{axis}": strides[place] for place, axis in enumerate(axes)}


def _blocks(cut: Tiling, group: int, dim: int, value_dim: int) -> dict[str, int]:
    """Returns the sizes that the kernel is compiled for, and the options of its launch."""
    return {
        "GROUP": group,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": _block(dim),
        "BLOCK_V": _block(value_dim),
        "BLOCK_Q": cut.queries,
        "BLOCK_K": cut.keys,
        "SPLITS": cut.splits,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


def _join(parts: Tensor, logs: Tensor, out: Tensor, splits: int) -> None:
    """Joins the shares of every query.

    Args:
        parts: the results by share, [splits, rows, q, heads, value dim] float32.
        logs: the logs of their weights, [splits, rows, q, heads].
        out: receives the results, [rows, q, heads, value dim].
        splits: the number of shares.
    """
    from shoal.models.attention import fused_kernels

    value_dim = out.shape[-1]
    places = out.numel() // value_dim
    fused_kernels.combine[(places,)](
        parts,
        logs,
        out,
        places,
        VALUE_DIM=value_dim,
        BLOCK_V=_block(value_dim),
        SPLITS=splits,
        BLOCK_S=_power(splits),
        num_warps=joining_warps(splits, value_dim),
    )


def joining_warps(splits: int, value_dim: int) -> int:
    """Returns the number of warps that join a query's shares; a thread has at most 64 numbers."""
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
def _multiplies(device: torch.device) -> bool:
    """Returns True if a GPU has the tensor cores of the kernels; they crawl on older GPUs."""
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
