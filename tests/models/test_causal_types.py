"""Every causal model type of the pinned Transformers is decoded, or refused with a reason: a new one must be looked at.

Tests of: models.structure, models.selfcheck.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attention_paths import RECURRENT_HERE
from shoal.errors import UnsupportedModel
from shoal.models.load_checks import LIMITS
from shoal.models.loading import wrap
from shoal.testing import ARCHITECTURES, RECURRENT, REFUSED, fill

pytestmark = pytest.mark.skipif(not RECURRENT_HERE, reason="an older Transformers has other types")

DECODED = {
    "apertus", "arcee", "cohere", "deepseek_v2", "ernie4_5", "exaone4", "flex_olmo", "gemma4_unified_text", "glm",
    "glm4_moe", "granitemoe", "helium", "hunyuan_v1_dense", "jetmoe", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "ministral3", "nanochat", "nemotron", "olmo3", "seed_oss", "vaultgemma",
}  # fmt: skip
"""Types without a family of the matrix that the first test below decodes."""
ALIKE = {
    "afmoe", "apertus1p5_text", "aria_text", "axk1", "bart", "beam", "biogpt", "bitnet", "cohere2_moe", "ctrl", "cwm",
    "diffllama", "dots1", "ernie4_5_moe", "exaone", "exaone_moe", "flint", "fuyu", "gemma4_unified", "glm4_moe_lite",
    "got_ocr2", "gpt-sw3", "granite_swa", "granitemoe_swa", "granitemoeshared", "hrm_text", "hunyuan_v1_moe", "hy_v3",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "mellum", "minimax_m3_vl_text",
    "ministral", "modernbert-decoder", "moshi", "moss_transcribe_diarize", "mvp", "olmo", "persimmon", "sarvam_mla",
    "sarvam_moe", "solar_open", "xglm", "youtu",
}  # fmt: skip
"""Types whose tiny models passed the self-check once, with 5.24.0; whatever differs at a load is refused by it."""
WHOLES = {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "llama4", "qwen4_exp"}
"""Multimodal models, of which the text half counts."""
DRAFTERS = {"gemma4_assistant", "gemma4_unified_assistant"}
INDEXED = {"axk2", "dots3_note_text", "hy_v4"}
BOTH_WAYS = {
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
"""Encoders that Transformers also loads as causal models, whose tokens see later ones unless a config says otherwise."""
SELF_CHECKED = {
    "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt", "cohere_compass_text", "cpmant", "dbrx", "doge", "dory",
    "dots3_note", "emu3", "gemma3n", "gemma3n_text", "git", "gpt_neox_japanese", "longcat_flash", "marian", "mbart",
    "mllama", "musicgen", "musicgen_melody", "openai-gpt", "pegasus", "phi4_multimodal", "plbart", "prophetnet",
    "reformer", "trocr", "whisper", "xlm", "xlnet", "xmod",
}  # fmt: skip
"""Old models, decoders of encoder-decoders and parts of others, in no matrix: the self-check of a load takes or refuses them."""
GROUPS = (DECODED, ALIKE, WHOLES, DRAFTERS, INDEXED, BOTH_WAYS, SELF_CHECKED)

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, "global_head_dim": 16, "n_embd": 32, "n_head": 4,
    "n_layer": 2, "n_positions": 128, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "sliding_window": 8, "shared_expert_intermediate_size": 24,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 1, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
}  # fmt: skip


def small(kind: str) -> Any:
    """A tiny random model of a type: its default config, with small numbers in the place of large ones, a layer of each kind."""
    known = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    entries = known.to_dict()
    options = {name: value for name, value in SHAPE.items() if name in entries}
    if "kv_lora_rank" in entries:
        options["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(entries.get("layer_types") or ()))
    if kinds:
        options["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        options["num_hidden_layers"] = len(options["layer_types"])
    feeds = list(dict.fromkeys(entries.get("mlp_layer_types") or ()))
    if feeds:
        options["mlp_layer_types"] = (feeds * 4)[: options["num_hidden_layers"]]
    hf = transformers.AutoModelForCausalLM.from_config(type(known)(**options))
    fill(hf, 0)
    return hf.eval()


def test_every_type_has_been_looked_at() -> None:
    specs = [*ARCHITECTURES.values(), *RECURRENT.values(), *REFUSED.values()]
    listed = [kind for group in GROUPS for kind in group]
    assert len(listed) == len(set(listed))
    matrix = {getattr(transformers, spec.config).model_type for spec in specs}
    assert set(listed) & matrix == set()
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - matrix == set(listed)


@pytest.mark.parametrize("kind", sorted(DECODED))
def test_others_pass_the_self_check(kind: str) -> None:
    error = wrap(small(kind), kind).self_check_error
    assert error is not None
    assert error < LIMITS[torch.float32] / 10


@pytest.mark.parametrize("kind", sorted(INDEXED))
def test_indexers_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{kind} \(.*\) is not supported: its indexers choose each token's keys"):
        wrap(small(kind), kind)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_models_that_see_later_tokens_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="ragged decoding diverges from a plain forward"):
        wrap(small(kind), kind)


@pytest.mark.parametrize("kind", ["cpmant", "openai-gpt"])
def test_modules_that_fail_over_rows_of_unequal_lengths_are_refused(kind: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"{kind} \(.*\) is not supported: its modules do not compute rows of unequal"
    ):
        wrap(small(kind), kind)
