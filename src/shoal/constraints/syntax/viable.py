"""Decides by CPython's own parser whether Python source can be completed.

The left and right quotients of Python come apart. Let x be the beginning of some program, and r the
end of some program: then x u and v r are programs for some u and v, and x u newline v r is one too,
because a program is a sequence of statements. So a middle m can still be completed between l and r
exactly if l m is the beginning of a program and r the end of one; r matters only for the end of a
text, and there the parser reads l m r.

With the flag that `codeop` sets, the parser says "incomplete input" if it has read all tokens up to
the end of the source before it found a token that does not fit. This is the answer that is needed.

An open string literal is closed in the shortest way before the parser is asked: invalid escapes,
and fields of f-strings that hold no expression, are refused. A tokenizer does not look into
literals, and CPython 3.11 parses fields only once all tokens are there: it finds the error in `f"{1
+}"` behind the last quote. This module closes the literal in the shortest way and asks the parser
about the result; it puts an incomplete expression into brackets, and asks about that. From 3.12 on
quotes of the literal's own kind may stand in a field; such strings are refused.
"""

from __future__ import annotations

import ast
import keyword
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from shoal.constraints.syntax.layout import SourceLayout
from shoal.errors import RequestError

_INCOMPLETE = 0x4000  # PyCF_ALLOW_INCOMPLETE_INPUT, from 3.11 on
_WORD = re.compile(r"[^\W\d]\w*$")
_NUMBER = re.compile(r"(?<!\w)(?:\d|\.\d)[\w.]*(?:(?<=[eE])[+-])?$")
_OPERATOR = re.compile(r"[-+*/%@&|^=<>!:.]{1,2}$")
_WORDS = (*keyword.kwlist, *keyword.softkwlist)
_OPERATORS = "!= == <= >= += -= *= /= //= %= @= &= |= ^= <<= >>= **= -> := ... << >> ** //".split()
_PREFIXES = frozenset("r b f u br rb fr rf".split())


def require_parser() -> None:
    """Raises RequestError: this Python's parser cannot say whether a program is incomplete."""
    if sys.version_info < (3, 11):
        raise RequestError(
            "syntax='python' needs Python 3.11 or later: older parsers do not tell incomplete "
            "from wrong"
        )


def is_complete(source: str) -> bool:
    """Returns True if a text is a program of the running Python."""
    return _classify.__wrapped__(source, 0) == "program"  # whole files are not kept


def is_viable(layout: SourceLayout) -> bool:
    """Returns True if a text is the beginning of a Python program."""
    text = layout.text
    if layout.quote:
        literal = text[layout.opened :]
        prefix = literal[: len(literal) - len(literal.lstrip("rRbBfFuU"))]
        if prefix.lower() not in ("", *_PREFIXES) or not _begins(
            text[: layout.opened] + _empty(prefix)
        ):
            return False
        return can_close(literal, layout.quote, is_complete, is_viable)
    if text.endswith(("'", '"')) and not is_complete(text[layout.opened :]):
        return False  # the parser would tell behind the next token
    if layout.joined:
        return _begins(text[:-1])
    if layout.blank and layout.depth <= 0:
        return _classify(text[: layout.line], _INCOMPLETE) != "wrong"
    return _begins(text) or any(map(_begins, _longer(text)))


def _empty(prefix: str) -> str:
    """Returns an empty string literal for the prefix: bytes and text do not mix."""
    return 'b""' if "b" in prefix.lower() else '""'


def _longer(text: str) -> Iterator[str]:
    """Yields the source with other tokens in the place of its last one, which may go on."""
    if word := _WORD.search(text):
        stem, begun = text[: word.start()], word[0]
        yield stem + begun + "_"
        yield from (stem + other for other in _WORDS if other.startswith(begun) and other != begun)
        if begun.lower() in _PREFIXES:
            yield stem + _empty(begun)
    if number := _NUMBER.search(text):
        yield from (text + end for end in ("0", "j", "0j"))
        if text[-1] == ".":
            yield text[: number.end() - 1] + "..."
    if operator := _OPERATOR.search(text):
        for begun in {operator[0], operator[0][-1]}:
            yield from (
                text[: -len(begun)] + other
                for other in _OPERATORS
                if other.startswith(begun) and other != begun
            )
        if text[-1] == ".":
            yield text + "0"


def _begins(text: str) -> bool:
    """Returns True if some token may follow a text that ends within a line.

    A backslash and a line break make the parser read on behind the text.
    """
    return _classify(text + "\\\n", _INCOMPLETE) != "wrong"


