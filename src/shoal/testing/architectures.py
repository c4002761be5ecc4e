"""The configs of tiny models of every architecture that shoal knows about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WINDOW = 8
"""The sliding window of the architectures that have one: short enough for a test to exceed it."""


@dataclass(frozen=True)
class Spec:
    """The config of one tiny architecture.

    Attributes:
        config: the name of the Transformers config class.
        options: its arguments beyond those in `names`.
        names: "llama" for current argument names, "gpt2" for older ones, "" for the vocabulary
            only.
        auto: Transformers' class that makes the model.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    names: str = "llama"
    auto: str = "AutoModelForCausalLM"


NAMES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
    "mha": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_positions": 128},
    "": {},
}
LAYERS = {
    "llama": "num_hidden_layers",
    "mha": "num_hidden_layers",
    "gpt2": "n_layer",
    "": "num_hidden_layers",
}

SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
QWEN_SLIDING: dict[str, Any] = {
    **SLIDING,
    "use_sliding_window": True,
    "max_window_layers": 1,
}  # layer 0: full attention
MIXED: dict[str, Any] = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
HEAD: dict[str, Any] = {"head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ARCHITECTURES: dict[str, Spec] = {
    "llama": Spec("LlamaConfig"),
    "qwen2": Spec("Qwen2Config"),
    "qwen2-sliding": Spec("Qwen2Config", QWEN_SLIDING),
    "qwen3": Spec("Qwen3Config", HEAD),
    "mistral": Spec("MistralConfig", {**HEAD, "sliding_window": None}),
    "mistral-sliding": Spec("MistralConfig", HEAD | SLIDING),
    "mixtral": Spec("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": Spec("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen2-moe-sliding": Spec(
        "Qwen2MoeConfig", EXPERTS | QWEN_SLIDING | {"shared_expert_intermediate_size": 24}
    ),
    "qwen3-moe": Spec("Qwen3MoeConfig", EXPERTS | HEAD),
    "olmoe": Spec("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": Spec("GPT2Config", names="gpt2"),
    "opt": Spec("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}, names="mha"),
    "gpt-neox": Spec("GPTNeoXConfig", names="mha"),
    "gpt-bigcode-mqa": Spec("GPTBigCodeConfig", {"multi_query": True}, names="gpt2"),
    "gpt-bigcode-mha": Spec("GPTBigCodeConfig", {"multi_query": False}, names="gpt2"),
    "starcoder2": Spec("Starcoder2Config", SLIDING),
    "gemma": Spec("GemmaConfig", HEAD),
    "gemma2": Spec(
        "Gemma2Config",
        HEAD
        | MIXED
        | {
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Spec("Gemma3TextConfig", HEAD | MIXED | {"query_pre_attn_scalar": 8}),
    "gemma4": Spec(  # its last two layers read the keys of the first two
        "Gemma4TextConfig",
        HEAD
        | SLIDING
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
        },
    ),
    "phi": Spec("PhiConfig"),
    "phi3": Spec("Phi3Config", {"pad_token_id": 0, "sliding_window": WINDOW}),
    "olmo2": Spec("Olmo2Config"),
    "phimoe": Spec("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": Spec(
        "SmolLM3Config", MIXED | {"use_sliding_window": True, "no_rope_layers": [1, 0]}
    ),
    "stablelm": Spec("StableLmConfig"),
    "cohere2": Spec("Cohere2Config", MIXED | {"logit_scale": 1.0}),
    "glm4": Spec("Glm4Config", HEAD | {"pad_token_id": 0}),
    "granite": Spec(
        "GraniteConfig",
        {"attention_multiplier": 0.35, "logits_scaling": 2.0, "residual_multiplier": 0.8},
    ),
    "gpt-oss": Spec(
        "GptOssConfig", HEAD | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek-v3": Spec(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "codegen": Spec("CodeGenConfig", {"rotary_dim": 4, "n_ctx": 128}, names="gpt2"),
    "gptj": Spec("GPTJConfig", {"rotary_dim": 4}, names="gpt2"),
    "falcon": Spec(
        "FalconConfig",
        {"alibi": False, "multi_query": True, "new_decoder_architecture": False},
        names="mha",
    ),
    "mpt": Spec(
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "max_seq_len": 128, "expansion_ratio": 2},
        names="",
    ),
    "llama4": Spec(
        "Llama4TextConfig",
        HEAD
        | {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],  # layer 0: chunks
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
}
"""The architectures that shoal decodes."""

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "mlp_layer_types": ["dense", "dense"],
}
SSM: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}

RECURRENT: dict[str, Spec] = {
    "lfm2": Spec("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "lfm2-moe": Spec(
        "Lfm2MoeConfig",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "lfm3": Spec("Lfm3Config", HEAD | {"layer_types": ["conv", "full_attention"]}),
    "mamba": Spec("MambaConfig", {"hidden_size": 32, "state_size": 8}, names=""),
    "falcon-mamba": Spec("FalconMambaConfig", {"hidden_size": 32, "state_size": 8}, names=""),
    "mamba2": Spec(
        "Mamba2Config",
        {
            "hidden_size": 32,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
        names="",
    ),
    "qwen3-next": Spec(
        "Qwen3NextConfig", EXPERTS | HEAD | DELTA | {"shared_expert_intermediate_size": 24}
    ),
    "qwen3.5": Spec("Qwen3_5TextConfig", HEAD | DELTA),
    "qwen3.5-moe": Spec(
        "Qwen3_5MoeTextConfig", EXPERTS | HEAD | DELTA | {"shared_expert_intermediate_size": 24}
    ),
    "olmo-hybrid": Spec("OlmoHybridConfig", DELTA),
    "kimi-linear": Spec(
        "KimiLinearConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            **LATENT,
        },
    ),
    "bailing-hybrid": Spec(
        "BailingHybridConfig",
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, **LATENT},
    ),
    "lara-mini": Spec(
        "LaraMiniConfig",
        HEAD | SLIDING | DELTA | {"layer_types": ["linear_attention", "sliding_attention"]},
    ),
    "zaya": Spec("ZayaConfig", HEAD | {"num_experts": 8, "moe_intermediate_size": 24}),
    "jamba": Spec(
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "bamba": Spec("BambaConfig", SSM | {"attn_layer_indices": [1]}),
    "zamba2": Spec(
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
        },
    ),
    "zamba": Spec(
        "ZambaConfig",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
        },
    ),
    "falcon-h1": Spec("FalconH1Config", SSM | {"mamba_d_ssm": 64}),
    "granite-hybrid": Spec(
        "GraniteMoeHybridConfig",
        SSM
        | {
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
    ),
    "nemotron-h": Spec(
        "NemotronHConfig",
        HEAD
        | {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "recurrent-gemma": Spec(
        "RecurrentGemmaConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "lru_width": 32,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
        },
        names="",
    ),
}
"""The architectures whose layers keep recurrent states."""

INKLING: dict[str, Any] = {
    **HEAD,
    **SLIDING,
    "layer_types": ["hybrid", "hybrid_sliding"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
INDEXED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
}

REFUSED: dict[str, Spec] = {
    "xlstm": Spec("xLSTMConfig", {"hidden_size": 32, "num_heads": 2}, names=""),
    "minimax": Spec(
        "MiniMaxConfig",
        HEAD
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v4": Spec("DeepseekV4Config", HEAD),
    "inkling": Spec(
        "InklingTextConfig", HEAD | SLIDING | {"layer_types": ["hybrid", "hybrid_sliding"]}
    ),
    "inkling2": Spec("Inkling2TextConfig", INKLING),
    "inkling2-loop": Spec("Inkling2LoopTextConfig", INKLING),
    "deepseek-v3.2": Spec("DeepseekV32Config", INDEXED),
    "glm-moe-dsa": Spec("GlmMoeDsaConfig", INDEXED),
    "qwen4-exp": Spec(
        "Qwen4ExpTextConfig",
        HEAD
        | EXPERTS
        | DELTA
        | {
            "layer_types": ["linear_attention", "indexed_attention"],
            "shared_expert_intermediate_size": 24,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
    "bloom": Spec("BloomConfig", {"hidden_size": 32, "n_head": 4}, names=""),
    "gpt-neo": Spec(
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 128,
            "window_size": WINDOW,
            "attention_types": [[["global", "local"], 1]],
        },
        names="",
    ),
    "falcon-alibi": Spec("FalconConfig", {"alibi": True}, names="mha"),
    "rwkv": Spec(
        "RwkvConfig",
        {"hidden_size": 32, "context_length": 128, "attention_hidden_size": 32},
        names="",
    ),
    "t5": Spec(
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        names="",
        auto="AutoModelForSeq2SeqLM",
    ),
}
"""The architectures that cannot have rows of different lengths, or that are not causal LMs."""
