"""The operations of a lean pass that lie between its products, by the kernels in C.

Kernels in C compute the operations between its products, if they take the inputs.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shoal.models.attention import AttentionInputs, Masks
from shoal.models.attention.methods import Method
from shoal.models.attention.unfused import takes
from shoal.models.cache import Plan, SlotCache
from shoal.models.cache.row_store import SCALE_BYTES
from shoal.models.lean import Angles, Decoder, Norm
from shoal.models.lean.whole import WholePass
from shoal.models.structure import embedded
from shoal.native import AttentionStruct, HeadsStruct
from shoal.native.build import SUFFIXES, library


class NativeKernels:
    """The kernels for one decoder; a call begins a pass. Raises NotBuilt without kernels."""

    def __init__(self, decoder: Decoder) -> None:
        kernels = library()
        self.decoder, self.angles = decoder, Angles(decoder.rotary)
        names = (f"{name}_{SUFFIXES[decoder.dtype]}" for name in ("rms_norm", "heads", "attend"))
        self.rms_norm, self.heads, self.attend = (getattr(kernels, name) for name in names)

    def of(self, decoder: Decoder) -> NativeKernels:
        """Returns the kernels for a decoder of some of the same layers."""
        other = copy.copy(self)
        other.decoder = decoder
        return other

    def __call__(self, plan: Plan, cache: SlotCache, method: Method) -> NativePass:
        return NativePass(self, plan, cache, method)


class NativePass:
    """The operations of one pass.

    Kernels take addresses: every tensor that they read is held here, or by the caller, meanwhile.
    """

    def __init__(
        self, kernels: NativeKernels, plan: Plan, cache: SlotCache, method: Method
    ) -> None:
        decoder = kernels.decoder
        self._kernels, self._plan, self._cache, self._method = kernels, plan, cache, method
        self._threads = torch.get_num_threads()
        if len(cache) < len(decoder.layers):
            cache.make_layers(
                len(decoder.layers),
                torch.empty(1, decoder.kv_heads, 1, decoder.dim, dtype=decoder.dtype),
            )
        self._stores = cache.addresses(plan.into)
        self._cos, self._sin = kernels.angles.reach(plan.reach)
        self._positions = plan.pack(plan.positions).reshape(-1)
        tokens, width = self._positions.numel(), decoder.heads * decoder.dim
        self._normed = torch.empty(tokens, decoder.width, dtype=decoder.dtype)
        self._normed_at = self._normed.data_ptr()
        self._out = torch.empty(tokens, width, dtype=decoder.dtype)
        self._heads = self._heads_of(plan, cache)
        self._heads_at = ctypes.byref(self._heads)
        self._attends = takes(plan)
        self._masks = Masks(plan)
        if self._attends:
            self._attention = self._attention_of(plan, cache)
            self._attention_at = ctypes.byref(self._attention)

    def _heads_of(self, plan: Plan, cache: SlotCache) -> HeadsStruct:
        decoder = self._kernels.decoder
        return HeadsStruct(
            tokens=len(self._positions),
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            dim=decoder.dim,
            rotary=self._cos.shape[1],
            threads=self._threads,
            rounded=cache.rounds,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            positions=self._positions.data_ptr(),
            cells=cache.written.data_ptr(),
        )

    def _attention_of(self, plan: Plan, cache: SlotCache) -> AttentionStruct:
        """Makes the struct of attention, without the addresses of a layer's tensors."""
        decoder = self._kernels.decoder
        heads, kv_heads, dim = decoder.heads, decoder.kv_heads, decoder.dim
        stored = dim + SCALE_BYTES if cache.rounds else dim
        token = kv_heads * stored
        self._row_starts = (
            self._first_tokens(plan),
            np.array(plan.slots or [0]) * (cache.capacity * token),
        )
        firsts, slots = (starts.ctypes.data for starts in self._row_starts)
        return AttentionStruct(
            rows=plan.rows,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            value_dim=dim,
            threads=self._threads,
            scale=decoder.scale,
            bounds=plan.bounds.data_ptr(),
            query_rows=firsts,
            key_rows=slots,
            value_rows=slots,
            columns=plan.q,
            rounded=cache.rounds,
            query_token=(heads + 2 * kv_heads) * dim,
            query_head=dim,
            key_token=token,
            key_head=stored,
            value_token=token,
            value_head=stored,
            shared_key_token=token,
            shared_key_head=stored,
            shared_value_token=token,
            shared_value_head=stored,
            out=self._out.data_ptr(),
        )

    def _first_tokens(self, plan: Plan) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Returns the index of each row's first token in the pass, [rows]."""
        if not plan.packed:
            return np.arange(plan.rows) * plan.q
        counts = np.array(plan.counts)
        return np.cumsum(counts) - counts

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalises [tokens, width]. The result is valid until the next call."""
        places = x.data_ptr(), norm.weight.data_ptr(), self._normed_at
        tokens, width = x.shape
        self._kernels.rms_norm(*places, tokens, width, norm.eps, self._threads)
        return self._normed

    def attend(self, states: Tensor, index: int) -> Tensor:
        """Rotates queries and keys, writes keys and values to the cache, and attends.

        Args:
            states: queries, keys and values of layer `index`, [tokens, (heads + 2 kv heads) * dim];
                they are overwritten.

        Returns:
            [tokens, heads * dim].
        """
        keys, values, shared_keys, shared_values = self._stores[4 * index : 4 * index + 4]
        heads, layer = self._heads, self._kernels.decoder.layers[index]
        heads.states = states.data_ptr()
        heads.keys, heads.values = (
            (shared_keys, shared_values) if self._plan.into is not None else (keys, values)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            heads.query_norm = layer.query_norm.weight.data_ptr()
            heads.key_norm = layer.key_norm.weight.data_ptr()
            heads.eps = layer.query_norm.eps
        self._kernels.heads(self._heads_at)
        if not self._attends:
            decoder = self._kernels.decoder
            query = states.view(len(states), -1, decoder.dim)[:, : decoder.heads]
            return attended(self._method, self._cache, self._masks, decoder, index, query)
        attention = self._attention
        attention.query, attention.key, attention.value = heads.states, keys, values
        attention.shared_key, attention.shared_value = shared_keys, shared_values
        attention.window = layer.window or 0
        if self._plan.parents is not None:
            tree = self._masks.tree(layer.window)
            assert tree is not None
            attention.positions, attention.words = tree[0].data_ptr(), tree[1].data_ptr()
        if self._kernels.attend(self._attention_at):
            raise MemoryError("no memory for the scores of attention")
        return self._out


def attended(
    method: Method, cache: SlotCache, masks: Masks, decoder: Decoder, index: int, query: Tensor
) -> Tensor:
    """Attends in layer `index` by a method, over the cache, the pass's own keys included.

    Args:
        query: [tokens, heads, dim], rotated.

    Returns:
        [tokens, heads * dim].
    """
    plan = cache.plan
    assert plan is not None
    rows = (
        plan.unpack(query[None]) if plan.packed else query.view(plan.rows, plan.q, *query.shape[1:])
    )
    key, value = cache.rows(index)
    shared_key, shared_value = cache.shared()
    inputs = AttentionInputs(
        rows.transpose(1, 2),
        key,
        value,
        masks=masks,
        scale=decoder.scale,
        window=decoder.layers[index].window,
        shared_key=shared_key,
        shared_value=shared_value,
    )
    return plan.pack(method(inputs)).reshape(len(query), -1)


def known_tokens(plan: Plan, tokens: Tensor, vocabulary: int) -> Tensor:
    """Returns the plan's columns of `tokens` with ids that the drafter has.

    A drafter may lack ids of a wider target. Such ids become its last id, so it drafts for the row
    as if the row held that token.
    """
    return tokens[:, : plan.q].clamp(max=vocabulary - 1)


class LeanPass:
    """The passes of a model without its modules, layer by layer.

    Args:
        kernels: the kernels for the operations between the products.

    Attributes:
        decoder: the model.
        whole: the passes in one call, for those passes that it can compute; None if it cannot
            compute this decoder.
        no_whole: the reason why there is no `whole`.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: NativeKernels,
        whole: WholePass | None = None,
        no_whole: str = "it was not made",
    ) -> None:
        self.decoder = decoder
        self.whole, self.no_whole = whole, no_whole
        self._kernels = kernels

    @property
    def carries_prompts(self) -> bool:
        """True if chunks of prompts may ride in passes of other rows (`PassBatch.riding`).

        The pass in one call reads its weights once for all rows, and computes no logits of those
        that ride.
        """
        return self.whole is not None and not self.decoder.stale

    def of(self, decoder: Decoder) -> LeanPass:
        """Makes the passes of another decoder, of the same layers or some of them."""
        whole = None if self.whole is None else self.whole.of(decoder)
        return LeanPass(decoder, self._kernels.of(decoder), whole, self.no_whole)

    def __call__(
        self,
        plan: Plan,
        tokens: Tensor,
        cache: SlotCache,
        method: Method,
        want_logits: bool,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes a pass over the plan's tokens.

        Args:
            tokens: [rows, q] int64, or more columns; ids beyond the embedding stand for the last
                one.
            cache: a cache that the plan was announced to (`SlotCache.begin`).
            method: the method that attends if the kernels cannot.
            hidden_layers: the numbers of the hidden states to return
                (`shoal.models.runner.Runner`).
            vectors: the vectors that negative ids stand for (`shoal.models.executor`).

        Returns:
            Logits [rows, q, vocab]; without `want_logits`, a tensor of no use.
            Hidden states [rows, q, layers * width], or packed [1, tokens, layers * width]; None
            without `hidden_layers`.
        """
        decoder = self.decoder
        tokens = plan.pack(known_tokens(plan, tokens, len(self.decoder.embedding)))
        do = self._kernels(plan, cache, method)
        x = embedded(tokens.flatten(), partial(decoder.embedding.index_select, 0), vectors)
        # Copied: the next layer may overwrite its input.
        states_of = {0: x.clone()} if 0 in hidden_layers else {}
        for index, layer in enumerate(decoder.layers):
            states = layer.states.linear(do.norm(x, layer.attention_norm))
            x = layer.out.linear_add(do.attend(states, index), x)
            h = do.norm(x, layer.mlp_norm)
            x = layer.down.linear_add(
                layer.up.linear_mul(h, layer.gate.linear(h, decoder.activation)), x
            )
            if index + 1 in hidden_layers:
                states_of[index + 1] = x.clone()
        last = (
            do.norm(x, decoder.norm) if want_logits or len(decoder.layers) in hidden_layers else x
        )
        states_of |= {len(decoder.layers): last} if hidden_layers else {}
        hidden = (
            torch.cat([states_of[layer] for layer in hidden_layers], dim=-1).view(*tokens.shape, -1)
            if hidden_layers
            else None
        )
        return plan.unpack(
            decoder.head.linear(last).view(*tokens.shape, -1)
        ) if want_logits else x, hidden
