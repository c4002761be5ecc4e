"""The attention over rows of unequal lengths, functions of tensors and masks; here their inputs.

The inputs of every method are the tensors of one layer and the masks of the pass. A mask describes
the visible keys by positions, by prefixes and by words of bits; a method reads the form it needs.

The package does not import Transformers (`shoal.models.bridge` does), and keeps nothing that
outlives a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.config import MOST_NODES
from shoal.errors import InternalError
from shoal.models.cache.pass_plan import Plan

T = TypeVar("T")


class Layout(Protocol):
    """The places of the queries and keys of a pass: a `Plan`, or the buffers of a captured pass."""

    @property
    def q(self) -> int:
        """The number of columns per row."""

    @property
    def kv(self) -> int:
        """The number of keys per slot."""

    @property
    def common_keys(self) -> int:
        """The number of first keys of its slot that each query sees, a sliding window aside.

        It is 0 where that number is not known.
        """

    @property
    def positions(self) -> Tensor:
        """The position of each column, [rows, q] int64."""

    @property
    def places(self) -> Tensor:
        """The positions minus the length of the row's prefix, [rows, q] int64.

        In a chain, a column's place is the index of its own key.
        """

    @property
    def firsts(self) -> Tensor:
        """The index of each row's column 0 in its slot, [rows] int64."""

    @property
    def words(self) -> Tensor | None:
        """The columns of its block that each column sees, [rows, q] int64.

        It is None if all rows are chains. See `shoal.models.cache.pass_plan`.
        """

    @property
    def bounds(self) -> Tensor:
        """The starts, counts, offsets and bases, [4, rows] integers.

        See `shoal.models.attention.fused`.
        """


