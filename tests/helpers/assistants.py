"""Tiny random pairs of a Gemma 4 target and its assistant, and the drafts of an assistant by Transformers' definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from shoal.testing import VOCABULARY, fill, tiny_model, tiny_tokenizer
from shoal.testing.architectures import NAMES, WINDOW


def assistant(
    vocab: int = VOCABULARY, *, width: int = 32, ordered: bool = False, unified: bool = False, **options: Any
) -> Any:
    """A tiny random assistant of three layers, for a target of tiny Gemma 4's shape."""
    text = {
        "model_type": "gemma4_text",
        "vocab_size": vocab,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 128,
    }
    family = "Gemma4Unified" if unified else "Gemma4"
    if unified:
        text["model_type"] = "gemma4_unified_text"
        del text["hidden_size_per_layer_input"], text["vocab_size_per_layer_input"]
    config = getattr(transformers, f"{family}AssistantConfig")(
        text_config=text | options,
        backbone_hidden_size=width,
        use_ordered_embeddings=ordered,
        num_centroids=vocab // 10,
        centroid_intermediate_top_k=3,
    )
    model = getattr(transformers, f"{family}AssistantForCausalLM")(config)
    fill(model, 5, 0.2)
    if ordered:
        order = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
        model.masked_embedding.token_ordering.copy_(order)
    return model.eval()


def unified_target(vocab: int) -> Any:
    """A tiny random Gemma 4 of the unified kind: every layer has keys of its own."""
    shape = NAMES["llama"] | {"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "vocab_size": vocab}
    kinds = ["sliding_attention", "full_attention"] * 2
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = transformers.Gemma4UnifiedTextConfig(**shape, **ends, num_hidden_layers=4, layer_types=kinds)
    model = transformers.Gemma4UnifiedForCausalLM(config)
    fill(model, 0)
    return model.eval()


def save_assisted(
    directory: Path, vocab: int = VOCABULARY, *, shared: int = 2, ordered: bool = False, unified: bool = False
) -> tuple[Path, Path]:
    """The directories of a target, of whose layers so many read the keys of others, and of an assistant."""
    places = directory / "target", directory / "assistant"
    shape = {"num_kv_shared_layers": shared, "vocab_size_per_layer_input": vocab, "pad_token_id": 0}
    target = unified_target(vocab) if unified else tiny_model("gemma4", vocab_size=vocab, **shape)
    for model, place in zip((target, assistant(vocab, ordered=ordered, unified=unified)), places, strict=True):
        model.save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    return places


@torch.inference_mode()
def by_definition(hf: Any, stock: Any, tokens: Sequence[int], draft: Sequence[int]) -> list[Tensor]:
    """The logits of each drafted token, without caches and batches.

    Args:
        hf: the target.
        stock: the assistant, as Transformers loads it.
        tokens: those of the row, of which the target has computed all but the last.
        draft: the drafted tokens.
    """
    known = hf(torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    state, found = known.hidden_states[-1][:, -1:], []
    for token in [tokens[-1], *draft[:-1]]:
        said = stock(
            inputs_embeds=torch.cat([hf.get_input_embeddings()(torch.tensor([[token]])), state], dim=-1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=known.shared_kv_states,
        )
        state = said.last_hidden_state
        found.append(said.logits[0, 0])
    return found
