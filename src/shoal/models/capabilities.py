"""The properties of a model that are known before its first token.

They are its attention path, its context, and whether its rows can have different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from shoal.errors import UnsupportedModel

REFUSED = {
    "bloom": "its ALiBi biases are built from a 2D mask shared by all rows, so rows of unequal "
    "lengths get wrong positions",
    "gpt_neo": "its local layers slice keys at an offset common to all rows",
}
ROPES_BY_LENGTH = ("dynamic", "longrope")
"""The kinds of rotary embedding that rescale by the longest row of a batch.

They read the row's positions on the host.
"""
RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "ssm", "rwkv", "hybrid")


def capabilities(hf: Any, name: str) -> tuple[str, int]:
    """Returns the attention path of a model (see `shoal.models.bridge`) and its context.

    The context is the number of tokens that a row may hold.

    Raises:
        UnsupportedModel: the rows of the model cannot have lengths of their own; the message names
            the reason.
    """
    config = hf.config.get_text_config()
    reason = _refusal(hf, config)
    if reason:
        raise UnsupportedModel(f"{name} ({config.model_type}) is not supported: {reason}")
    attention_path = "interface" if type(hf)._can_set_attn_implementation() else "mask"
    return attention_path, _context(config)


def keeps_states(hf: Any) -> bool:
    """Returns True if layers of a model keep a recurrent state."""
    layers = getattr(hf.config.get_text_config(), "layer_types", None) or ()
    recurrent = any(word in layer for layer in layers for word in RECURRENT)
    return recurrent or getattr(hf, "_is_stateful", False)


def _refusal(hf: Any, config: Any) -> str | None:
    if getattr(hf.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; shoal decodes causal language models"
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    layers = set(getattr(config, "layer_types", None) or ())
    if (
        keeps_states(hf)
        and not {"cache", "past_key_values"} & signature(hf.forward).parameters.keys()
    ):
        return "it keeps recurrent states in an object of its own kind, not in Transformers' cache"
    if "chunked_attention" in layers or getattr(config, "attention_chunk_size", None):
        return "its chunked attention is not implemented for ragged rows"
    if getattr(config, "alibi", False):
        return "ALiBi: its position biases are built from a 2D mask shared by all rows"
    if hf.get_output_embeddings() is None:
        return "it has no language-model head"
    return None


def _context(config: Any) -> int:
    """Returns the number of positions that a row may use.

    Dynamic and long RoPE rescale by the longest row of a batch, so a row beyond the original length
    would change its neighbours. Models with such a RoPE are limited to the original length.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    context = next((int(v) for v in (getattr(config, n, None) for n in names) if v), 1 << 20)
    for parameters in rope_parameters(config):
        if parameters.get("rope_type", parameters.get("type")) in ROPES_BY_LENGTH:
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            context = min(context, int(original or context))
    return context


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Returns the RoPE parameters of a model: one mapping, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return (
        list(rope.values())
        if rope and all(isinstance(value, Mapping) for value in rope.values())
        else [rope]
    )
