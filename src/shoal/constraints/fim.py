"""Fill-in-the-middle prompts, in the special tokens that a tokenizer knows."""

from __future__ import annotations

from typing import Any

from shoal.errors import RequestError

TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, the bundled pair
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""What stands before the prefix, before the suffix, and before the middle that the model writes."""


def middle_tokens(tokenizer: Any) -> tuple[str, str, str] | None:
    """Those of the `TOKENS` that a tokenizer knows; None: its model was not trained to fill in."""
    vocabulary = tokenizer.get_vocab()
    return next((tokens for tokens in TOKENS if all(token in vocabulary for token in tokens)), None)


def fill_in_middle(tokenizer: Any, prefix: str, suffix: str) -> list[int]:
    """The ids of a prompt whose continuation belongs between prefix and suffix (Bavarian et al. 2022, PSM order).

    Raises:
        RequestError: if the tokenizer has none of the `TOKENS`.
    """
    found = middle_tokens(tokenizer)
    if found is None:
        raise RequestError(
            "this tokenizer has no fill-in-the-middle tokens: the model cannot be asked for text before a suffix"
        )
    vocabulary = tokenizer.get_vocab()
    before, between, after = (vocabulary[token] for token in found)
    start = _start(tokenizer)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    return [*start, before, *texts[0], between, *texts[1], after]


def prefix_end(tokenizer: Any, prefix: str) -> int:
    """Where the prefix ends in the ids of `fill_in_middle`: the place at which a prompt with a suffix is aligned."""
    return len(_start(tokenizer)) + 1 + len(tokenizer.encode(prefix, add_special_tokens=False))


def _start(tokenizer: Any) -> list[int]:
    return [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
