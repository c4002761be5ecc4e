"""The strings of a call's arguments in Lark's syntax, each with the text that follows it.

A schema's keywords about strings become regular expressions. The marks that end an argument or a
call in the model's form are no part of a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.constraints.grammar_sources import literal
from shoal.constraints.json_schemas import FORMATS, is_remark

STRING_WORDS = ("minLength", "maxLength", "pattern", "format")
LONGEST_COUNT = 64
"""The least length that is counted beside marks; the grammar library cannot count further there."""
BLANK = r"[\s\x1c-\x1f]*"


class Unwritable(Exception):
    """An error: a form cannot express a schema."""


class Rules:
    """The rules of one grammar in Lark's syntax; equal ones are written once."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special, self._names = special, dict[str, str]()

    @property
    def lines(self) -> list[str]:
        return [f"{name}: {body}" for body, name in self._names.items()]

    def text(self, text: str) -> str:
        """Returns a text, with the numbers of special tokens for their names."""
        return literal(text, self.special)

    def rule(self, body: str) -> str:
        """Returns the name of a rule."""
        return self._names.setdefault(body, f"r{len(self._names)}")

    def terminal(self, body: str) -> str:
        """Returns the name of a terminal, an expression."""
        return self._names.setdefault(body, f"T{len(self._names)}")


def require_free(text: str, banned: tuple[str, ...]) -> None:
    """Raises Unwritable: a text holds one of the marks."""
    if any(mark in text for mark in banned):
        raise Unwritable


def string_bounds(one: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema's keywords about strings, `format` as a pattern. Raises Unwritable."""
    if {*one} - {"type", *STRING_WORDS}:
        raise Unwritable
    bounds = {k: v for k, v in one.items() if k != "type"}
    if is_remark(bounds):
        bounds.pop("format")
    if "format" in bounds:
        bounds = {**FORMATS.get(bounds.pop("format"), {"format": ""}), **bounds}
    if "format" in bounds or ("pattern" in bounds and len(bounds) > 1):
        raise Unwritable
    return bounds


def lengths(bounds: Mapping[str, Any]) -> tuple[int, int | str]:
    """Returns the least and the greatest length of a string; "" = there is no greatest."""
    least, most = bounds.get("minLength", 0), bounds.get("maxLength", "")
    if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
        raise Unwritable
    if most != "" and most < least:
        raise Unwritable
    return least, most


def text_before(
    rules: Rules, body: str, behind: str, excluded: Sequence[str] = (), *, empty: bool = False
) -> str:
    """Returns, in Lark's syntax, strings and the text that follows them.

    Both are one terminal, up to the first special token in that text: the longest match of a
    terminal is read, and a string may contain the beginning of the text that follows.

    Args:
        rules: the rules of the grammar.
        body: an expression of the strings.
        behind: the text that follows.
        excluded: expressions of strings that are left out.
        empty: True if the empty string is one of them.
    """
    at = min((behind.find(name) for name in rules.special if name in behind), default=len(behind))
    head, rest = escaped(behind[:at]), rules.text(behind[at:])
    if not body and not head:
        return rest
    parts = [f"/{body}{head}/"]
    if excluded:
        parts.append(f"~/{'|'.join(one + head for one in excluded)}/")
    if not head:
        parts.append("/(?s:.+)/")
    return f"{rules.terminal(' & '.join(parts))}{'?' if empty and not head else ''} {rest}"


def string(
    rules: Rules,
    bounds: Mapping[str, Any],
    banned: tuple[str, ...],
    behind: str,
    *,
    read_as: Sequence[str] = (),
    trimmed: bool = False,
) -> str:
    """Returns, in Lark's syntax, strings without quotes and the text that follows them.

    A string with a greatest length, or with a least one above `LONGEST_COUNT`, contains no `<`, the
    first character of all marks.

    Args:
        rules: the rules of the grammar.
        bounds: see `string_bounds`.
        banned: the marks, which no string contains.
        behind: the text that follows.
        read_as: expressions of strings that the reader would take for values of other types.
        trimmed: True if a string neither begins nor ends with a line break.
    """
    pattern, (least, most) = bounds.get("pattern"), lengths(bounds)
    counted = bool(banned) and (most != "" or least > LONGEST_COUNT)
    excluded = [rf"{BLANK}(?:{'|'.join(read_as)}){BLANK}"] if read_as else []
    if banned and not counted:
        excluded.append(texts_with(banned))
    if pattern is None:
        body = _texts(least, most, "[^<]" if counted else "(?s:.)", trimmed)
        return text_before(rules, body, behind, excluded, empty=not least)
    if trimmed:
        excluded += [r"\n(?s:.*)", r"(?s:.*)\n"]
    try:
        empty = re.search(pattern, "") is not None
    except (re.error, TypeError) as error:
        raise Unwritable from error
    return text_before(rules, f"(?:{whole_texts(pattern)})", behind, excluded, empty=empty)


def _texts(least: int, most: int | str, unit: str, trimmed: bool) -> str:
    """Returns an expression of `least` to `most` characters, each a `unit`."""
    if not trimmed or most == 0:
        return f"{unit}{{{least},{most}}}" if most != 0 else ""
    edge = r"[^<\n]" if "<" in unit else r"[^\n]"
    inner = f"{unit}{{{max(least - 2, 0)},{'' if most == '' else max(int(most) - 2, 0)}}}"
    two = [] if most == 1 else [f"{edge}{inner}{edge}"]
    texts = two if least > 1 else [edge, *two]
    return f"(?:{'|'.join(texts)}){'' if least else '?'}"


def texts_with(banned: tuple[str, ...]) -> str:
    """Returns an expression of the texts that contain one of several texts."""
    return f"(?s:.*)(?:{'|'.join(map(escaped, banned))})(?s:.*)"


def whole_texts(pattern: Any) -> str:
    """Returns the expression of whole texts in which a pattern is found, for Lark's syntax.

    Raises:
        Unwritable: the pattern has anchors inside, or alternatives beside them.
    """
    if not isinstance(pattern, str):
        raise Unwritable
    inside = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern.removeprefix("^"))
    ends = bool(re.search(r"(?<!\\)(?:\\\\)*\$$", pattern))
    inside = inside.removesuffix("$") if ends else inside
    flat = inside
    while flat != (flat := re.sub(r"\([^()]*\)", "", flat)):
        pass
    if re.search(r"[\^$]|\(\?[=!<]", inside) or "|" in flat:
        raise Unwritable
    body = pattern.removeprefix("^")
    body = body[:-1] if ends else body
    body = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", body).replace("\n", r"\n")
    start = "" if pattern.startswith("^") else "(?s:.*)"
    return f"{start}({body}){'' if ends else '(?s:.*)'}"


def escaped(text: str) -> str:
    """Returns an expression of one text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
