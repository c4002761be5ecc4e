"""The form of weights changes no number, and what users may do to a model still works in every form.

Tests of: models.weights.layers, models.weights.parameter, models.quantize, models.weights,
models.weights.matrix, models.formats.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

import shoal
from shoal.errors import RequestError
from shoal.models import formats, quantize, weights
from shoal.models.loading import wrap
from shoal.models.weights.matrix import INPUT_MAJOR, PACKED
from shoal.models.weights.parameter import PackedWeight
from shoal.testing import save_pair, tiny_model

LINEARS = 2 * 7 + 1
"""Of a tiny Llama: seven per layer, and the head."""
IDS = torch.arange(24).view(2, 12)


def layers(hf: Any) -> list[nn.Linear]:
    return [layer for layer in hf.modules() if isinstance(layer, nn.Linear)]


def moved(hf: Any) -> int:
    return sum(layer.weight.stride(0) == 1 for layer in layers(hf))  # of rows of a common matrix, too


def packed(hf: Any) -> int:
    return sum(isinstance(layer.weight, PackedWeight) and layer.weight.matrix.form == PACKED for layer in layers(hf))


def always_packed(keys: Any) -> dict[Any, str]:
    return dict.fromkeys(keys, PACKED)


@torch.inference_mode()
def logits(hf: Any) -> torch.Tensor:
    return hf(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dtype", "mkl", "expected"),
    [(torch.float32, True, LINEARS), (torch.float32, False, 0), (torch.bfloat16, True, 0), (torch.float64, True, 0)],
)
def test_float32_weights_move_where_mkl_multiplies_them(
    dtype: torch.dtype, mkl: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(mkl=mkl))
    hf = tiny_model("llama").to(dtype)
    before = {name: weight.clone() for name, weight in hf.named_parameters()}
    assert weights.lay_out(hf, weights.without_packing) == ("input-major" if expected else "as-is")
    assert moved(hf) == expected
    assert all(torch.equal(weight, before[name]) for name, weight in hf.named_parameters())
    assert hf.model.embed_tokens.weight.is_contiguous()


def test_tied_weights_stay_tied_and_the_model_says_the_same() -> None:
    hf = tiny_model("llama", tie_word_embeddings=True)
    expected = logits(hf)
    weights.lay_out(hf, weights.without_packing)
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    assert hf.lm_head.weight.t().is_contiguous()
    torch.testing.assert_close(logits(hf), expected, rtol=0, atol=1e-4)
    assert wrap(hf, "tiny").self_check_error is not None


# ── what users may touch ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=[INPUT_MAJOR, PACKED])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == PACKED:
        monkeypatch.setattr(weights, "by_facts", always_packed)
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def loaded(request: pytest.FixtureRequest, form: str, tmp_path: Path) -> Any:
    """The target of a loaded pair, input-major or packed."""
    hf = shoal.load(*save_pair(tmp_path / "pair", tie_word_embeddings=request.param)).target.hf
    assert in_form(hf, form)
    assert (hf.lm_head.weight is hf.model.embed_tokens.weight) == request.param
    return hf


def in_form(hf: Any, form: str) -> bool:
    return (packed(hf) if form == PACKED else moved(hf)) == LINEARS


def same_weights(a: Any, b: Any) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def stored_names(directory: Path) -> list[str]:
    names = []
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names += list(tensors.keys())
    return sorted(names)


@pytest.mark.parametrize("size", ["50GB", "10KB"])
def test_a_loaded_model_saves_and_comes_back_equal(loaded: Any, form: str, size: str, tmp_path: Path) -> None:
    tied = loaded.config.tie_word_embeddings
    loaded.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "10KB")
    assert stored_names(tmp_path) == sorted({*loaded.state_dict()} - ({"lm_head.weight"} if tied else set()))  # each once
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
    assert same_weights(back, loaded)
    assert in_form(loaded, form)  # saving changed nothing
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_saving_takes_what_transformers_takes(loaded: Any, tmp_path: Path) -> None:
    doubled = {name: 2 * tensor for name, tensor in loaded.state_dict().items()}
    loaded.save_pretrained(tmp_path / "given", True, doubled)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "given")
    assert torch.equal(back.model.norm.weight, 2 * loaded.model.norm.weight)
    loaded.save_pretrained(tmp_path / "named", variant="x")
    assert (tmp_path / "named" / "model.x.safetensors").is_file()


def test_changes_in_place_reach_the_passes_and_the_file(loaded: Any, tmp_path: Path) -> None:
    head = loaded.lm_head.weight
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(2)
    assert loaded.lm_head.weight is head
    assert all(torch.equal(tensor, 2 * before[name]) for name, tensor in loaded.state_dict().items())
    loaded.save_pretrained(tmp_path)
    assert same_weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), loaded)
    loaded.state_dict()["model.norm.weight"].fill_(3)  # a state dict is the weights themselves, not a copy
    assert bool((loaded.model.norm.weight == 3).all())
    loaded.state_dict()["lm_head.weight"].fill_(5)
    assert bool((loaded.lm_head.weight == 5).all())
    expected = tiny_model("llama", tie_word_embeddings=loaded.config.tie_word_embeddings)
    loaded.load_state_dict(before)
    expected.load_state_dict(before)
    assert same_weights(loaded, expected)
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda hf: pickle.loads(pickle.dumps(hf))], ids=["deepcopy", "pickle"])
def test_a_copy_saves_itself(loaded: Any, copied: Any, tmp_path: Path) -> None:
    other = copied(loaded)
    with torch.no_grad():
        other.model.norm.weight.fill_(7)
    other.save_pretrained(tmp_path / "other")
    loaded.save_pretrained(tmp_path / "own")
    kept = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).model.norm.weight for name in ("other", "own")
    ]
    assert bool((kept[0] == 7).all())
    assert torch.equal(kept[1], loaded.model.norm.weight)
    assert torch.equal(logits(copied(loaded)), logits(loaded))


def test_casting_generate_and_torch_save_work(loaded: Any, tmp_path: Path) -> None:
    torch.save(loaded.state_dict(), tmp_path / "state.pt")
    assert all(torch.equal(a, loaded.state_dict()[name]) for name, a in torch.load(tmp_path / "state.pt").items())
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    plain = tiny_model("llama", tie_word_embeddings=loaded.config.tie_word_embeddings)
    plain.load_state_dict(loaded.state_dict())
    ids = torch.arange(5)[None]
    assert torch.equal(loaded.generate(ids, **options), plain.generate(ids, **options))
    half = loaded.to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert back.dtype == torch.bfloat16
    assert same_weights(back, half)


def test_dropping_a_model_frees_its_weights_at_once(tmp_path: Path) -> None:
    import gc
    import weakref

    hf = tiny_model("llama", tie_word_embeddings=True)
    weights.lay_out(hf, weights.without_packing)
    gc.collect()
    gc.disable()
    try:
        weight = weakref.ref(hf.lm_head.weight)
        del hf
        assert weight() is None  # the way to save it is no cycle
    finally:
        gc.enable()


def test_a_quantised_model_is_not_saved_as_what_it_is_not(loaded: Any, tmp_path: Path) -> None:
    eight, _ = quantize.quantized(loaded, "int8")
    with pytest.raises(RequestError, match="quantised cannot be saved"):
        eight.save_pretrained(tmp_path / "eight")
    assert not (tmp_path / "eight").exists()
    loaded.save_pretrained(tmp_path / "own")  # the model it was made from can be
    assert same_weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own"), loaded)


def test_a_copy_that_torchao_quantised_is_not_saved(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao has kernels for CUDA only, so it is replaced here by something that quantises nothing."""
    fake = SimpleNamespace(
        Int8WeightOnlyConfig=object, Float8DynamicActivationFloat8WeightConfig=object, PerRow=object,
        quantize_=lambda hf, config: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    with pytest.raises(RequestError, match="quantised cannot be saved"):
        quantize._with_torchao(loaded, "int8").save_pretrained(tmp_path / "eight")
    loaded.save_pretrained(tmp_path / "own")
    assert same_weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own"), loaded)
