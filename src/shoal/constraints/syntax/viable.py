"""Decides by CPython's own parser whether Python source can be completed.

The left and right quotients of Python come apart. Let x be the beginning of some program, and r the
end of some program: then x u and v r are programs for some u and v, and x u newline v r is one too,
because a program is a sequence of statements. So a middle m can still be completed between l and r
exactly if l m is the beginning of a program and r the end of one; r matters only for the end of a
text, and there the parser reads l m r.

With the flag that `codeop` sets, the parser says "incomplete input" if it has read all tokens up to
the end of the source before it found a token that does not fit. This is the answer that is needed.
"""

from __future__ import annotations

import ast
import keyword
import re
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache

from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.literals import can_close
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
    return _parsed.__wrapped__(source, 0) == "program"  # whole files are not kept


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
        return _parsed(text[: layout.line], _INCOMPLETE) != "wrong"
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
    return _parsed(text + "\\\n", _INCOMPLETE) != "wrong"


@lru_cache(maxsize=1 << 15)
def _parsed(source: str, flags: int) -> str:
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
