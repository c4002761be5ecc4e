"""The lean pass: a decoder of the Llama family in few operations, read off a Transformers model.

It takes the weights of an unmodified model. `whole` is the pass in one call of C, `steps` are a
drafter's steps in one call each, `forward` is the pass layer by layer; norms, heads and attention
are kernels in C.

Every layer is x + attention(norm(x)), then x + mlp(norm(x)), with RMS norms, rotary positions, and
a gated MLP (Touvron et al. 2023). A model belongs to the family by its class: another class with
modules of the same names may compute something else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal.models.structure import Structure
from shoal.models.weights import LINEARS, Matrix, matrix_of
from shoal.models.weights.parameter import PackedWeight

_STALE = operator.attrgetter("stale")
FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""The classes of Transformers whose layers have that form."""

FIXED_ROTARY = {"default", "linear", "llama3", "yarn", "proportional"}
"""The rotary embeddings whose angles depend on the position alone, not on the length of the text.
"""

ACTIVATIONS = {"silu": "silu", "swish": "silu"}
"""The activations of the gate: from their Transformers names to their `Matrix.linear` names."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm.

    Attributes:
        weight: [width].
        eps: the number that is added to the mean square.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class DecoderLayer:
    """A layer of the decoder.

    Attributes:
        states: the matrix of queries, keys and values of all heads.
        query_norm: the norm of each head's query before the rotation (Qwen3), or None.
        key_norm: the norm of each head's key before the rotation (Qwen3), or None.
        out: the matrix back to the width of the model.
        gate: the matrix of the MLP's gate.
        up: the matrix of the MLP's values.
        down: the matrix of the MLP back to the width of the model.
        window: the sliding window, or None.
    """

    attention_norm: Norm
    states: Matrix
    query_norm: Norm | None
    key_norm: Norm | None
    out: Matrix
    mlp_norm: Norm
    gate: Matrix
    up: Matrix
    down: Matrix
    window: int | None


@dataclass(frozen=True)
class Decoder:
    """A model of the family.

    Attributes:
        embedding: the table [vocabulary, width].
        rotary: the model's own module of cosines and sines.
        scale: the factor of the attention scores.
        activation: the activation of the gate, as `Matrix.linear` names it.
        width: the number of features of the model.
        dtype: the number format of weights and states.
        structure: the structure of the model, to find changes of it.
    """

    embedding: Tensor
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Matrix
    rotary: Any
    heads: int
    kv_heads: int
    dim: int
    scale: float
    activation: str
    width: int
    dtype: torch.dtype
    structure: Structure

    @property
    def stale(self) -> bool:
        """True if weights or layers were replaced since the decoder was read."""
        return any(map(_STALE, self.matrices)) or self.structure.changed

    @cached_property
    def matrices(self) -> list[Matrix]:
        """The matrices of all layers, and the head's."""
        return [
            *(
                matrix
                for layer in self.layers
                for matrix in (layer.states, layer.out, layer.gate, layer.up, layer.down)
            ),
            self.head,
        ]


MatrixOf = Callable[[Sequence[Any]], Matrix]
"""The function that makes the common matrix of layers with the same input.

See `shoal.models.weights.matrix_of`.
"""


def decoder_of(
    hf: Any, linears: Sequence[type] = LINEARS, matrix_of: MatrixOf = matrix_of
) -> Decoder | None:
    """Reads the decoder off a Transformers model; returns None if `obstacle` has a reason.

    Args:
        linears: the classes of the model's linear layers, of which `matrix_of` makes matrices.
    """
    config = hf.config
    if obstacle(hf, linears) is not None:
        return None
    windowed = type(hf).__name__ == "MistralForCausalLM"
    window = config.sliding_window if windowed else None
    layers = [_layer(layer, window, matrix_of) for layer in hf.model.layers]
    first, head = hf.model.layers[0].self_attn, matrix_of([hf.lm_head])
    return Decoder(
        _embedding(hf.model.embed_tokens.weight),
        layers,
        _norm(hf.model.norm),
        head=head,
        rotary=hf.model.rotary_emb,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=first.head_dim,
        scale=first.scaling,
        activation=ACTIVATIONS[config.hidden_act],
        width=config.hidden_size,
        dtype=hf.dtype,
        structure=Structure(hf),
    )


