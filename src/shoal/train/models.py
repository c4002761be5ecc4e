"""The shapes of target and drafter, and how they are built, run and exported."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.train.tokenizer import CONTEXT, VOCABULARY

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


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes the logits of tokens (batch, length), the first excepted.

    They are (batch, length - 1, vocabulary).
    """
    result: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return result


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes the mean cross-entropy, in nats, of tokens (batch, length)."""
    return F.cross_entropy(logits(model, tokens).flatten(0, 1), tokens[:, 1:].flatten())


def export(model: LlamaForCausalLM, tokenizer: Path, directory: Path) -> None:
    """Writes a Hugging Face directory with bfloat16 weights; leaves `model` as it is."""
    from transformers import AutoTokenizer

    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
