"""The fused kernel: its cases, in a process of their own; what it refuses, how it is chosen and cut; that it compiles for GPUs."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import RequestError
from shoal.models.attention import methods
from shoal.models.attention.fused import STEP_BYTES, Tiling, available, fused, tiling
from test_attention import build

module = importlib.import_module("shoal.models.attention.fused")  # the name in the package is the function

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (extra `triton`)"
)
DEFAULT_SHARED_MEMORY = 99 * 1024  # what a program may have on GPUs of compute capability 8.6 and 8.9


@needs_triton
@pytest.mark.limit(300)
def test_the_cases_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("fused_cases.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


# ── where it runs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RequestError, match=r"needs Triton, a CUDA device .*; got cpu, torch.float32; attention='auto' runs"):
        fused(build([3], [1], torch.float32))


def test_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RequestError, match=r"got cpu, torch\.float32, no Triton"):
        fused(build([3], [1], torch.float32))


@pytest.mark.parametrize(
    ("cuda", "triton", "dtype", "chosen"),
    [
        (True, True, torch.bfloat16, "fused"),
        (True, True, torch.float64, "mixed"),
        (True, False, torch.bfloat16, "mixed"),
        (False, True, torch.bfloat16, "mixed"),
    ],
)
def test_auto_takes_it_where_it_runs(
    cuda: bool, triton: bool, dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA tensor is only pretended here: `auto` asks for nothing but its device and dtype."""
    asked = []
    for name in ("mixed", "fused"):
        monkeypatch.setattr(methods, name, lambda inputs, name=name: asked.append(name))
    monkeypatch.setattr(module, "_has_triton", lambda: triton)
    monkeypatch.setattr(methods, "native_available", lambda *_: False)
    query = SimpleNamespace(is_cuda=cuda, dtype=dtype, device=torch.device("cpu"))
    methods.auto(replace(build([50, 40], [1, 1], torch.float32), query=query))  # type: ignore[arg-type]
    assert asked == [chosen]


@pytest.mark.parametrize(("variable", "runs"), [("1", True), ("0", False), (None, False)])
def test_the_interpreter_is_asked_for_by_its_variable(
    variable: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRITON_INTERPRET", variable)
    assert available(torch.zeros(1)) is runs


# ── how the work is cut ─────────────────────────────────────────────────────────────────────────────────────────────


def cut(rows: int, heads: int, kv_heads: int, q: int, dim: int, span: int, dtype: torch.dtype = torch.bfloat16) -> Tiling:
    query = torch.empty(rows, heads, q, dim, dtype=dtype, device="meta")
    key = torch.empty(rows, kv_heads, span, dim, dtype=dtype, device="meta")
    return tiling(query, key, dim, span, processors=132)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((1, 32, 8, 1, 128, 8192), 32),  # 8 programs: 33 each would fill the GPU, but not with 256 keys each
        ((8, 32, 8, 7, 128, 2048), 4),  # 5 would fill the GPU twice; powers of two only
        ((8, 32, 8, 7, 128, 900), 2),  # 3 have keys enough
        ((64, 32, 8, 7, 128, 2048), 1),  # enough programs without
        ((1, 32, 8, 1, 128, 100), 1),  # too few keys
        ((1, 8, 1, 1, 128, 1 << 20), 64),
        ((1, 32, 8, 2048, 128, 2048), 1),  # a prompt
    ],
)
def test_keys_are_shared_out_until_the_gpu_is_busy(shape: tuple[int, int, int, int, int, int], splits: int) -> None:
    assert cut(*shape).splits == splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("q", [1, 9, 40])
def test_steps_are_powers_of_two_that_fit(q: int, dim: int, dtype: torch.dtype) -> None:
    made = cut(8, 32, 8, q, dim, 4096, dtype)
    for size in (made.queries, made.keys):
        assert size & (size - 1) == 0
        assert 16 <= size <= 128
    width = 1 << (dim - 1).bit_length()
    assert made.keys * 2 * width * dtype.itemsize <= max(STEP_BYTES, 16 * 2 * width * dtype.itemsize)


# ── for GPUs that are not here ──────────────────────────────────────────────────────────────────────────────────────


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, cut: Tiling) -> Any:
    """The kernel in the machine code of that compute capability, by Triton's own assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith(("_row", "_head", "_cell"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile(source, GPUTarget("cuda", capability, 32), {"num_warps": cut.warps, "num_stages": cut.stages})


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="Triton's assembler is for Linux on x86-64"
)
@pytest.mark.parametrize(
    ("capability", "q", "dim", "dtype", "trees"),
    [
        (90, 7, 128, "bf16", False), (80, 1, 64, "fp16", False), (90, 40, 128, "bf16", False), (80, 1, 64, "fp32", False),
        (90, 7, 128, "bf16", True), (80, 9, 64, "fp16", True),
    ],
)  # fmt: skip
def test_it_compiles_for_gpus(
    capability: int, q: int, dim: int, dtype: str, trees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter forgives what the compiler does not. Matrices are multiplied by tensor cores, float32 without TF32."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from shoal.models.attention import kernels

    made = cut(8, 32, 8, q, dim, 4096, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype])
    assert made.splits > 1
    types = dict.fromkeys(("query", "key", "value", "shared_key", "shared_value", "sinks"), f"*{dtype}")
    constants = {
        "SOFTCAP": 50.0, "GROUP": 4, "DIM": dim, "VALUE_DIM": dim, "BLOCK_D": dim, "BLOCK_V": dim,
        "BLOCK_Q": made.queries, "BLOCK_K": made.keys, "SPLITS": made.splits,
    }  # fmt: skip
    blocks = dict.fromkeys(("positions", "words"))
    types, constants = (types | dict.fromkeys(blocks, "*i64"), constants) if trees else (types, constants | blocks)
    types |= {"bounds": "*i32", "out": "*fp32", "logs": "*fp32", "scale": "fp32"}
    binary = compiled(kernels.attend, types, constants, capability, made)
    assert binary.metadata.shared <= DEFAULT_SHARED_MEMORY
    assert "cp.async" in binary.asm["ptx"]  # keys are fetched while the last ones are worked on
    assert ("mma" in binary.asm["ptx"]) is (dtype != "fp32")
    constants = {"VALUE_DIM": dim, "BLOCK_V": dim, "SPLITS": made.splits, "BLOCK_S": 8}
    joined = compiled(kernels.combine, {"parts": "*fp32", "logs": "*fp32", "out": f"*{dtype}"}, constants, capability, made)
    assert joined.asm["cubin"]
