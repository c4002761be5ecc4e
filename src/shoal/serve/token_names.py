"""Names and bytes of single tokens."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

BROKEN = "\ufffd"
"""What tokenizers decode a part of a character to."""


@lru_cache(2**16)
def name_and_bytes(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    r"""A token's name, and its bytes in a text; None if the tokenizer does not have them.

    The name is its text, spaces and special tokens included; for a part of a character, as OpenAI writes it, "bytes:\xe2\x82".
    """
    text = _decoded(tokenizer, token)
    if BROKEN not in text:
        return text, text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    raw = None if piece is None else _bytes(piece)
    return (text, None) if raw is None else ("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _decoded(tokenizer: Any, token: int) -> str:
    """The text of a token after another one: some tokenizers remove the space at the beginning of a text."""
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def _bytes(piece: str) -> bytes | None:
    """The bytes of a token as byte-level BPE or byte fallback writes it."""
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
