"""The layers of DFlash, which draft a block of tokens in one pass (Chen et al., arXiv 2602.06036).

A block is the row's last committed token and mask tokens behind it, each at its own position; the
state of a mask says the token at its place. Each layer attends to a context and to the block. The
context are the committed tokens before the block: their keys and values are projections of the
output of `fc` for the target's hidden states there, the same input for all layers. Inside the block
attention goes both ways, except in layers that are said to be causal. Embeddings and head are the
target's, without a norm or a scale that its embeddings have.

Tensors have the names of z-lab, SpecForge and SGLang: fc, hidden_norm, layers.*, norm. The package
speculators adds a head and ids of its own (d2t); Transformers' `muse_glimmer_assistant` names the
first two encoder.fc and encoder.output_norm_enc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from shoal.models.bridge import NAME
from shoal.models.eagle3_layer import Eagle3Model, config_of, over_target

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A function (number of the layer, queries, keys, values) -> [rows, q, heads, dim].

Its arguments are [rows, heads, q, dim] each.
"""


@dataclass(frozen=True)
class BlockForm:
    """The entries of a config.json beside those of the layers.

    Attributes:
        size: the number of tokens of a block.
        mask: the id of the mask token.
        windows: the sliding window of each layer, its own position included; None = all tokens.
        causal: for each layer, True if a token of a block does not see those behind it.
        scale: multiplies the embeddings.
        multiplier: multiplies the logits.
        softcap: logits become softcap * tanh(logits / softcap); None = they do not.
    """

    size: int
    mask: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None


class BlockHeads(nn.Module):
    """The weights, with the attributes of `shoal.models.eagle3_layer.Eagle3Heads`.

    Args:
        form: the other entries of config.json.
        features: the width of the target's hidden states side by side.
        drafts: the number of ids that are drafted.
        embedding: the target's embedding; None if the checkpoint has one, `embed_tokens`.
        head: the target's head; None if the checkpoint has one, `lm_head`.
    """

    title, shares, depth = "DFlash layers", True, 1

    def __init__(
        self,
        config: Qwen3Config,
        form: BlockForm,
        features: int,
        drafts: int,
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> None:
        super().__init__()
        self.config, self.form = config, form
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(features, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, number) for number in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(width, eps=eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.features, self.width = features, width
        if embedding is None:
            self.embed_tokens = embedding = nn.Embedding(config.vocab_size, width)
        if head is None:
            self.lm_head = head = nn.Linear(width, drafts, bias=False)
        self._of_target = embedding, head  # in a tuple: they must not become submodules
        self.target_vocab = config.vocab_size
        self.target_ids: Tensor
        self.register_buffer("target_ids", torch.arange(drafts), persistent=False)

    @property
    def head(self) -> Any:
        """The head, the target's or its own."""
        return self._of_target[1]

    def logits(self, states: Tensor) -> Tensor:
        """Computes logits over the target's vocabulary of states [..., width]."""
        form = self.form
        logits = self.head(states) * form.multiplier
        if form.softcap is not None:
            logits = form.softcap * torch.tanh(logits / form.softcap)
        return over_target(logits, self.target_ids, self.target_vocab)

    def write(self, features: Tensor, positions: Tensor, cache: Any) -> None:
        """Writes the keys and values of a context to a cache.

        Args:
            features: the target's hidden states, [rows, q, features].
            positions: [rows, q].
        """
        states = self.hidden_norm(self.fc(features))
        rotary = self.rotary(states, positions)
        for number, layer in enumerate(self.layers):
            cache.update(*_keys(layer.self_attn, states, rotary), number)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Computes the states of blocks, [rows, q, width].

        Args:
            tokens: [rows, q].
            positions: [rows, q].
            attend: attends to the context and to the block.
        """
        layers: Any = self.layers
        table: Any = self._of_target[0]
        x = F.embedding(tokens, table.weight) * self.form.scale
        rotary = self.rotary(x, positions)
        for number, layer in enumerate(layers):
            own, normed = layer.self_attn, layer.input_layernorm(x)
            query = _turned(own.q_norm(_by_head(own, own.q_proj, normed)), rotary)
            output = attend(number, query, *_keys(own, normed, rotary))
            x = x + own.o_proj(output.flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


class BlockModel(Eagle3Model):
    """A model of the layers and a runner's cache.

    A pass without logits reads a context; any other pass computes blocks. The constructor takes the
    arguments of `Eagle3Model`; the state of a token is the input of `fc`.
    """

    def get_output_embeddings(self) -> nn.Module:
        return self.heads.head

    def forward(
        self,
        tokens: Tensor,
        past_key_values: Any,
        use_cache: bool,
        position_ids: Tensor,
        logits_to_keep: int = 0,
    ) -> Any:
        """Computes a pass; see `Eagle3Model.forward`."""
        plan, heads, function = past_key_values.plan, self.heads, AttentionInterface()[NAME]
        if plan.final:
            heads.write(plan.pack(self._states(plan)), position_ids, past_key_values)
            return SimpleNamespace(logits=torch.empty(0))

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = past_key_values.update(key, value, number)
            options = {
                "scaling": query.shape[-1] ** -0.5,
                "sliding_window": heads.form.windows[number],
                "both_ways": not heads.form.causal[number],
            }
            return function(self, query, keys, values, None, **options)[0]

        return SimpleNamespace(logits=heads.logits(heads(tokens, position_ids, attend)))


def block_config(values: dict[str, Any]) -> Qwen3Config:
    """Makes the config of the layers, see `config_of`."""
    return config_of(Qwen3Config, values, "vocab_size", "num_hidden_layers")


def _by_head(attention: Any, projection: nn.Module, x: Tensor) -> Tensor:
    """Projects [rows, q, width] to [rows, heads, q, dim], before norms and rotary angles."""
    projected: Tensor = projection(x)
    return projected.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2)


def _keys(attention: Any, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns keys and values, [rows, kv heads, q, dim] each, of [rows, q, width]."""
    key = attention.k_norm(_by_head(attention, attention.k_proj, x))
    return _turned(key, rotary), _by_head(attention, attention.v_proj, x)


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns [rows, heads, q, dim] by the angles of its positions."""
    cos, sin = (angle.unsqueeze(1) for angle in rotary)
    return x * cos + rotate_half(x) * sin
