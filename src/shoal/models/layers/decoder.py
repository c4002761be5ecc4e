"""A pass of a decoder of the Llama family: nine kernels a layer, ten where attention shares its
keys out. Captured in rounds, launched one by one elsewhere.

Norm, product for queries, keys and values, heads, attention, product, norm with the residual sum,
product for gate and up, activation, product. In the model's modules the same are some forty
launches, each of which takes a GPU longer than its arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.models.attention.fused import available
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.masks import Masks
from shoal.models.attention.methods import Method
from shoal.models.cache import SlotCache
from shoal.models.layers.eight_bit import WeightOnly8Bit, matrix_of_8_bit
from shoal.models.layers.operations import MOST_WIDTH, add_norm, begin, heads, silu_mul
from shoal.models.layers.plan_state import PlanState
from shoal.models.lean.decoder import Decoder, MatrixOf, decoder_of
from shoal.models.weights import LINEARS, Matrix, matrix_of


class PassState(Protocol):
    """The pass under way, as its layers see it."""

    @property
    def method(self) -> Method:
        """Attends."""

    @property
    def masks(self) -> Masks:
        """Of the pass."""

    @property
    def cells(self) -> Tensor:
        """Where the tokens are written, [tokens] int64."""

    def unpacked(self, query: Tensor) -> Tensor:
        """Queries of the tokens, [tokens, heads, dim] -> [rows, q, heads, dim]."""

    def packed(self, attended: Tensor) -> Tensor:
        """The other way: [rows, q, heads, dim] -> [tokens, heads, dim]."""

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they are written, [cells, kv heads, dim] or more dimensions
        before."""

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows of the pass, [rows, kv heads, keys, dim]."""

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """The shared store of the layer that was asked for last, [cells, kv heads, dim] each;
        (None, None) without prefixes."""


@dataclass(frozen=True)
class FusedLayers:
    """A decoder whose layers are computed by the kernels.

    Attributes:
        gate_up: of each layer, gate above up as one matrix.
    """

    decoder: Decoder
    gate_up: Sequence[Matrix]

    @property
    def stale(self) -> bool:
        """Whether some weight was replaced by another tensor, which only the model's modules
        know."""
        return self.decoder.stale

    def __call__(self, tokens: Tensor, positions: Tensor, state: PassState) -> Tensor:
        """Computes logits [rows, q, vocab]: a function of tensors alone, for captured rounds.

        Args:
            tokens, positions: [rows, q] int64.
        """
        x, added = self._through(tokens, positions, state)
        return self._logits(x, added, tokens)

    def ordinary(
        self, tokens: Tensor, cache: SlotCache, method: Method, want_logits: bool
    ) -> Tensor:
        """Computes a pass as long as its rows are.

        Args:
            tokens: [rows, q] int64, or packed, [1, tokens].
            cache: announced their plan.
            method: attends.
            want_logits: False if only keys and values matter; then those of the last layer are the
                last that is computed.

        Returns:
            Logits of the tokens, shaped as they are. Without `want_logits`, any tensor.
        """
        plan, store = cache.plan, self.decoder.embedding
        assert plan is not None
        cache.make_layers(
            len(self.decoder.layers), store.new_empty(0, self.decoder.kv_heads, 0, self.decoder.dim)
        )
        state = PlanState(plan, cache, method)
        x, added = self._through(
            tokens, plan.pack(plan.positions), state, keys_only=not want_logits
        )
        return self._logits(x, added, tokens) if want_logits else x

    def _logits(self, x: Tensor, added: Tensor | None, tokens: Tensor) -> Tensor:
        return self.decoder.head.linear(add_norm(x, added, self.decoder.norm)).view(
            *tokens.shape, -1
        )

    def _through(
        self, tokens: Tensor, positions: Tensor, state: PassState, keys_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The states after the last layer, but for its last sum, [tokens, width], and what is to be
        added."""
        decoder = self.decoder
        rotary = decoder.rotary.inv_freq, float(decoder.rotary.attention_scaling)
        x, h, angles = begin(
            tokens,
            positions.contiguous(),
            decoder.embedding,
            rotary,
            decoder.layers[0].attention_norm,
        )
        added: Tensor | None = None
        for index, (layer, gate_up) in enumerate(zip(decoder.layers, self.gate_up, strict=True)):
            states = layer.states.linear(
                h if not index else add_norm(x, added, layer.attention_norm)
            )
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = layer.query_norm, layer.key_norm
            query = heads(states, angles, norms, state.stores(index), state.cells)
            if keys_only and index + 1 == len(decoder.layers):
                break
            attended = self._attended(query, index, state)
            h = add_norm(x, layer.out.linear(attended), layer.mlp_norm)
            added = layer.down.linear(silu_mul(gate_up.linear(h)))
        return x, added

    def _attended(self, query: Tensor, index: int, state: PassState) -> Tensor:
        """query [tokens, heads, dim] -> [tokens, heads * dim]."""
        keys, values = state.rows(index)
        decoder = self.decoder
        inputs = AttentionInputs(
            state.unpacked(query).transpose(1, 2),
            keys,
            values,
            state.masks,
            decoder.scale,
            decoder.layers[index].window,
            None,
            None,
            *state.shared(),
        )
        return state.packed(state.method(inputs)).reshape(len(query), -1)


def fused_layers_of(hf: Any) -> FusedLayers | None:
    """The fused layers of a model; None where it is none of the family, or its owner has changed
    it, or the kernels cannot run.

    Queries, keys and values of each layer become one matrix, and so do gate and up: the parameters
    are then rows of them, so that nothing is stored twice and a write into a parameter is a write
    into the matrix. For a model that is ours. Weights of one byte stay so.
    """
    if (
        not available(torch.empty(0, device=hf.device, dtype=hf.dtype))
        or hf.config.hidden_size > MOST_WIDTH
    ):
        return None
    known = _known_linears(hf)
    if decoder_of(hf, *known) is None:
        return None
    gate_up = [known[1]([layer.mlp.gate_proj, layer.mlp.up_proj]) for layer in hf.model.layers]
    decoder = decoder_of(hf, *known)  # its weights have got other addresses
    return None if decoder is None else FusedLayers(decoder, gate_up)


def _known_linears(hf: Any) -> tuple[Sequence[type], MatrixOf]:
    """Classes of a model's linear layers that can be computed with, all of them alike, and what
    makes a matrix of several."""
    if type(getattr(hf, "lm_head", None)) is WeightOnly8Bit:
        return (WeightOnly8Bit,), matrix_of_8_bit
    return LINEARS, matrix_of
