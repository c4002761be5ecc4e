"""Multimodal checkpoints: their text half is loaded by its own class, and writes what Transformers' whole writes.

Tests of: models.pretrained, models.lean.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shoal
from grouped_files import Layout, regroup
from native_kernels import needs_compiler
from shoal.errors import UnsupportedModel
from shoal.models import formats
from shoal.models.executor import C_DECODER
from shoal.models.weights.groups import GroupLinear
from shoal.native.build import missing
from shoal.testing import fill, tiny_model, tiny_tokenizer

VIT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE = VIT | {"image_size": 16, "patch_size": 8}
QWEN = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32, "patch_size": 8}
WHOLES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "gemma3", SQUARE | {"vision_use_head": False}, {"mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4Config", "gemma4", VIT | {"head_dim": 8, "global_head_dim": 8}, {"audio_config": None}),
    "internvl": ("InternVLConfig", "qwen3", SQUARE, {}),
    "llava": ("LlavaConfig", "llama", SQUARE | {"model_type": "clip_vision_model"}, {}),
    "mistral3": ("Mistral3Config", "mistral", SQUARE | {"head_dim": 8}, {}),
    "qwen3.5": ("Qwen3_5Config", "qwen3.5", QWEN | {"num_position_embeddings": 4}, {}),
    "qwen3.5-moe": ("Qwen3_5MoeConfig", "qwen3.5-moe", QWEN | {"num_position_embeddings": 4}, {}),
    "llama4": ("Llama4Config", "llama4", SQUARE | {"vision_output_dim": 32, "projector_output_dim": 16}, {}),
}
"""The config class of each whole, the architecture of its text half, and the options of the vision half and of the whole."""
LOADED = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "internvl": "Qwen3ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "llava": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "qwen3.5-moe": "Qwen3_5MoeForCausalLM",
}
PROMPTS = ([5], [40, 3, 7, 100, 20, 21, 22, 23, 24, 25, 26, 9, 31], [9, 8, 7, 6])
NEW = 16

if not hasattr(transformers, "Mistral3Config") or not hasattr(transformers, "Gemma4Config"):
    pytest.skip("an older Transformers does not know them", allow_module_level=True)


def whole(name: str, seed: int = 0, **options: Any) -> Any:
    """A tiny random multimodal model, as Transformers makes it."""
    kind, text, vision, more = WHOLES[name]
    own = tiny_model(text, pad_token_id=0).config.to_dict()
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, kind)(
        text_config=own, vision_config=vision, **{"tie_word_embeddings": False, **ends, **more, **options}
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    fill(model, seed)
    return model.eval()


def saved(model: Any, place: Path) -> Path:
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def generated(model: Any, prompt: list[int]) -> tuple[int, ...]:
    """Greedy ids of Transformers' own `generate`, one prompt alone.

    The whole of Llama 4 ends in an AttributeError without an image (5.24): its half says them.
    """
    model = model.language_model if type(model).__name__.startswith("Llama4") else model
    block = torch.tensor([prompt])
    out = model.generate(block, attention_mask=torch.ones_like(block), max_new_tokens=NEW, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.slow(but=["gemma3"])
@pytest.mark.parametrize("name", sorted(LOADED))
def test_text_is_that_of_the_whole(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of unequal lengths, a drafter that is a multimodal checkpoint too, and is right now and then."""
    model = whole(name)
    place = saved(model, tmp_path / "target")
    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert len(set(expected[1])) > 4  # it wanders: equality says something
    head = model.get_output_embeddings().weight.data
    head.add_(0.15 * float(head.std()) * torch.randn(head.shape, generator=torch.Generator().manual_seed(7)))
    draft = saved(model, tmp_path / "drafter")

    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING, "transformers"), shoal.load(place, draft, dtype="float32", device="cpu") as pair:
        for runner in (pair.target, pair.draft_model):
            assert runner is not None
            assert type(runner.hf).__name__ == LOADED[name]
            assert not any("vision" in key for key in runner.hf.state_dict())
        result = pair.generate(PROMPTS, 2, temperature=0, max_new_tokens=NEW, lookahead=3, eos=())
    assert [[sample.token_ids for sample in output.samples] for output in result] == [[ids, ids] for ids in expected]
    assert 0 < result.stats.accepted < result.stats.drafted
    assert "LOAD REPORT" not in caplog.text  # nobody has asked for the tensors of the other half


