"""DFlash checkpoints in their published form, random or trained for a moment, and their drafts by definition."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

SIZE, MASK, WIDTH, DIM, V = 5, 3, 32, 8, 260
LAYERS: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": DIM, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128, "vocab_size": V,
    "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip
CONFIG: dict[str, Any] = {
    **LAYERS, "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
    "attention_bias": False, "block_size": SIZE, "num_target_layers": 2, "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}  # fmt: skip
"""As of z-lab's Qwen3-8B-DFlash-b16, in small."""


def shapes(vocab: int = V, reads: int = 2) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file of z-lab."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, reads * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
    }
    for number in range(2):
        own = {
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
            "self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,),
            "self_attn.q_proj": (4 * DIM, WIDTH), "self_attn.k_proj": (2 * DIM, WIDTH), "self_attn.v_proj": (2 * DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, 4 * DIM), "mlp.gate_proj": (48, WIDTH), "mlp.up_proj": (48, WIDTH),
            "mlp.down_proj": (WIDTH, 48),
        }  # fmt: skip
        found |= {f"layers.{number}.{name}.weight": shape for name, shape in own.items()}
    return found


def random_tensors(seed: int = 0, std: float = 0.35) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        name: std * torch.randn(shape, generator=made) if len(shape) > 1 else 0.5 + torch.rand(shape, generator=made)
        for name, shape in shapes().items()
    }


def save_dflash(directory: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    """A checkpoint of the published layout; None in the place of an entry leaves it out."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors or random_tensors()), directory / "model.safetensors")
    entries = {name: value for name, value in (CONFIG | config).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(entries))
    return directory


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """[heads, tokens, dim] with rotary embeddings."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10000.0 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def block_states(
    tensors: Mapping[str, Tensor],
    context: Tensor,
    block: Tensor,
    *,
    windows: Sequence[int | None] = (None, None),
    one_way: Sequence[bool] = (False, False),
) -> Tensor:
    """The states of a block, [tokens, width], by the tensors of a file, without caches and batches.

    Args:
        context: the hidden states of the committed tokens before the block side by side, [tokens, features].
        block: the embeddings of the block, [tokens, width].
    """

    def times(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], 1e-5)

    known, x = norm("hidden_norm", times("fc", context)), block
    places = torch.arange(len(known) + len(x))
    mine = places[len(known) :]
    for number, (window, causal) in enumerate(zip(windows, one_way, strict=True)):
        at = f"layers.{number}"
        normed = norm(f"{at}.input_layernorm", x)
        both = torch.cat([known, normed])

        def heads(name: str, given: Tensor, at: str = at) -> Tensor:
            return times(f"{at}.self_attn.{name}_proj", given).view(len(given), -1, DIM).transpose(0, 1)

        query = turned(norm(f"{at}.self_attn.q_norm", heads("q", normed)), mine)
        key = turned(norm(f"{at}.self_attn.k_norm", heads("k", both)), places).repeat_interleave(2, 0)
        value = heads("v", both).repeat_interleave(2, 0)
        scores = query @ key.transpose(1, 2) / DIM**0.5
        distance = mine[:, None] - places[None]
        hidden = (distance < 0) & causal
        if window is not None:
            hidden |= distance >= window
        seen = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        x = x + times(f"{at}.self_attn.o_proj", seen.transpose(0, 1).flatten(1))
        normed = norm(f"{at}.post_attention_layernorm", x)
        x = x + times(
            f"{at}.mlp.down_proj", F.silu(times(f"{at}.mlp.gate_proj", normed)) * times(f"{at}.mlp.up_proj", normed)
        )
    return norm("norm", x)


def context_of(hf: Any, tokens: Sequence[int], reads: Sequence[int]) -> Tensor:
    """The hidden states of all tokens but the last, [tokens - 1, features]; reads are numbered as Transformers does."""
    if len(tokens) == 1:
        return torch.zeros(0, len(reads) * WIDTH, dtype=hf.dtype)
    states = hf(torch.tensor([list(tokens[:-1])]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in reads], dim=-1)


def by_definition(
    hf: Any,
    tensors: Mapping[str, Tensor],
    tokens: Sequence[int],
    reads: Sequence[int] = (1, 2),
    size: int = SIZE,
    **options: Any,
) -> Tensor:
    """The logits of all masks behind a row's tokens, [size - 1, vocab]."""
    own = {name: tensor.to(hf.dtype) for name, tensor in tensors.items()}
    ids = torch.tensor([tokens[-1], *[MASK] * (size - 1)])
    block = own.get("embed_tokens.weight", hf.get_input_embeddings().weight)[ids]
    states = block_states(own, context_of(hf, tokens, reads), block, **options)
    return F.linear(states[1:], own.get("lm_head.weight", hf.get_output_embeddings().weight))


def trained(hf: Any, texts: Sequence[Sequence[int]], first: int, steps: int = 300, seed: int = 0) -> dict[str, Tensor]:
    """Tensors that have learned for a moment what a target wrote in these texts from position `first` on."""
    own = {name: tensor.requires_grad_(True) for name, tensor in random_tensors(seed, 0.15).items()}
    optimizer = torch.optim.Adam(list(own.values()), lr=3e-3)
    with torch.no_grad():
        contexts = [context_of(hf, text, (1, 2)) for text in texts]
        table, head = hf.get_input_embeddings().weight.detach(), hf.get_output_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = torch.zeros(())
        for text, context in zip(texts, contexts, strict=True):
            anchor = int(torch.randint(first, len(text) - SIZE, (), generator=generator))
            block = table[torch.tensor([text[anchor], *[MASK] * (SIZE - 1)])]
            said = F.linear(block_states(own, context[:anchor], block)[1:], head)
            loss = loss + F.cross_entropy(said, torch.tensor(text[anchor + 1 : anchor + SIZE]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in own.items()}