class Masks:
    """The masks of one pass.

    Args:
        layout: the places of the queries and keys.
        chunk: the size of the chunks of positions within which a query sees keys; None = all. The
            rows must have no prefixes then.
    """

    def __init__(self, layout: Layout, chunk: int | None = None) -> None:
        self.layout, self.chunk = layout, chunk
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of the pass's first call of `make` for that key."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def both_ways(self) -> Masks:
        """Returns masks of the pass by which a column also sees the columns behind it."""
        layout = self.layout
        if not isinstance(layout, Plan):
            raise InternalError("attention goes one way in captured passes")
        return self.once("both ways", lambda: Masks(layout.both_ways()))

    def clear(self) -> None:
        """Forgets all masks, because the layout's buffers have changed or will change."""
        self._results.clear()

    @property
    def bounds(self) -> Tensor:
        """The layout's bounds in int32."""
        return self.once("bounds", lambda: self.layout.bounds.to(torch.int32))

    def tree(self, window: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Returns the positions, and the words restricted to the window, [rows, q] int64 each.

        Returns None if all rows are chains.
        """
        layout, words = self.layout, self.layout.words
        if words is None:
            return None
        return self.once(
            ("tree", window),
            lambda: (layout.positions, within(words, layout.positions, self._recent(window))),
        )

    def _recent(self, window: int | None) -> int | Tensor | None:
        """Returns how many of the most recent positions a query sees, its own included.

        In chunks it is a number for each query, [rows, q, 1] int64; None = all.
        """
        chunk = self.chunk
        if chunk is None:
            return window
        return self.once("recent", lambda: self.layout.positions[..., None] % chunk + 1)

    def visible(
        self, window: int | None = None, width: int | None = None, rows: slice = slice(None)
    ) -> Tensor:
        """Computes the keys of its slot that each query sees, [rows, q, width] bool.

        A query sees keys causally or by its tree, within the sliding window if there is one.

        Args:
            window: number of most recent positions a query sees, its own included; None = all.
            width: number of keys; None = `kv`.
            rows: rows of the pass.
        """
        layout, tree = self.layout, self.tree(window)
        places = layout.places[rows]
        keys = torch.arange(layout.kv if width is None else width, device=places.device)
        recent = self._recent(window)
        recent = recent[rows] if isinstance(recent, Tensor) else recent
        if tree is None:
            return seen_in_chains(keys, places[..., None], recent)
        return seen_in_trees(keys, places, layout.firsts[rows], tree[1][rows], recent)

    def bias(self, dtype: torch.dtype, window: int | None = None, fold: int = 1) -> Tensor | None:
        """Returns the additive mask over slots, [rows, 1, fold * q, kv].

        The mask is 0 where a key is visible, the dtype's lowest number elsewhere.

        Args:
            fold: query heads per KV head folded into the query axis (head-major), so the mask
                repeats that often.

        Returns:
            None when every query of every row surely sees every key (one token per row, all of one
            length).
        """
        if window is not None and window >= self.layout.kv:
            window = None
        if (window, self.chunk) == (None, None) and self.layout.kv <= self.layout.common_keys:
            return None
        return self.once((dtype, window, fold), lambda: additive(self.visible(window), dtype, fold))

    def explicit_bias(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Returns the mask of `bias`, or zeros where `bias` returns None."""
        bias = self.bias(dtype, window)
        if bias is not None:
            return bias
        rows, q = self.layout.positions.shape
        return torch.zeros(
            rows, 1, q, self.layout.kv, dtype=dtype, device=self.layout.positions.device
        )


def within(words: Tensor, positions: Tensor, window: int | Tensor | None) -> Tensor:
    """Removes from the words the columns that a sliding window hides, by position; [rows, q] int64.

    Args:
        words: [rows, q] int64.
        positions: [rows, q] int64.
        window: number of most recent positions that a column sees, its own included, or a number
            for each column, [rows, q, 1]; None = all.
    """
    if window is None:
        return words
    recent = positions[:, None, :] > positions[:, :, None] - window  # [rows, column, seen column]
    bits = torch.arange(words.shape[1], device=words.device)
    return words & (recent.long() << bits).sum(-1)


def seen_in_trees(
    keys: Tensor, places: Tensor, firsts: Tensor, words: Tensor, window: int | Tensor | None
) -> Tensor:
    """Computes the keys of its slot that each column sees, [rows, q, kv] bool.

    Args:
        keys: indices in the slot, [kv].
        places: see `Layout`.
        firsts: see `Layout`.
        words: restricted by `within`, [rows, q].
        window: see `within`.
    """
    column = keys - firsts[:, None, None]  # [rows, 1, kv]
    inside = (words[..., None] >> column.clamp(0, MOST_NODES)) & 1 > 0
    committed = column < 0 if window is None else (column < 0) & (keys > places[..., None] - window)
    return committed | (inside & (column >= 0) & (column <= MOST_NODES))


def seen_in_chains(keys: Tensor, places: Tensor, window: int | Tensor | None) -> Tensor:
    """Computes the keys that a query at each place sees, a bool each."""
    visible = keys <= places
    return visible if window is None else visible & (keys > places - window)


def additive(visible: Tensor, dtype: torch.dtype, fold: int = 1) -> Tensor:
    """Converts [rows, q, kv] bool to an additive mask, [rows, 1, fold * q, kv].

    The mask is 0 where a key is seen, the dtype's lowest number elsewhere.
    """
    mask = ~visible.repeat(1, fold, 1)[:, None]
    zeros = torch.zeros(mask.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(mask, torch.finfo(dtype).min)


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer's ragged attention.

    Index i of row b's keys and values is the token at position plan.offsets[b] + i (in a draft
    tree: of column i - plan.firsts[b]). The keys of row b before plan.offsets[b] lie in the cells
    of plan.prefixes[b] in the shared store.

    Attributes:
        query: [rows, heads, q, dim].
        key: [rows, kv heads, kv, dim].
        value: [rows, kv heads, kv, value dim].
        masks: the keys that each query sees.
        scale: multiplies the scores.
        window: sliding window in tokens, or None.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2), or None.
        sinks: one extra logit per head that takes probability and gives nothing (GPT-OSS), [heads],
            or None.
        shared_key: keys of the shared store, [cells, kv heads, dim]; None when no row has a prefix.
        shared_value: values of the shared store, [cells, kv heads, value dim]; None when no row has
            a prefix.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    shared_key: Tensor | None = None
    shared_value: Tensor | None = None

    def repeated(self) -> AttentionInputs:
        """Returns the inputs without a shared store: every row has all its keys."""
        if self.shared_key is None or self.shared_value is None:
            return self
        plan = self.plan
        whole = plan.without_prefixes()
        pairs = (self.key, self.shared_key), (self.value, self.shared_value)
        key, value = (plan.repeated(tail, shared)[:, :, : whole.kv] for tail, shared in pairs)
        return replace(
            self, key=key, value=value, masks=Masks(whole), shared_key=None, shared_value=None
        )

    def in_chunks(self, size: int) -> AttentionInputs:
        """Returns the inputs of a layer whose tokens see only the tokens of their own chunk of
        positions.

        Every row has all its keys (`repeated`).
        """
        whole = self.repeated()
        layout = whole.masks.layout
        return replace(whole, masks=self.masks.once(("chunks", size), lambda: Masks(layout, size)))

    @property
    def plan(self) -> Plan:
        """The layout of an ordinary pass, on the host; raises InternalError in a captured pass."""
        if not isinstance(self.masks.layout, Plan):
            raise InternalError("this attention method does not work in captured passes")
        return self.masks.layout

    @property
    def group(self) -> int:
        """The number of query heads per KV head: 1 = MHA, heads = MQA."""
        return self.query.shape[1] // self.key.shape[1]
