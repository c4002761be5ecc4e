"""The names and bytes of single tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from shoal.constraints.token_bytes import byte_letters, fallback

BROKEN = "\ufffd"
"""The text to which tokenizers decode a part of a character."""


@lru_cache(2**16)
def name_and_bytes(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    r"""Returns a token's name, and its bytes in a text; None if the tokenizer does not have them.

    The name is its text, spaces and special tokens included; for a part of a character, as OpenAI
    writes it, "bytes:\xe2\x82"; for an id without a text, as vLLM writes it, "token_id:7".
    """
    text = _decoded(tokenizer, token)
    if not text:
        return f"token_id:{token}", b""
    if BROKEN not in text:
        return text, text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    raw = None if piece is None else _bytes(piece)
    return (
        (text, None) if raw is None else ("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)
    )


def _decoded(tokenizer: Any, token: int) -> str:
    """Returns the text of a token after another one.

    Some tokenizers remove the space at the beginning of a text.
    """
    once, twice = (
        str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False))
        for times in (1, 2)
    )
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def _bytes(piece: str) -> bytes | None:
    """Returns the bytes of a token as byte-level BPE or byte fallback writes it."""
    byte, known = fallback(piece), byte_letters()
    if byte is not None:
        return byte
    return (
        bytes(known[letter] for letter in piece)
        if all(letter in known for letter in piece)
        else None
    )