def _embedding(weight: Tensor) -> Tensor:
    """Returns the table of embeddings; that of the matrix if it is tied to a packed head."""
    if not isinstance(weight, PackedWeight):
        return weight
    assert weight.matrix.table is not None
    return weight.matrix.table


def _layer(layer: Any, window: int | None, matrix_of: MatrixOf) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [
        _norm(getattr(attention, name)) if hasattr(attention, name) else None
        for name in ("q_norm", "k_norm")
    ]
    return DecoderLayer(
        _norm(layer.input_layernorm),
        matrix_of(_inputs_of(layer)),
        norms[0],
        key_norm=norms[1],
        out=matrix_of([attention.o_proj]),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=matrix_of([mlp.gate_proj]),
        up=matrix_of([mlp.up_proj]),
        down=matrix_of([mlp.down_proj]),
        window=getattr(attention, "sliding_window", window),
    )


def _inputs_of(layer: Any) -> list[Any]:
    """Returns the linear layers of queries, keys and values, which share one matrix."""
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def obstacle(hf: Any, linears: Sequence[type] = LINEARS) -> str | None:
    """Returns the reason why a Transformers model is not an unchanged decoder of the family.

    Returns None if it is one. Its owner may have changed a model of the family.
    """
    if not type(hf).__module__.startswith("transformers."):
        return f"{type(hf).__name__} is none of {', '.join(sorted(FAMILY))}"
    return _difference(type(hf).__name__, hf.config) or _alteration(hf, linears)


def in_family(config: Any) -> bool:
    """Returns True if Transformers' model of a config, or its text half, is of the family."""
    config = config.get_text_config(decoder=True)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    return _difference(kind, config) is None


def _difference(kind: str, config: Any) -> str | None:
    """Returns the difference of a class of models with this config from the family, or None."""
    if kind not in FAMILY:
        return f"{kind} is none of {', '.join(sorted(FAMILY))}"
    if config.rope_parameters["rope_type"] not in FIXED_ROTARY:
        return (
            f"the angles of its rotary positions depend on the length of the text "
            f"({config.rope_parameters['rope_type']})"
        )
    return None if config.hidden_act in ACTIVATIONS else f"its gate is {config.hidden_act}"


def _alteration(hf: Any, linears: Sequence[type]) -> str | None:
    """Returns the owner's change to a model (adapters, quantised layers, hooks), or None."""
    names = [f"self_attn.{kind}_proj" for kind in "qkvo"] + [
        f"mlp.{kind}_proj" for kind in ("gate", "up", "down")
    ]
    layers = [layer.get_submodule(name) for layer in hf.model.layers for name in names]
    foreign = next((layer for layer in [*layers, hf.lm_head] if type(layer) not in linears), None)
    if foreign is not None:
        return f"a linear layer is a {type(foreign).__name__}"
    if any(
        len({isinstance(each, nn.Linear) for each in _inputs_of(layer)}) > 1
        for layer in hf.model.layers
    ):
        return "its queries, keys and values are stored in several formats"
    if type(hf.model.embed_tokens) is not nn.Embedding:
        return f"its embedding is a {type(hf.model.embed_tokens).__name__}"
    if any(parameter.dtype != hf.dtype for parameter in _floating(hf, linears)):
        return "its weights have several number formats"
    if any(
        "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks
        for module in hf.modules()
    ):
        return "a module has hooks, or a forward of its own"
    return None


def _floating(hf: Any, linears: Sequence[type]) -> Iterator[Tensor]:
    """Yields the parameters, except of linear layers that are stored in another format."""
    for module in hf.modules():
        if isinstance(module, nn.Linear) or type(module) not in linears:
            yield from (
                parameter for parameter in module._parameters.values() if parameter is not None
            )


class Angles:
    """The tables [positions, rotary] float32 of the positions asked for; they grow by doubling."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._tables = torch.empty(0, 0), torch.empty(0, 0)

    def reach(self, positions: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of positions 0 .. positions - 1, or more.

        The returned tables never change: another thread gets larger ones.
        """
        tables = self._tables
        if len(tables[0]) < positions:
            device, count = self._rotary.inv_freq.device, 1 << (positions - 1).bit_length()
            cos, sin = self._rotary(
                torch.empty(0, device=device), torch.arange(count, device=device)[None]
            )
            self._tables = tables = cos[0].contiguous(), sin[0].contiguous()
        return tables
