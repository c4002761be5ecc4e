"""What a model meets inside a static pass: a cache and an attention that are functions of static tensors alone.

Plans, context variables and lists of lengths, as the dynamic path uses them, would be frozen into a captured graph. Here the same
attention methods are called with a plan whose numbers are tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from shoal.errors import InternalError
from shoal.models.attention import AttentionInputs, Method
from shoal.models.cache import Plan
from shoal.models.cache.plan import additive, seen_keys
from shoal.models.cache.tree import seen_by_words, within
from shoal.models.compiled.block import Block

NAME = "shoal-static"
"""The implementation name models are switched to for a static pass."""

Stores = list[tuple[Tensor, Tensor, Tensor, Tensor]]
"""Of each layer: keys and values of the slots, [slots, capacity, kv heads, dim], and of shared prompts, [cells, kv heads, dim]."""


class StaticPlan(Plan):
    """A plan made of a block's buffers, for the methods of `shoal.models.attention`; it has only what those of a static pass
    ask for."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._masks: dict[tuple[object, ...], Tensor | None] = {}
        self._trees: dict[int | None, tuple[Tensor, Tensor]] = {}

    @property
    def bounds(self) -> Tensor:  # type: ignore[override]
        """As `Plan.bounds`, [4, rows] int32."""
        return self._block.bounds.to(torch.int32)

    def tree(self, window: int | None = None) -> tuple[Tensor, Tensor] | None:
        """As `Plan.tree`; chains are trees here, except that a single column is nobody's child."""
        block = self._block
        if block.bucket.q == 1:
            return None
        if window not in self._trees:
            self._trees[window] = block.positions, within(block.words, block.positions, window)
        return self._trees[window]

    def forget(self) -> None:
        """Masks are made anew in every pass, once for all layers."""
        self._masks.clear()
        self._trees.clear()

    def bias(self, dtype: torch.dtype, window: int | None = None, fold: int = 1, width: int | None = None) -> Tensor:
        """As `Plan.bias`, over all keys of the bucket where no width is given: [rows, 1, fold * q, keys]."""
        key = (dtype, window, fold, width)
        bias = self._masks.get(key)
        if bias is None:
            keys = torch.arange(self._block.bucket.keys if width is None else width, device=self._block.positions.device)
            bias = self._masks[key] = additive(self._seen(keys, window), dtype, fold)
        return bias

    def _seen(self, keys: Tensor, window: int | None) -> Tensor:
        """Which keys each column sees, [rows, q, keys] bool; no row has a prefix."""
        block, tree = self._block, self.tree(window)
        if tree is None:
            return seen_keys(keys, block.positions[..., None], window)
        return seen_by_words(keys, block.positions, block.bounds[0], tree[1], window)


class View(Cache):
    """A bucket's rows of a slot cache, behind Transformers' Cache API.

    Args:
        block: says where a pass writes. stores: the slot cache's own tensors. method: attends. shares: rows may have a prefix.
    """

    def __init__(self, block: Block, stores: Stores, method: Method, shares: bool) -> None:
        super().__init__(layers=[])
        self.block, self.plan, self.method, self.shares = block, StaticPlan(block), method, shares
        self._stores, self._layer = stores, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [rows, heads, q, dim] to the block's cells; returns all keys and values, [rows, heads, keys, dim]."""
        self._layer = layer_idx
        keys, values, *_ = self._stores[layer_idx]
        return self._written(keys, key_states), self._written(values, value_states)

    def _written(self, store: Tensor, states: Tensor) -> Tensor:
        bucket, cells = self.block.bucket, self.block.cells
        flat = store.view(-1, store.shape[2] * store.shape[3])
        flat.index_copy_(0, cells, states.transpose(1, 2).reshape(bucket.rows * bucket.q, -1))
        return store[: bucket.rows, : bucket.keys].transpose(1, 2)

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """The shared store of the layer that was updated last, [cells, heads, dim]; (None, None) if no row can have a prefix."""
        return self._stores[self._layer][2:] if self.shares else (None, None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Transformers only uses this for default positions and masks, which are always given."""
        return 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.block.bucket.keys, 0

    def __len__(self) -> int:
        return len(self._stores)


class _Current:
    """The view of the pass under way. A plain global, because tracers follow those and not context variables; hence one static
    pass at a time in a process."""

    view: View | None = None


_current = _Current()
_lock = threading.RLock()


@contextmanager
def looking_at(view: View) -> Iterator[None]:
    """Within it, models switched to "shoal-static" attend to this view."""
    with _lock:
        before, _current.view = _current.view, view
        try:
            yield
        finally:
            _current.view = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The registered function; shapes as in `shoal.models.attention`."""
    view = _current.view
    if view is None:
        raise InternalError("a model switched to shoal's static attention ran outside of a static pass")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = other["sliding_window"] if "sliding_window" in other else getattr(module, "sliding_window", None)
    return view.method(AttentionInputs(query, key, value, view.plan, scale, window, softcap, s_aux, *view.shared())), None


AttentionInterface.register(NAME, _attend)
