"""Filters: sets of texts that are combined by & (and), | (or) and ~ (not), as a constraint on all
of the new text.

A filter is about text, never about single tokens: words and letters may be divided among tokens in
any way. llguidance (the extra `grammar`) walks the bytes of the vocabulary along the states of the
filter's automaton, which it keeps; a token may follow if some text of the set begins with the text
up to this token, and the text may end if it is in the set. The boolean filters of Constrained Text
Generation Studio (Roush et al. 2022, arXiv 2306.15926) look at tokens one by one instead.

Patterns of schemas that look around become plain patterns of the same texts (`without_looks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

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
        """The set as a grammar; over HTTP, `grammar` takes its `text` with the type "lark"."""
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


LOOK = re.compile(r"\(\?=((?:[^()\[\]\\|]|\\.|\[(?:[^\]\\]|\\.)+\])*)\)")
"""A look ahead at a text without groups and alternatives."""
NEVER = re.compile(r"\(\?!(?:\(\?:([^()]*)\)(\$?)|((?:[^()\\]|\\.)*))\)")
"""A look ahead at texts that may not follow: alternatives, and the end behind all of them."""
_UNIT = r"(?:\\[dDwWsS]|\\[^\w\s]|[^\\()\[\]{}|?*+.^$]|\[\^?(?:[^\[\]\\]|\\.)+\])"
"""One character of a pattern: itself, an escape or a class."""
BEHIND = re.compile(rf"\(\?<!({_UNIT})\)\$\Z")
_NUL = r"\x00"
_SIGN, _LINE_ENDS = r"[^\x00]", r"\n\r\u2028\u2029"
_REST_OF_LINES = rf"(?:[{_LINE_ENDS}]{_SIGN}*)?$"


def without_looks(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with a pattern for each look at the beginning of its pattern and its end.

    All of them hold, as of `^(?=.*[0-9])(?!-)[a-z0-9-]{8,}(?<!-)$`; other looks are left, and
    refused. A look at texts that may not follow becomes a pattern of all other texts.
    """
    pattern = schema["pattern"]
    if not isinstance(pattern, str) or not pattern.startswith("^") or "allOf" in schema:
        return schema
    place, looks = 1, list[str]()
    try:
        while look := LOOK.match(pattern, place) or NEVER.match(pattern, place):
            if look.re is LOOK:
                looks.append(f"^{look[1]}")
            else:
                body, end = (look[3], "") if look[1] is None else (look[1], look[2])
                looks += [_never(f"{one}{end}") for one in body.split("|")]
            place = look.end()
        rest = pattern[place:]
        if end_look := BEHIND.search(rest):
            looks.append(f"^(?:{_SIGN}*{_none_of(end_look[1])})?$")
            rest = f"{rest[: end_look.start()]}$"
    except ValueError:
        return schema
    if not looks or "|" in rest or "(?=" in rest or "(?!" in rest or "(?<" in rest:
        return schema
    own = {keyword: value for keyword, value in schema.items() if keyword != "pattern"}
    return own | {"allOf": [{"pattern": one} for one in (*looks, f"^{rest}")]}


def _never(look: str) -> str:
    """Returns a pattern of the texts that begin with none of the texts of a look.

    Raises:
        ValueError: no plain pattern can say so.
    """
    match = re.fullmatch(rf"(\.\*)?({_UNIT}+?)([*+]?)(\$?)", look)
    if match is None:
        raise ValueError(look)
    anywhere, text, count, end = match.groups()
    units = re.findall(_UNIT, text)
    if anywhere:
        if count or end:
            raise ValueError(look)
        return f"^{_without_word(units)}{_REST_OF_LINES}"
    if count and (len(units) > 1 or not end):
        raise ValueError(look)
    if count:
        others = f"{_SIGN}*{_none_of(units[0])}{_SIGN}*"
        return f"^{others}$" if count == "*" else f"^(?:{others})?$"
    made = f"(?:{_SIGN}+)" if end else ""
    for i, unit in enumerate(reversed(units)):
        further = f"|{unit}{made}" if made or i else ""
        made = f"(?:{_none_of(unit)}{_SIGN}*{further})" + ("" if end and not i else "?")
        made = made if made.endswith("?") else f"{made}?"
    return f"^{made}$"


def _without_word(units: list[str]) -> str:
    """Returns a pattern of the lines without a word. Raises ValueError: see `_never`."""
    first, rest = units[0], units[1:]
    other = _none_of(first, _LINE_ENDS)
    if not rest:
        return f"{other}*"
    if any(unit != _literal(unit) for unit in units):
        raise ValueError("classes")
    spelled = [_inner(unit) for unit in units]  # "-" and "\\-" are one character
    if set(spelled) == {spelled[0]}:
        return f"(?:{first}{{0,{len(rest)}}}{other})*{first}{{0,{len(rest)}}}"
    if spelled[0] in spelled[1:]:
        raise ValueError("a word that begins again within itself")
    again, away = first, _none_of(first, _inner(rest[-1]) + _LINE_ENDS)
    begun = ""
    for unit in reversed(rest[:-1]):
        again = f"(?:{first}|{unit}{again})"
        away = f"(?:{_none_of(first, _inner(unit) + _LINE_ENDS)}|{unit}{away})"
        begun = f"(?:{unit}{begun})?"
    begin = f"{first}{again}*"
    return f"(?:{other}|{begin}{away})*(?:{begin}{begun})?"


def _literal(unit: str) -> str:
    """Returns one character of a pattern if it stands for itself; else nothing."""
    return "" if unit[0] == "[" or unit[1:].isalpha() else unit


def _inner(unit: str) -> str:
    """Returns one character of a pattern as a part of a class. Raises ValueError."""
    if unit.startswith("[^") or (unit[0] == "\\" and unit[1:].isupper()):
        raise ValueError(unit)
    if unit[0] == "[":
        return unit[1:-1]
    return unit if unit[0] == "\\" or unit.isalnum() or not unit.isascii() else f"\\{unit}"


def _none_of(unit: str, more: str = "") -> str:
    """Returns any other character than one of a pattern, and than more. Raises ValueError."""
    if not more and unit.startswith("[^"):
        return f"[{unit[2:].removeprefix(_NUL)}"
    if not more and unit[0] == "\\" and unit[1:].isupper():
        return unit.lower()
    return rf"[^{_NUL}{_inner(unit)}{more}]"
