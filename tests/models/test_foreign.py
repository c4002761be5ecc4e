"""Checkpoints that others quantised: read with their scales, or refused by name; whole numbers are never taken for weights.

Tests of: models.pretrained, models.selfcheck (tolerance), models.quantize (set_apart).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import shoal
from shoal.drafting.ngram import NGramDrafter
from shoal.errors import RequestError, UnsupportedModel
from shoal.models import pretrained, weights
from shoal.models.load_checks import BYTES
from shoal.models.loading import wrap
from shoal.models.pretrained import load_weights
from shoal.models.quantize import rounds_features, set_apart
from shoal.models.selfcheck import tolerance
from shoal.testing import save_pair, tiny_model, tiny_tokenizer

Tensors = dict[str, Tensor]
BLOCK = 16
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of four bits, of which the highest is the sign (OCP Microscaling, E2M1)."""


def of_a_tensor(name: str, weight: Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.reshape(1)}


def of_rows(name: str, weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def of_blocks(name: str, weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    parts = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = parts.abs().amax((1, 3)) / 448
    stored = (parts / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scale}


def save_quantised(place: Path, config: Any, form: Callable[[str, Tensor], Tensors]) -> Tensors:
    """Saves a tiny model whose layers' matrices are of a form; returns all tensors before it."""
    tiny_model("llama").save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return rewrite(place, config, lambda name, one: form(name, one) if name.endswith("proj.weight") else {name: one})


def rewrite(place: Path, config: Any, form: Callable[[str, Tensor], Tensors]) -> Tensors:
    file = place / "config.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(whole | ({"quantization_config": config} if config else {})), encoding="utf-8")
    tensors = load_file(place / "model.safetensors")
    changed = {key: value for name, tensor in tensors.items() for key, value in form(name, tensor).items()}
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, place / "model.safetensors", {"format": "pt"})
    return tensors


UNREAD = {
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, of_a_tensor, "was quantised by modelopt, which"),
    "new": ({"quant_method": "something new"}, of_rows, "was quantised by something new, which"),
    "unnamed": ({"bits": 8}, of_rows, "was quantised by an unnamed method, which"),
    "mlx": ({"group_size": 32, "bits": 8, "mode": "affine"}, of_rows, "was quantised by an unnamed method, which"),
    "exl3": ({"quant_method": "exl3", "bits": 4.0}, of_rows, "was quantised by exl3, which"),
    "nvfp4 of modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, of_rows, "was quantised by modelopt, which"),
    "gguf": ({"quant_method": "gguf"}, of_rows, "was quantised by gguf, which"),
    "other case": ({"quant_method": "FP8"}, of_blocks, "was quantised by FP8, which"),
    "int8 alone": (None, of_rows, "holds quantised weights .*weight_scale and 13 more.* no quantization_config"),
    "fp8 alone": (None, of_blocks, "holds quantised weights .*weight_scale_inv and 13 more"),
    "fp8 of tensors": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, of_a_tensor,
        "holds quantised weights .*weight_scale and 13 more.* reads no such tensors of fp8",
    ),
    "int8 as fp8": ({"quant_method": "fp8"}, of_rows, "weight_scale and 13 more.* reads no such tensors of fp8"),
    "int8 as mxfp4": ({"quant_method": "mxfp4"}, of_rows, "weight_scale and 13 more.* reads no such tensors of mxfp4"),
}  # fmt: skip
NOT_READ_WRONG = ("unnamed", "mlx", "gguf", "int8 as mxfp4")
"""Those that Transformers does not load either: it asks for the method's name, or computes with whole numbers."""


