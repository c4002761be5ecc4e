"""The tokenizers of `shoal.testing`, each made once, with scripted models over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from shoal.api import Shoal
from shoal.constraints.token_bytes import fallback, token_bytes
from shoal.testing import large_tokenizer, sentence_piece_tokenizer, tagged_tokenizer
from shoal.testing.scripted import History, adversary, hashed, mixed, says, scripted

KINDS: dict[str, Callable[[], Any]] = {
    "llama": sentence_piece_tokenizer,
    "gemma": partial(sentence_piece_tokenizer, "gemma"),
    "unigram": partial(sentence_piece_tokenizer, "unigram"),
    "tagged": tagged_tokenizer,
    "large": large_tokenizer,
}
SMALL = ("llama", "gemma", "unigram", "tagged")
PIECES = ("llama", "gemma", "unigram")


@cache
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


def plain(kind: str, text: str) -> tuple[int, ...]:
    """The ids of a text without special tokens around it."""
    return tuple(tokenizer(kind).encode(text, add_special_tokens=False))


def written(kind: str, ids: Sequence[int]) -> str:
    """The text of ids, as Transformers decodes it."""
    found = tokenizer(kind).decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(found)


def saying(kind: str, prompt: Sequence[int], ids: Sequence[int]) -> Shoal:
    """A pair whose target goes on from a prompt with these ids, then ends; its drafter is right now and then."""
    size, end = len(tokenizer(kind)), tokenizer(kind).eos_token_id
    script = says([(*prompt, *ids, end)], size, otherwise=end)
    return shoal(kind, script, mixed(script, adversary(script, size), every=3))


def chatty(kind: str, seed: int = 0) -> Shoal:
    """A pair that says any tokens but those of bytes, which it says where a grammar leaves no choice; it mostly agrees."""
    size = len(tokenizer(kind))
    names = tokenizer(kind).convert_ids_to_tokens(range(size))
    pairs = zip(token_bytes(tokenizer(kind)), names, strict=True)
    odd = torch.tensor([0.0 if _whole(raw) and not fallback(name) else 40.0 for raw, name in pairs])
    said, drafted = (hashed(size, each, spread=3.0) for each in (seed, seed + 1))
    script: History = lambda ids: said(ids) - odd  # noqa: E731
    return shoal(kind, script, mixed(script, lambda ids: drafted(ids) - odd, every=3))


def _whole(raw: bytes | None) -> bool:
    try:
        return bool((raw or b"").decode())
    except UnicodeDecodeError:
        return False


def shoal(kind: str, target: History, drafter: History) -> Shoal:
    size = len(tokenizer(kind))
    made = Shoal(scripted(target, size), scripted(drafter, size), tokenizer(kind), max_batch=8)
    made.eos = (tokenizer(kind).eos_token_id,)
    return made
