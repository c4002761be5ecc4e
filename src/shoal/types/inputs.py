"""Prompts and bad words, in all the forms that users give them -> token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from torch import Tensor

from shoal.config import plain, require_text
from shoal.errors import RequestError
from shoal.types.options import of_prompt

Prompts = str | Iterable[str | SupportsIndex | Iterable[SupportsIndex]] | Tensor


def read_prompts(prompts: Prompts, tokenizer: Any) -> list[tuple[str | None, tuple[int, ...]]]:
    """The text, if it was given as text, and the token ids of each prompt.

    Raises:
        RequestError: for anything else, and for a text without a tokenizer.
    """
    items: Sequence[Any] = [prompts] if isinstance(prompts, str) else plain(prompts)
    if isinstance(items, Sequence) and items and isinstance(items[0], int):
        items = [items]
    if not isinstance(items, Sequence) or not items:
        raise RequestError(f"prompts must be a text, texts or lists of token ids, at least one, got {prompts!r:.200}")
    found = []
    for place, item in enumerate(items):
        with of_prompt(place, len(items)):
            found.append((item if isinstance(item, str) else None, _ids(item, tokenizer)))
    return found


def _ids(item: Any, tokenizer: Any) -> tuple[int, ...]:
    if not isinstance(item, str):
        if isinstance(item, (bytes, bytearray)):  # a sequence of integers that are not token ids
            raise RequestError(f"a prompt must be a text or a list of token ids, got {item!r:.80}")
        try:
            return tuple(index(token) for token in item)
        except TypeError:
            raise RequestError(f"a prompt must be a text or a list of token ids, got {item!r:.200}") from None
    if tokenizer is None:
        raise RequestError("a text prompt needs a tokenizer, and this model was given none")
    require_text(item, "the prompt")
    return tuple(tokenizer.encode(item))


def with_bad_words(options: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The options, with those `bad_words` that are texts replaced by their token ids."""
    words = plain(options.get("bad_words"))
    words = [words] if isinstance(words, str) else words
    if not isinstance(words, Sequence) or not any(isinstance(word, str) for word in words):
        return {**options, "bad_words": words} if "bad_words" in options else dict(options)
    spelled = [ids for word in words for ids in (_spellings(word, tokenizer) if isinstance(word, str) else [word])]
    return {**options, "bad_words": spelled}


def _spellings(word: str, tokenizer: Any) -> list[list[int]]:
    """A word's ids, without and with a space before it."""
    if tokenizer is None:
        raise RequestError("bad_words that are texts need a tokenizer, and this model was given none")
    require_text(word, "a bad word")
    return [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]
