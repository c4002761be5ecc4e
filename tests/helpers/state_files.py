"""Tiny GGUF files of models whose layers keep recurrent states, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from gguf_files import END, TOKENS, write_vocabulary

COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "initializer_range": 0.2, "eos_token_id": TOKENS.index(END),
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 256,
}  # fmt: skip
MIXER = {"state_size": 16, "conv_kernel": 4, "expand": 2, "num_hidden_layers": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**MIXER, "time_step_rank": 4}),
    "mamba2": ("Mamba2", {**MIXER, "head_dim": 32, "num_heads": 4, "n_groups": 2, "chunk_size": 16}),
    "jamba": (
        "Jamba",
        {
            **ATTENTION, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            **ATTENTION, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3next": (
        "Qwen3Next",
        {
            **ATTENTION, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
}  # fmt: skip
"""The names of Transformers' classes and their configs, by the architecture that a file names."""


def tiny_state_model(family: str, noise: float = 0.0) -> Any:
    """Returns a Transformers model with random weights, or one near it."""
    torch.manual_seed(0)
    name, shape = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON, **shape)
    made = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight += noise * torch.randn(weight.shape)
    return made


def write_state_gguf(file: Path, hf: Any, family: str) -> Path:
    """Writes a model."""
    import gguf

    config, writer = hf.config, gguf.GGUFWriter(str(file), family)
    layers = config.num_hidden_layers
    writer.add_context_length(getattr(config, "max_position_embeddings", 1 << 12))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    FACTS[family](writer, config)
    write_vocabulary(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], layers)
    for name, weight in hf.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, stored in _parts(name.replace("dt_bias", "dt_proj.bias"), _stored(name, weight.detach(), family)):
            place = names.get_name(part, try_suffixes=(".weight", ".bias")) or part
            assert place.startswith(("blk.", "token_embd", "output")), name
            writer.add_tensor(place, stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _stored(name: str, weight: Tensor, family: str) -> Tensor:
    """Converts a weight to the file's form."""
    if name.endswith("A_log"):
        weight = -weight.exp()
    if "conv" in name and weight.ndim == 3:
        weight = weight.squeeze(1)
    if family == "mamba2" and name.endswith((".A_log", ".D")):
        weight = weight[:, None]
    if family == "mamba2" and name.endswith("mixer.norm.weight"):
        weight = weight.view(2, -1)
    if family == "qwen3next" and name.endswith("norm.weight") and "linear_attn" not in name:
        weight = weight + 1
    if name.endswith("shared_expert_gate.weight"):
        weight = weight.squeeze(0)
    return weight


def _parts(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a file that hold a weight, with names of Transformers or of the file."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("in_proj_qkvz.weight"):  # by key heads: queries, keys, two values, two gates
        parts = weight.t().reshape(len(weight[0]), 2, -1).split([16, 16, 32, 32], -1)
        query, key, value, gate = (part.flatten(1).t() for part in parts)
        return [(f"{layer}.attn_qkv.weight", torch.cat([query, key, value])), (f"{layer}.attn_gate.weight", gate)]
    if name.endswith("experts.gate_up_proj"):
        gates, ups = weight.chunk(2, 1)
        return [(f"{layer}.ffn_gate_exps.weight", gates), (f"{layer}.ffn_up_exps.weight", ups)]
    if name.endswith("experts.down_proj"):
        return [(f"{layer}.ffn_down_exps.weight", weight)]
    return [(name, weight)]


def _mamba(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(2 * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(4)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_dt_b_c_rms(False)


def _mamba2(writer: Any, config: Any) -> None:
    _mamba(writer, config)
    writer.add_ssm_group_count(config.n_groups)


def _attention(writer: Any, config: Any, attends: list[bool]) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads if one else 0 for one in attends])


def _jamba(writer: Any, config: Any) -> None:
    _attention(writer, config, [False, True] * 2)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(2 * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)


def _lfm2(writer: Any, config: Any) -> None:
    _attention(writer, config, [kind == "full_attention" for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _qwen3next(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)


FACTS: dict[str, Callable[[Any, Any], None]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "qwen3next": _qwen3next,
}
