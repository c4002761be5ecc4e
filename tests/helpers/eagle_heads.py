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

from shoal.models.eagle3_layer import Eagle3Heads, layer_config
from shoal.models.runner import Runner

V, WIDTH, DRAFTS = 260, 32, 120
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": V, "draft_vocab_size": DRAFTS, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 128, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
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


def turned(x: Tensor) -> Tensor:
    """[1, heads, q, dim] with rotary embeddings."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / 10000.0 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def by_definition(
    target: Runner,
    file: dict[str, Tensor],
    tokens: Sequence[int],
    draft: Sequence[int],
    reads: Sequence[int] = (0, 1, 2),
    normed: bool = False,
    eps: float = 1e-5,
) -> list[Tensor]:
    """The logits of each drafted token by the tensors of a file, without caches and batches.

    Pair i is token i + 1 and what is known at position i. t2d alone says which ids are drafted."""
    known_names = {name.replace("layers.0.", "midlayer."): tensor.to(target.hf.dtype) for name, tensor in file.items()}

    def times(name: str, x: Tensor) -> Tensor:
        return F.linear(x, known_names[f"{name}.weight"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), known_names[f"{name}.weight"], eps)

    embed = known_names.get("embed_tokens.weight", target.hf.get_input_embeddings().weight)
    states = target.hf(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    known, found = times("fc", torch.cat([states[layer] for layer in reads], dim=-1))[:, : len(tokens) - 1], []
    for i in range(len(draft)):
        own = norm("midlayer.hidden_norm", known)
        x = torch.cat([norm("midlayer.input_layernorm", embed[None, [*tokens[1:], *draft[:i]]]), own], dim=-1)
        q, k, v = (times(f"midlayer.self_attn.{name}_proj", x).view(*x.shape[:2], -1, 8).transpose(1, 2) for name in "qkv")
        out = (own if normed else known) + times("midlayer.self_attn.o_proj", causal(turned(q), turned(k), v).flatten(2))
        x = norm("midlayer.post_attention_layernorm", out)
        out = out + times(
            "midlayer.mlp.down_proj", F.silu(times("midlayer.mlp.gate_proj", x)) * times("midlayer.mlp.up_proj", x)
        )
        logits = torch.full((V,), -torch.inf, dtype=target.hf.dtype)
        logits[file["t2d"]] = times("lm_head", norm("norm", out[0, -1]))
        found.append(logits)
        known = torch.cat([known, out[:, -1:]], dim=1)
    return found
