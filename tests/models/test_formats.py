"""Number formats are decided by facts: the checkpoint's own format and the CPU's instructions, never by a clock.

Tests of: models.quantize, models.weights, models.formats.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import shoal
from by_pairs import by_pairs
from native_kernels import needs_compiler
from shoal.cli import check_model
from shoal.models import formats, loading, passes, quantize, weights
from shoal.models.formats import WIDE, Cpu, _name, number_format
from shoal.models.loading import LoadOptions
from shoal.native import build
from shoal.testing import save_pair, tiny_model

PLAIN, AMX, AVX, ARM = Cpu(), Cpu.of({"amx_bf16"}), Cpu.of({"avx512_bf16", "avx2"}), Cpu.of({"bf16", "neon"})
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("checkpoint", "width", "cpu", "chosen", "why"),
    [
        (BF16, WIDE, AMX, BF16, "this CPU has AMX-BF16"),
        (BF16, WIDE, AVX, BF16, "this CPU has AVX512-BF16"),
        (BF16, WIDE, ARM, BF16, "this CPU has ARM-BF16"),
        (BF16, WIDE, PLAIN, F32, "this CPU has no bfloat16 products"),
        (BF16, WIDE, Cpu.of({"avx512_fp16"}), F32, "this CPU has no bfloat16 products"),
        (BF16, WIDE - 1, AMX, F32, "features gain nothing"),
        (F32, WIDE, AMX, F32, "the checkpoint is in float32"),  # bfloat16 would round its weights
        (F16, WIDE, AMX, F32, "the checkpoint is in float16"),  # likewise
        (None, WIDE, AMX, F32, "the checkpoint is in an unknown format"),
    ],
)
def test_a_target_is_bfloat16_only_where_checkpoint_cpu_and_width_allow_it(
    checkpoint: torch.dtype | None, width: int, cpu: Cpu, chosen: torch.dtype, why: str
) -> None:
    dtype, said = number_format(checkpoint, width, cpu)
    assert (dtype, said.partition(":")[0]) == (chosen, str(chosen).removeprefix("torch."))
    assert why in said


@pytest.mark.parametrize("checkpoint", [BF16, F16, F32, None])
@pytest.mark.parametrize("packs", [{BF16}, set()], ids=["packed", "not packed"])
def test_kernels_in_c_compute_bfloat16_of_any_width_on_any_cpu(
    checkpoint: torch.dtype | None, packs: set[torch.dtype]
) -> None:
    dtype, said = number_format(checkpoint, 32, Cpu(packs=frozenset(packs)), kernels=True)
    assert (dtype == BF16) == (checkpoint == BF16 and bool(packs))
    assert ("the kernels in C compute it" in said) == (dtype == BF16)


@needs_compiler
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, BF16),
        ({"compile": "off"}, F32),
        ({"strict": True}, F32),
        ({"attention": "pad"}, F32),
        ({"quantize": "int8"}, F32),
    ],
)
def test_a_directory_in_bfloat16_is_computed_by_the_kernels(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor with AVX2 alone, where oneDNN packs no bfloat16."""
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: 1 / 0)
    facts = Cpu(packs=frozenset(filter(formats.can_pack, (F32, BF16))))
    assert facts.packs == {F32, BF16}
    monkeypatch.setattr(formats, "cpu", lambda: facts)
    tiny_model("llama").to(BF16).save_pretrained(tmp_path)
    runner = loading.load_runner(tmp_path, LoadOptions(**options))
    passes.choose_passes(runner, options.get("compile", "auto"), owned=True)
    assert runner.dtype == dtype
    if not options:
        assert runner.explain([0], [1]).executor == "C decoder"
        found = check_model.number_format(runner)
        assert (found.status, found.data["seeds_hold"]) == ("ok", True)
        assert "Kernels in C: a seed gives the same tokens in every call" in found.figure


@pytest.mark.parametrize(
    ("checkpoint", "target", "cpu", "chosen"),
    [
        (BF16, BF16, AMX, BF16),
        (BF16, BF16, PLAIN, BF16),  # whatever made the target so
        (BF16, F32, AMX, F32),
        (BF16, torch.float64, AMX, F32),
        (F32, BF16, AMX, F32),  # its own checkpoint does not allow it
        (F16, BF16, AMX, F32),
    ],
)
def test_a_drafter_follows_its_target_unless_that_rounds_its_weights(
    checkpoint: torch.dtype, target: torch.dtype, cpu: Cpu, chosen: torch.dtype
) -> None:
    assert number_format(checkpoint, 32, cpu, target)[0] == chosen


