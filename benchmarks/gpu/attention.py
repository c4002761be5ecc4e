"""Attention alone: the fused kernel against PAD, SPLIT and torch's FlashAttention on real shapes, its errors first.

Each line is one layer's attention of a ragged pass: rows at lengths spread between half the context and all of it, q new tokens
each. Times are of a CUDA graph over several sets of keys and values, so that none is found in the cache of the GPU; SPLIT, which
asks the host for lengths, is launched call by call. Bandwidth counts the keys and values of each row's real length once, a shared
prompt once for all rows. "varlen" is FlashAttention 2 as it lies in torch, over the slots with lengths on the device: what
shoal would call if it had no kernel of its own.

Run by benchmarks/gpu/run.sh, or alone: python benchmarks/gpu/attention.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common import arguments, deliver, device_or_exit, microseconds
from shoal.bench.work import ceilings
from shoal.models.attention import AttentionInputs, Masks
from shoal.models.attention.fused import available
from shoal.models.attention.methods import METHODS, reference
from shoal.models.cache import Plan
from shoal.types.requests import Prefix

MOST_SETS, CACHE = 12, 256 << 20
"""The most further sets of keys and values, and the bytes that they need not exceed together."""
REPEATS = 15
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One layer's pass. context: tokens of the longest row before it; shared: how many of them all rows have in one store."""

    rows: int
    q: int
    heads: int
    kv_heads: int
    dim: int
    context: int
    shared: int = 0

    def __str__(self) -> str:
        shared = f", {self.shared} shared" if self.shared else ""
        return f"{self.rows} x {self.q} over {self.context}{shared}; {self.heads}/{self.kv_heads} heads of {self.dim}"


SHAPES = {
    "cuda": [
        Shape(8, 1, 32, 32, 128, 1024),  # the 7.8B target of BASS, plain
        Shape(8, 7, 32, 32, 128, 1024),  # ... and verifying
        Shape(8, 7, 32, 8, 128, 1024),
        Shape(1, 7, 32, 8, 128, 16384),
        Shape(64, 1, 32, 8, 128, 2048),
        Shape(8, 512, 32, 8, 128, 1024),  # a chunk of a prompt
        Shape(8, 17, 32, 8, 128, 1024),
        Shape(8, 7, 28, 4, 128, 4096),  # Qwen2 7B
        Shape(8, 7, 71, 1, 64, 1024),  # Falcon 7B
        Shape(8, 7, 8, 4, 256, 1024),  # Gemma 2 2B
        Shape(8, 1, 16, 16, 128, 1024),  # the 310M drafter of BASS
        Shape(16, 5, 32, 8, 128, 8192, shared=8000),
    ],
    "cpu": [Shape(2, 2, 4, 2, 16, 40), Shape(2, 2, 4, 2, 16, 40, shared=20)],
}


def inputs_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> AttentionInputs:
    """Random tensors; the tails of rows are views of a slot store, as in a run."""
    spread = torch.linspace(0.5, 1, shape.rows) if shape.rows > 1 else torch.ones(1)
    starts = [shape.shared + int((shape.context - shape.shared) * share) for share in spread.tolist()]
    prefixes = [Prefix(0, shape.shared)] * shape.rows if shape.shared else None
    plan = Plan(range(shape.rows), starts, [shape.q] * shape.rows, device, prefixes=prefixes)
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=dtype, device=device)

    query = random(shape.rows, shape.q, shape.heads, shape.dim).transpose(1, 2)
    key, value = (random(shape.rows, plan.kv, shape.kv_heads, shape.dim).transpose(1, 2) for _ in range(2))
    shared = [random(shape.shared, shape.kv_heads, shape.dim) for _ in range(2)] if shape.shared else [None, None]
    return AttentionInputs(query, key, value, Masks(plan), shape.dim**-0.5, None, None, None, *shared)


def read_bytes(inputs: AttentionInputs) -> int:
    """Keys and values there are: each row's own, and the shared prompt once."""
    tokens = sum(inputs.plan.tails) + max(inputs.plan.offsets)
    return tokens * inputs.key.shape[1] * (inputs.key.shape[-1] + inputs.value.shape[-1]) * inputs.key.element_size()


