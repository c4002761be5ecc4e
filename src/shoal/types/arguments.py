"""The arguments of `generate` and `stream`: keyword options, prompts and bad words.

The options have their types here, and the settings they belong to. Prompts and bad words become
token ids, from all the forms that users give them in.
"""

from __future__ import annotations

import difflib
import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, TypedDict, Union

from shoal.config import GUIDES_PROMPTS, Grammar, Limits, Sampling, Speculation
from shoal.errors import RequestError
from shoal.values import plain, require_text

if TYPE_CHECKING:
    from torch import Tensor


Number = float | SupportsFloat
"""A number; NumPy numbers and tensors of one element are included."""
Integer = int | SupportsIndex

SETTINGS: dict[str, type[Sampling] | type[Limits] | type[Speculation]] = {
    "sampling": Sampling,
    "limits": Limits,
    "speculation": Speculation,
}


class Options(TypedDict, total=False):
    """The fields of `Sampling`, `Limits` and `Speculation` by name, or these objects as a whole.

    A field that is not given has its default. `tests/engine/test_library.py` checks that no field
    is missing here.
    """

    temperature: Number
    top_k: Integer
    top_p: Number
    min_p: Number
    typical_p: Number
    guidance: Number
    plausibility: Number
    posterior: Number
    repetition_penalty: Number
    presence_penalty: Number
    frequency_penalty: Number
    logit_bias: Mapping[int, float] | Mapping[Any, Number]
    bad_words: Sequence[Sequence[int]] | str | Iterable[str | Iterable[Integer]]
    negative_prompt: Sequence[int] | str | Iterable[Integer]
    positive_prompt: Sequence[int] | str | Iterable[Integer]
    min_new_tokens: Integer
    no_repeat_ngram: Integer
    processors: Sequence[Any] | Iterable[Any]
    grammar: Grammar | None
    seed: Integer | None
    max_new_tokens: Integer
    stop: Sequence[str] | str | Iterable[str]
    eos: Sequence[int] | Integer | Iterable[Integer] | None
    time_budget: Number | None
    lookahead: Any
    rule: str
    sampling: Sampling | Iterable[Sampling | None] | None
    limits: Limits | Iterable[Limits | None] | None
    speculation: Speculation | None


def split_options(options: Mapping[str, Any]) -> tuple[Sampling, Limits, Speculation]:
    """Returns the three settings that the keyword options make.

    A setting given as a whole (`sampling=Sampling(...)`) is taken as it is.

    Raises:
        RequestError: for an unknown name (with the nearest known one), a value out of range, or a
            field of a setting that is given as a whole.
    """
    known = [*SETTINGS, *(f.name for cls in SETTINGS.values() for f in fields(cls))]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; known options: {', '.join(sorted(known))}"
            )
            raise RequestError(f"unknown option {name!r}{hint}")
    sampling, limits, speculation = (_setting(name, cls, options) for name, cls in SETTINGS.items())
    return sampling, limits, speculation


def split_for_each(
    options: Mapping[str, Any], prompts: int
) -> tuple[list[Sampling], list[Limits], Speculation]:
    """Returns the settings for several prompts.

    `sampling` and `limits` may be lists with one setting for each prompt; see `split_options`.

    Args:
        prompts: the number of prompts.

    Raises:
        RequestError: an error of `split_options`, or the number of settings is not the number of
            prompts. The error of an entry names its prompt.
    """
    listed = {
        name: list_of(name, options[name], prompts)
        for name in ("sampling", "limits")
        if _is_list(options.get(name))
    }
    common = {name: value for name, value in options.items() if name not in listed}
    settings = []
    for place in range(prompts if listed else 1):
        with of_prompt(place, prompts):
            settings.append(
                split_options(common | {name: entries[place] for name, entries in listed.items()})
            )
    settings *= 1 if listed else prompts
    return (
        [sampling for sampling, _, _ in settings],
        [limits for _, limits, _ in settings],
        settings[0][2],
    )


def list_of(name: str, values: Iterable[Any], prompts: int) -> list[Any]:
    """Returns the values as a list. Raises RequestError: there is not one value for each prompt."""
    items = list(values)
    if len(items) != prompts:
        raise RequestError(
            f"{name}= has {len(items)} entries for {prompts} prompts: give one for each, or one "
            f"for all"
        )
    return items


@contextmanager
def of_prompt(place: int, prompts: int) -> Iterator[None]:
    """Names the prompt in the errors of a request, if there are several prompts.

    Args:
        place: the place of the prompt among all, from 0.
        prompts: the number of prompts.
    """
    try:
        yield
    except RequestError as error:
        if prompts == 1:
            raise
        raise RequestError(f"prompt {place + 1} of {prompts}: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _setting(name: str, cls: Any, options: Mapping[str, Any]) -> Any:
    whole = options.get(name)
    own = {f.name: options[f.name] for f in fields(cls) if f.name in options}
    if whole is None:
        return cls(**own)
    if not isinstance(whole, cls):
        raise RequestError(f"{name} must be a shoal.{cls.__name__}, got {whole!r:.80}")
    if own:
        raise RequestError(
            f"{' and '.join(own)} given beside {name}=, which has that already: put it into "
            f"shoal.{cls.__name__}"
        )
    return whole


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
    pairs = []
    for place, item in enumerate(items):
        with of_prompt(place, len(items)):
            pairs.append((item if isinstance(item, str) else None, _ids(item, tokenizer)))
    return pairs


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
    """Returns a text with these line ends; a carriage return belongs to a line's end."""
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
    return special_names(tokenizer).sub(lambda match: match[0][:1] + MARK + match[0][1:], text)


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
    cuts = [match.start() + 1 for match in names.finditer(text)]
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
    """Returns the options, with token ids in place of texts in `bad_words` and guides' prompts."""
    texts = {name: options.get(name) for name in GUIDES_PROMPTS.values()}
    spelled = {name: _ids(text, tokenizer) for name, text in texts.items() if isinstance(text, str)}
    options = {**options, **spelled}
    words = plain(options.get("bad_words"))
    words = [words] if isinstance(words, str) else words
    if not isinstance(words, Sequence) or not any(isinstance(word, str) for word in words):
        return {**options, "bad_words": words} if "bad_words" in options else dict(options)
    bad = [
        ids
        for word in words
        for ids in (_spellings(word, tokenizer) if isinstance(word, str) else [word])
    ]
    return {**options, "bad_words": bad}


def _spellings(word: str, tokenizer: Any) -> list[list[int]]:
    """Returns a word's ids, without and with a space before it."""
    if tokenizer is None:
        raise RequestError(
            "bad_words that are texts need a tokenizer, and this model was given none"
        )
    require_text(word, "a bad word")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return [encoded_inside(encode, text) for text in (word, f" {word}")]
