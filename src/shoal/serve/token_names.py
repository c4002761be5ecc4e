"""Tokens by themselves: their bytes, and a name for each."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

BROKEN = "\ufffd"
"""What tokenizers show for a piece of a character."""


@lru_cache(2**16)
def name_and_bytes(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    r"""A token's name, and its bytes in a text; None where the tokenizer does not tell them.

    The name is its text, spaces and special tokens included; for a piece of a character, as OpenAI writes it, "bytes:\xe2\x82".
    """
    text = _decoded(tokenizer, token)
    if BROKEN not in text:
        return text, text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    raw = None if piece is None else _bytes(piece)
    return (text, None) if raw is None else ("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _decoded(tokenizer: Any, token: int) -> str:
    """Text of a token after another: some tokenizers drop the space with which a text begins."""
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def _bytes(piece: str) -> bytes | None:
    """Of a piece as byte-level BPE or byte fallback writes it."""
    if fallback := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(fallback[1])
    known = _byte_letters()
    return bytes(known[letter] for letter in piece) if all(letter in known for letter in piece) else None


@cache
def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's letters: printable bytes stand for themselves, the others follow from U+0100 on (GPT-2's encoder)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