@pytest.mark.parametrize("name", UNREAD)
def test_what_nobody_reads_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a target and as a drafter. Without the two questions such weights are read as others, hundreds of times as large."""
    config, form, message = UNREAD[name]
    right = save_quantised(tmp_path / "quantised", config, form)
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    for roles in ((tmp_path / "quantised", None), (tmp_path / "plain", str(tmp_path / "quantised"))):
        with pytest.raises(UnsupportedModel, match=message + ".*take the checkpoint that it was made from"):
            shoal.load(*roles, dtype="float32")
    if name not in NOT_READ_WRONG:
        monkeypatch.setattr(pretrained, "require_known_method", lambda *_: None)
        monkeypatch.setattr(pretrained, "require_no_scales", lambda *_: None)
        with shoal.load(tmp_path / "quantised", dtype="float32") as pair:
            found = pair.target.hf.state_dict()["model.layers.0.self_attn.q_proj.weight"]
        assert (found - right["model.layers.0.self_attn.q_proj.weight"]).abs().max() > 100


OF_FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
OF_FOURS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
SPARSE = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def compressed(kind: str, weights: dict[str, Any], **entries: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **entries}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        method: (package, {"quant_method": method}, "")
        for method, package in {
            "eetq": "kernels", "fouroversix": "fouroversix", "gemma": "", "bitnet": "", "higgs": "flute", "metal": "kernels",
            "nvfp4": "", "quanto": "optimum", "sinq": "sinq", "vptq": "vptq",
        }.items()
    },
    "aqlm": ("aqlm", {"quant_method": "aqlm", "in_group_size": 8, "num_codebooks": 1, "nbits_per_codebook": 16}, ""),
    "auto-round": ("auto_round", {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}, ""),
    "hqq": ("hqq", {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 16}}}, ""),
    "quark": ("quark", {"quant_method": "quark", "export": {"pack_method": "reorder"}, "global_quant_config": {}}, ""),
    "fbgemm_fp8": ("fbgemm_gpu", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, ""),
    "awq of a column": ("gptqmodel", {"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "its version gemv_fast is"),
    "gptq of 2 bits": ("gptqmodel", {"quant_method": "gptq", "bits": 2, "group_size": 32}, "its weights have 2 bits"),
    "gptq of 3 bits": (
        "gptqmodel", {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True, "sym": False}, "weights have 3 bits"
    ),
    "gptq of marlin": (
        "gptqmodel", {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        "the checkpoint_format marlin is",
    ),
    "compressed floats": ("compressed_tensors", compressed("float-quantized", OF_FLOATS), "its weights are float of 8 bits"),
    "compressed fours": ("compressed_tensors", compressed("nvfp4-pack-quantized", OF_FOURS), "its weights are float of 4 bits"),
    "compressed sparse": ("compressed_tensors", compressed("marlin-24", SPARSE), "its format is marlin-24"),
    "compressed features": (
        "compressed_tensors",
        compressed("int-quantized", SPARSE | {"num_bits": 8}, input_activations={"num_bits": 8, "type": "int"}),
        "it is W8A8: its input_activations are quantised too",
    ),
}  # fmt: skip
"""Methods that Transformers knows: the package it computes them with, a config, and why the kernels in C do not."""


@pytest.mark.parametrize("name", METHODS)
def test_methods_whose_package_is_missing_are_refused_by_name(name: str, tmp_path: Path) -> None:
    package, config, ours = METHODS[name]
    if package and find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    method = config["quant_method"]
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        pytest.skip(f"an older Transformers does not know {method}")
    save_quantised(tmp_path, config, of_rows)
    with pytest.raises(UnsupportedModel, match=f"was quantised by {method}, and cannot be read here: .*{ours}.*take the"):
        shoal.load(tmp_path, dtype="float32")


def agrees(place: Path, right: Tensors) -> None:
    """The weights are the right ones, and a model that has them writes the same greedily, with itself as the drafter, too."""
    with shoal.load(place, str(place), dtype="float32") as pair:
        found = pair.target.hf.state_dict()
        for name, tensor in right.items():
            assert (found[name].float() - tensor).abs().max() <= 0.01 * tensor.abs().max(), name
        result = pair.generate([[5, 3, 7]], 2, temperature=0.0, max_new_tokens=12, lookahead=3, eos=())
        assert result.stats.accepted > 0
        assert result.stats.drafted == result.stats.accepted
        (plain,) = {
            sample.token_ids
            for sample in pair.generate([[5, 3, 7]], 1, temperature=0.0, max_new_tokens=12, lookahead=0, eos=())[0].samples
        }
        assert {sample.token_ids for sample in result[0].samples} == {plain}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformers computes in fp8 there")
def test_fp8_is_read_by_its_blocks(tmp_path: Path) -> None:
    right = save_quantised(
        tmp_path, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}, of_blocks
    )
    for name, weight in right.items():
        if name.endswith("proj.weight"):
            stored, scale = of_blocks(name, weight).values()
            right[name] = stored.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            assert not torch.equal(right[name], weight)
    agrees(tmp_path, right)


def in_blocks(rows: int, columns: int) -> Callable[[str, Tensor], Tensors]:
    """Blocks of any size; the last one of a side is what is left of it."""

    def form(name: str, weight: Tensor) -> Tensors:
        scale = (
            torch.stack([torch.stack([part.abs().max() for part in row.split(columns, 1)]) for row in weight.split(rows)])
            / 448
        )
        stored = weight / wide(scale, weight, rows, columns)
        return {name: stored.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}

    return form


def wide(scale: Tensor, weight: Tensor, rows: int, columns: int) -> Tensor:
    whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: weight.shape[0], : weight.shape[1]]


FP8_BLOCKS = [(16, 16), (8, 16), (16, 8), (128, 128), (1, 16)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformers computes in fp8 there")
@pytest.mark.parametrize("sizes", FP8_BLOCKS, ids=str)
def test_fp8_blocks_of_any_size_are_read(sizes: tuple[int, int], tmp_path: Path) -> None:
    """With layers that are not converted, by name, and without the entry where blocks are the usual ones."""
    form, kept = in_blocks(*sizes), "model.layers.0.mlp.up_proj"
    named = ["lm_head", kept, "model.layers.1.mlp"]  # of which the last is converted all the same
    config = {"quant_method": "fp8", "weight_block_size": list(sizes), "modules_to_not_convert": named}
    if sizes == (128, 128):
        del config["weight_block_size"]
    right = save_quantised(tmp_path, config, lambda name, one: {name: one} if kept in name else form(name, one))
    for name, weight in right.items():
        if name.endswith("proj.weight") and kept not in name:
            stored, scale = form(name, weight).values()
            right[name] = stored.float() * wide(scale, weight, *sizes)
    agrees(tmp_path, right)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformers computes in fp8 there")
def test_fp8_blocks_that_are_cut_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 features in blocks of 32 and 16 would be read as two blocks of 24."""
    config = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    right = save_quantised(tmp_path, config, in_blocks(32, 32))
    with pytest.raises(
        UnsupportedModel, match=r"by fp8, .*blocks of \[32, 32\] do not part its .*mlp.* 2 blocks of 24; take the"
    ):
        shoal.load(tmp_path, dtype="float32")
    monkeypatch.setattr(pretrained, "require_even_blocks", lambda *_: None)
    with shoal.load(tmp_path, dtype="float32") as pair:
        found = pair.target.hf.state_dict()["model.layers.0.mlp.up_proj.weight"]
    name = "model.layers.0.mlp.up_proj.weight"
    stored, scale = in_blocks(32, 32)(name, right[name]).values()
    meant = stored.float() * wide(scale, right[name], 32, 32)
    assert (found - meant).abs().max() > 0.1 > (right[name] - meant).abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformers may compute in mxfp4 there")