@pytest.mark.parametrize(
    ("flags", "onednn", "products"),
    [
        ({"avx512_bf16"}, True, {BF16: "AVX512-BF16"}),
        ({"avx512_bf16", "amx_bf16", "amx_tile"}, True, {BF16: "AMX-BF16"}),
        ({"svebf16"}, True, {BF16: "SVE-BF16"}),
        ({"amx_fp16", "amx_bf16"}, True, {BF16: "AMX-BF16", F16: "AMX-FP16"}),
        ({"avx512_bf16"}, False, {}),
        ({"avx512_f", "avx512_vnni", "amx_int8"}, True, {}),
        (set(), True, {}),
    ],
)
def test_instructions_by_flags(flags: set[str], onednn: bool, products: dict[torch.dtype, str]) -> None:
    assert Cpu.of(flags, onednn=onednn).products == products


def test_flags_come_from_torch_or_from_linux_or_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False, "num_sockets": 1}, raising=False
    )
    assert build.cpu_flags() == {"avx2"}
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch 2.6 has none
    file = tmp_path / "cpuinfo"
    assert build.cpu_flags(file) == set()
    file.write_text("processor : 0\nflags\t\t: fpu avx512_bf16\n\nFeatures : asimd BF16\n")
    assert {"avx512_bf16", "bf16"} <= build.cpu_flags(file)
    assert "processor" not in build.cpu_flags(file)


def test_this_machine_says_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # what tests/conftest.py put in its place
    first = formats.cpu()
    formats.cpu.cache_clear()
    assert formats.cpu() == first


def test_the_stored_format_is_that_of_the_config_else_of_the_file(tmp_path: Path) -> None:
    hf = tiny_model("llama").to(BF16)
    hf.save_pretrained(tmp_path)
    assert formats.stored_format(transformers.AutoConfig.from_pretrained(tmp_path), tmp_path) == BF16
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in said.items() if name not in ("dtype", "torch_dtype")}))
    bare = transformers.AutoConfig.from_pretrained(tmp_path)
    assert bare.dtype is None
    assert formats.stored_format(bare, tmp_path) == BF16
    assert formats.stored_format(bare, "nobody/nothing") is None
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert formats.stored_format(bare, tmp_path) is None


@pytest.fixture
def bf16_pair(tmp_path: Path) -> tuple[Path, Path]:
    """A saved pair in bfloat16."""
    places = save_pair(tmp_path)
    for place in places:
        hf = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=BF16)
        hf.save_pretrained(place)
    return places


def _chosen(model: shoal.Shoal) -> list[Any]:
    return [(runner.dtype, runner.notes) for runner in (model.target, model.draft_model) if runner is not None]


@pytest.mark.parametrize(("cpu", "expected"), [(AMX, BF16), (Cpu(mkl=True), F32), (PLAIN, F32)])
def test_load_chooses_the_same_again_whatever_the_clock_says(
    bf16_pair: tuple[Path, Path], cpu: Cpu, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "WIDE", 32)
    monkeypatch.setattr(formats, "cpu", lambda: cpu)
    clock = time.perf_counter
    first = shoal.load(*bf16_pair, device="cpu")
    assert [runner.dtype for runner in (first.target, first.draft_model) if runner] == [expected, expected]
    for factor in (0.0, 100.0, -1.0):  # clocks that stand still, run wild, run backwards
        monkeypatch.setattr(time, "perf_counter", lambda factor=factor: factor * clock())
        monkeypatch.setattr(time, "monotonic", lambda factor=factor: factor * clock())
        assert _chosen(shoal.load(*bf16_pair, device="cpu")) == _chosen(first)