@lru_cache(maxsize=1 << 15)
def _classify(source: str, flags: int) -> str:
    """Returns "program", "incomplete" or "wrong"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "<source>", "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
        return "program"
    except SyntaxError as error:
        return "incomplete" if flags and "incomplete input" in str(error.msg) else "wrong"
    except (ValueError, OverflowError, MemoryError, RecursionError):
        return "wrong"  # a null character; nested too deep for the parser


_ESCAPE = re.compile(
    r"(?<!\\)(?:\\\\)*(\\(?:N(?:\{[^}]*)?|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}))\Z"
)
_DIGITS = {"x": 2, "u": 4, "U": 8}
_LAMBDA = re.compile(r"(?<!\w)lambda\W\Z")
_MOST_FIELDS = 2
"""The largest depth of fields: one in the text, and one in the format of a field."""
_NEW = sys.version_info >= (3, 12)
"""True if fields may hold backslashes and comments."""


class Field(NamedTuple):
    """The place in an f-string where its text ends.

    Attributes:
        depth: the number of open fields; 0 = in the text.
        part: the part of the innermost field: "expression", "conversion" (behind `!`), "after"
            (behind an expression and `=`, or a conversion), "format"; outside of fields "text", or
            "brace" behind a brace that may be doubled.
        start: the place where the expression begins.
    """

    depth: int
    part: str
    start: int = 0


def can_close(
    literal: str,
    quote: str,
    complete: Callable[[str], bool],
    begins: Callable[[SourceLayout], bool],
) -> bool:
    """Returns True if some text closes a literal.

    Args:
        literal: the source from the literal's prefix on.
        quote: the quotes that it began with.
        complete: returns True for a text that is a program.
        begins: returns True for the beginning of a program.
    """
    before, _, body = literal.partition(quote)
    prefix = before.lower()
    closed = lambda text: complete(before + quote + text + quote)  # noqa: E731
    if "f" not in prefix:
        return not ("\\" in body or "b" in prefix) or closed(_text(body, "r" in prefix))
    field = _field(body, "r" in prefix)
    if field is None or field.depth > _MOST_FIELDS:
        return False
    if field.part == "brace":
        return closed(body[:-1] + " ")
    if field.part == "expression":
        return _expression_begins(body, field, closed, begins)
    ends = "}" * field.depth
    if field.part in ("text", "format"):
        return closed(_text(body, "r" in prefix) + ends)
    return closed(body + ("r" if field.part == "conversion" else "") + ends)


def _text(body: str, raw: bool) -> str:
    """Returns the text with its last escape completed, and a blank behind it.

    The blank separates the text's last quotes from the closing quotes.
    """
    match = None if raw else _ESCAPE.search(body)
    if match is None:
        return body + " "
    escape = match[1]
    digits = _DIGITS.get(escape[1:2])
    return (
        body[: match.start(1)] if digits is None else body + "0" * (digits - len(escape) + 2)
    ) + " "


def _expression_begins(
    body: str, field: Field, closed: Callable[[str], bool], begins: Callable[[SourceLayout], bool]
) -> bool:
    """Returns True if the expression can be completed, and the text before it can be closed."""
    if not closed(body[: field.start - 1] + " " + "}" * (field.depth - 1)):
        return False
    text = body[field.start :]
    if text[-1:] in ("!", "="):  # of `!=` and `==`, or the sign behind the expression
        if closed(body[:-1] + "}" * field.depth):
            return True
        text += "=" if text[-2:] not in ("==", "!=", "<=", ">=") else ""
    layout = SourceLayout(forgets=False)
    layout.feed("(")
    for character in text:
        if (
            not layout.feed(character)
            or layout.depth < 1
            or (not _NEW and (layout.comment or character == "\\"))
        ):
            return False
        if layout.depth == 1 and not layout.quote and _LAMBDA.search(layout.text):
            return False  # its colon would end the expression
    return begins(layout)


def _field(body: str, raw: bool) -> Field | None:
    """Returns the field where the text ends; None: a brace or another sign does not fit."""
    depth, place = 0, 0
    while place < len(body):
        character = body[place]
        if not raw and body.startswith("\\N{", place):
            place = (body.find("}", place) + 1) or len(body)
        elif character == "{" and depth == 0 and body.startswith("{{", place):
            place += 2
        elif character == "{":
            if depth == 0 and place + 1 == len(body):
                return Field(0, "brace")
            field = _behind_expression(body, place + 1, depth + 1)
            if not isinstance(field, int):
                return field
            depth, place = depth + (body[field - 1] == ":"), field
        elif character == "}" and depth:
            depth, place = depth - 1, place + 1
        elif character == "}":
            if place + 1 == len(body):
                return Field(0, "brace")
            if body[place + 1] != "}":
                return None
            place += 2
        else:
            place += (
                2
                if character == "\\" and not raw and body[place + 1 : place + 2] not in ("{", "}")
                else 1
            )
    return Field(depth, "format" if depth else "text")


def _behind_expression(body: str, start: int, depth: int) -> int | Field | None:
    """Returns the place behind the `}` or `:` that ends an expression and its conversion.

    If the text ends before that, it returns the field there; None: a sign does not fit.
    """
    place = _end_of_expression(body, start)
    if place is None or (place + 1 == len(body) and body[place] in "!="):
        return Field(depth, "expression", start)
    if body[place] == "=":
        place += 1 + len(body[place + 1 :]) - len(body[place + 1 :].lstrip())
        if place == len(body):
            return Field(depth, "after")
    if body[place] == "!":
        if place + 1 == len(body):
            return Field(depth, "conversion")
        place += 2
        if place >= len(body):
            return Field(depth, "after")
    return place + 1 if body[place] in ":}" else None


def _end_of_expression(body: str, start: int) -> int | None:
    """Returns the place of the sign behind an expression, outside brackets and strings, or None."""
    opened, quote, place = 0, "", start
    while place < len(body):
        character = body[place]
        if quote:
            if body.startswith(quote, place):
                place, quote = place + len(quote) - 1, ""
        elif character in "'\"":
            quote = character * 3 if body.startswith(character * 3, place) else character
            place += len(quote) - 1
        elif character in "([{":
            opened += 1
        elif character in ")]}" and opened:
            opened -= 1
        elif not opened and body[place : place + 2] in ("==", "!=", "<=", ">="):
            place += 1
        elif not opened and character in "!:}=":
            return place
        place += 1
    return None
