"""Fill-in-the-middle prompts, in the special tokens that a tokenizer knows."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from shoal.errors import RequestError
from shoal.types.arguments import as_plain, encoded_inside, encoded_plain

TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, the bundled pair
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
"""The tokens before the prefix, before the suffix, and before the middle that the model writes; ""
= the middle follows the text without a token."""
SUFFIX_FIRST = ("<[fim-prefix]>", "[PREFIX]")
"""The first tokens of the families that read the suffix before the prefix."""
FILE_TOKENS = (
    ("<|repo_name|>", "<|file_sep|>"),
    ("<repo_name>", "<file_sep>"),
    ("<reponame>", "<filename>"),
    ("<|reponame|>", "<|filename|>"),  # Granite
)
"""The tokens before a repository's name and before each of its files, for models that have read
several files at once."""
PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<|file_separator|>", "[MIDDLE]")
"""The tokens that fill up, or end, middles that models were trained on."""
SUFFIX_SHARE = 4
"""The divisor of a prompt's tokens that gives the least share of a suffix, if the prompt does not
hold all (as in llama.cpp's server)."""
CHARACTERS = 16
"""The characters per token to look at where a text has to be cut: more than any text of words
has."""


@dataclass(frozen=True)
class MiddlePrompt:
    """A prompt whose continuation belongs between two texts.

    Attributes:
        ids: the ids of the prompt.
        end: the place in the ids where the text before the cursor ends: the place of alignment.
    """

    ids: tuple[int, ...]
    end: int


def middle_tokens(tokenizer: Any) -> tuple[str, str, str] | None:
    """Returns the tokens of `TOKENS` that a tokenizer knows; None if its model cannot fill in."""
    known = _numbers(tokenizer)
    return next((names for names in TOKENS if known.keys() >= {*names} - {""}), None)


def middle_ends(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens behind which no middle goes on: another part or file would begin."""
    return frozenset(_numbers(tokenizer).values())


def asks_for_middle(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Returns True if a prompt has all tokens of a family: somebody wrote its parts by hand."""
    middle = None if tokenizer is None else middle_tokens(tokenizer)
    if middle is None:
        return False
    known = _numbers(tokenizer)
    return all(known[name] in ids for name in middle if name)


_known: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], dict[str, int]]] = (
    weakref.WeakKeyDictionary()
)


def _numbers(tokenizer: Any) -> dict[str, int]:
    """Returns the tokens of this module that a tokenizer knows; its vocabulary is read once."""
    names = (*chain(*TOKENS, *FILE_TOKENS), *PADS)
    numbers = _known.setdefault(tokenizer, {})
    if names not in numbers:
        vocabulary = tokenizer.get_vocab()
        numbers[names] = {name: vocabulary[name] for name in names if name and name in vocabulary}
    return numbers[names]


def fill_in_middle(tokenizer: Any, prefix: str, suffix: str) -> list[int]:
    """Returns the ids of `middle_prompt`."""
    return list(middle_prompt(tokenizer, prefix, suffix).ids)


def middle_prompt(tokenizer: Any, prefix: str, suffix: str, before: str = "") -> MiddlePrompt:
    """Returns the prompt whose continuation belongs between prefix and suffix.

    Names of special tokens in these texts are text: a file about tokenizers is a file.
    The order is PSM (Bavarian et al. 2022), or that of `SUFFIX_FIRST`.

    Args:
        tokenizer: the target's.
        prefix: the text before the new one.
        suffix: the text behind the new one.
        before: text before the whole prompt, such as excerpts of other files.

    Raises:
        RequestError: the tokenizer has none of the `TOKENS`.
    """
    names = middle_tokens(tokenizer)
    if names is None:
        raise RequestError(
            "this tokenizer has no fill-in-the-middle tokens: the model cannot be asked for "
            "text before a suffix"
        )
    first, between, last = ([_numbers(tokenizer)[name]] if name else [] for name in names)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    prefix, suffix = as_plain(tokenizer, prefix), as_plain(tokenizer, suffix)
    context, left = encoded_plain(encode, before), encoded_plain(encode, prefix)
    right = encoded_inside(partial(encoded_plain, encode), suffix)
    start = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
    if names[0] in SUFFIX_FIRST:
        head, behind = [*start, *between, *right, *first, *context, *left], last
    else:
        head, behind = [*start, *context, *first, *left], [*between, *right, *last]
    return MiddlePrompt((*head, *behind), len(head))


