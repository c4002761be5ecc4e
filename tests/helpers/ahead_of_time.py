"""Triton kernels compiled for GPUs that are not here, by Triton's own compiler and assembler; what the machine code takes."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.models.attention.fused import Card, Tiling, _block, has_triton, tiling

CAPABILITIES = (80, 90, 100)
"""A100; H100 and H200; B200."""
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""By compute capability: bytes of shared memory that a program may have."""
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""The instruction for 16-bit matrices. Those of one warp are HMMA everywhere."""

needs_compiler = pytest.mark.skipif(
    not has_triton() or (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs Triton (extra `triton`), whose assembler is for Linux on x86-64",
)


@dataclass(frozen=True)
class Binary:
    """Machine code of one kernel.

    Attributes:
        registers: of a thread. stack, local: bytes of a thread's frame and of spilled registers. shared: bytes of a program.
        warps: of a program. instructions: the mnemonics there are. ptx: the assembler code.
    """

    registers: int
    stack: int
    local: int
    shared: int
    warps: int
    instructions: frozenset[str]
    ptx: str

    @property
    def keeps_to_registers(self) -> bool:
        """Nothing is spilled, and nothing is indexed at run time."""
        return self.stack == self.local == 0 and not self.instructions & {"LDL", "STL"}

    def spills(self, most: int = 0) -> bool:
        """Whether more than so many bytes of a thread are in memory."""
        return self.local > 0 or self.stack > most or (not most and not self.keeps_to_registers)

    @property
    def programs(self) -> int:
        """How many a multiprocessor has registers for."""
        return 65536 // (self.registers * 32 * self.warps)


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    folder: Path,
    *,
    warps: int,
    stages: int = 2,
) -> Binary:
    """The kernel for a compute capability.

    Args:
        types: of arguments; those of neither mapping are 32-bit integers. constants: constexpr arguments, and those that are None.
        folder: for files. Pointers, and strides, are multiples of 16, as in the models that matter.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith(("_row", "_head", "_cell", "width", "puts"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned)
    made = compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages})
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    dumped = _dumped(file, "--dump-resource-usage", "--dump-sass")
    numbers = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dumped))
    names = frozenset(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\w+)", dumped, re.MULTILINE))
    registers, stack, local = (int(numbers[name]) for name in ("REG", "STACK", "LOCAL"))
    return Binary(registers, stack, local, made.metadata.shared, warps, names, made.asm["ptx"])


def _dumped(file: Path, *what: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, *what, file], capture_output=True, text=True, check=True).stdout


def cut(
    rows: int,
    heads: int,
    kv_heads: int,
    q: int,
    dim: int,
    span: int,
    dtype: torch.dtype = torch.bfloat16,
    values: int = 0,
    capability: int = 90,
) -> Tiling:
    """The tiling of a pass. values: the size of a value's head where it is not the key's."""
    query = torch.empty(rows, heads, q, dim, dtype=dtype, device="meta")
    key = torch.empty(rows, kv_heads, span, dim, dtype=dtype, device="meta")
    return tiling(query, key, values or dim, span, Card(132, SHARED[capability]))


FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Variant:
    """An attention kernel that is compiled: new tokens per row, head size, format; what the model and the pass have."""

    q: int = 7
    dim: int = 128
    dtype: str = "bf16"
    rows: int = 8
    trees: bool = False
    shared: bool = False
    sinks: bool = False
    softcap: float | None = None
    heads: int = 32
    kv_heads: int = 8
    values: int = 0

    @property
    def cut(self) -> Tiling:
        """That on an H100."""
        return self.on(90)

    def on(self, capability: int) -> Tiling:
        shape = self.rows, self.heads, self.kv_heads, self.q, self.dim, 4096
        return cut(*shape, FORMATS[self.dtype], self.values, capability)

    def counted(self, capability: int) -> int:
        """The bytes of shared memory that the method expects a program to take."""
        size = FORMATS[self.dtype].itemsize
        return self.on(capability).shared_bytes(self.dim, self.values or self.dim, size, SHARED[capability])

    def compiled(self, capability: int, folder: Path) -> Binary:
        from shoal.models.attention import fused_kernels

        made, pointer, value_dim = self.on(capability), f"*{self.dtype}", self.values or self.dim
        there = {"shared_key": self.shared, "shared_value": self.shared, "sinks": self.sinks, "positions": self.trees}
        there |= {"words": self.trees, "logs": made.splits > 1}
        types = dict.fromkeys(("query", "key", "value", "shared_key", "shared_value", "sinks"), pointer)
        types |= {"bounds": "*i32", "logs": "*fp32", "scale": "fp32", "positions": "*i64", "words": "*i64"}
        types["out"] = "*fp32" if made.splits > 1 else pointer
        constants: dict[str, Any] = {
            "SOFTCAP": self.softcap, "GROUP": self.heads // self.kv_heads, "DIM": self.dim,
            "VALUE_DIM": value_dim, "BLOCK_D": _block(self.dim), "BLOCK_V": _block(value_dim), "BLOCK_Q": made.queries,
            "BLOCK_K": made.keys, "SPLITS": made.splits,
        }  # fmt: skip
        constants |= {name: None for name, given in there.items() if not given}
        return compiled(fused_kernels.attend, types, constants, capability, folder, warps=made.warps, stages=made.stages)
