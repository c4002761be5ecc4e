"""The kernels of a decoder layer: their cases, in a process of their own; when they are used; what a layer launches.

Tests of: models.layers.draw_kernels, models.layers, models.layers.layer_kernels, models.passes,
models.quantize.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ahead_of_time import CAPABILITIES, SHARED, TENSOR_CORES, compiled, needs_compiler
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import layers, loading, passes, quantize
from shoal.models.attention.fused import Card, has_triton
from shoal.models.layers import COLUMNS, MIDDLE, NARROW, WIDE, _power, cut_of, gpu_draws, product_or_sums, shares_of
from shoal.native.build import missing
from shoal.sampling.uniforms import BUCKETS
from shoal.testing import tiny_model

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton 3.6 is not installed (extra `triton`)")


@needs_triton
@pytest.mark.slow
@pytest.mark.limit(1200)
@pytest.mark.parametrize("cases", ["fused", "layers", "layer_models", "steps"])
def test_the_cases_in_the_interpreter(cases: str) -> None:
    """Attention, layers, whole models, steps: each file in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).with_name(f"{cases}_cases.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


# ── for GPUs that are not here ──────────────────────────────────────────────────────────────────────────────────────

NO_SHARES: dict[str, object] = {"scales": None, "bias": None, "SHARES": 0}
KERNELS: dict[str, tuple[dict[str, str], dict[str, object], int]] = {
    "begin": (
        dict.fromkeys(("embedding", "weight", "x", "out"), "*bf16") | dict.fromkeys(("tokens", "positions"), "*i64")
        | dict.fromkeys(("frequencies", "cos", "sin"), "*fp32") | {"scaling": "fp32", "eps": "fp32"},
        {"HALF": 64, "ANGLES": 64, "BLOCK": 4096}, 8,
    ),
    "add_norm": (
        dict.fromkeys(("x", "other", "weight", "out"), "*bf16") | {"eps": "fp32"}, {"BLOCK": 4096} | NO_SHARES, 8
    ),
    "add_norm, nothing added": (
        dict.fromkeys(("x", "weight", "out"), "*bf16") | {"eps": "fp32"}, {"BLOCK": 16384, "other": None} | NO_SHARES, 32
    ),
    "add_norm, sums by share": (
        dict.fromkeys(("x", "bias", "weight", "out"), "*bf16") | {"other": "*fp32", "scales": "*fp32", "eps": "fp32"},
        {"BLOCK": 4096, "SHARES": 8}, 8,
    ),
    "join": (
        {"parts": "*fp32", "scales": "*fp32", "bias": "*bf16", "out": "*bf16"}, {"BLOCK": COLUMNS, "SHARES": 8}, 4
    ),
    "eight_bit_product, sums by share": (
        {"x": "*bf16", "weight": "*i8", "scales": "*fp32", "out": "*fp32"},
        {"BLOCK_T": 16, "BLOCK_N": NARROW.outputs, "BLOCK_K": NARROW.inputs, "bias": None, "APART": True}, 4,
    ),
    "eight_bit_product, fp8, sums by share, 64 tokens": (
        {"x": "*bf16", "weight": "*fp8e4nv", "scales": "*fp32", "out": "*fp32"},
        {"BLOCK_T": 64, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs, "bias": None, "APART": True}, 4,
    ),
    "eight_bit_product, all shares of 64 tokens": (
        dict.fromkeys(("x", "bias", "out"), "*bf16") | {"weight": "*i8", "scales": "*fp32"},
        {"BLOCK_T": 64, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs, "SHARES": 8}, 4,
    ),
    "heads": (
        dict.fromkeys(("states", "query", "keys", "values"), "*bf16")
        | {"cos": "*fp32", "sin": "*fp32", "cells": "*i64", "eps": "fp32"},
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "ROTARY": 128, "BLOCK": 128, "query_weight": None, "key_weight": None}, 1,
    ),
    "heads, normalised": (
        dict.fromkeys(("states", "query", "keys", "values", "query_weight", "key_weight"), "*bf16")
        | {"cos": "*fp32", "sin": "*fp32", "cells": "*i64", "eps": "fp32"},
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 80, "ROTARY": 40, "BLOCK": 128}, 1,
    ),
    "eight_bit_product": (
        dict.fromkeys(("x", "bias", "out"), "*bf16") | {"weight": "*i8", "scales": "*fp32"},
        {"BLOCK_T": 16, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs}, 4,
    ),
    "eight_bit_product, 32 tokens": (
        dict.fromkeys(("x", "out"), "*bf16") | {"weight": "*i8", "scales": "*fp32"},
        {"BLOCK_T": 32, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs, "bias": None}, 4,
    ),
    "eight_bit_product, 64 tokens": (
        dict.fromkeys(("x", "out"), "*fp16") | {"weight": "*i8", "scales": "*fp32"},
        {"BLOCK_T": 64, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs, "bias": None}, 4,
    ),
    "eight_bit_product, fp8": (
        dict.fromkeys(("x", "bias", "out"), "*bf16") | {"weight": "*fp8e4nv", "scales": "*fp32"},
        {"BLOCK_T": 16, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs}, 4,
    ),
    "eight_bit_product, fp8, 64 tokens": (
        dict.fromkeys(("x", "out"), "*bf16") | {"weight": "*fp8e4nv", "scales": "*fp32"},
        {"BLOCK_T": 64, "BLOCK_N": MIDDLE.outputs, "BLOCK_K": MIDDLE.inputs, "bias": None}, 4,
    ),
    "eight_bit_product, few outputs": (
        dict.fromkeys(("x", "bias", "out"), "*bf16") | {"weight": "*i8", "scales": "*fp32"},
        {"BLOCK_T": 16, "BLOCK_N": NARROW.outputs, "BLOCK_K": NARROW.inputs}, 4,
    ),
    "eight_bit_product, many outputs": (
        dict.fromkeys(("x", "bias", "out"), "*bf16") | {"weight": "*i8", "scales": "*fp32"},
        {"BLOCK_T": 64, "BLOCK_N": WIDE.outputs, "BLOCK_K": WIDE.inputs}, 4,
    ),
    "eight_bit_product, fp8, many outputs": (
        dict.fromkeys(("x", "out"), "*bf16") | {"weight": "*fp8e4nv", "scales": "*fp32"},
        {"BLOCK_T": 64, "BLOCK_N": WIDE.outputs, "BLOCK_K": WIDE.inputs, "bias": None}, 4,
    ),
    "silu_mul": ({"both": "*bf16", "out": "*bf16"}, {"BLOCK": 1024}, 4),
}  # fmt: skip
"""Types, constants and warps, as `shoal.models.layers` launches them for a model of 4096 features."""
FRAMES = {"begin": 32, "eight_bit_product, many outputs": 8, "eight_bit_product, all shares of 64 tokens": 8}
"""Bytes of a thread in memory with Triton 3.7: a cosine of large angles; an accumulator's address on compute capability 10.0."""
DRAWS: dict[str, tuple[dict[str, str], dict[str, object], int]] = {
    "inverse_transform": (
        {"weights": "*fp32", "sums": "*fp64", "uniforms": "*fp64", "tokens": "*i64"}, {"SIZE": 256, "BLOCKS": 1024}, 4
    ),
    "parts_of_softmax": (
        {"logits": "*bf16", "temperatures": "*fp32", "tops": "*fp32", "places": "*i32", "totals": "*fp32"}, {"SIZE": 2048}, 4
    ),
    "softmax": (
        {"logits": "*bf16", "places": "*i32", "best": "*i64", "sound": "*i1"}
        | dict.fromkeys(("temperatures", "tops", "totals", "probs"), "*fp32"),
        {"PARTS": 128, "SIZE": 2048}, 4,
    ),
    "bucket_sums": ({"weights": "*fp32", "sums": "*fp64"}, {"DEPTH": 64, "BUCKETS": 64}, 4),
    "exponential_race": (
        {"weights": "*fp32", "sums": "*fp64", "uniforms": "*fp64", "tokens": "*i64"},
        {"PARTS": 64, "BUCKETS": 64, "MEMBERS": 4096}, 16,
    ),
    "block_sums": ({"weights": "*fp32", "sums": "*fp64"}, {"SIZE": 256}, 1),
    "feed": (
        dict.fromkeys(("drawn", "tokens", "kept", "positions", "cells", "starts", "counts"), "*i64"), {}, 1
    ),
}  # fmt: skip
"""The same of `gpu_draws`, for the largest vocabulary."""


