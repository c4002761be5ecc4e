"""All kernels of well-known models, compiled ahead of time for the GPUs there are: nothing spilled, shared memory that suffices.

Tests of: models.attention.fused_kernels, models.attention.fused, models.layers.layer_kernels, models.layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ahead_of_time import FORMATS, SHARED, TENSOR_CORES, Variant, compiled, needs_compiler
from shoal.models.attention.fused import SLACK, Card
from shoal.models.layers import _power, _warps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.limit(900),
    needs_compiler,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

FRAMES = {120: 72}
"""Bytes of a thread in memory with Triton 3.7, where a tile has 64 queries: 18 registers on an RTX 50, six elsewhere (24)."""


@dataclass(frozen=True)
class Shape:
    """Of a model's layers: the width, heads and their size; normed: heads are normalised; sinks: heads have one."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    normed: bool = False
    softcap: float | None = None
    sinks: bool = False


MODELS = {
    "Llama-2 7B": Shape(4096, 32, 32, 128),
    "Llama-2 13B": Shape(5120, 40, 40, 128),
    "Llama-2 70B": Shape(8192, 64, 8, 128),
    "Llama-3 8B": Shape(4096, 32, 8, 128),
    "Mistral 7B": Shape(4096, 32, 8, 128),
    "Qwen2 0.5B": Shape(896, 14, 2, 64),
    "Qwen2 7B": Shape(3584, 28, 4, 128),
    "Qwen3 0.6B": Shape(1024, 16, 8, 128, normed=True),
    "Qwen3 8B": Shape(4096, 32, 8, 128, normed=True),
    "Gemma 2 9B": Shape(3584, 16, 8, 256, softcap=50.0),
    "Gemma 2 27B": Shape(4608, 32, 16, 128, softcap=50.0),
    "Gemma 3 4B": Shape(2560, 8, 4, 256, normed=True),
    "Gemma 3 27B": Shape(5376, 32, 16, 128, normed=True),
    "Phi-3 mini": Shape(3072, 32, 32, 96),
    "Falcon 7B": Shape(4544, 71, 1, 64),
    "Qwen2.5 3B": Shape(2048, 16, 2, 128),
    "Llama 3.2 3B": Shape(3072, 24, 8, 128),
    "GLM-4 9B": Shape(4096, 32, 2, 128),
    "MoE: Qwen3 30B-A3B": Shape(2048, 32, 4, 128, normed=True),
    "MoE: gpt-oss 20B": Shape(2880, 64, 8, 64, sinks=True),
}
LAYERS = [name for name in MODELS if name.startswith(("Llama", "Mistral", "Qwen"))]
"""The models whose layers are ours."""
COLUMNS = (1, 7, 40)
"""New tokens per row: plain decoding, verification, a prompt."""


