"""The tokens of a target as a drafter writes them that has bytes, or characters, only.

No token of such a drafter begins with another one, so that there is one sequence of them for each
text. The sequences of all of the target's tokens form a trie: what the drafter says of its next
tokens gives the probability that it writes the bytes of a token of the target, psi of string-level
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
"""Most tokens of the drafter for one of the target's: longer ones are never proposed."""


@dataclass
class _Node:
    symbol: int = -1
    token: int = -1
    children: dict[int, _Node] = field(default_factory=dict)


class TokenTrie:
    """Nodes are numbered from the root, 0, by depth; the children of a node follow each other.

    Args:
        sequences: the drafter's ids for each token of the target that it can write, by the target's
            id.

    Attributes:
        first: the children of node v are the nodes first[v] up to first[v + 1], [nodes + 1] int64.
        symbols: [nodes] int64, the drafter's id that leads to each.
        tokens: [nodes] int64, the target's that ends there, or -1.
        above: [nodes] int64, the last token of the target that ends before a node's children, the
            node's own included, or -1.
        sequences: as given.
    """

    def __init__(self, sequences: Mapping[int, Sequence[int]]) -> None:
        self.sequences = {
            token: tuple(ids) for token, ids in sequences.items() if 0 < len(ids) <= MOST_DEPTH
        }
        root = _Node()
        for token, ids in sorted(self.sequences.items()):
            node = root
            for symbol in ids:
                node = node.children.setdefault(symbol, _Node(symbol))
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
        """The numbers of a node's children."""
        return np.arange(self.first[node], self.first[node + 1])

    def inner(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these nodes have children."""
        found: npt.NDArray[np.bool_] = self.first[nodes + 1] > self.first[nodes]
        return found


def token_trie(
    target: Spelling, draft: Spelling, same: Mapping[int, int], target_size: int, draft_size: int
) -> TokenTrie | None:
    """The trie of two vocabularies; None where some token of the drafter begins with another one.

    Args:
        same: special tokens of the target and the drafter's ids of them. Sizes: ids that each model
            has.
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
    """The only sequence of pieces, none of which begins with another one, that makes up the
    data."""
    found, start = [], 0
    for end in range(1, len(data) + 1):
        if data[start:end] in pieces:
            found.append(pieces[data[start:end]])
            start = end
    return found if start == len(data) else None