def repository(tokenizer: Any, excerpts: Sequence[tuple[str, str]]) -> str:
    """Returns the text before a prompt, made of parts of other files with their names.

    The form is that of Qwen2.5-Coder (Hui et al. 2024, section 3).

    Args:
        tokenizer: the target's.
        excerpts: the name and the text of each part.
    """
    known = _numbers(tokenizer)
    file_names = next((names for names in FILE_TOKENS if known.keys() >= {*names}), None)
    if file_names is None:
        return "".join(f"{text}\n\n" for _, text in excerpts)
    excerpts = [(file, as_plain(tokenizer, text)) for file, text in excerpts]
    files = "".join(f"{file_names[1]}{file}\n{text}" for file, text in excerpts)
    return f"{file_names[0]}project\n{files}{file_names[1]}file\n"


def read_middles(
    prefixes: Any, suffixes: str | Sequence[str], tokenizer: Any
) -> tuple[list[tuple[str | None, tuple[int, ...]]], list[int]]:
    """Returns the prompts between texts, with their prefixes, and the ends of the prefixes.

    Args:
        prefixes: a text or texts.
        suffixes: one for all of them, or as many.
        tokenizer: the target's.

    Raises:
        RequestError: for any other type, without a tokenizer, and see `middle_prompt`.
    """
    texts = [prefixes] if isinstance(prefixes, str) else list(prefixes)
    behind = [suffixes] * len(texts) if isinstance(suffixes, str) else list(suffixes)
    if not texts or not all(isinstance(text, str) for text in (*texts, *behind)):
        raise RequestError(
            "suffix needs prompts that are texts, and is a text or one for each prompt"
        )
    if len(behind) != len(texts):
        raise RequestError(
            f"suffix must be one text or as many as prompts: there are {len(texts)} prompts and "
            f"{len(behind)} suffixes"
        )
    if tokenizer is None:
        raise RequestError("suffix needs a tokenizer, and this model was given none")
    made = [
        middle_prompt(tokenizer, prefix, suffix)
        for prefix, suffix in zip(texts, behind, strict=True)
    ]
    return [(text, one.ids) for text, one in zip(texts, made, strict=True)], [
        one.end for one in made
    ]


def nearest(tokenizer: Any, prefix: str, suffix: str, space: int) -> tuple[str, str]:
    """Returns an end of the prefix and a beginning of the suffix that fit into `space` tokens.

    If both do not fit, the suffix gets a quarter, or more if the prefix leaves it; whole lines are
    kept if there are any.
    """

    def tokens(text: str) -> int:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return len(encoded_plain(encode, as_plain(tokenizer, text)))

    prefix, suffix = prefix[-CHARACTERS * space :], suffix[: CHARACTERS * space]
    left, right = tokens(prefix), tokens(suffix)
    if left + right <= space:
        return prefix, suffix
    share = max(space // SUFFIX_SHARE, space - left)
    if right > share:
        fits = bisect_left(
            range(len(suffix)), True, key=lambda size: tokens(suffix[: size + 1]) > share
        )
        line = suffix.rfind("\n", 0, fits) + 1
        suffix = suffix[: line or fits]
    rest = space - tokens(suffix)
    if left > rest:
        cut = bisect_left(
            range(len(prefix)), True, key=lambda start: tokens(prefix[start:]) <= rest
        )
        line = prefix.find("\n", cut - 1 if cut else 0) + 1
        prefix = prefix[line or cut :]
    return prefix, suffix