@needs_compiler
@pytest.mark.parametrize("form", ["gptq", "pack-quantized", "int-quantized"])
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3.5"])
def test_a_quantised_whole_gives_its_half_in_groups(name: str, form: str, tmp_path: Path) -> None:
    """As published: the layers of the text half are quantised under the names of the whole, or those of both halves."""
    layout = Layout("gptq" if form == "gptq" else "compressed-tensors", 8, symmetric=False, form=form)
    place = saved(whole(name), tmp_path / "quantised")
    shutil.copytree(place, tmp_path / "plain")
    meant = regroup(place, layout, lambda part: form != "pack-quantized" or "language_model" in part)
    save_file(meant, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    stock = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "plain")
    with shoal.load(place, "suffix", dtype="float32") as pair:
        assert type(pair.target.hf).__name__ == LOADED[name]
        assert sum(isinstance(each, GroupLinear) for each in pair.target.hf.modules()) >= 8
        result = pair.generate(PROMPTS, 2, temperature=0, max_new_tokens=NEW, lookahead=3, eos=())
    assert result.stats.drafted
    assert [[sample.token_ids for sample in output.samples] for output in result] == [
        [generated(stock, prompt)] * 2 for prompt in PROMPTS
    ]


def test_a_whole_whose_half_is_refused_is_refused(tmp_path: Path) -> None:
    place = saved(whole("llava"), tmp_path)
    config = place / "config.json"
    stored = json.loads(config.read_text())
    stored["text_config"]["attention_chunk_size"] = 8
    config.write_text(json.dumps(stored))
    with pytest.raises(UnsupportedModel, match="does not say which of its layers attend in chunks"):
        shoal.load(place)


@pytest.mark.parametrize("names", ["language_model.model.{}", "model.language_model.{}"])
def test_names_of_other_years(names: str, tmp_path: Path) -> None:
    """As published before and after the wrappers had a model of their own; the head is beside it in the second."""
    model = whole("mistral3")
    place = saved(model, tmp_path)
    file = place / "model.safetensors"
    head = "language_model.lm_head.weight" if names.startswith("lang") else "lm_head.weight"
    parts = {
        head
        if name.endswith("lm_head.weight")
        else names.format(name.rpartition("language_model.")[2].removeprefix("model.")): one
        for name, one in load_file(file).items()
        if "language_model" in name
    }
    assert len(parts) == 21
    save_file(parts, file, metadata={"format": "pt"})
    with shoal.load(place, "suffix", dtype="float32") as pair:
        result = pair.generate(PROMPTS, 1, temperature=0, max_new_tokens=NEW, lookahead=3, eos=())
    assert [output.samples[0].token_ids for output in result] == [generated(model, prompt) for prompt in PROMPTS]


def test_format_ends_and_ties_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(whole("gemma3", eos_token_id=[256, 259], tie_word_embeddings=True).to(torch.bfloat16), tmp_path)
    (place / "generation_config.json").unlink()
    config = place / "config.json"
    stored = json.loads(config.read_text())
    stored["text_config"] |= {"eos_token_id": 1, "tie_word_embeddings": False}
    stored["text_config"].pop("dtype", None)
    config.write_text(json.dumps(stored))
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu({torch.bfloat16: "AVX512-BF16"}, mkl=True))
    monkeypatch.setattr(formats, "WIDE", 8)
    with shoal.load(place, device="cpu") as pair:
        hf = pair.target.hf
        assert pair.eos == (256, 259)
        assert hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
        assert pair.target.dtype == torch.bfloat16


@pytest.mark.skipif(bool(missing()), reason="no kernels in C")
def test_kernels_in_c_compute_a_half_of_their_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset({torch.bfloat16})))
    with shoal.load(saved(whole("mistral3").to(torch.bfloat16), tmp_path), device="cpu") as pair:
        assert pair.target.dtype == torch.bfloat16
        assert "the kernels in C compute it" in pair.target.notes["dtype"]
        assert C_DECODER in pair.generate(PROMPTS, 1, max_new_tokens=4, eos=()).stats.executors["target"]
