"""Filters: sets of texts that are combined by & (and), | (or) and ~ (not), as a constraint on all
of the new text.

A filter is about text, never about single tokens: words and letters may be divided among tokens in
any way. llguidance (the extra `grammar`) walks the bytes of the vocabulary along the states of the
filter's automaton, which it keeps; a token may follow if some text of the set begins with the text
up to this token, and the text may end if it is in the set. The boolean filters of Constrained Text
Generation Studio (Roush et al. 2022, arXiv 2306.15926) look at tokens one by one instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from shoal.config import Grammar
from shoal.errors import RequestError

_ANY = "/(?s:.*)/"


@dataclass(frozen=True)
class Filter:
    """A set of texts.

    Attributes:
        expression: the set as an expression over terminals in Lark's syntax, as llguidance reads
            it.
        name: the name in messages.
    """

    expression: str
    name: str

    def __and__(self, other: Filter) -> Filter:
        return Filter(f"({self.expression} & {other.expression})", f"({self.name} & {other.name})")

    def __or__(self, other: Filter) -> Filter:
        return Filter(f"({self.expression} | {other.expression})", f"({self.name} | {other.name})")

    def __invert__(self) -> Filter:
        # The complement is one of byte strings; strings that are no text are left out.
        return Filter(f"({_ANY} & ~{self.expression})", f"~{self.name}")

    def __repr__(self) -> str:
        return self.name

    @property
    def grammar(self) -> Grammar:
        """The set as a grammar.

        Its `text` is the value that `grammar` takes over HTTP with the type "lark".
        """
        return Grammar("lark", f"start: TEXT\nTEXT: {self.expression}")


def without(*texts: str, ignore_case: bool = False) -> Filter:
    """Returns the texts that contain none of these letters, words or phrases.

    Raises:
        RequestError: no texts are given, or an empty one.
    """
    return Filter((~_containing(texts, ignore_case)).expression, _call("without", texts))


def containing(*texts: str, ignore_case: bool = False) -> Filter:
    """Returns the texts that contain at least one of these.

    Raises:
        RequestError: no texts are given, or an empty one.
    """
    return _containing(texts, ignore_case)


def only_words(words: Iterable[str], separators: str = " \n\t.,;:!?") -> Filter:
    """Returns the texts made of these words, with one separator or more between two.

    Separators may also stand at both ends.

    Raises:
        RequestError: there are no words, or an empty one, or no separators.
    """
    words = _texts(sorted(set(words)), "words")
    between = f"[{_escape(_texts([separators], 'separators')[0])}]"
    word = _trie(words)
    expression = f"/{between}*({word}({between}+{word})*{between}*)?/"
    return Filter(expression, _call("only_words", words))


def only_characters(characters: str) -> Filter:
    """Returns the texts of these characters. Raises RequestError: there are no characters."""
    return Filter(
        f"/[{_escape(_texts([characters], 'characters')[0])}]*/",
        _call("only_characters", [characters]),
    )


def matching(regex: str) -> Filter:
    """Returns the texts that a regular expression matches as a whole.

    Args:
        regex: the expression, in Rust's syntax.

    Raises:
        RequestError: it is empty.
    """
    (own,) = _texts([regex], "an expression")
    return Filter(f"/{_without_slashes(own)}/", _call("matching", [own]))


def conjunction(filters: Sequence[Filter]) -> Filter:
    """Returns the texts that are in all the filters, at least one."""
    return reduce(Filter.__and__, filters)


def _containing(texts: Sequence[str], ignore_case: bool) -> Filter:
    pattern = "|".join(map(_escape, _texts(list(texts), "texts")))
    return Filter(
        f"/(?s:.*)(?{'i' if ignore_case else ''}:{pattern})(?s:.*)/", _call("containing", texts)
    )


def _trie(words: Sequence[str]) -> str:
    """Returns an expression for words in their order; common beginnings are written once."""
    ends, rests = False, dict[str, list[str]]()
    for word in words:
        if word:
            rests.setdefault(word[0], []).append(word[1:])
        else:
            ends = True
    if not rests:
        return ""
    inner = "|".join(_escape(first) + _trie(rest) for first, rest in rests.items())
    return f"(?:{inner})" + ("?" if ends else "")


def _escape(text: str) -> str:
    """Returns the text as a regular expression, also inside brackets."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _without_slashes(regex: str) -> str:
    """Returns the expression as it stands between two slashes, on one line."""
    return regex.replace("\\/", "/").replace("/", "\\x2f").replace("\n", "\\n")


def _texts(texts: list[str], what: str) -> list[str]:
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"a filter needs {what}, and no empty text, got {texts!r:.80}")
    return texts


def _call(name: str, texts: Iterable[str]) -> str:
    listed = ", ".join(map(repr, texts))
    return f"{name}({listed if len(listed) < 60 else listed[:60] + ' ...'})"
