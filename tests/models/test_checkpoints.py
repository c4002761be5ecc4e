"""Checkpoints as they are published: in shards, with tied weights saved twice, with fields of older releases, quantised by others.

Tests of: models.loading, models.formats, models.sources, serve (several EOS).
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal
from serving import served
from shoal.errors import ShoalError, UnsupportedModel
from shoal.models import formats
from shoal.testing import save_pair, tiny_model, tiny_tokenizer
from shoal.testing.reference import decode
from shoal.types.requests import Request


def saved(place: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(place, **options)
    tiny_tokenizer().save_pretrained(place)
    return place


def changed(place: Path, name: str, **fields: Any) -> None:
    """Writes fields into a JSON file of a checkpoint; None takes one out."""
    file = place / name
    whole = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    sampling = shoal.Sampling(temperature=0, seed=0)
    return decode(model, Request(tuple(prompt), 1, sampling, shoal.Limits(max_new_tokens=new)))


def ids(place: Path, **options: Any) -> tuple[int, ...]:
    pair = shoal.load(place, "ngram", **options)
    result = pair.generate([[5, 3, 7]], temperature=0, max_new_tokens=20, lookahead=3, eos=())
    return result[0].samples[0].token_ids


def test_shards_with_an_index(tmp_path: Path) -> None:
    model = tiny_model("llama")
    place = saved(tmp_path, model, max_shard_size="20KB")
    assert len(list(place.glob("model-*.safetensors"))) > 2
    assert ids(place) == tuple(greedy(model, [5, 3, 7], 20))
    missing = sorted(place.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ShoalError, match=missing.name):
        shoal.load(place)


def test_tied_weights_that_were_saved_twice(tmp_path: Path) -> None:
    """As older exports have them; one that says tied and has no head is the usual case."""
    model = tiny_model("llama", tie_word_embeddings=True)
    place = saved(tmp_path, model)
    right = tuple(greedy(model, [5, 3, 7], 20))
    tensors = load_file(place / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert ids(place) == right
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    assert ids(place) == right


@pytest.mark.parametrize("name", ["bfloat16", "float16", "torch.bfloat16"])
def test_number_formats_of_older_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`torch_dtype` was the name of the field until 2025."""
    from transformers import AutoConfig

    stored = getattr(torch, name.removeprefix("torch."))
    place = saved(tmp_path, tiny_model("llama").to(stored))
    changed(place, "config.json", dtype=None, torch_dtype=name.removeprefix("torch."))
    assert "torch_dtype" in json.loads((place / "config.json").read_text())
    assert formats.stored_format(AutoConfig.from_pretrained(place), place) == stored
    loaded = shoal.load(place)
    assert loaded.target.dtype == torch.float32
    assert f"the checkpoint is in {name.removeprefix('torch.')}" in loaded.target.notes["dtype"] or (
        stored == torch.bfloat16 and "no bfloat16 products" in loaded.target.notes["dtype"]
    )
    instructions = formats.Cpu({torch.bfloat16: "AVX512-BF16"}, mkl=True)
    monkeypatch.setattr(formats, "cpu", lambda: instructions)
    monkeypatch.setattr(formats, "WIDE", 8)
    assert shoal.load(place).target.dtype == (torch.bfloat16 if stored == torch.bfloat16 else torch.float32)


def test_any_of_several_eos_ids_ends_an_answer(tmp_path: Path) -> None:
    """Those of generation_config.json, as chat models have them, before that of config.json."""
    target, drafter = save_pair(tmp_path)
    changed(target, "generation_config.json", eos_token_id=[256, 259, 40])
    pair = shoal.load(target, drafter, max_batch=4)
    assert set(pair.eos) == {256, 259, 40}
    with served(pair) as running:
        for token in (256, 259, 40, 41):
            body = {"max_tokens": 5, "logit_bias": {str(token): 100}, "return_token_ids": True}
            (choice,) = running.post(**body).json()["choices"]
            ended = token != 41
            assert choice["finish_reason"] == ("stop" if ended else "length")
            assert choice["token_ids"] == [token] * (1 if ended else 5)
            assert choice["text"] == ("" if ended and token != 40 else choice["text"])
        (choice,) = running.post(max_tokens=5, logit_bias={"259": 100}, ignore_eos=True).json()["choices"]
        assert choice["finish_reason"] == "length"


