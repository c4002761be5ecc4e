"""The fused kernel: its cases, in a process of their own; what it refuses, how it is chosen and cut; that it compiles for GPUs.

Tests of: models.attention.fused, models.attention.fused_kernels, models.attention.methods.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ahead_of_time
from ahead_of_time import CAPABILITIES, SHARED, TENSOR_CORES, Variant, compiled, cut, needs_compiler
from attending import build
from by_pairs import by_pairs
from shoal.errors import RequestError
from shoal.models import passes
from shoal.models.attention import methods
from shoal.models.attention.fused import STEP_BYTES, Card, available, fused, has_triton, joining_warps, tiling
from shoal.models.loading import wrap
from shoal.testing import tiny_model

module = importlib.import_module("shoal.models.attention.fused")  # the name in the package is the function
DEFAULT_SHARED_MEMORY = min(SHARED.values())


# ── where it runs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RequestError, match=r"needs Triton, a CUDA device .*; got cpu, torch.float32; attention='auto' runs"):
        fused(build([3], [1], torch.float32))


def test_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_triton", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RequestError, match=r"got cpu, torch\.float32, no Triton"):
        fused(build([3], [1], torch.float32))


@pytest.mark.parametrize(("version", "fits"), [("3.2.0", False), ("3.5.1", False), ("3.6.0", True), ("3.10.0+git", True)])
def test_an_older_triton_counts_as_none(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA builds of torch before 2.10 bring one that lacks what the kernels are written in."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version, __spec__=SimpleNamespace()))
    assert has_triton.__wrapped__() == fits


@pytest.mark.parametrize(
    ("cuda", "triton", "dtype", "chosen"),
    [
        (True, True, torch.bfloat16, "fused"),
        (True, True, torch.float64, "pad"),
        (True, False, torch.bfloat16, "pad"),
        (False, True, torch.bfloat16, "pad"),
    ],
)
def test_auto_takes_it_where_it_runs(
    cuda: bool, triton: bool, dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA tensor is only pretended here: `auto` asks for nothing but its device and dtype."""
    asked = []
    for name in ("pad", "fused"):
        monkeypatch.setattr(methods, name, lambda inputs, name=name: asked.append(name))
    monkeypatch.setattr(module, "has_triton", lambda: triton)
    monkeypatch.setattr(module, "_multiplies", lambda device: True)
    monkeypatch.setattr(methods, "native_available", lambda *_: False)
    query = SimpleNamespace(is_cuda=cuda, dtype=dtype, device=torch.device("cpu"))
    methods.auto(replace(build([50, 40], [1, 1], torch.float32), query=query))  # type: ignore[arg-type]
    assert asked == [chosen]


