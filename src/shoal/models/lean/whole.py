"""A pass in one call: the kernel `decode`, for decoders with all matrices packed in panels.

The drafting steps of a round are built from it (`shoal.models.lean.steps`).
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.models.attention import Masks
from shoal.models.cache import Plan, SlotCache
from shoal.models.lean import Angles, Decoder, DecoderLayer, Norm
from shoal.models.weights import Matrix
from shoal.models.weights.groups import GroupMatrix
from shoal.models.weights.panels import Int8PanelMatrix, PanelMatrix
from shoal.native import LayerStruct, ModelStruct, NormStruct, PassStruct, WeightsStruct
from shoal.native.build import SUFFIXES, library


def whole_pass(decoder: Decoder, angles: Angles) -> tuple[WholePass | None, str]:
    """Makes the passes in one call, or tells why the kernel does not compute the decoder.

    Raises:
        NotBuilt: see `shoal.native.build`.
    """
    try:
        return WholePass(decoder, angles), ""
    except _Unfit as reason:
        return None, str(reason)


class WholePass:
    """The passes of a decoder in one call each.

    The structs with the addresses of the weights are made once. `Decoder.stale` finds weights that
    have moved later; until then the tensors are held here, so that no address is one of freed
    memory. Packed weights never move (`PanelMatrix`).

    Attributes:
        weight_bytes: the bytes of all weights, which a pass reads but for rows of the embedding.
    """

    def __init__(self, decoder: Decoder, angles: Angles) -> None:
        self.decoder, self.angles = decoder, angles
        self._decode: Any = getattr(library(), f"decode_{SUFFIXES[decoder.dtype]}")
        structs = _Structs(decoder.dtype)
        self._model, self._owners = structs.model(decoder, angles), structs.owners
        self._model_at = ctypes.pointer(self._model)
        gated, attended = decoder.layers[0].gate.shape[0], decoder.heads * decoder.dim
        features = 2 * decoder.width + 2 * (attended + decoder.kv_heads * decoder.dim) + gated
        self._token_bytes = features * decoder.dtype.itemsize
        self.weight_bytes = sum(owner.nbytes for owner in structs.owners)

    def of(self, decoder: Decoder) -> WholePass:
        """Makes the passes of a decoder of some of the same layers."""
        return WholePass(decoder, self.angles)

    def __call__(
        self,
        plan: Plan,
        tokens: Tensor,
        cache: SlotCache,
        want_logits: bool,
        vectors: Tensor | None = None,
        riding: int = 0,
    ) -> Tensor:
        """Computes a pass of at most `MOST_COLUMNS` tokens a row.

        Args:
            riding: the number of last rows without logits (`PassBatch.riding`).

        Returns:
            Logits of the other rows, as many columns as the longest of them has; empty without
            `want_logits`.
        """
        decoder = self.decoder
        scored = plan.counts[: plan.rows - riding]
        vocab = decoder.head.shape[0] if want_logits else 0
        logits = torch.empty(len(scored), max(scored), vocab, dtype=decoder.dtype)
        work = self.prepared(plan, tokens, cache, logits if want_logits else None, vectors=vectors)
        require_done(self._decode(work.pass_))
        return logits

    def prepared(
        self,
        plan: Plan,
        tokens: Tensor,
        cache: SlotCache,
        logits: Tensor | None,
        ahead: int = 0,
        vectors: Tensor | None = None,
    ) -> Prepared:
        """Prepares a pass for the kernel.

        Args:
            logits: the tensor that receives the logits of the first rows, all or some,
                [rows, columns, vocab].
            ahead: the number of positions of later passes that the same struct will compute.
            vectors: the vectors that negative ids stand for (`shoal.models.executor`).
        """
        decoder = self.decoder
        if len(cache) < len(decoder.layers):
            cache.make_layers(
                len(decoder.layers),
                torch.empty(1, decoder.kv_heads, 1, decoder.dim, dtype=decoder.dtype),
            )
        bounds = array(
            "i", [*plan.starts, *plan.counts, *plan.offsets, *plan.bases, *(plan.slots or [0])]
        )
        ids, stores = tokens.contiguous(), cache.addresses(plan.into)
        trees = _Trees(plan, decoder) if plan.parents is not None or plan.gaps is not None else None
        cos, sin = self.angles.reach(plan.reach + ahead)
        count, rows = sum(plan.counts) if plan.packed else plan.rows * plan.q, plan.rows
        workspace = torch.empty(
            (2 * rows + 4 * count) * 8 + count * self._token_bytes, dtype=torch.uint8
        )
        tree_positions, words = (None, None) if trees is None else trees.addresses
        scored_rows, scored_columns = (0, 0) if logits is None else logits.shape[:2]
        pass_ = PassStruct(
            self._model_at,
            stores.buffer_info()[0],
            tokens=count,
            rows=rows,
            columns=plan.q,
            threads=torch.get_num_threads(),
            packed=plan.packed,
            capacity=cache.capacity,
            rounded=cache.rounds,
            id_row=ids.shape[1],
            vector_count=0 if vectors is None else len(vectors),
            ids=ids.data_ptr(),
            vectors=None if vectors is None else vectors.data_ptr(),
            bounds=bounds.buffer_info()[0],
            tree_positions=tree_positions,
            words=words,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            workspace=workspace.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            scored_rows=scored_rows,
            scored_columns=scored_columns,
        )
        return Prepared(pass_, bounds, (ids, vectors, stores, trees, cos, sin, workspace, logits))


class Prepared(NamedTuple):
    """A pass that is ready for the kernel.

    Attributes:
        pass_: the struct of the pass.
        bounds: the starts and lengths of the rows, as the kernel reads them.
        owners: the objects that must live until the pass is computed.
    """

    pass_: PassStruct
    bounds: array[int]
    owners: Any


def require_done(failure: int) -> None:
    """Raises an error if the return value of `decode` means that the pass failed.

    Raises:
        MemoryError: the memory does not suffice for the scores of attention.
        IndexError: a token is unknown.
    """
    if failure:
        raise (
            MemoryError("no memory for the scores of attention")
            if failure == 1
            else IndexError("no such token")
        )


class _Trees:
    """The tensors of columns that do not follow from the starts of their rows.

    They hold the positions of such columns, and the columns that a column of a draft tree sees.

    Attributes:
        positions: [rows, q] int64.
        addresses: the address of the positions, and the address of the addresses of each layer's
            words (None for chains).
    """

    def __init__(self, plan: Plan, decoder: Decoder) -> None:
        masks, self.positions = Masks(plan), plan.positions.contiguous()
        if plan.parents is None:
            self.addresses: tuple[int, int | None] = self.positions.data_ptr(), None
            return
        self._owners = [masks.tree(layer.window) for layer in decoder.layers]
        self._words = array("q", [tree[1].data_ptr() for tree in self._owners if tree is not None])
        self.addresses = self.positions.data_ptr(), self._words.buffer_info()[0]


class _Unfit(Exception):
    """The reason why the kernel does not compute a decoder."""


class _Structs:
    """The structs of a decoder. Methods raise _Unfit.

    Attributes:
        owners: the tensors whose addresses are in the structs.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.owners: list[Tensor] = []
        self._dtype = dtype

    def model(self, decoder: Decoder, angles: Angles) -> ModelStruct:
        if decoder.activation != "silu":
            raise _Unfit(f"its gate is {decoder.activation}, and the kernel has silu")
        if len({layer.gate.shape for layer in decoder.layers}) > 1:
            raise _Unfit("its layers are of several sizes")
        layers = (LayerStruct * len(decoder.layers))(*map(self._layer, decoder.layers))
        return ModelStruct(
            layer_count=len(layers),
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            dim=decoder.dim,
            rotary=angles.reach(1)[0].shape[1],
            width=decoder.width,
            vocabulary=len(decoder.embedding),
            scale=decoder.scale,
            embedding=self._address(decoder.embedding),
            layers=layers,
            norm=self._norm(decoder.norm),
            head=self._weights(decoder.head),
        )

    def _layer(self, layer: DecoderLayer) -> LayerStruct:
        return LayerStruct(
            *map(self._weights, (layer.states, layer.out, layer.gate, layer.up, layer.down)),
            *map(
                self._norm, (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
            ),
            layer.window or 0,
        )

    def _weights(self, matrix: Matrix) -> WeightsStruct:
        if not isinstance(matrix, PanelMatrix | Int8PanelMatrix | GroupMatrix) or not matrix.whole:
            raise _Unfit("its weights are not packed in panels")
        bias = None if matrix.bias is None else self._address(matrix.bias)
        weight = self._address(matrix.panels, matrix.panels.dtype)
        if isinstance(matrix, Int8PanelMatrix):
            scales = self._address(matrix.scales, torch.float32)
        else:
            scales = None
        form, exact = 0, False
        if isinstance(matrix, GroupMatrix):
            form, exact = matrix.kernel_form, matrix.exact
        outputs, width = matrix.shape
        return WeightsStruct(width, outputs, form, exact, weight=weight, bias=bias, scales=scales)

    def _norm(self, norm: Norm | None) -> NormStruct:
        return NormStruct() if norm is None else NormStruct(self._address(norm.weight), norm.eps)

    def _address(self, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        if not tensor.is_contiguous():
            raise _Unfit("a weight has gaps in memory")
        if tensor.dtype != (dtype or self._dtype):
            raise _Unfit(f"a weight is {tensor.dtype}, and the model {self._dtype}")
        self.owners.append(tensor.detach())
        return tensor.data_ptr()