def attending() -> dict[str, tuple[Variant, bool]]:
    """The attention kernels of all models, each kind once; and if one differs from those before by more than its heads."""
    found: dict[tuple[object, ...], tuple[str, tuple[Variant, bool]]] = {}
    for name, shape in MODELS.items():
        for q in COLUMNS:
            one = Variant(q, shape.dim, softcap=shape.softcap, sinks=shape.sinks, heads=shape.heads, kv_heads=shape.kv_heads)
            kind = one.dim, one.softcap, one.sinks, one.cut.queries, one.cut.keys, one.cut.splits > 1
            new = all(kind != other[:-1] for other in found)
            found.setdefault((*kind, one.heads // one.kv_heads), (f"{name}, {q} columns", (one, new)))
    return dict(found.values())


ATTENDING = attending()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


OLDER, NEWER = (80, 86, 89, 120), (90, 100)
"""The matrices of the first are multiplied by the same instructions, in the same shared memory; each of the others has its own."""


@pytest.mark.parametrize(("number", "name"), list(enumerate(ATTENDING)))
def test_attention_of_models_compiles_for_gpus(number: int, name: str, tmp_path: Path) -> None:
    """Each kernel for two GPUs, by turns, or for one. The shared memory of the smallest suffices, a multiprocessor holds two
    programs of decoding, matrices are multiplied by tensor cores."""
    variant, new = ATTENDING[name]
    large = variant.cut.queries >= 64
    for capability in (OLDER[number % 4], NEWER[number % 2]) if new else ((OLDER + NEWER)[number % 6],):
        binary = variant.compiled(capability, tmp_path)
        assert not binary.spills(FRAMES.get(capability, 24) if large else 0), (
            capability,
            binary.registers,
            binary.stack,
            binary.local,
        )
        assert binary.shared <= (min(SHARED.values()) if capability in OLDER else SHARED[capability]), capability
        assert binary.shared <= variant.counted(capability)
        assert binary.programs >= (1 if large or variant.dim > 128 else 2)
        assert "LDGSTS" in binary.instructions  # keys are fetched while the last ones are worked on
        used = TENSOR_CORES.get(capability, "HMMA") if large else "HMMA"
        assert binary.instructions & {"HMMA", *TENSOR_CORES.values()} == {used}


LATENTS = {"heads": 128, "kv_heads": 1, "values": 512}
WIDE = {
    "DeepSeek-V3": Variant(1, 192, heads=128, kv_heads=128, values=128),
    "DeepSeek-V3, a prompt": Variant(40, 192, heads=128, kv_heads=128, values=128),
    "DeepSeek-V3, latents": Variant(7, 576, **LATENTS),
    "DeepSeek-V2 Lite, latents": Variant(1, 576, **{**LATENTS, "heads": 16}),
    "latents in float32": Variant(7, 576, dtype="fp32", **LATENTS),
    "Gemma 4, global": Variant(7, 512, heads=16, kv_heads=8),
    "Gemma 4, global, a prompt": Variant(40, 512, heads=16, kv_heads=8),
    "heads of 512 in float32": Variant(7, 512, dtype="fp32", heads=16, kv_heads=8),
    "heads of 1024": Variant(1, 1024, heads=16, kv_heads=16),
}
"""Latent attention, whose values are narrower than its keys, as models compute it and over the latents themselves; the widest heads
of models, and wider ones."""
REFUSED = {("latents in float32", 86)}


@pytest.mark.parametrize(("number", "name"), list(enumerate(WIDE)))
def test_the_widest_heads_fit_or_are_refused(number: int, name: str, tmp_path: Path) -> None:
    """Cuts are chosen by the card's shared memory: 99 KiB on an RTX 30, 40 or 50, 163 on an A100, 227 on the largest. What no cut
    has room for is refused before anything is compiled. Heads of 512 and more keep a few registers in memory."""
    variant = WIDE[name]
    size = FORMATS[variant.dtype].itemsize
    for capability in (86, (80, 90, 100)[number % 3]):
        card = Card(132, SHARED[capability])
        assert card.holds(variant.dim, variant.values or variant.dim, size) is ((name, capability) not in REFUSED)
        if (name, capability) in REFUSED:
            assert variant.counted(capability) > SHARED[capability]
            continue
        binary = variant.compiled(capability, tmp_path)
        assert binary.shared <= variant.counted(capability) <= SHARED[capability]
        assert binary.local == 0
        assert binary.stack <= (120 if variant.dim >= 512 else 0)


def test_the_count_of_shared_memory_is_not_generous(tmp_path: Path) -> None:
    """What the method counts is what the compiled code takes but for its slack: no cut is smaller than it must be."""
    for name, capability in (("DeepSeek-V3, latents", 86), ("DeepSeek-V3, latents", 90), ("heads of 512 in float32", 80)):
        taken = WIDE[name].compiled(capability, tmp_path).shared
        assert taken <= WIDE[name].counted(capability) <= taken + 4 * SLACK


HEADS = sorted({(shape.heads, shape.kv_heads, shape.dim, shape.normed) for name, shape in MODELS.items() if name in LAYERS})


@pytest.mark.parametrize(("number", "shape"), list(enumerate(HEADS)), ids=str)
def test_heads_of_models_compile_for_gpus(number: int, shape: tuple[int, int, int, bool], tmp_path: Path) -> None:
    from shoal.models.layers import layer_kernels

    heads, kv_heads, dim, normed = shape
    weights = ("query_weight", "key_weight")
    types = dict.fromkeys(("states", "query", "keys", "values", *weights), "*bf16")
    types |= {"cos": "*fp32", "sin": "*fp32", "cells": "*i64", "eps": "fp32"}
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "ROTARY": dim, "BLOCK": _power(dim)}
    constants |= {} if normed else dict.fromkeys(weights)
    for capability in (OLDER[number % 4], NEWER[number % 2]):
        assert compiled(layer_kernels.heads, types, constants, capability, tmp_path, warps=1, stages=1).keeps_to_registers


@pytest.mark.parametrize(("number", "width"), list(enumerate(sorted({_power(MODELS[name].width) for name in LAYERS}))))
def test_norms_of_models_compile_for_gpus(number: int, width: int, tmp_path: Path) -> None:
    from shoal.models.layers import layer_kernels

    types = {**dict.fromkeys(("x", "other", "weight", "out"), "*bf16"), "eps": "fp32"}
    constants = {"BLOCK": width, "SHARES": 0, "scales": None, "bias": None}
    for capability in (OLDER[number % 4], NEWER[number % 2]):
        binary = compiled(layer_kernels.add_norm, types, constants, capability, tmp_path, warps=_warps(width), stages=1)
        assert binary.keeps_to_registers
        assert binary.registers <= 64
