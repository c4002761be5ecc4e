"""A pass of a decoder of the Llama family in nine kernels a layer.

There are ten where attention shares its keys out. The kernels are captured in rounds, and launched
one by one elsewhere.

The steps are norm, product for queries, keys and values, heads, attention, product, norm with the
residual sum, product for gate and up, activation, product. In the model's modules these are some
forty launches, each of which takes a GPU longer than its arithmetic.

The state of a pass that is launched kernel by kernel is a plan over a slot cache, as long as its
rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.models.attention import AttentionInputs, Masks
from shoal.models.attention.fused import available
from shoal.models.attention.methods import Method
from shoal.models.cache import Plan, SlotCache
from shoal.models.layers import (
    MOST_WIDTH,
    Sums,
    WeightOnly8Bit,
    add_norm,
    begin,
    heads,
    product,
    product_or_sums,
    silu_mul,
)
from shoal.models.lean import Decoder, MatrixOf, decoder_of
from shoal.models.weights import LINEARS, Matrix, matrix_of
from shoal.models.weights.layers import joined, starts
from shoal.models.weights.matrix import Products, products_of


class PlanState:
    """The state of a pass that was announced to the cache.

    See `shoal.models.layers.triton_decoder.PassState`.

    Args:
        method: attends.
    """

    def __init__(self, plan: Plan, cache: SlotCache, method: Method) -> None:
        self.masks, self.method = Masks(plan), method
        self._plan, self._cache = plan, cache

    @property
    def cells(self) -> Tensor:
        """The cells that the tokens are written to, [tokens] int64."""
        return self._cache.written

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values as written, in cells of slots or the shared store."""
        return self._cache.written_stores(layer)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the rows of the pass, [rows, kv heads, keys, dim]."""
        return self._cache.rows(layer)

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the shared store of the layer that was asked for last.

        Returns:
            [cells, kv heads, dim] each; (None, None) without prefixes.
        """
        return self._cache.shared()

    def unpacked(self, query: Tensor) -> Tensor:
        """Converts [tokens, heads, dim] to [rows, q, heads, dim]."""
        plan = self._plan
        if plan.packed:
            return plan.unpack(query[None])
        return query.view(plan.rows, plan.q, *query.shape[1:])

    def packed(self, attended: Tensor) -> Tensor:
        """Converts [rows, q, heads, dim] to [tokens, heads, dim]."""
        return self._plan.pack(attended)[0] if self._plan.packed else attended.flatten(0, 1)


class PassState(Protocol):
    """The pass under way, as its layers see it."""

    @property
    def method(self) -> Method:
        """The attention method."""

    @property
    def masks(self) -> Masks:
        """The masks of the pass."""

    @property
    def cells(self) -> Tensor:
        """The cells that the tokens are written to, [tokens] int64."""

    def unpacked(self, query: Tensor) -> Tensor:
        """Converts queries of the tokens, [tokens, heads, dim], to [rows, q, heads, dim]."""

    def packed(self, attended: Tensor) -> Tensor:
        """Converts [rows, q, heads, dim] to [tokens, heads, dim]."""

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a layer as they are written.

        They are [cells, kv heads, dim], or have more dimensions in place of the first.
        """

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the rows of the pass, [rows, kv heads, keys, dim]."""

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the shared store of the layer that was asked for last.

        Returns:
            [cells, kv heads, dim] each; (None, None) without prefixes.
        """


@dataclass(frozen=True)
class FusedLayers:
    """A decoder whose layers are computed by the kernels.

    Attributes:
        decoder: the weights.
        gate_up: for each layer, gate above up as one matrix.
    """

    decoder: Decoder
    gate_up: Sequence[Matrix]

    @property
    def stale(self) -> bool:
        """True if some weight was replaced by a tensor that only the model's modules use."""
        return self.decoder.stale

    def __call__(self, tokens: Tensor, positions: Tensor, state: PassState) -> Tensor:
        """Computes logits [rows, q, vocab]: a function of tensors alone, for captured rounds.

        Args:
            tokens: [rows, q] int64.
            positions: [rows, q] int64.
        """
        x, added = self._through(tokens, positions, state)
        return self._logits(x, added, tokens)

    def ordinary(
        self, tokens: Tensor, cache: SlotCache, method: Method, want_logits: bool
    ) -> Tensor:
        """Computes a pass as long as its rows are.

        Args:
            tokens: [rows, q] int64, or packed, [1, tokens].
            cache: has been announced the pass's plan.
            method: attends.
            want_logits: False if only keys and values matter; the pass then ends with those of the
                last layer.

        Returns:
            Logits of the tokens, [*tokens.shape, vocab]. Without `want_logits`, any tensor.
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

    def _logits(self, x: Tensor, added: Tensor | Sums | None, tokens: Tensor) -> Tensor:
        return self.decoder.head.linear(add_norm(x, added, self.decoder.norm)).view(
            *tokens.shape, -1
        )

    def _through(
        self, tokens: Tensor, positions: Tensor, state: PassState, keys_only: bool = False
    ) -> tuple[Tensor, Tensor | Sums | None]:
        """Computes the states after the last layer without its last sum, [tokens, width].

        The second value is to be added for that sum.
        """
        decoder = self.decoder
        rotary = decoder.rotary.inv_freq, float(decoder.rotary.attention_scaling)
        x, h, angles = begin(
            tokens,
            positions.contiguous(),
            decoder.embedding,
            rotary,
            decoder.layers[0].attention_norm,
        )
        added: Tensor | Sums | None = None
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
            h = add_norm(x, _sums(layer.out, attended), layer.mlp_norm)
            added = _sums(layer.down, silu_mul(gate_up.linear(h)))
        return x, added

    def _attended(self, query: Tensor, index: int, state: PassState) -> Tensor:
        """Attends: query [tokens, heads, dim] -> [tokens, heads * dim]."""
        keys, values = state.rows(index)
        decoder = self.decoder
        shared_key, shared_value = state.shared()
        inputs = AttentionInputs(
            state.unpacked(query).transpose(1, 2),
            keys,
            values,
            masks=state.masks,
            scale=decoder.scale,
            window=decoder.layers[index].window,
            shared_key=shared_key,
            shared_value=shared_value,
        )
        return state.packed(state.method(inputs)).reshape(len(query), -1)


class WeightOnlyMatrix(Matrix):
    """The matrix W of 8 bits, [out, in], with a scale per output (`product`).

    It is the weight of one `WeightOnly8Bit`, or of several, one below the other.

    Attributes:
        scales: [out] float32.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.scales = scales
        super().__init__(weight, bias)

    def sums(self, x: Tensor) -> Tensor | Sums:
        """Computes `linear(x)`, or its sums by share, for `add_norm` to join."""
        return product_or_sums(x, self._weight, self.scales, self.bias)

    def _products(self) -> Products:
        weight, scales, bias = self._weight, self.scales, self.bias
        return products_of(lambda x: product(x, weight, scales, bias))