@pytest.mark.parametrize(("capability", "runs"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_without_tensor_cores_for_it_pads(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a T4 the kernel compiles, spills kilobytes a thread and takes many times as long as the padded call."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(module, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(
        is_cuda=True, dtype=torch.float16, device=torch.device("cuda", capability[0] * 10 + capability[1])
    )
    assert available(query) is runs  # type: ignore[arg-type]


@pytest.mark.parametrize(("variable", "runs"), [("1", True), ("0", False), (None, False)])
def test_the_interpreter_is_asked_for_by_its_variable(
    variable: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRITON_INTERPRET", variable)
    assert available(torch.zeros(1)) is runs


SMALL_CARD = Card(processors=84, shared=99 * 1024)


@pytest.mark.parametrize(
    ("dim", "values", "dtype", "fits"),
    [
        (576, 512, torch.bfloat16, True),
        (576, 512, torch.float32, False),
        (512, 512, torch.float32, True),
        (2048, 2048, torch.half, False),
    ],
)
def test_heads_that_no_cut_has_room_for_are_padded_or_refused(
    dim: int, values: int, dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card of 99 KiB. `auto` asks nobody, who asks for the kernel by its name is told."""
    monkeypatch.setattr(Card, "of", lambda device: SMALL_CARD)
    monkeypatch.setattr(module, "available", lambda query: True)
    monkeypatch.setattr(methods, "available", lambda query: True)
    monkeypatch.setattr(module, "attend", lambda inputs: inputs.query)
    monkeypatch.setattr(methods, "pad", lambda inputs: None)
    inputs = build([3], [1], dtype, dim=dim, value_dim=values)
    query = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"), shape=inputs.query.shape)
    inputs = replace(inputs, query=query)  # type: ignore[arg-type]
    assert methods.auto(inputs) is (query if fits else None)
    if fits:
        assert fused(inputs) is query
    else:
        with pytest.raises(
            RequestError, match=f"no room for heads of {dim} numbers in {dtype}: 99 KiB .*'auto' runs anywhere"
        ):
            fused(inputs)


@pytest.mark.parametrize(
    ("triton", "torchs", "kibibytes"),
    [
        (232448, 232448, 227),
        (101376, 232448, 99),  # what a launch is held to counts
        (None, 166912, 163),
        (0, 0, 99),
        (None, None, 99),
        (None, 49152, 99),  # the limit without an option
    ],
)
def test_the_shared_memory_of_a_card_is_what_launches_are_held_to(
    triton: int | None, torchs: int | None, kibibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither number need be there: every card from 8.0 on has 99 KiB."""
    asked: list[int] = []

    def properties(index: int) -> dict[str, int]:
        asked.append(index)
        return {} if triton is None else {"max_shared_mem": triton}

    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace(get_device_properties=properties)))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    said = {} if torchs is None else {"shared_memory_per_block_optin": torchs}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=84, **said))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name, index in (("cuda:1", 1), ("cuda", 3)):
        assert Card.of.__wrapped__(torch.device(name)) == Card(84, kibibytes * 1024)  # type: ignore[attr-defined]
        assert asked.pop() == index


class OutOfResources(Exception):
    """Triton's, which is no RuntimeError."""


def test_heads_whose_launch_is_refused_are_padded_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with what the method counts: a row does not end for it."""
    errors: list[Exception] = [OutOfResources("out of resource: shared memory"), ValueError("another")]

    def refused(inputs: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(module, "REFUSED", set())
    monkeypatch.setattr(methods, "REFUSED", module.REFUSED)
    monkeypatch.setattr(methods, "fused", refused)
    monkeypatch.setattr(methods, "available", lambda query: True)
    monkeypatch.setattr(methods, "pad", lambda inputs: "padded")
    wide, narrow = (build([3], [1], torch.bfloat16, dim=dim, value_dim=dim) for dim in (512, 64))
    query = SimpleNamespace(is_cuda=True)
    with pytest.warns(RuntimeWarning, match="padded attention for heads of 512 numbers: out of resource"):
        assert methods.auto(replace(wide, query=query)) == "padded"  # type: ignore[arg-type]
    assert not module.holds(wide.key, wide.value)
    assert methods.auto(replace(wide, query=query)) == "padded"  # type: ignore[arg-type]
    assert module.holds(narrow.key, narrow.value)
    with pytest.raises(ValueError, match="another"):
        methods.auto(replace(narrow, query=query))  # type: ignore[arg-type]


@pytest.mark.parametrize(("processors", "kibibytes", "method"), [(132, 227, "auto"), (84, 2, "pad")])
def test_a_model_whose_heads_do_not_fit_is_padded_from_its_load(
    processors: int, kibibytes: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that rounds are captured with the padded call, and not with a kernel that cannot be launched."""
    runner = wrap(tiny_model("deepseek-v3"), "tiny", checked=False)
    monkeypatch.setattr(passes, "resolved", lambda *_: "fused")
    monkeypatch.setattr(Card, "of", lambda device: Card(processors, kibibytes * 1024))
    assert passes.heads_fit(runner) is (method == "auto")
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    monkeypatch.setattr(runner, "capture_rounds", lambda executor: None)
    monkeypatch.setattr(passes, "executor_for", lambda mode, device: None)
    passes.choose_passes(runner, "off", owned=True)
    assert runner.attention == method


