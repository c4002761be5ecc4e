"""Prompts and bad words, in all the forms that users give them -> token ids."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, Union

from shoal.errors import RequestError
from shoal.types.keyword_options import of_prompt
from shoal.values import plain, require_text

if TYPE_CHECKING:
    from torch import Tensor

# A name in quotes, so that commands that refuse their arguments do not wait for torch.
Prompts = Union[str, Iterable[str | SupportsIndex | Iterable[SupportsIndex]], "Tensor"]


def read_prompts(prompts: Prompts, tokenizer: Any) -> list[tuple[str | None, tuple[int, ...]]]:
    """Returns the text (None if it was not given as text) and the token ids of each prompt.

    Raises:
        RequestError: for any other type, and for a text without a tokenizer.
    """
    items: Sequence[Any] = [prompts] if isinstance(prompts, str) else plain(prompts)
    if isinstance(items, Sequence) and items and isinstance(items[0], int):
        items = [items]
    if not isinstance(items, Sequence) or not items:
        raise RequestError(
            f"prompts must be a text, texts or lists of token ids, at least one, got "
            f"{prompts!r:.200}"
        )
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
            raise RequestError(
                f"a prompt must be a text or a list of token ids, got {item!r:.200}"
            ) from None
    if tokenizer is None:
        raise RequestError("a text prompt needs a tokenizer, and this model was given none")
    require_text(item, "the prompt")
    return encoded(tokenizer, item)


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Returns the ids of a text that begins a document, with the tokenizer's special tokens.

    A text that already begins with BOS, as a chat template's does, gets no second one.
    """
    ids, bos = tuple(tokenizer.encode(text)), getattr(tokenizer, "bos_token_id", None)
    twice = bos is not None and ids[:2] == (bos, bos)
    if twice and tuple(tokenizer.encode(text, add_special_tokens=False))[: len(ids) - 1] == ids[1:]:
        return ids[1:]
    return ids


ANCHOR = "\n"
"""The text before a text inside a document: some tokenizers write a space before the first text."""


