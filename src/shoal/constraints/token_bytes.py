"""The bytes of a tokenizer's tokens."""

from __future__ import annotations

import re
import weakref
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_known: weakref.WeakKeyDictionary[Any, list[bytes | None]] = weakref.WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """The bytes of every token by its id; None for special tokens, which are no text. Made once for a tokenizer."""
    if tokenizer not in _known:
        special = set(tokenizer.all_special_ids)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        spelled = _of_byte_level if byte_level else _of_pieces
        _known[tokenizer] = [None if i in special or t is None else spelled(t) for i, t in enumerate(tokens)]
    return _known[tokenizer]


def _of_byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


def _of_pieces(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2): itself if it is printable."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}