@pytest.mark.parametrize("shared", [99, 163, 227])
def test_cuts_shrink_until_they_fit(shared: int) -> None:
    """First fewer steps in flight, then fewer queries; narrow heads are cut alike on all cards."""
    card = Card(132, shared * 1024)
    query, key = (
        torch.empty(8, 128, 7, 576, device="meta", dtype=torch.bfloat16),
        torch.empty(8, 1, 4096, 576, device="meta"),
    )
    made = tiling(query, key, 512, 4096, card)
    assert (made.queries, made.stages) == {99: (16, 2), 163: (32, 2), 227: (64, 2)}[shared]
    assert made.shared_bytes(576, 512, 2, card.shared) <= card.shared
    narrow = [tiling(query[..., :128], key[..., :128], 128, 4096, Card(132, size)) for size in (99 << 10, card.shared)]
    assert narrow[0] == narrow[1]


# ── how the work is cut ─────────────────────────────────────────────────────────────────────────────────────────────


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


@by_pairs({"dtype": [torch.float32, torch.bfloat16], "dim": [16, 64, 80, 128, 192, 256, 512], "q": [1, 9, 40]})
def test_steps_are_powers_of_two_that_fit(q: int, dim: int, dtype: torch.dtype) -> None:
    made = cut(8, 32, 8, q, dim, 4096, dtype)
    for size in (made.queries, made.keys):
        assert size & (size - 1) == 0
        assert 16 <= size <= 128
    width = 1 << (dim - 1).bit_length()
    assert made.keys * 2 * width * dtype.itemsize <= max(STEP_BYTES, 16 * 2 * width * dtype.itemsize)


# ── for GPUs that are not here ──────────────────────────────────────────────────────────────────────────────────────

VARIANTS = {
    "plain, narrow heads": Variant(q=1, dim=64, dtype="fp16"),
    "plain, wide heads": Variant(q=1, dim=256),
    "many rows": Variant(q=1, rows=64),
    "verifying, odd heads": Variant(dim=80),
    "verifying, wide heads": Variant(dim=256),
    "a prompt, wide heads": Variant(q=40, dim=192),
    "everything": Variant(trees=True, shared=True, sinks=True, softcap=50.0),
    "float32": Variant(dtype="fp32"),
    "float32, wide heads": Variant(dim=256, dtype="fp32", shared=True),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_for_gpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_compile_matrix.py` has it of models; here formats, odd heads, and what a pass may have besides. The interpreter
    forgives what the compiler does not. Nothing is spilled, the shared memory of the smaller GPUs suffices, a multiprocessor holds
    two programs of decoding, matrices are multiplied by tensor cores (float32 without TF32)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = VARIANTS[name]
    for capability in CAPABILITIES if name in ("a prompt, wide heads", "everything") else (80,):
        binary = variant.compiled(capability, tmp_path)
        few = 32 if name == "everything" else 8  # Triton 3.7; nothing of it is loaded
        assert not binary.spills(few), (capability, binary.registers, binary.stack, binary.local)
        assert binary.shared <= DEFAULT_SHARED_MEMORY
        assert binary.programs >= (1 if variant.cut.queries > 32 or variant.dim > 128 else 2)
        assert "LDGSTS" in binary.instructions  # keys are fetched while the last ones are worked on
        used = {TENSOR_CORES[capability] if variant.cut.queries >= 64 else "HMMA"} if variant.dtype != "fp32" else set()
        assert binary.instructions & {"HMMA", *TENSOR_CORES.values()} == used


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shares_are_joined_on_gpus(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from shoal.models.attention import fused_kernels

    types = {"parts": "*fp32", "logs": "*fp32", "out": "*bf16"}
    splits, dim = {80: (64, 256), 90: (4, 128), 100: (64, 128)}[capability]
    constants = {"VALUE_DIM": dim, "BLOCK_V": dim, "SPLITS": splits, "BLOCK_S": splits}
    warps = joining_warps(splits, dim)
    assert compiled(fused_kernels.combine, types, constants, capability, tmp_path, warps=warps).keeps_to_registers


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_tile_that_is_too_large_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two warps do not hold the sums of 32 queries of 256 features, nor 128 keys in a step."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide, cuts = VARIANTS["verifying, wide heads"], tiling
    monkeypatch.setattr(ahead_of_time, "tiling", lambda *shape, **more: replace(cuts(*shape, **more), warps=2))
    assert not wide.compiled(80, tmp_path).keeps_to_registers
