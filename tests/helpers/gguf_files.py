"""GGUF files for tests: tiny ones with random weights, and SmolLM2's in other formats."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

import smollm2

END = "<|endoftext|>"
MERGES = ("1 2", "Ġ t", "h e", "i n", "Ġt he", "Ġ a", "o n")
TOKENS = [*sorted(bytes_to_unicode().values()), *("".join(pair.split()) for pair in MERGES), END, "<|im_start|>"]
NORMAL, CONTROL = 1, 3
FORMATS = {"Q4_0": 2, "Q8_0": 7, "BF16": 32, "F32": 0}
"""Numbers of `llama_ftype`."""


def require_llama() -> None:
    """Skips the test where llama.cpp is not installed."""
    pytest.importorskip("llama_cpp", reason="needs gguf: llama-cpp-python is not installed")


def tiny_gguf_model(seed: int = 0, layers: int = 2) -> Any:
    """Returns a Transformers model of a family whose tensors GGUF files have as they are."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.2, eos_token_id=TOKENS.index(END), bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def write_gguf(
    file: Path, hf: Any, pre: str = "gpt-2", architecture: str = "qwen3", kind: str = "F32", **more: str | int | float
) -> Path:
    """Writes a model with a byte-level vocabulary.

    Args:
        kind: of matrices; the model's own weights become those that the file stands for.
        more: further texts and numbers of the file's metadata, "__" for dots.
    """
    import gguf

    form = gguf.GGMLQuantizationType[kind]
    config, writer = hf.config, gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    write_rotary(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    write_vocabulary(writer, pre)
    for key, value in more.items():
        add: Any = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, weight in hf.state_dict().items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        numbers = weight.detach().numpy()
        if numbers.ndim > 1 and kind != "F32":
            stored = gguf.quants.quantize(numbers, form)
            weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(stored, form)))
            numbers = weight.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            numbers = numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        stored = gguf.quants.quantize(numbers, form) if numbers.ndim > 1 else numbers
        writer.add_tensor(place, stored, raw_dtype=form if numbers.ndim > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_vocabulary(writer: Any, pre: str = "gpt-2") -> None:
    """Writes the byte-level vocabulary."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL if token.startswith("<|") else NORMAL for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(TOKENS.index(END))
    writer.add_add_bos_token(False)


def write_rotary(writer: Any, config: Any) -> None:
    """Writes a config's rotary positions as llama.cpp's converter does: Llama 3.1's as a factor of each frequency."""
    import gguf

    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original / (2 * math.pi * rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim))
        share = np.clip((turns - low) / (high - low), 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - share) / factor + share)).astype(np.float32))


@torch.inference_mode()
def greedy(hf: Any, ids: list[int], count: int) -> list[int]:
    """Returns the next `count` greedy ids, each by a pass without a cache."""
    for _ in range(count):
        ids = [*ids, int(hf(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


def smollm2_gguf(folder: Path, kind: str) -> Path:
    """Returns SmolLM2's file in a format; its own is Q4_1."""
    from shoal.models.gguf import library

    source = smollm2.gguf_file()
    if source is None:
        pytest.skip("needs smollm2, of the extra `real`")
    if kind == "Q4_1":
        return source
    file = folder / f"smollm2-{kind}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)  # llama.cpp makes no folder, and answers 1
        part = file.with_suffix(f".{os.getpid()}")  # a killed run leaves no half of a file under the name
        lib = library()
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = FORMATS[kind], True, 2
        status = lib.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params))
        assert status == 0, f"llama.cpp's quantize answered {status} for {part}"
        part.replace(file)
    return file
