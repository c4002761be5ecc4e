"""A radix tree of kept token ids and their cells, one tree per owner. Pure Python.

Each node has the tokens that its prefix adds to its parent's, and the cells of their keys and
values. A node is split where two prefixes part, so that a search finds all tokens that a prefix
shares with any other (RadixAttention, Zheng et al. 2023, arXiv 2312.07104, section 3).

The node that was not used for the longest time is given up first. Nodes are kept in the order of
their last use, a node after those below it. So the first node always is a leaf.

The tokens are found in a radix tree, one per owner. Keys and values are copied out of a row and
into another row. So each row has cells of its own, and its passes are ordinary passes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.models.cache import SlotCache
from shoal.models.cache.row_store import Moves
from shoal.types.requests import Prefix

Cells = list[int]
TOKEN_BYTES = 12
"""The bytes of a kept token and of the number of its cell in a tree."""
NODE_BYTES = 570
"""The bytes of a node, its arrays, children and place in the order of use besides (measured)."""


class _PrefixNode:
    """A node: the tokens that follow its parent's tokens, and their cells.

    Both are arrays: as Python's numbers a token and its cell take 80 bytes.
    """

    __slots__ = ("cells", "children", "parent", "tokens")

    def __init__(
        self, tokens: Sequence[int], cells: Sequence[int], parent: _PrefixNode | None
    ) -> None:
        self.tokens, self.cells, self.parent = array("i", tokens), array("q", cells), parent
        self.children: dict[int, _PrefixNode] = {}

    def path(self) -> Iterator[_PrefixNode]:
        """Yields this node and the nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class _Root(_PrefixNode):
    """The node above the first tokens of an owner."""

    __slots__ = ("owner",)

    def __init__(self, owner: str) -> None:
        super().__init__((), [], None)
        self.owner = owner


