"""EAGLE-3 heads, random and by definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from shoal.models.eagle3 import Eagle3Heads, layer_config
from shoal.models.runner import Runner

V, WIDTH, DRAFTS = 260, 32, 120
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": V, "draft_vocab_size": DRAFTS, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 128, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}  # fmt: skip


def random_heads(config: dict[str, Any], features: int, target_vocab: int, own: bool = False) -> Eagle3Heads:
    """With embeddings of their own, or those of nobody."""
    torch.manual_seed(0)
    drafts = config.get("draft_vocab_size", target_vocab)
    heads = Eagle3Heads(layer_config(config), features, drafts, target_vocab, None if own else torch.nn.Identity())
    for parameter in heads.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return heads.eval().requires_grad_(False)


def save_eagle3(directory: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """A random checkpoint of the published layout."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:DRAFTS].sort().values
    found = {name: tensor.contiguous() for name, tensor in random_heads(CONFIG, 3 * WIDTH, V).state_dict().items()}
    found |= {"d2t": ids - torch.arange(DRAFTS), "t2d": torch.zeros(V, dtype=torch.bool).scatter(0, ids, True)}
    save_file({name: t for name, t in (found | (tensors or {})).items() if t.numel()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    return directory


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def by_definition(target: Runner, heads: Eagle3Heads, tokens: Sequence[int], draft: Sequence[int]) -> list[Tensor]:
    """The logits of each drafted token, without caches and batches: pair i is token i + 1 and what is known at position i."""
    states = target.hf(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    known = heads.fc(torch.cat([states[layer] for layer in (0, 1, 2)], dim=-1))[:, : len(tokens) - 1]
    found = []
    for i in range(len(draft)):
        fed = torch.tensor([[*tokens[1:], *draft[:i]]])
        out = heads(fed, known, torch.arange(fed.shape[1])[None], causal)
        found.append(heads.said(out[0, -1]))
        known = torch.cat([known, out[:, -1:]], dim=1)
    return found
