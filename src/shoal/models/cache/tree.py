"""The layout of draft trees in a verification block.

The layout has the depth of each column, and the columns of the block that it sees. Column 0 of a
row is its last committed token, the root; column 1 + i is node i of its tree. A node's parent comes
before the node. A column sees itself and its ancestors: bit i of its word is 1 if it sees column i
(Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781, "tree attention").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.config import MOST_NODES
from shoal.errors import InternalError, RequestError

Parents = Sequence[Sequence[int]]
"""The parent node of each node of each row's tree; -1 is the root."""
Array = npt.NDArray[np.int64]


def branching(parents: Parents | None) -> bool:
    """Returns True if some row's tree is not a chain."""
    return parents is not None and any(
        tree != range(-1, len(tree) - 1) and list(tree) != list(range(-1, len(tree) - 1))
        for tree in parents
    )


def layout(parents: Parents, counts: Sequence[int]) -> tuple[Array, Array]:
    """Computes the depths and words of all columns, [rows, q] int64 each.

    Unused columns continue the row's last column as a chain.

    Args:
        parents: [rows][nodes].
        counts: columns of each row, 1 + nodes. q = max(counts).

    Raises:
        RequestError: more than `MOST_NODES` nodes.
        InternalError: counts that do not fit, or a parent that is not an earlier node.
    """
    if [len(tree) + 1 for tree in parents] != list(counts):
        raise InternalError(
            f"trees of {[len(tree) for tree in parents]} nodes in blocks of {list(counts)} columns"
        )
    rows, q = len(counts), max(counts)
    if q > 1 + MOST_NODES:
        raise RequestError(f"a draft tree may have at most {MOST_NODES} nodes, got {q - 1}")
    columns = np.tile(np.arange(-1, q - 1), (rows, 1))  # the parent of each column
    for row, tree in zip(columns, parents, strict=True):
        row[1 : len(tree) + 1] = np.asarray(tree, dtype=np.int64) + 1
    if (columns[:, 1:] < 0).any() or (columns >= np.arange(q)).any():
        raise InternalError("a draft tree has a node whose parent does not come before it")
    every = np.arange(rows)
    depths, words = np.zeros((rows, q), dtype=np.int64), np.tile(_own(q), (rows, 1))
    for column in range(1, q):
        parent = columns[:, column]
        depths[:, column] = depths[every, parent] + 1
        words[:, column] |= words[every, parent]
    return depths, words.view(np.int64)


def _own(q: int) -> npt.NDArray[np.uint64]:
    """Returns the bit of each column, [q]."""
    return np.left_shift(np.uint64(1), np.arange(q, dtype=np.uint64))


def chain_words(q: int) -> Array:
    """Returns the words of a chain's columns, [q] int64: the lower triangle."""
    return np.bitwise_or.accumulate(_own(q)).view(np.int64)
