"""The shapes of target and drafter, and how they are built and exported."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pair_tokenizer import CONTEXT, VOCABULARY

END_ID, PAD_ID = 0, 4


def target_config() -> LlamaConfig:
    """Returns the target's config, of about 8.8 M parameters."""
    return _config(layers=12, intermediate=640)


def drafter_config() -> LlamaConfig:
    """Returns the drafter's config, with one layer.

    It has about 1.1 M parameters, and takes an eighth of the target's time per token.
    """
    return _config(layers=1, intermediate=480)


def _config(layers: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Builds a model with seeded weights whose layers start as the identity."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
    return model


def export(model: LlamaForCausalLM, tokenizer: Path, directory: Path) -> None:
    """Writes a Hugging Face directory with bfloat16 weights; leaves `model` as it is."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
