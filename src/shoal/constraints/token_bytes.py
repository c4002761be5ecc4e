"""The bytes that the tokens of a tokenizer write.

"Ġthe" of byte-level BPE and "▁the" of SentencePiece are both b" the", "<0x0A>" is a line feed.
Special tokens write nothing.
"""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

_known: weakref.WeakKeyDictionary[Any, tuple[bytes | None, ...]] = weakref.WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> tuple[bytes | None, ...]:
    """Returns the bytes of every token by its id, made once.

    Tokens that write nothing, and ids without a token, have None. Tokens that were added to a
    vocabulary go through the decoder as others do: Gemma's run of "▁▁" is two spaces. Letters that
    byte-level BPE does not have stand for themselves.
    """
    if tokenizer not in _known:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        always = set(getattr(tokenizer, "all_special_ids", ()))
        read = byte_level if has_byte_level(tokenizer) else sentence_piece
        pieces = tokenizer.get_vocab()
        spelled: list[bytes | None] = [None] * (max(pieces.values(), default=-1) + 1)
        for piece, i in pieces.items():
            if i not in always and not (i in added and added[i].special):
                spelled[i] = read(piece) or (piece.encode() if i in added else b"") or None
        _known[tokenizer] = tuple(spelled)
    return _known[tokenizer]


def bytes_at(table: Sequence[bytes | None], token: int) -> bytes | None:
    """Returns the bytes of a token by a table of `token_bytes`; None for ids behind the table."""
    return table[token] if token < len(table) else None


def decode(written: bytes) -> tuple[str, bytes] | None:
    """Returns the text of bytes, and the bytes of a last character that is not complete.

    None: the bytes do not begin any text in UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(written), decoder.getstate()[0]
    except UnicodeDecodeError:
        return None


def has_byte_level(tokenizer: Any) -> bool:
    """Returns True if a fast tokenizer's decoder reads the letters of byte-level BPE."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def fallback(piece: str) -> bytes | None:
    """Returns the byte of a token of SentencePiece's byte fallback; None for other tokens."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(match[1]) if match else None


def sentence_piece(piece: str) -> bytes:
    """Returns the bytes of one of SentencePiece's pieces."""
    byte = fallback(piece)
    return piece.replace("▁", " ").encode() if byte is None else byte


def byte_level(piece: str) -> bytes:
    """Returns the bytes of a token of byte-level BPE; empty if it has other letters."""
    letters = byte_letters()
    if all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return b""


@cache
def byte_letters() -> dict[str, int]:
    """Returns the letters of byte-level BPE with their bytes.

    Printable bytes stand for themselves, the others follow from U+0100 on (GPT-2's encoder).
    """
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