def encoded_inside(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Returns the ids of a text inside a document, without a space that a tokenizer adds.

    Args:
        encode: splits a text into tokens, without special ones around it.
    """
    before, whole = list(encode(ANCHOR)), list(encode(ANCHOR + text))
    if before and whole[: len(before)] == before:
        return whole[len(before) :]
    return list(encode(text))


def line_end(*texts: str) -> str:
    """Returns the end of most lines in the texts of a file: that of Windows, or a line feed."""
    windows, lines = (sum(text.count(end) for text in texts) for end in ("\r\n", "\n"))
    return "\r\n" if windows and 2 * windows >= lines else "\n"


def with_line_feeds(text: str) -> str:
    """Returns a text with line feeds for the ends of lines of Windows, as models know them."""
    return text.replace("\r\n", "\n")


def with_line_ends(text: str, end: str) -> str:
    """Returns a text whose lines end so; a carriage return belongs to a line's end."""
    return text.replace("\r", "").replace("\n", end)


MARK = "\ufdd0"
"""A character that no text has (Unicode keeps it for programs): tokens do not reach across it."""
CONTROL = re.compile(r"<[|｜].+[|｜]>|</?(?:fim|file|repo)[-_]?\w*>|<\[fim-\w+\]>", re.DOTALL)
"""The names of tokens that are controls of a model, though some tokenizers do not call them so."""
_names: weakref.WeakKeyDictionary[Any, re.Pattern[str]] = weakref.WeakKeyDictionary()


def special_names(tokenizer: Any) -> re.Pattern[str]:
    """Returns an expression of the names of special tokens, controls included."""
    if tokenizer not in _names:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {str(one) for one in added if one.special or CONTROL.fullmatch(str(one))}
        names |= set(getattr(tokenizer, "all_special_tokens", ()))
        longest = sorted(map(re.escape, filter(None, names)), key=len, reverse=True)
        _names[tokenizer] = re.compile("|".join(longest) or "(?!)")
    return _names[tokenizer]


def as_plain(tokenizer: Any, text: str) -> str:
    """Returns a text with a mark inside each name of a special token, for `encoded_plain`."""
    return special_names(tokenizer).sub(lambda found: found[0][:1] + MARK + found[0][1:], text)


def as_plain_within(tokenizer: Any, value: Any) -> Any:
    """Returns a copy of a JSON value with the marks of `as_plain` in its texts and names."""
    copy = [json.loads(json.dumps(value))]
    waiting: list[Any] = [copy]
    while waiting:  # however deep it is
        held = waiting.pop()
        pairs = list(held.items()) if isinstance(held, dict) else list(enumerate(held))
        if isinstance(held, dict):
            held.clear()
        for name, inner in pairs:
            name = as_plain(tokenizer, name) if isinstance(name, str) else name
            held[name] = as_plain(tokenizer, inner) if isinstance(inner, str) else inner
            if isinstance(inner, (dict, list)):
                waiting.append(inner)
    return copy[0]


def encoded_plain(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Returns the ids of a text in which marks keep names from being special tokens.

    Args:
        encode: splits a text into tokens, without special ones around it.
    """
    return _encoded_apart(encode, text.split(MARK))


def encoded_spelled(
    encode: Callable[[str], Sequence[int]], text: str, names: re.Pattern[str]
) -> list[int]:
    """Returns the ids of a text that may have any characters, with names spelled by other tokens.

    Args:
        encode: splits a text into tokens, without special ones around it.
        names: an expression of the names, see `special_names`.
    """
    cuts = [found.start() + 1 for found in names.finditer(text)]
    return _encoded_apart(encode, [text[a:b] for a, b in pairwise([0, *cuts, len(text)])])


def _encoded_apart(encode: Callable[[str], Sequence[int]], parts: Sequence[str]) -> list[int]:
    """Returns the ids of the parts of a text; no token reaches across two of them."""
    first, *others = parts
    return [*encode(first), *(token for part in others for token in encoded_inside(encode, part))]


def chat_template_of(tokenizer: Any, *, tools: bool = False) -> str | None:
    """Returns the chat template of a tokenizer; None if it has none.

    Of several templates it returns the one for tools, or else the default, as in Transformers.

    Args:
        tools: True if the chat has tools.

    Raises:
        RequestError: there are several templates and none of them is the default.
    """
    own = getattr(tokenizer, "chat_template", None)
    if not isinstance(own, Mapping):
        return own or None
    name = "tool_use" if tools and "tool_use" in own else "default"
    if name not in own:
        names = ", ".join(sorted(own))
        raise RequestError(
            f"this model has the chat templates {names} and no default: name or give one"
        )
    return str(own[name])


def with_token_ids(options: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns the options, with token ids in place of texts in `bad_words`, `negative_prompt`."""
    negative = options.get("negative_prompt")
    if isinstance(negative, str):
        options = {**options, "negative_prompt": _ids(negative, tokenizer)}
    words = plain(options.get("bad_words"))
    words = [words] if isinstance(words, str) else words
    if not isinstance(words, Sequence) or not any(isinstance(word, str) for word in words):
        return {**options, "bad_words": words} if "bad_words" in options else dict(options)
    spelled = [
        ids
        for word in words
        for ids in (_spellings(word, tokenizer) if isinstance(word, str) else [word])
    ]
    return {**options, "bad_words": spelled}


def _spellings(word: str, tokenizer: Any) -> list[list[int]]:
    """Returns a word's ids, without and with a space before it."""
    if tokenizer is None:
        raise RequestError(
            "bad_words that are texts need a tokenizer, and this model was given none"
        )
    require_text(word, "a bad word")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return [encoded_inside(encode, text) for text in (word, f" {word}")]
