"""The EAGLE-3 heads as published: one decoder layer on three hidden states of a target.

The heads have norms and a vocabulary of their own. After Li et al., "EAGLE-3" (2025, arXiv
2503.01840), section 3.1. The draft after token j is computed from the token's embedding and a
state. For a committed token the matrix `fc` makes the state of the target's hidden states of three
layers at position j - 1; for a drafted token the state is the output of the layer itself for the
token before. The embedding and the state are normalised, and side by side they are the input of
attention. The residual sum begins with the state, normalised or not.

Tensors have the names that SGLang and vLLM read: fc, midlayer.*, norm, lm_head, d2t (for each id of
the draft vocabulary, the target's id minus it) and t2d. `Eagle3Model` has the methods of a
Transformers model that `Runner` uses.
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

from shoal.models.bridge import NAME
from shoal.models.cache import Plan

HIDDEN = -1e4
"""The score of a first token, which has no state: no other token sees it."""


class Eagle3Attention(nn.Module):
    """The projections of the layer's attention, with an input twice as wide as the layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.dim = dim
        sizes = self.heads, self.kv_heads, self.kv_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * width, heads * dim, bias=config.attention_bias) for heads in sizes
        )
        self.o_proj = nn.Linear(self.heads * dim, width, bias=config.attention_bias)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects [rows, q, 2 * width] to queries, keys and values, [rows, heads, q, dim] each."""
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
    """The weights of the heads.

    `shoal.models.mtp_layer` has others with the same attributes and methods.

    Args:
        features: the width of the target's three hidden states side by side.
        draft_vocab: the number of ids that the heads draft.
        target_vocab: the number of the target's ids.
        embedding: the target's embedding; None if the checkpoint has one, `embed_tokens`.

    Attributes:
        title: the name of the heads in reports.
        shares: True if rows of a group may read one stored prompt.
        features: the width of the hidden states that they read, side by side.
        width: the width of their own states.
        depth: the number of layers.
        target_ids: the target's id of each id that they draft.
        target_vocab: the number of the target's ids.
    """

    title, shares, depth = "EAGLE-3 heads", True, 1

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
        self._embedding = [embedding]  # in a list: it must not become a submodule
        self._sums_norms = getattr(config, "norm_before_residual", False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.features, self.width = features, config.hidden_size
        self.target_ids: Tensor
        self.register_buffer("target_ids", torch.arange(draft_vocab), persistent=False)

    def read(self, hidden: Tensor) -> Tensor:
        """Returns the states [tokens, width] of the target's hidden states [tokens, features]."""
        return self.fc(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [rows, q, width] of tokens [rows, q]."""
        embedding = self._embedding[0]
        return (self.embed_tokens if embedding is None else embedding)(tokens)

    def drafted(self, states: Tensor) -> Tensor:
        """Computes logits over the ids that the heads draft, of the layer's states."""
        return self.lm_head(self.norm(states))

    def logits(self, states: Tensor) -> Tensor:
        """Computes logits over the target's vocabulary of the layer's states [..., width].

        The logits are -inf for ids that the heads never draft.
        """
        return over_target(self.drafted(states), self.target_ids, self.target_vocab)

    def compute(self, tokens: Tensor, states: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Computes the layer's states, [rows, q, width], with a cache (arguments as `forward`)."""
        function = AttentionInterface()[NAME]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key = _with_mask(query, key, positions)
            keys, values = cache.update(key, value, 0)
            return function(self, query, keys, values, None, scaling=value.shape[-1] ** -0.5)[0]

        return self(tokens, states, positions, attend)

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        attend: Callable[..., Tensor],
        number: int = 0,
    ) -> Tensor:
        """Computes the layer's states, [rows, q, width].

        Args:
            tokens: [rows, q].
            states: the state of each token, [rows, q, width].
            positions: [rows, q].
            attend: queries, keys and values [rows, heads, q, dim] -> [rows, q, heads, dim].
            number: the number of the layer: 0, as there is one.
        """
        layer: Any = self.midlayer
        normed = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(self.embed(tokens)), normed], dim=-1)
        states = normed if self._sums_norms else states
        query, key, value = layer.self_attn.projected(x)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, positions))
        states = states + layer.self_attn.o_proj(attend(query, key, value).flatten(2))
        return states + layer.mlp(layer.post_attention_layernorm(states))


