"""Checkpoints with a multi-token-prediction layer, and the drafts of the layer by Transformers' definition."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.testing import fill, tiny_model, tiny_tokenizer
from shoal.testing.architectures import NAMES

PLAIN = ("deepseek-v3", "glm4-moe", "bailing-hybrid")
"""Their layer is numbered behind the model's own."""
HYBRID = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "olmo-hybrid")
"""Their layer is named `mtp`, with Qwen's modules beside it."""
STACKED = "nemotron-h"
"""Its layer is a stack of blocks of its own."""
OUTER = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
"""The names beside the layer's block: DeepSeek's and Qwen's."""
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}


def target(architecture: str, vocab: int) -> Any:
    if architecture == STACKED:
        # By a bound on time steps a pass over several tokens would differ from passes over one.
        sizes = {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_routed_experts": 4}
        return tiny_model(architecture, vocab_size=vocab, num_nextn_predict_layers=1, time_step_min=1e-9, **sizes)
    if architecture != "glm4-moe":
        return tiny_model(architecture, vocab_size=vocab)
    shape = NAMES["llama"] | EXPERTS | {"vocab_size": vocab, "num_hidden_layers": 2, "head_dim": 8, "pad_token_id": None}
    model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**shape, eos_token_id=None, bos_token_id=None))
    fill(model, 0)
    return model.eval()


def turning(name: str, tensor: Tensor, turn: Tensor) -> Tensor:
    """A weight of a target that says turn[t] after t, and of a layer that says turn[turn[t]] from the state of t."""
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return torch.zeros_like(tensor)
    if "embed_tokens" in name:
        return torch.eye(len(turn))
    if "lm_head" in name:
        return 9.0 * torch.eye(len(turn))[turn.argsort()]
    if name.endswith(("eh_proj.weight", "fc.weight")):
        return torch.cat([torch.zeros(len(turn), len(turn)), torch.eye(len(turn))[turn.argsort()]], dim=1)
    return tensor if tensor.dim() > 1 or "norm" not in name else tensor.round()


def save_mtp(directory: Path, architecture: str, *, vocab: int = 260, layers: int = 1, turn: Tensor | None = None) -> Path:
    """A random target and such layers, or those of `turn`, under the names of their family."""
    model = target(architecture, vocab)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(7)
    tensors = load_file(file)
    if architecture == STACKED:
        save_file(tensors | stack(model, directory / "blocks"), file, {"format": "pt"})
        return directory
    own = {name[15:]: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    norm = next(tensor for tensor in own.values() if tensor.shape == (model.config.hidden_size,))
    own |= {f"{name}.weight": norm for name in OUTER}
    own["eh_proj.weight"] = torch.zeros(model.config.hidden_size, 2 * model.config.hidden_size)
    for number in range(layers):
        for name, tensor in own.items():
            noise, outer = torch.randn(tensor.shape, generator=generator), name.removesuffix(".weight") in OUTER
            place = f"mtp.layers.{number}.{name}" if architecture in HYBRID else f"model.layers.{2 + number}.{name}"
            if outer and architecture in HYBRID:
                place = f"mtp.{OUTER[name.removesuffix('.weight')]}.weight"
            elif architecture == "bailing-hybrid":
                place = place.replace("shared_head.norm", "final_layernorm")
            tensors[place] = 0.3 * noise if tensor.dim() > 1 else tensor + 0.1 * noise
    if turn is not None:
        tensors = {name: turning(name, tensor, turn) for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return directory


def stack(model: Any, directory: Path) -> dict[str, Tensor]:
    """A layer of an attention block and one of experts, by the names that Nemotron-H's checkpoints have."""
    config = copy.deepcopy(model.config)
    config.layers_block_type = ["full_attention", "moe"]
    blocks = type(model.model)(config)
    fill(blocks, 7)
    blocks.save_pretrained(directory)
    found = {
        f"mtp.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items() if "layers" in name
    }
    width, generator = config.hidden_size, torch.Generator().manual_seed(8)
    end = "layers.1.final_layernorm"
    for name, shape in (("enorm", [width]), ("hnorm", [width]), ("eh_proj", [width, 2 * width]), (end, [width])):
        noise = torch.randn(shape, generator=generator)
        found[f"mtp.{name if name == end else 'layers.0.' + name}.weight"] = 0.3 * noise + (len(shape) == 1)
    return found


@torch.inference_mode()
def by_definition(hf: Any, layer: Any, tokens: Sequence[int], draft: Sequence[int]) -> list[Tensor]:
    """The logits of each drafted token, without caches and batches.

    Pair i of layer 0 is token i + 1 and the target's state of position i; pair i of layer k is token i + k + 1 and the result of
    pair i of layer k - 1. Layer k drafts token k + 1, and the last layer goes on by its own results.
    """
    known = hf(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states[-1][
        :, : len(tokens) - 1
    ]
    before, layer.config._attn_implementation = layer.config._attn_implementation, "eager"
    found, depth = [], len(layer.layers)
    for i in range(len(draft)):
        k = min(i, depth - 1)
        fed = torch.tensor([[*tokens[1 + k :], *draft[:i]]])
        cache = transformers.cache_utils.MtpCache(config=layer.config) if hasattr(layer, "rotary_emb") else None
        out = layer.forward_layer(k, known, 1 + k + torch.arange(fed.shape[1])[None], cache, input_ids=fed)
        found.append(layer._project_to_logits(out[0, -1]))
        known = out if i + 1 < depth else torch.cat([known, out[:, -1:]], dim=1)
    layer.config._attn_implementation = before
    return found