def exact(inputs: AttentionInputs) -> Tensor:
    """The definition in float64."""
    names = ("query", "key", "value", "shared_key", "shared_value")
    tensors = {name: getattr(inputs, name) for name in names}
    return reference(replace(inputs, **{name: t.double() for name, t in tensors.items() if t is not None}))


def varlen(inputs: AttentionInputs) -> Callable[[], Tensor]:
    """Chains over slots by FlashAttention in torch; [rows, q, heads, value dim]."""
    plan, (rows, heads, q, dim), keys = inputs.plan, inputs.query.shape, inputs.key.shape[2]
    packed = [
        tensor.transpose(1, 2).reshape(-1, tensor.shape[1], dim) for tensor in (inputs.query, inputs.key, inputs.value)
    ]
    ends = [torch.arange(rows + 1, dtype=torch.int32, device=inputs.query.device) * length for length in (q, keys)]
    used = torch.tensor(plan.tails, dtype=torch.int32, device=inputs.query.device)
    attend = torch.ops.aten._flash_attention_forward

    def call() -> Tensor:
        attended = attend(*packed, *ends, q, keys, 0.0, True, False, scale=inputs.scale, seqused_k=used)
        return attended[0].view(rows, q, heads, dim)

    return call


def call_of(method: str, inputs: AttentionInputs) -> Callable[[], Tensor]:
    """A call of the method, all that can be made before it made."""
    return varlen(inputs) if method == "varlen" else lambda: METHODS[method](inputs)


def copied(inputs: AttentionInputs) -> AttentionInputs:
    """The same pass over keys and values at other addresses."""
    names = ("key", "value", "shared_key", "shared_value")
    tensors = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{name: tensor.clone() for name, tensor in tensors.items() if tensor is not None})


def time_of(method: str, calls: Sequence[Callable[[], Tensor]], device: torch.device) -> float:
    """Microseconds of one call on the device."""
    if device.type == "cuda" and method == "split":  # it cannot be captured
        from triton.testing import do_bench

        return 1000 * float(do_bench(calls[0], return_mode="median"))
    return microseconds(calls, device, REPEATS)


def measured(shape: Shape, methods: Sequence[str], device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    """A line for each method; "verified": whether it is off by at most four times what the padded call is."""
    inputs = inputs_of(shape, DTYPES[device.type], device)
    sets = [
        inputs,
        *(copied(inputs) for _ in range(min(MOST_SETS, CACHE // read_bytes(inputs)) if device.type == "cuda" else 0)),
    ]
    truth = exact(inputs)
    lines, allowed = [], 4 * float((METHODS["pad"](inputs).double() - truth).abs().max())
    for method in methods:
        line: dict[str, Any] = {"shape": str(shape), "attention": method}
        try:
            calls = [call_of(method, one) for one in sets]
            error = float((calls[0]().double() - truth).abs().max())
            taken = time_of(method, calls, device)
        except RuntimeError as failure:  # a shape that a library refuses
            lines.append(
                {
                    **line,
                    "microseconds": "-",
                    "of bandwidth": "-",
                    "error": str(failure)[:60],
                    "verified": method == "varlen",
                }
            )
            continue
        share = read_bytes(inputs) / (taken / 1e6) / bandwidth
        lines.append({**line, "microseconds": taken, "of bandwidth": share, "error": error, "verified": error <= allowed})
    return lines


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = device_or_exit(options.device)
    own = ["fused"] if available(torch.empty(0, dtype=DTYPES[device.type], device=device)) else []
    methods = ["pad", "split", *(["varlen"] if device.type == "cuda" else []), *own]
    bandwidth = ceilings(device, DTYPES[device.type]).bytes
    lines = [
        line
        for shape in SHAPES[device.type]  # FlashAttention knows no second range of keys
        for line in measured(shape, [m for m in methods if not (m == "varlen" and shape.shared)], device, bandwidth)
    ]
    title = f"attention of one layer, {DTYPES[device.type]}; a copy moves {bandwidth / 1e9:.0f} GB/s"
    deliver(title, list(lines[0]), lines, device, options.results, "attention")
    raise SystemExit(0 if all(line["verified"] for line in lines) else 1)


if __name__ == "__main__":
    main()