class PrefixTree:
    """The prefixes of token ids and the cells that hold them, numbered below `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = array("q")
        # Cells from `_begun` on were never taken, so that memory grows with the kept tokens.
        self._fresh = 0
        self._roots: dict[str, _Root] = {}
        self._by_use: OrderedDict[_PrefixNode, None] = OrderedDict()

    @property
    def used(self) -> int:
        """The number of cells that are taken."""
        return self._fresh - len(self._free)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the tree takes, without the cells' keys and values."""
        return TOKEN_BYTES * self.used + NODE_BYTES * len(self._by_use)

    def find(self, owner: str, tokens: Sequence[int]) -> Cells:
        """Returns the cells of the longest kept prefix of the tokens, and counts it as used."""
        cells: Cells = []
        last: _PrefixNode = self._roots.get(owner) or _Root(owner)
        for node, shared in self._walk(last, tokens):
            cells += node.cells[:shared]
            last = node
        self._use(last)
        return cells

    def add(self, owner: str, tokens: Sequence[int]) -> tuple[int, Cells]:
        """Keeps the tokens, or the first of them where cells do not suffice.

        Returns:
            The number of tokens that were kept before, and the cells of the tokens that follow; the
            caller fills them.
        """
        root = self._roots.pop(owner, None) or _Root(owner)
        node: _PrefixNode = root
        count = 0
        for child, shared in self._walk(node, tokens):
            count += shared
            node = child if shared == len(child.tokens) else self._split(child, shared)
        self._use(node)
        cells = self._take(min(len(tokens) - count, self.capacity - count), node)
        if cells:
            added = _PrefixNode(tokens[count : count + len(cells)], cells, node)
            node.children[added.tokens[0]] = added
            self._use(added)
        if root.children:
            self._roots[owner] = root
        return count, cells

    def _walk(self, node: _PrefixNode, tokens: Sequence[int]) -> Iterator[tuple[_PrefixNode, int]]:
        """Yields the nodes along the tokens, and the number of each node's tokens that these share.

        All nodes but the last one share all their tokens.
        """
        at = 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            shared = common(child.tokens, tokens[at : at + len(child.tokens)])
            ends = shared < len(child.tokens)  # read before the caller splits the child
            yield child, shared
            if ends:
                return
            node, at = child, at + shared

    def _split(self, node: _PrefixNode, at: int) -> _PrefixNode:
        """Parts a node after `at` of its tokens; returns the upper part."""
        assert node.parent is not None
        upper = _PrefixNode(node.tokens[:at], node.cells[:at], node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.cells, node.parent = node.tokens[at:], node.cells[at:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _use(self, node: _PrefixNode) -> None:
        for each in node.path():
            self._by_use[each] = None
            self._by_use.move_to_end(each)

    def _take(self, count: int, below: _PrefixNode) -> Cells:
        """Returns `count` free cells, or fewer.

        Nodes are given up for them, but neither `below` nor a node above it.
        """
        protected = set(below.path())
        while self.capacity - self.used < count:
            oldest = next(iter(self._by_use), None)
            if oldest is None or oldest in protected:
                break
            self._give_up(oldest)
        count = min(count, self.capacity - self.used)
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        start, self._fresh = self._fresh, self._fresh + count - len(again)
        return [*again, *range(start, self._fresh)]

    def _give_up(self, leaf: _PrefixNode) -> None:
        del self._by_use[leaf]
        self._free += leaf.cells
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        if isinstance(parent, _Root) and not parent.children:
            self._roots.pop(parent.owner, None)  # not there while `add` has it


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences."""
    least = min(len(one), len(other))
    if tuple(one[:least]) == tuple(other[:least]):
        return least
    return next(i for i in range(least) if one[i] != other[i])


MIN_TOKENS = 8
"""The length of the shortest prefix that is worth copying."""
Pair = tuple[Tensor, Tensor]


class KeptPrefixes:
    """The kept tokens of one model.

    A tree gives the cells of the tokens; the cells are [cells, heads, dim] per layer, beside the
    model's caches. Rows are copied from a cache of the model and into one, which may be another
    cache: caches come and go with engines.

    Args:
        capacity: most tokens.
    """

    def __init__(self, capacity: int) -> None:
        self._tree = PrefixTree(capacity)
        self._layers: list[Pair] = []
        self._cells = 0

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes of all cells, taken or not."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer)

    @property
    def tree_bytes(self) -> int:
        """The number of bytes of the tree without its cells."""
        return self._tree.nbytes

    def serves(self, cache: SlotCache) -> None:
        """Begins to keep tokens of rows of a cache."""

    def settle(self, cache: SlotCache, slot: int) -> None:
        """Stops watching the row in a slot, which has had a round."""

    def reachable(self, count: int, tokens: int) -> int:
        """Returns how many of the `count` first tokens of a kept prompt a later row may copy.

        Args:
            tokens: the number of tokens of the prompt.
        """
        return count

    def kept_length(self, owner: str, tokens: Sequence[int]) -> int:
        """Returns the number of first tokens that are kept for the owner; 0 if too few to copy."""
        return len(self._cells_of(owner, tokens))

    @torch.inference_mode()
    def load(
        self,
        cache: SlotCache,
        owner: str,
        tokens: Sequence[int],
        slot: int,
        prefix: Prefix | None = None,
    ) -> int:
        """Copies the kept tokens to the beginning of an empty slot, or into the shared store.

        Args:
            prefix: the place in the shared store; None = the slot.

        Returns:
            The number of tokens that were copied, from the first on.
        """
        cells = np.asarray(self._cells_of(owner, tokens), dtype=np.int64)
        base = slot * cache.capacity if prefix is None else prefix.base
        moves = Moves()
        moves.add(cells, base + np.arange(len(cells)))
        for layer, (own, shared) in (
            zip(self._layers, _stores(cache), strict=True) if len(cells) else ()
        ):
            moves.carry_out(layer, own if prefix is None else shared)
        if prefix is None:
            cache.lengths[slot] = len(cells)
        return len(cells)

    @torch.inference_mode()
    def keep(self, cache: SlotCache, owner: str, tokens: Sequence[int], slot: int) -> None:
        """Keeps the tokens that the row in a slot begins with; copies those that are new."""
        start, cells = self._tree.add(owner, tokens)
        if not cells:
            return
        self._reserve(_stores(cache), max(cells) + 1)
        prefix = cache.prefixes[slot]
        offset, base = (0, 0) if prefix is None else (prefix.length, prefix.base)
        positions, into = np.arange(start, start + len(cells)), np.asarray(cells)
        stored = positions < offset
        from_slot, from_store = Moves(), Moves()
        from_slot.add(slot * cache.capacity + positions[~stored] - offset, into[~stored])
        from_store.add(base + positions[stored], into[stored])
        for layer, (own, shared) in zip(self._layers, _stores(cache), strict=True):
            from_slot.carry_out(own, layer)
            from_store.carry_out(shared, layer)

    def _cells_of(self, owner: str, tokens: Sequence[int]) -> list[int]:
        cells = self._tree.find(owner, tokens)
        return cells if len(cells) >= MIN_TOKENS else []

    def _reserve(self, stores: Sequence[tuple[Pair, Pair]], cells: int) -> None:
        """Makes room for `cells` cells and keeps the tokens that are there.

        The room grows at least to twice the size before, if the capacity allows it.
        """
        if cells <= self._cells:
            return
        cells = max(cells, min(2 * self._cells, self._tree.capacity))
        for number, (own, _) in enumerate(stores):  # both sizes exist for one layer at a time
            layer = [tensor.new_empty(cells, *tensor.shape[2:]) for tensor in own]
            if self._cells:
                for new, before in zip(layer, self._layers[number], strict=True):
                    new[: self._cells] = before[: self._cells]
            self._layers[number : number + 1] = [(layer[0], layer[1])]
        self._cells = cells


def _stores(cache: SlotCache) -> list[tuple[Pair, Pair]]:
    """Returns a cache's keys and values by layer: the pairs of the slots, and the shared pairs."""
    return [
        ((keys, values), (shared_keys, shared_values))
        for keys, values, shared_keys, shared_values in cache.stores()
    ]
