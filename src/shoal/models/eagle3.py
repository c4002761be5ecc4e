"""EAGLE-3 heads as published: one decoder layer on three hidden states of a target, with norms and
a vocabulary of its own.

After Li et al., "EAGLE-3" (2025, arXiv 2503.01840), section 3.1. What is drafted after token j is
computed from the token's embedding and a state: for a committed token the target's hidden states of
three layers at position j - 1, of which the matrix `fc` makes one; for a drafted one what the layer
itself has computed for the token before. Both are normalised, and side by side they are the input
of attention. The residual sum begins with the state.

Tensors are named as SGLang and vLLM read them: fc, midlayer.*, norm, lm_head, d2t (of each id of
the draft vocabulary, the target's id minus it) and t2d. `Eagle3Model` quacks like a Transformers
model as far as `Runner` looks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from shoal.models.cache import Plan

HIDDEN = -1e4
"""Score of a first token, which has no state: no other token sees it."""


class Eagle3Attention(nn.Module):
    """Its projections, with an input twice as wide as the layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
        )
        sizes = self.heads, self.kv_heads, self.kv_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * width, heads * dim, bias=config.attention_bias) for heads in sizes
        )
        self.o_proj = nn.Linear(self.heads * dim, width, bias=config.attention_bias)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, q, 2 * width] -> queries, keys and values, [rows, heads, q, dim] each."""
        return tuple(  # type: ignore[return-value]
            layer(x).view(*x.shape[:2], -1, self.dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )


class Eagle3Layer(nn.Module):
    """The decoder layer, `midlayer`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.self_attn, self.mlp = Eagle3Attention(config), LlamaMLP(config)


class Eagle3Heads(nn.Module):
    """The weights.

    Args:
        config: of the layer.
        features: width of the target's hidden states, three side by side.
        draft_vocab: ids that it drafts.
        target_vocab: the target's.
        embedding: the target's, unless the checkpoint has one: `embed_tokens`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        features: int,
        draft_vocab: int,
        target_vocab: int,
        embedding: nn.Module | None,
    ) -> None:
        super().__init__()
        self.config, self.target_vocab = config, target_vocab
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        if embedding is None:
            self.embed_tokens = nn.Embedding(target_vocab, config.hidden_size)
        self._embedding = [embedding]  # in a list: it is the target's, no module of this one
        self.rotary = LlamaRotaryEmbedding(config)
        self.target_ids: Tensor
        self.register_buffer("target_ids", torch.arange(draft_vocab), persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """[rows, q] -> [rows, q, width]."""
        embedding = self._embedding[0]
        found: Tensor = (self.embed_tokens if embedding is None else embedding)(tokens)
        return found

    def said(self, states: Tensor) -> Tensor:
        """States that the layer computed, [..., width], -> logits over the target's vocabulary,
        -inf for ids never drafted."""
        logits = self.lm_head(self.norm(states))
        if logits.shape[-1] == self.target_vocab:
            return logits  # type: ignore[no-any-return]
        whole = logits.new_full((*logits.shape[:-1], self.target_vocab), -torch.inf)
        whole[..., self.target_ids] = logits
        return whole

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """What the layer computes, [rows, q, width].

        Args:
            tokens, positions: [rows, q].
            states: of each token, [rows, q, width].
            attend: queries, keys and values [rows, heads, q, dim] -> [rows, q, heads, dim].
        """
        layer: Any = self.midlayer
        x = torch.cat(
            [layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(states)], dim=-1
        )
        query, key, value = layer.self_attn.projected(x)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, positions))
        states = states + layer.self_attn.o_proj(attend(query, key, value).flatten(2))
        return states + layer.mlp(layer.post_attention_layernorm(states))  # type: ignore[no-any-return]


States = Callable[[Plan], Tensor]
"""A pass -> the state of each of its tokens, [rows, q, width]."""


class Eagle3Model(nn.Module):
    """The heads behind a runner's cache.

    Args:
        heads: shared by all that draft with them.
        states: of the tokens of a pass.
        target: whose positions and number format they have.

    Attributes:
        computed: what the layer computed for the tokens of the last pass, [rows, q, width].
    """

    def __init__(self, heads: Eagle3Heads, states: States) -> None:
        super().__init__()
        self.heads, self._states = heads, states
        self.config = SimpleNamespace(
            _attn_implementation="eager", eos_token_id=None, model_type="eagle3"
        )
        self.computed = torch.empty(0)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.heads.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.heads.fc.weight.dtype

    def get_output_embeddings(self) -> nn.Module:
        return self.heads.lm_head

    def forward(
        self,
        tokens: Tensor,
        past_key_values: Any,
        use_cache: bool,
        position_ids: Tensor,
        logits_to_keep: int = 0,
    ) -> Any:
        """tokens, position_ids [rows, q] or packed -> an object with `logits` [rows, q, target's
        vocabulary]."""
        plan = past_key_values.plan
        function = AttentionInterface()[self.config._attn_implementation]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key = _with_mask(query, key, position_ids)
            keys, values = past_key_values.update(key, value, 0)
            found: Tensor = function(
                self, query, keys, values, None, scaling=value.shape[-1] ** -0.5
            )[0]
            return found

        states = self.heads(tokens, plan.pack(self._states(plan)), position_ids, attend)
        self.computed = plan.unpack(states)
        return SimpleNamespace(logits=self.heads.said(states[:, -logits_to_keep:]))


def _with_mask(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One feature more, whose product hides the keys of position 0."""
    first = (positions == 0).to(key.dtype)[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    return torch.cat([query, torch.ones_like(query[..., :1])], dim=-1), torch.cat(
        [key, HIDDEN * first], dim=-1
    )


def layer_config(values: dict[str, Any]) -> LlamaConfig:
    """The config of the layer by a published config.json. Raises ValueError, TypeError:
    Transformers does not take it."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "max_position_embeddings",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
    )
    return LlamaConfig(**{name: values[name] for name in names if values.get(name) is not None})


def published_layers(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Hidden states that heads read, as Transformers numbers them: those that a config.json names,
    else those that SGLang and vLLM take."""
    named = values.get("eagle_aux_hidden_state_layer_ids") or (
        values.get("eagle_config") or {}
    ).get("eagle_aux_hidden_state_layer_ids")
    return tuple(named) if named else (2, layers // 2, layers - 3)