def test_mxfp4_is_read_by_its_blocks(tmp_path: Path) -> None:
    tiny_model("gpt-oss", hidden_size=32, intermediate_size=32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    generator, expected = torch.Generator().manual_seed(3), {}

    def form(name: str, tensor: Tensor) -> Tensors:
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            return {name: tensor}
        experts, columns, rows = tensor.shape
        bits = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.full((experts, rows, columns // 32), 127 - 4, dtype=torch.uint8)
        halves = torch.stack([bits & 15, bits >> 4], dim=-1).flatten(-2).long()
        numbers = FP4[halves & 7] * (1 - 2 * (halves >> 3)) * 2.0**-4
        expected[name] = numbers.flatten(-2).transpose(1, 2)
        return {f"{name}_blocks": bits, f"{name}_scales": scales}

    right = rewrite(tmp_path, {"quant_method": "mxfp4"}, form) | expected
    assert len(expected) > 1
    agrees(tmp_path, right)


BY_PACKAGES = {
    "bitsandbytes 8": ("bitsandbytes", lambda: transformers.BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes 4": ("bitsandbytes", lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "torchao": ("torchao", lambda: transformers.TorchAoConfig(torchao_config("Int8WeightOnlyConfig"))),
    "torchao, features too": (
        "torchao", lambda: transformers.TorchAoConfig(torchao_config("Int8DynamicActivationInt8WeightConfig"))
    ),
    "torchao in fp8": ("torchao", lambda: transformers.TorchAoConfig(torchao_config("Float8WeightOnlyConfig"))),
    "torchao, whole numbers of any size": (
        "torchao", lambda: transformers.TorchAoConfig(torchao_config("IntxWeightOnlyConfig", weight_dtype=torch.int4))
    ),
}  # fmt: skip


def torchao_config(name: str, **settings: Any) -> Any:
    return getattr(import_module("torchao.quantization"), name)(**settings)


@pytest.mark.parametrize("name", BY_PACKAGES)
def test_what_a_package_of_transformers_computes_runs_by_modules(name: str, tmp_path: Path) -> None:
    """As a target with the ids of Transformers, and as a drafter whose drafts are counted."""
    package, config = BY_PACKAGES[name]
    pytest.importorskip(package)
    plain, _ = save_pair(tmp_path, hidden_size=64, intermediate_size=128)
    quantised = tmp_path / "quantised"
    transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=config()).save_pretrained(quantised)
    tiny_tokenizer().save_pretrained(quantised)
    require_by_modules(plain, quantised)


def compressed_config(kind: str) -> dict[str, Any]:
    """The entry of weights with one scale an output, and of features that are rounded token by token."""
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel"},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    form = f"{kind}-quantized"
    entry = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return entry | {"ignore": ["lm_head"], "config_groups": {"group_0": scheme}}


def of_fp8_rows(name: str, weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


@pytest.mark.parametrize(("kind", "form"), [("int", of_rows), ("float", of_fp8_rows)])
def test_compressed_tensors_whose_features_are_rounded_run_by_modules(
    kind: str, form: Callable[[str, Tensor], Tensors], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    save_quantised(plain, None, lambda name, weight: {name: weight})
    save_quantised(quantised, compressed_config(kind), form)
    require_by_modules(plain, quantised)


def require_by_modules(plain: Path, quantised: Path) -> None:
    """Decodes with a target as Transformers does, and drafts by it for another."""
    alone = transformers.AutoModelForCausalLM.from_pretrained(quantised)
    ids = torch.tensor([[1, 2, 3, 4]])
    right = alone.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 4:].tolist()
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "eos": ()}
    with shoal.load(quantised) as model:
        assert model.loaded["target"]["passes"] == "modules"  # type: ignore[index]
        for lookahead, drafter in (("off", None), (3, NGramDrafter())):
            found = model.generate(ids.tolist(), 2, lookahead=lookahead, drafter=drafter, **options)
            assert [list(one.token_ids) for one in found[0].samples] == [right] * 2
    with shoal.load(plain, quantised) as model:
        drafted = model.generate(ids.tolist(), 2, lookahead=3, **options)
        assert drafted.stats.accepted > 0
        plainly = model.generate(ids.tolist(), 2, lookahead="off", **options)
        assert [one.token_ids for one in drafted[0].samples] == [one.token_ids for one in plainly[0].samples]


@pytest.mark.parametrize("kind", ["int4_weight_only", None, {"default": {}, "lm_head": {}}])
def test_settings_of_an_older_torchao_are_refused_by_name(kind: Any, tmp_path: Path) -> None:
    """With the package or without it: Transformers would end in an assertion of its own."""
    save_quantised(tmp_path, {"quant_method": "torchao", "quant_type": kind, "quant_type_kwargs": {}}, of_rows)
    with pytest.raises(
        UnsupportedModel, match=re.escape(f"by torchao, and cannot be read here: its quant_type {kind!r} is")
    ):
        shoal.load(tmp_path, dtype="float32")


def test_an_assertion_of_transformers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        assert not _, "one key of the settings"

    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(
        RequestError, match=r"cannot load the ModelForCausalLM of .*: AssertionError one key of the settings"
    ):
        load_weights(tmp_path, transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("error", [NotImplementedError, AssertionError])
def test_modules_of_a_method_that_do_not_compute_here_are_named(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao's weights of 4 bits, as published, need a GPU and the package mslk, which the first pass shows."""
    save_quantised(tmp_path, None, lambda name, weight: {name: weight})
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    hf.config.quantization_config = {"quant_method": "torchao"}

    def fails(*_: Any) -> None:
        raise error("no attribute 'mslk'. This could be because of much\nmore")

    monkeypatch.setattr(hf.model.layers[0].mlp.down_proj, "forward", fails)
    named = (
        rf"was quantised by torchao, whose modules do not compute on cpu \({error.__name__}: no attribute 'mslk'\): take the"
    )
    with pytest.raises(UnsupportedModel, match=named):
        wrap(hf, "quantised")


class Elsewhere(Tensor):
    """A weight of another library: its bytes are not those of its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.view, Tensor.data_ptr):
            raise NotImplementedError(f"{func} of another library's tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_of_another_library_is_left_to_its_module() -> None:
    """It is not packed, and its products may be rounded as its library rounds them; a layer beside it is packed."""
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp.down_proj
    weight = layer.weight.detach().as_subclass(Elsewhere)
    layer._parameters["weight"] = weight
    assert not rounds_features(model)
    set_apart(model)
    forms = weights.lay_out(model, weights.by_facts)
    assert layer.weight is weight
    assert type(layer) not in weights.LINEARS
    others = [each for each in model.modules() if type(each) in weights.LINEARS]
    assert len(others) == 14
    assert forms
    assert rounds_features(model)
    assert tolerance(SimpleNamespace(has_modules=True, hf=model, dtype=torch.float32)) == BYTES[torch.float32]  # type: ignore[arg-type]


def test_a_layer_with_a_forward_of_another_library_is_left_to_it() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp.down_proj
    weight = layer.weight
    layer.forward = lambda features: 2 * torch.nn.functional.linear(features, weight)
    ids = torch.tensor([[1, 2, 3]])
    right = model(ids).logits
    set_apart(model)
    assert weights.lay_out(model, weights.by_facts)
    assert layer.weight is weight
    assert type(layer) not in weights.LINEARS
    torch.testing.assert_close(model(ids).logits, right)