States = Callable[[Plan], Tensor]
"""A function from a pass to the state of each of its tokens, [rows, q, width]."""


class Eagle3Model(nn.Module):
    """A model of the heads and a runner's cache.

    Args:
        heads: the heads, shared by all models that draft with them.
        states: the function that gives the states of the tokens of a pass.

    Attributes:
        computed: the layer's states for the tokens of the last pass, [rows, q, width].
    """

    def __init__(self, heads: Any, states: States) -> None:
        super().__init__()
        self.heads, self._states = heads, states
        self.config = SimpleNamespace(
            _attn_implementation="eager", eos_token_id=None, model_type="eagle3"
        )
        self.computed = torch.empty(0)
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.heads.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.heads.parameters()).dtype

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
        """Computes the logits [rows, q, target's vocabulary] of a pass.

        Args:
            tokens: [rows, q] or packed.
            position_ids: [rows, q] or packed.

        Returns:
            An object with the attribute `logits`.
        """
        plan = past_key_values.plan
        own = plan.pack(self._states(plan))
        states = self.heads.compute(tokens, own, position_ids, past_key_values)
        self.computed = plan.unpack(states)
        return SimpleNamespace(logits=self.heads.logits(states[:, -logits_to_keep:]))


def over_target(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Spreads logits [..., drafted ids] over the target's vocabulary, -inf for other ids.

    Args:
        ids: the target's id of each drafted one.
        vocab: the number of the target's ids.
    """
    if logits.shape[-1] == vocab:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    whole[..., ids] = logits
    return whole


def _with_mask(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Appends a feature to queries and keys whose product hides the keys of position 0."""
    first = (positions == 0).to(key.dtype)[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    return torch.cat([query, torch.ones_like(query[..., :1])], dim=-1), torch.cat(
        [key, HIDDEN * first], dim=-1
    )


CONFIG_NAMES = (
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
)
"""The entries of a published config.json that Transformers' layers of all heads read."""


FORM = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "partial_rotary_factor": 1.0,
}
"""The entries of config.json or its `eagle_config` that have these values in EAGLE-3.

ModelOpt writes most of them; others are other heads.
"""


def config_of(kind: Callable[..., Any], values: dict[str, Any], *names: str) -> Any:
    """Makes the config of layers from the entries of a published config.json.

    Args:
        kind: Transformers' class of the config.
        values: the entries.
        names: the names that are read beside `CONFIG_NAMES`.

    Raises:
        ValueError: Transformers does not take the config.
        TypeError: Transformers does not take the config.
    """
    read = {name: values.get(name) for name in (*CONFIG_NAMES, *names)}
    return kind(**{name: value for name, value in read.items() if value is not None})


def layer_config(values: dict[str, Any]) -> LlamaConfig:
    """Makes the config of the layer, see `config_of`."""
    return config_of(LlamaConfig, values, "mlp_bias", "norm_before_residual")


def flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the entries of the layer beside the others.

    The package speculators writes the layer's config apart, without the values that are Llama's
    defaults.
    """
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return values
    return {"vocab_size": LlamaConfig().vocab_size, **values, **layer}


def published_layers(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the numbers of the hidden states that heads read, as Transformers numbers them.

    Hidden state n is the input of layer n. So does speculators number them, at the top of
    config.json; SGLang, SpecForge and ModelOpt name in `eagle_config` the layers whose outputs are
    read. Without either, they are the ones that SGLang and vLLM take.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    if named := values.get(key):
        return tuple(named)
    outputs = (values.get("eagle_config") or {}).get(key)
    if outputs:
        return tuple(layer + 1 if isinstance(layer, int) else layer for layer in outputs)
    return 2, layers // 2, layers - 3
