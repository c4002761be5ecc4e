"""The bytes that the tokens of a tokenizer spell, and the spelling of bytes in tokens.

See `shoal.constraints.token_bytes`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

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
        self.pieces, self.special, self.end, self.begin = (
            dict(pieces),
            dict(special or {}),
            end,
            tuple(begin),
        )
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
                neither byte-level BPE nor SentencePiece's pieces.
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
        made = Spelling(
            pieces,
            encode,
            special=special,
            begin=whole[:at],
            end=getattr(tokenizer, "eos_token_id", None),
            pads=pieces.get(plain[0], b"")[:1] == b" ",
            fallbacks=fallbacks,
        )
        if made.spelled(encode(PROBE)) not in (PROBE.encode(), b" " + PROBE.encode()):
            raise PairMismatch(
                f"the tokenizer of {name} cannot be compared with another one: it changes "
                f"texts, or its tokens do not spell them "
                "(it has neither byte-level BPE nor SentencePiece's pieces)"
            )
        return made

    def spelled(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes that tokens write, without special tokens."""
        return b"".join(self.pieces.get(i, b"") for i in ids)

    def tokens_of(self, spelled: bytes) -> Sequence[int]:
        """Returns all tokens that write these bytes.

        Ordinary tokens come first, then the tokens for single bytes, each by id.
        """
        return self._ids.get(spelled, ())

    def text(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of tokens that begin a document.

        The space that the tokenizer writes there is left out.
        """
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
            found = self.spelled(ids)
            if first and found == b" " + data:
                return ids
            if found not in (before + data, b" " + before + data):
                continue
            ends = list(accumulate(len(self.pieces[i]) for i in ids))
            cut = len(found) - len(data)
            if cut == 0:
                return ids
            if cut in ends:
                return ids[bisect_right(ends, cut) :]
        return self._by_longest(data)

    def _by_longest(self, data: bytes) -> list[int]:
        found: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            found += self._ids[data[at : at + size]][:1] if size else []
            at += size or 1
        return found

    def windows(self, tokens: Sequence[int], floor: int = 0) -> list[int]:
        """Returns the places in tokens from which they may be split anew with a text that follows.

        The places are the last two tokens that begin with white space, the earlier first, and then
        the end. They are among the last `WINDOW` tokens and not before `floor`.
        """
        found = [len(tokens)]
        for at in range(len(tokens) - 1, max(floor, len(tokens) - WINDOW) - 1, -1):
            piece = self.pieces.get(tokens[at])
            if piece is None or len(found) == 3:
                break
            if piece[:1].isspace():
                found.append(at)
        return found[::-1]


def _complete(data: bytes) -> int:
    """Returns the number of bytes before a character that is cut at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if size <= back else len(data) - back
    return len(data)