QUANTISED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemv"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
}
PACKAGES = {"awq": "gptqmodel"}
"""That Transformers asks for, where the method's name is not the package's."""


@pytest.mark.parametrize("name", QUANTISED)
def test_weights_that_others_quantised_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Before any weight is read: Transformers asks for packages that would not help, or takes the weights for missing."""
    place = saved(tmp_path, tiny_model("llama"))
    changed(place, "config.json", quantization_config=QUANTISED[name])
    for file in place.glob("*.safetensors"):
        file.unlink()
    package = PACKAGES.get(name, name)
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    asked = package.replace("_", "[-_]")
    with pytest.raises(UnsupportedModel, match=rf"quantised by {name}, and cannot be read here: .*{asked}.*quantize"):
        shoal.load(place)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"model_type": "qwen3", "architectures": ["DFlash2DraftModel"], "block_size": 16},
            "DFlash 2 .DFlash2DraftModel in its .* take dflash:DIR",
        ),
        (
            {"model_type": "qwen3", "dflash_config": {"mask_token_id": 1, "selector_rank": 4}},
            "DFlash 2 .selector_rank: 4 in its",
        ),
        ({"model_type": "llama", "architectures": ["DSparkForCausalLM"]}, "DSpark .DSparkForCausalLM in its"),
        ({"model_type": "qwen3", "speculators_model_type": "dspark"}, "DSpark .dspark in its"),
        ({"model_type": "dspark", "block_size": 8}, "DSpark .dspark in its"),
        ({"model_type": "qwen3", "architectures": ["DominoDraftModel"]}, "Domino .DominoDraftModel in its"),
        ({"model_type": "qwen3", "dflash_config": {"projector_type": "domino"}}, "Domino .domino in its .* dflash:DIR"),
        ({"model_type": "llama", "architectures": ["PEagleDraftModel"]}, "P-EAGLE .PEagleDraftModel in its .* eagle3:DIR"),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True},
            "P-EAGLE .parallel_drafting: True in its",
        ),
        ({"model_type": "llama", "eagle_config": {"fc_norm": True}}, "EAGLE-3.1 .fc_norm: True in its"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle"]}, "EAGLE-1 or EAGLE-2 .* eagle3:DIR"),
        ({"hydra_num_heads": 4}, "Hydra .hydra_num_heads: 4 in its .* medusa:DIR"),
        ({"model_type": "mlp_speculator", "n_predict": 4}, "MLP speculator .mlp_speculator in its"),
    ],
    ids=lambda given: str(next(iter(given))) if isinstance(given, dict) else "",
)
def test_drafters_of_one_target_are_refused_by_name(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Before any weight is read: some of them call themselves Qwen3, and lack its embedding and its head."""
    target, draft = save_pair(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # such repositories hold none
        (draft / name).unlink()
    (draft / "config.json").write_text(json.dumps(fields))
    (draft / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=rf"drafter\b.*{reason}"):
        shoal.load(target, draft)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DFlashDraftModel", "it drafts a block of tokens in one pass .* as the drafter, dflash:DIR"),
        ("DSparkForCausalLM", "it is a drafter of the kind DSpark, .* take dflash:DIR with a checkpoint of that kind"),
    ],
)
def test_drafters_of_one_target_are_no_targets(name: str, reason: str, tmp_path: Path) -> None:
    place = saved(tmp_path, tiny_model("llama"))
    changed(place, "config.json", architectures=[name])
    with pytest.raises(UnsupportedModel, match=reason):
        shoal.load(place)