VOCABULARIES = (151_936, 152_064, 256_000)
"""Qwen3, Qwen2.5, Gemma; those of Llama 3 and DeepSeek-V3 have half as many parts."""


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws_of_large_vocabularies_are_those_that_are_compiled(vocabulary: int) -> None:
    members = -(-vocabulary // BUCKETS)
    sizes = {
        "inverse_transform": {"SIZE": gpu_draws.SIZE, "BLOCKS": _power(-(-vocabulary // gpu_draws.SIZE))},
        "softmax": {"SIZE": gpu_draws.PART, "PARTS": _power(-(-vocabulary // gpu_draws.PART))},
        "exponential_race": {
            "BUCKETS": BUCKETS, "MEMBERS": _power(members), "PARTS": _power(-(-members // gpu_draws.DEPTH))
        },
    }  # fmt: skip
    assert vocabulary <= gpu_draws.MOST_TOKENS
    for name, constants in sizes.items():
        assert DRAWS[name][1] == constants, name


@pytest.mark.skipif(not has_triton(), reason="needs Triton (extra `triton`)")
def test_every_kernel_of_a_draw_that_is_launched_is_compiled() -> None:
    launched = re.findall(r"kernels\.(\w+)\[", Path(gpu_draws.__file__).read_text(encoding="utf-8"))
    assert set(launched) == set(DRAWS)


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("number", "name"), list(enumerate(DRAWS)))
def test_draws_compile_for_gpus(number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from shoal.models.layers import draw_kernels

    types, constants, warps = DRAWS[name]
    kernel, cards = getattr(draw_kernels, name), sorted(SHARED)
    for capability in (cards[number % 6], cards[(number + 3) % 6]):
        binary = compiled(kernel, types, constants, capability, tmp_path, warps=warps, stages=1)
        assert binary.keeps_to_registers
        assert binary.programs >= 1
        assert binary.shared <= 16 * 1024


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("number", "name"), list(enumerate(KERNELS)))
def test_they_compile_for_gpus(number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For GPUs by turns, products of matrices for an A100 as well. Nothing is spilled, and threads are so small that loads of many
    are under way."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from shoal.models.layers import layer_kernels

    types, constants, warps = KERNELS[name]
    multiplies = name.startswith("eight_bit")
    constants = {"SHARES": 1, "APART": False} | constants if multiplies else constants
    few = name in ("eight_bit_product, few outputs", "eight_bit_product, sums by share")
    turn = CAPABILITIES[1 + number % 2 if multiplies else number % 3]
    for capability in (80, turn) if multiplies and "fp8" not in name else (turn,):  # fp8 from 8.9 on
        binary = compiled(
            getattr(layer_kernels, name.split(",")[0]),
            types,
            constants,
            capability,
            tmp_path,
            warps=warps,
            stages=(NARROW if few else WIDE).stages if multiplies else 1,
        )
        assert not binary.spills(FRAMES.get(name, 0))
        assert "cos.approx" not in binary.ptx  # wrong by whole turns at large positions
        assert binary.registers <= (255 if "many outputs" in name else 160 if multiplies else 128 if "share" in name else 80)
        assert binary.shared <= (99 * 1024 if multiplies else 1024)
        assert bool(binary.instructions & {"HMMA", *TENSOR_CORES.values()}) is multiplies
        assert ("LDGSTS" in binary.instructions) is multiplies  # weights are fetched while the last ones are worked on


def test_products_of_bytes_are_cut_by_tokens_and_outputs() -> None:
    found = {(tokens, outputs): cut_of(tokens, outputs) for tokens in (8, 17, 56) for outputs in (4096, 16384, 128256)}
    assert [found[8, 4096], found[8, 16384], found[8, 128256]] == [NARROW, MIDDLE, MIDDLE]
    assert [found[17, 4096], found[56, 4096], found[17, 16384], found[56, 128256]] == [MIDDLE, MIDDLE, WIDE, WIDE]


# A drafter's and a small target's `out` and `down`, those of 7B, of 13B and of MQA; wide matrices are not divided.
SHARED_INPUTS = {
    (2048, 2048): 4, (5632, 2048): 4, (8192, 2048): 4, (1024, 1024): 2, (3072, 1024): 4, (4864, 896): 8, (4096, 4096): 2,
    (13824, 4096): 2, (5120, 5120): 1, (2048, 6144): 1, (4096, 27648): 1, (4096, 128256): 1, (512, 2048): 1, (576, 192): 1,
}  # fmt: skip


def test_inputs_are_divided_by_the_shape_of_a_matrix() -> None:
    for (inputs, outputs), count in SHARED_INPUTS.items():
        shares, each = shares_of(inputs, outputs)
        assert shares == count, (inputs, outputs)
        assert each % max(cut.inputs for cut in (NARROW, MIDDLE, WIDE)) == 0
        assert (shares - 1) * each < inputs <= shares * each  # no share is empty


@pytest.mark.parametrize("processors", [132, 108, 58, 24])
def test_products_of_few_tokens_occupy_a_card(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least as many programs as multiprocessors; where tokens and outputs alone make two for
    each multiprocessor, a program has all shares, and nothing is to be joined."""
    from shoal.models.layers import layer_kernels

    launched: list[tuple[tuple[int, ...], dict[str, object]]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **arguments: launched.append((grid, arguments))

    monkeypatch.setattr(layer_kernels, "eight_bit_product", Noted())
    monkeypatch.setattr(layers.Card, "of", staticmethod(lambda device: Card(processors, 1 << 20)))
    for (inputs, outputs), shares in SHARED_INPUTS.items():
        for tokens in (1, 8, 56, 256):
            launched.clear()
            x = torch.empty(tokens, inputs, dtype=torch.bfloat16, device="meta")
            weight = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
            found = product_or_sums(x, weight, torch.empty(outputs, device="meta"), None)
            ((grid, arguments),) = launched
            apart = isinstance(found, layers.Sums)
            assert (grid[2], arguments["SHARES"]) == ((shares, 1) if apart else (1, shares))
            assert apart is (shares > 1 and grid[0] * grid[1] < 2 * processors)
            if inputs >= 2048 and tokens <= 64:
                assert math.prod(grid) >= min(processors, 128), (inputs, outputs, tokens)


# ── when they are used ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "owned", "used"),
    [("auto", True, True), ("on", True, True), ("modules", True, False), ("off", True, False), ("auto", False, False)],
)
def test_a_model_of_ours_on_cuda_gets_them_unless_its_modules_are_asked_for(
    mode: str, owned: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = loading.wrap(tiny_model("llama"), "tiny", checked=False), []
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    monkeypatch.setattr(passes, "executor_for", lambda mode, device: None if mode == "off" else "eager")
    monkeypatch.setattr(passes, "heads_fit", lambda runner: True)
    monkeypatch.setattr(passes, "use_fused_layers", asked.append)
    passes.choose_passes(runner, mode, owned=owned)
    assert asked == [runner] * used
    assert (runner.captures is None) is (mode == "off")


def test_modules_compute_on_a_cpu_too_where_they_are_asked_for() -> None:
    for mode, lean in (("auto", not missing()), ("modules", False)):
        runner = loading.wrap(tiny_model("llama"), "tiny", checked=False)
        passes.choose_passes(runner, mode, owned=True)
        assert (runner.lean is not None) is lean


def test_without_a_device_for_the_kernels_the_modules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    runner = loading.wrap(tiny_model("llama"), "tiny", checked=False)
    weight = runner.hf.model.layers[0].mlp.gate_proj.weight
    address = weight.data_ptr()
    passes.use_fused_layers(runner)
    assert runner.bridge.layers is None
    assert weight.data_ptr() == address


def test_weights_of_8_bits_on_cuda_are_ours_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA model is only pretended here; without Triton they are torchao's."""
    hf = tiny_model("llama").to(torch.bfloat16)
    monkeypatch.setattr(type(hf), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(quantize, "_with_torchao", lambda hf, form: f"torchao, {form}")
    monkeypatch.setattr(torch, "empty", lambda *_, dtype, **__: torch.zeros(0, dtype=dtype))
    monkeypatch.setattr(quantize, "_weight_only", lambda hf, form: form)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for there in (True, False):
        monkeypatch.setattr(quantize, "available", lambda query, there=there: there)
        for form, ours in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
            assert quantize.quantized(hf, form) == (ours if there else f"torchao, {form}", form)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with pytest.raises(RequestError, match="NVIDIA A100 has no fp8; take int8"):
            quantize.quantized(hf, "fp8")
    for form in ("int8", "fp8"):  # products of float32 spill registers
        with pytest.raises(RequestError, match=f"{form} on CUDA needs a model in bfloat16 or float16, got float32"):
            quantize.quantized(hf.float(), form)


# ── what a round launches ───────────────────────────────────────────────────────────────────────────────────────────

LAUNCHES: dict[tuple[int, str], tuple[int, int]] = {
    (0, "rejection"): (0, 28),
    (4, "rejection"): (10, 71),
    (4, "coupled"): (10, 39),
}
"""By drafts and rule: the most launches besides layers of each draft, and of the rest of a round, with those that only fill numbers
in."""


@needs_triton
@pytest.mark.parametrize(("k", "rule"), LAUNCHES)
def test_what_is_launched_besides_layers(k: int, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_launches import of_a_round

    def besides(drafts: int) -> int:
        names = of_a_round(Fixed(drafts), drafts > 0, rule, monkeypatch)
        assert names["begin"] == drafts + 1
        assert names["heads"] == drafts + 1  # one layer each
        return names.total() - 9 * (drafts + 1)

    whole = besides(k)
    draft = whole - besides(k - 1) if k else 0
    assert draft <= LAUNCHES[k, rule][0]
    assert whole - k * draft <= LAUNCHES[k, rule][1]


@needs_triton
@torch.inference_mode()
def test_what_a_graph_fills_in_counts_as_launched() -> None:
    """Numbers of Python become tensors by kernels of their own, at each replay; padding is filled, then the values are copied."""
    from fused_launches import Launches

    x = torch.ones(2, 3)
    with Launches() as mode:
        x.view(3, 2).transpose(0, 1)
        torch.where(torch.arange(3) > 1, x, 0.5)
        torch.nn.functional.pad(x, (0, 1))
    assert mode.names == {"arange": 1, "gt": 1, "scalar_tensor": 1, "where": 1, "constant_pad_nd": 2}


def test_the_launches_are_those_that_the_documents_say() -> None:
    (_, plain), (draft, chains), (_, coupled) = LAUNCHES.values()
    said = f"{plain} plain; {draft} a draft and {chains} ({coupled} by the coupled rule) with drafts"
    assert said in Path("docs/explanation/fused-layers.md").read_text(encoding="utf-8")
    drafted = "".join(rf"\| {k} drafts \| \d+ \| {chains + k * draft} \|.*\n" for k in (4, 6))
    table = rf"\| plain \| \d+ \| {plain} \|.*\n{drafted}"
    assert re.search(table, Path("docs/measurements/gpu.md").read_text(encoding="utf-8"))
