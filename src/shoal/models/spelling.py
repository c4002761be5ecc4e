"""The bytes that the tokens of a tokenizer spell, and the spelling of bytes in tokens.

See `shoal.constraints.token_bytes`.

The tokens of a target as sequences of a drafter's tokens, for drafters of bytes or characters.

No token of such a drafter begins with another one, so there is one sequence of them for each text.
The sequences of all of the target's tokens form a trie. The drafter's distributions of its next
tokens give the probability that it writes the bytes of a token of the target: psi of string-level
rejection sampling (Timor et al. 2025, arXiv 2502.05202, Algorithm 3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.constraints.token_bytes import fallback, has_byte_level, token_bytes
from shoal.errors import PairMismatch

PROBE = 'def f(x):\n    return x ** 2  # 10 %, I\'m 3.14\n\n\t<b>"ok"</b>'
"""A text that every tokenizer must split without loss."""
ANCHOR = "\n"
"""The text before a text that does not begin a document.

Some tokenizers write a space at the beginning of a text.
"""
WINDOW = 10
"""The largest number of tokens before a new piece of text that may be split anew with it."""


class Spelling:
    """The tokens of a vocabulary as bytes.

    Args:
        encode: the function that splits a text into tokens.
        pads: True if the tokenizer writes a space before a text.
        fallbacks: the tokens that stand for a byte for which there is no other token.

    Attributes:
        pieces: the bytes of each token that writes any, by id.
        special: the names of the tokens that write no bytes, by id.
        end: the id of the token that ends a text, or None.
        begin: the ids that the tokenizer writes before a text.
    """

    def __init__(
        self,
        pieces: Mapping[int, bytes],
        encode: Callable[[str], Sequence[int]],
        *,
        special: Mapping[int, str] | None = None,
        end: int | None = None,
        begin: Sequence[int] = (),
        pads: bool = False,
        fallbacks: Collection[int] = (),
    ) -> None:
        self.pieces = dict(pieces)
        self.special = dict(special or {})
        self.end = end
        self.begin = tuple(begin)
        self._encode, self._pads = encode, pads
        self._ids: dict[bytes, list[int]] = {}
        for i in sorted(self.pieces, key=lambda i: (i in fallbacks, i)):
            self._ids.setdefault(self.pieces[i], []).append(i)
        self._longest = max(map(len, self._ids), default=0)

    @staticmethod
    def of(tokenizer: Any, name: str) -> Spelling:
        """Returns the spelling of a Transformers tokenizer.

        Args:
            name: the name of the tokenizer's model.

        Raises:
            PairMismatch: the tokenizer changes texts, or its tokens do not spell them: it has
                neither byte-level BPE nor SentencePiece's pieces. One that lacks some characters
                writes the others.
        """
        added = {
            i: (str(token), token.special)
            for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        always = set(getattr(tokenizer, "all_special_ids", ()))
        special = {i: text for i, (text, is_special) in added.items() if is_special or i in always}
        pieces = {i: piece for i, piece in enumerate(token_bytes(tokenizer)) if piece is not None}
        byte_tokens = () if has_byte_level(tokenizer) else tokenizer.get_vocab().items()
        fallbacks = {i for piece, i in byte_tokens if i in pieces and fallback(piece) is not None}

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        plain, whole = encode("a"), list(tokenizer.encode("a"))
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        spelling = Spelling(
            pieces,
            encode,
            special=special,
            begin=whole[:at],
            end=getattr(tokenizer, "eos_token_id", None),
            pads=pieces.get(plain[0], b"")[:1] == b" ",
            fallbacks=fallbacks,
        )
        if not spelling.spells(encode(PROBE), PROBE.encode()):
            raise PairMismatch(
                f"the tokenizer of {name} cannot be compared with another one: it changes texts, "
                "or its tokens do not spell them (it has neither byte-level BPE nor "
                "SentencePiece's pieces)"
            )
        return spelling

    def spelled(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes that tokens write, without special tokens."""
        return b"".join(self.pieces.get(i, b"") for i in ids)

    def spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Returns True if tokens write these ASCII bytes, save for those that no piece has.

        They may write a space before them. Pieces must have a space, and half of the bytes.
        """
        bytes_of_pieces = set(b"".join(self.pieces.values()))
        spellable = bytes(byte for byte in data if byte in bytes_of_pieces)
        usable = ord(" ") in bytes_of_pieces and 2 * len(spellable) >= len(data)
        return usable and self.spelled(ids) in (spellable, b" " + spellable)

    def tokens_of(self, spelled: bytes) -> Sequence[int]:
        """Returns all tokens that write these bytes.

        Ordinary tokens come first, then the tokens for single bytes, each by id.
        """
        return self._ids.get(spelled, ())

    def text(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of tokens that begin a document, without the tokenizer's own space."""
        spelled = self.spelled(ids)
        return spelled[1:] if self._pads and spelled.startswith(b" ") else spelled

    def ids(self, data: bytes, *, first: bool = False) -> list[int]:
        """Returns tokens that spell the bytes, as the tokenizer splits them.

        Characters that are cut at an end are spelled by the longest pieces. Bytes that no piece
        spells are left out.

        Args:
            first: True if the bytes begin a document.
        """
        start = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), len(data[:4]))
        stop = _complete(data)
        if start >= stop:
            return self._by_longest(data)
        return [
            *self._by_longest(data[:start]),
            *self._whole(data[start:stop], first),
            *self._by_longest(data[stop:]),
        ]

    def _whole(self, data: bytes, first: bool) -> list[int]:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._by_longest(data)
        for anchor in ("", ANCHOR):
            ids = list(self._encode(anchor + text))
            if any(i not in self.pieces for i in ids):
                continue
            before = anchor.encode()
            spelling = self.spelled(ids)
            if first and spelling == b" " + data:
                return ids
            if spelling not in (before + data, b" " + before + data):
                continue
            ends = list(accumulate(len(self.pieces[i]) for i in ids))
            cut = len(spelling) - len(data)
            if cut == 0:
                return ids
            if cut in ends:
                return ids[bisect_right(ends, cut) :]
        return self._by_longest(data)

    def _by_longest(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            ids += self._ids[data[at : at + size]][:1] if size else []
            at += size or 1
        return ids

    def windows(self, tokens: Sequence[int], floor: int = 0) -> list[int]:
        """Returns the places in tokens from which they may be split anew with a text that follows.

        The places are the last two tokens that begin with white space, the earlier first, and then
        the end. They are among the last `WINDOW` tokens and not before `floor`.
        """
        sizes = [len(tokens)]
        for at in range(len(tokens) - 1, max(floor, len(tokens) - WINDOW) - 1, -1):
            piece = self.pieces.get(tokens[at])
            if piece is None or len(sizes) == 3:
                break
            if piece[:1].isspace():
                sizes.append(at)
        return sizes[::-1]


def _complete(data: bytes) -> int:
    """Returns the number of bytes before a character that is cut at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if size <= back else len(data) - back
    return len(data)


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
        return self.first[nodes + 1] > self.first[nodes]


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
            ids = _ids_for(target.pieces[i], pieces)
            sequences |= {} if ids is None else {i: ids}
    return TokenTrie(sequences)


def _ids_for(data: bytes, pieces: Mapping[bytes, int]) -> list[int] | None:
    """Returns the only sequence of pieces that makes up the data, or None.

    No piece begins with another one.
    """
    ids, start = [], 0
    for end in range(1, len(data) + 1):
        if data[start:end] in pieces:
            ids.append(pieces[data[start:end]])
            start = end
    return ids if start == len(data) else None