def test_no_choice_reads_a_clock(bf16_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> float:
        raise AssertionError("a choice of formats read a clock")

    config = transformers.AutoConfig.from_pretrained(bf16_pair[0])
    hf = tiny_model("llama")
    for name in ("perf_counter", "monotonic", "time", "process_time", "perf_counter_ns", "thread_time"):
        monkeypatch.setattr(time, name, never)
    for cpu in (AMX, AVX, PLAIN):
        monkeypatch.setattr(formats, "cpu", lambda cpu=cpu: cpu)
        loading._auto_dtype(config, bf16_pair[0], torch.device("cpu"), LoadOptions(), sharded=False)
        weights.lay_out(hf, weights.by_facts)
        quantize.quantized(hf, "off")


def test_a_mixed_pair_is_mixed_by_its_checkpoints(
    bf16_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "WIDE", 32)
    monkeypatch.setattr(formats, "cpu", lambda: AMX)
    single = save_pair(tmp_path / "single")
    model = shoal.load(bf16_pair[0], single[1], device="cpu")
    assert model.draft_model is not None
    assert (model.target.dtype, model.draft_model.dtype) == (BF16, F32)
    assert model.generate("ab", 2, max_new_tokens=8, seed=0, eos=(), lookahead=3).stats.drafted > 0
    asked = shoal.load(bf16_pair[0], single[1], device="cpu", dtype="bfloat16")
    assert asked.draft_model is not None
    assert asked.draft_model.dtype == BF16  # what is asked for is done


def test_a_narrow_drafter_of_a_wide_target_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own width it would be in float32: only the target's format makes it bfloat16."""
    monkeypatch.setattr(formats, "WIDE", 32)
    monkeypatch.setattr(formats, "cpu", lambda: AMX)
    target, drafter = save_pair(tmp_path)
    tiny_model("llama").to(BF16).save_pretrained(target)
    tiny_model("llama", hidden_size=16, num_attention_heads=2, num_key_value_heads=1).to(BF16).save_pretrained(drafter)
    pair = shoal.load(target, drafter, device="cpu")
    assert pair.draft_model is not None
    assert (pair.target.dtype, pair.draft_model.dtype) == (BF16, BF16)
    assert "target" in pair.draft_model.notes["dtype"]
    assert shoal.load(drafter, device="cpu").target.dtype == F32  # by itself
    assert pair.generate("ab", 2, max_new_tokens=8, seed=0, eos=(), lookahead=3).stats.drafted > 0


@pytest.mark.parametrize(
    ("dtype", "cpu", "verdict"),
    [(BF16, AMX, "ok"), (BF16, PLAIN, "warn"), (F16, AMX, "warn"), (F16, Cpu.of({"avx512_fp16"}), "ok"), (F32, PLAIN, "ok")],
)
def test_check_goes_by_the_same_facts(dtype: torch.dtype, cpu: Cpu, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loading.wrap(tiny_model("llama").to(dtype), "tiny")
    runner.notes["dtype"] = "as it is"
    monkeypatch.setattr(formats, "cpu", lambda: cpu)
    found = check_model.number_format(runner)
    assert (found.status, found.data["dtype"], found.figure.startswith("as it is")) == (verdict, _name(dtype), True)
    assert ("seed" in found.figure) == (dtype != F32)
    assert ("--dtype float32" in found.advice) == (dtype != F32)
    assert found.data["seeds_hold"] == (dtype == F32)


@by_pairs({"dtype": [BF16, F16, F32], "strict": [True, False], "device": ["cpu", "cuda"]})
def test_check_says_whether_seeds_hold_and_the_way_out(dtype: torch.dtype, strict: bool, device: str) -> None:
    notes = {"dtype": "as it is"} | ({"strict": "proved"} if strict else {})
    runner = SimpleNamespace(dtype=dtype, device=torch.device(device), notes=notes, lean=None, kv="off")
    found = check_model.number_format(runner)  # type: ignore[arg-type]
    holds = strict or dtype == F32
    assert found.data["seeds_hold"] == holds
    assert ("may give other tokens each time" in found.figure) != holds
    assert ("seeds hold" in found.advice or "seed's tokens hold: --dtype float32" in found.advice) != holds
    if found.status == "ok" and not holds:
        assert ("--strict" in found.advice) == (device == "cpu")  # strict passes exist on a CPU only


def test_packing_is_tried_and_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "missing", lambda: "no compiler")
    assert not formats.can_pack(torch.float64)
    if torch.backends.mkldnn.is_available():
        assert formats.can_pack(F32)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to_dense", lambda self: torch.zeros(self.shape))  # a version that loses weights
            assert not formats.can_pack(F32)
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # a version without these operations
    assert not formats.can_pack(F32)