@torch.no_grad()
def matrix_of_8_bit(layers: Sequence[WeightOnly8Bit]) -> WeightOnlyMatrix:
    """Makes one matrix of layers, as `shoal.models.weights.matrix_of` does.

    Weights, scales and biases of the layers become rows of common tensors. A bias that another
    model has as well stays that model's.

    Raises:
        ValueError: some have a bias and some have none, or unlike inputs or formats.
    """
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        raise ValueError(
            "layers of one matrix need the same input, the same format, and all a bias or none"
        )
    weight = joined([layer.weight.detach().view(torch.int8) for layer in layers]).view(
        layers[0].weight.dtype
    )
    scales = joined([layer.scales.detach() for layer in layers])
    bias = None if layers[0].bias is None else joined([layer.bias.detach() for layer in layers])
    for layer, start in zip(layers, starts(layers), strict=True):
        rows = slice(start, start + layer.out_features)
        layer.weight.data, layer.scales.data = weight[rows], scales[rows]
        if bias is not None and layer.bias.data_ptr() != bias[rows].data_ptr():
            layer.bias = nn.Parameter(bias[rows], requires_grad=False)
    return WeightOnlyMatrix(weight, scales, bias)


def _sums(matrix: Matrix, x: Tensor) -> Tensor | Sums:
    """Computes a product whose result is only added to others, [tokens, out]."""
    return matrix.sums(x) if isinstance(matrix, WeightOnlyMatrix) else matrix.linear(x)


def fused_layers_of(hf: Any) -> FusedLayers | None:
    """Returns the fused layers of a model, or None.

    There are none where the model is not of the family, or its owner has changed it, or the kernels
    cannot run.

    Queries, keys and values of each layer become one matrix, and so do gate and up: the parameters
    are then rows of these matrices, so that nothing is stored twice and a write into a parameter is
    a write into the matrix. The model must be ours. Weights of one byte stay so.
    """
    if (
        not available(torch.empty(0, device=hf.device, dtype=hf.dtype))
        or hf.config.hidden_size > MOST_WIDTH
    ):
        return None
    linears = _known_linears(hf)
    if decoder_of(hf, *linears) is None:
        return None
    gate_up = [linears[1]([layer.mlp.gate_proj, layer.mlp.up_proj]) for layer in hf.model.layers]
    decoder = decoder_of(hf, *linears)  # its weights have got other addresses
    return None if decoder is None else FusedLayers(decoder, gate_up)


def _known_linears(hf: Any) -> tuple[Sequence[type], MatrixOf]:
    """Returns the classes of a model's linear layers, and the function that joins layers.

    The kernels can compute with layers of these classes, all of a model alike. The function makes a
    matrix of several layers.
    """
    if type(getattr(hf, "lm_head", None)) is WeightOnly8Bit:
        return (WeightOnly8Bit,), matrix_of_8_bit
    return LINEARS, matrix_of
