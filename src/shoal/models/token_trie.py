"""The tokens of a target as sequences of a drafter's tokens, for drafters of bytes or characters.

No token of such a drafter begins with another one, so there is one sequence of them for each text.
The sequences of all of the target's tokens form a trie. The drafter's distributions of its next
tokens give the probability that it writes the bytes of a token of the target: psi of string-level
rejection sampling (Timor et al. 2025, arXiv 2502.05202, Algorithm 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shoal.models.spelling import Spelling

MOST_DEPTH = 12
"""The largest number of the drafter's tokens for one of the target's.

Tokens of the target with longer sequences are never proposed.
"""


@dataclass
class _TrieNode:
    symbol: int = -1
    token: int = -1
    children: dict[int, _TrieNode] = field(default_factory=dict)


class TokenTrie:
    """A trie of the target's tokens as the drafter writes them.

    Nodes are numbered from the root, 0, by depth; the children of a node follow each other.

    Args:
        sequences: the drafter's ids for each token of the target that it can write, by the target's
            id.

    Attributes:
        first: the children of node v are the nodes first[v] up to first[v + 1], [nodes + 1] int64.
        symbols: the drafter's id that leads to each node, [nodes] int64.
        tokens: the target's token that ends at each node, or -1, [nodes] int64.
        above: the last token of the target that ends before a node's children, the node's own
            included, or -1, [nodes] int64.
        sequences: the given sequences of at most `MOST_DEPTH` ids.
    """

    def __init__(self, sequences: Mapping[int, Sequence[int]]) -> None:
        self.sequences = {
            token: tuple(ids) for token, ids in sequences.items() if 0 < len(ids) <= MOST_DEPTH
        }
        root = _TrieNode()
        for token, ids in sorted(self.sequences.items()):
            node = root
            for symbol in ids:
                node = node.children.setdefault(symbol, _TrieNode(symbol))
            node.token = token if node.token < 0 else node.token
        nodes, above, first = [root], [-1], [1]
        for at, node in enumerate(nodes):  # grows
            below = node.token if node.token >= 0 else above[at]
            above[at] = below
            nodes += node.children.values()
            above += [below] * len(node.children)
            first.append(len(nodes))
        self.first, self.above = np.array(first), np.array(above)
        self.symbols, self.tokens = (
            np.array([getattr(node, name) for node in nodes]) for name in ("symbol", "token")
        )

    def children(self, node: int) -> npt.NDArray[np.int64]:
        """Returns the numbers of a node's children."""
        return np.arange(self.first[node], self.first[node + 1])

    def inner(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the nodes that have children."""
        found: npt.NDArray[np.bool_] = self.first[nodes + 1] > self.first[nodes]
        return found


def token_trie(
    target: Spelling, draft: Spelling, same: Mapping[int, int], target_size: int, draft_size: int
) -> TokenTrie | None:
    """Makes the trie of two vocabularies; None if a token of the drafter begins with another one.

    Args:
        same: the special tokens of the target, and the drafter's ids of them.
        target_size: the number of the target's ids.
        draft_size: the number of the drafter's ids.
    """
    pieces = {
        piece: i
        for i in sorted(draft.pieces, reverse=True)
        if i < draft_size
        for piece in (draft.pieces[i],)
    }
    if not pieces or any(longer.startswith(piece) for piece, longer in pairwise(sorted(pieces))):
        return None
    sequences: dict[int, Sequence[int]] = {i: [own] for i, own in same.items()}
    for i in target.pieces:
        if i < target_size and target.tokens_of(target.pieces[i])[0] == i:
            found = _written(target.pieces[i], pieces)
            sequences |= {} if found is None else {i: found}
    return TokenTrie(sequences)


def _written(data: bytes, pieces: Mapping[bytes, int]) -> list[int] | None:
    """Returns the only sequence of pieces that makes up the data, or None.

    No piece begins with another one.
    """
    found, start = [], 0
    for end in range(1, len(data) + 1):
        if data[start:end] in pieces:
            found.append(pieces[data[start:end]])
            start = end
    return found if start == len(data) else None
