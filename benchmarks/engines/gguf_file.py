"""Writes a Llama or Qwen2 checkpoint of Transformers as a GGUF file, as llama.cpp reads it; without a tokenizer, for ids only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
"""Of matrices; vectors stay float32, as llama.cpp wants them."""
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(model: Path, out: Path, dtype: str) -> None:
    """model: directory of one float32 safetensors file. dtype: a key of `TYPES`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    architecture = config["model_type"]
    if architecture not in ("llama", "qwen2"):
        raise ValueError(f"only Llama and Qwen2 are written as GGUF, not {architecture}")
    writer = gguf.GGUFWriter(out, architecture)
    _head(writer, config)
    with safe_open(model / "model.safetensors", "numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            array = tensors.get_tensor(name)
            if architecture == "llama":
                array = _interleaved(name, array, config)
            kind = TYPES[dtype] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _head(writer: Any, config: dict[str, Any]) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    channels = config.get("head_dim") or width // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(channels)
    writer.add_value_length(channels)
    writer.add_rope_dimension_count(channels)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of Transformers."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def _interleaved(name: str, array: Any, config: dict[str, Any]) -> Any:
    """Queries and keys as llama.cpp rotates them for Llama: channels 2i and 2i + 1 together, not i and i + half."""
    for part, heads in (("q_proj.weight", "num_attention_heads"), ("k_proj.weight", "num_key_value_heads")):
        if name.endswith(part):
            count = config[heads]
            halves = array.reshape(count, 2, array.shape[0] // count // 2, array.shape[1])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return array
