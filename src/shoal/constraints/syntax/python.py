"""Middles of Python programs, as a check of tokens (`shoal.constraints.protocol`).

The method is that of Melcer, Fulton, Gouda and Qian (arXiv 2402.17988): the check refuses a token
only if the text up to it cannot be completed, and the text ends only if the whole parses.

Whether a text can be the end of some program is decided from its lines (`ends_program`). It begins
in one of a few lexical states: in code, in a string, in a comment, behind a backslash. If the text
goes on to the end of the file, the brackets that it closes and does not open are open before it, so
each state determines the ends of its lines. The lines after the first stand at known indentations,
and the parser reads them behind headers of blocks.
"""

from __future__ import annotations

import codecs
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from shoal.constraints.protocol import Cutting
from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.viable import is_complete, is_viable, require_parser
from shoal.constraints.token_bytes import bytes_at, decode, token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Row

_STRINGS = [
    begun.replace("'", quote)
    for quote in "'\""
    for begun in ("'", "'\\", "''", "'''", "'''\\", "'''a'", "'''a''")
]
_STATES = ("", "#", "\\", *_STRINGS)
"""The characters that lead to the states in which a text may begin; for strings also the states
behind a backslash, two quotes, or some of the last quotes."""
_BEFORE = ("", "if a: a", "try: a", "try: a\n{0}except a: a", "for a in a: a", "@a")
"""The statements and lines that others have to follow; {0} is the indentation."""
_FORMATTED = re.compile(r"[fF][rR]?['\"]|[rR][fF]['\"]")


def ends_program(text: str) -> bool:
    """Returns False if no program ends with the text.

    It returns True if a program does, or if nothing behind the first line of the text rules it out.
    From Python 3.12 on strings may stand within the fields of strings, which this function does not
    follow: it returns True for a text with f-strings, or one that may begin in such a field.
    """
    if sys.version_info >= (3, 12):
        first = text.partition("\n")[0]
        if _FORMATTED.search(text) or ("}" in first and ("'" in first or '"' in first)):
            return True
    return any(_ends(begun, text) for begun in _STATES)


def _ends(begun: str, text: str) -> bool:
    """Returns True if a program may end with the characters of a state and the text."""
    lines = _lines(begun, text)
    return lines is not None and all(map(_parses, _segments(lines)))


def _lines(begun: str, text: str) -> list[str] | None:
    """Returns the logical lines behind the first one; None if brackets or strings do not fit."""
    layout, opened, missing = SourceLayout(forgets=False), "", 0
    for character in begun:
        layout.feed(character)
    ends: list[tuple[int, int]] = []  # of lines, each with the brackets missing so far
    for place, character in enumerate(text):
        in_code = not (layout.quote or layout.comment or layout.joined)
        if not layout.feed(character):
            return None
        if in_code and character in "([{":
            opened += character
        elif in_code and character in ")]}":
            if opened and opened[-1] + character not in ("()", "[]", "{}"):
                return None
            missing += not opened
            opened = opened[:-1]
        elif character == "\n" and not (layout.quote or layout.joined or opened):
            ends.append((place + 1, missing))
    if layout.quote or layout.joined or opened:
        return None
    starts = [end for end, closed in ends if closed == missing]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=False)]


def _segments(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields segments of lines, each with its indentation.

    A segment begins with a line that is indented less than all lines before it, and ends before the
    next such line.
    """
    indent, segment = "", ""
    for line in lines:
        stripped = line.lstrip(" \t\f")
        if not stripped.strip() or stripped.startswith("#"):
            segment += line if segment else ""
            continue
        own = line[: len(line) - len(stripped)]
        if segment and len(own.expandtabs()) >= len(indent.expandtabs()):
            segment += line
            continue
        if segment:
            yield indent, segment
        indent, segment = own, line
    if segment:
        yield indent, segment


def _parses(part: tuple[str, str]) -> bool:
    """Returns True if statements at an indentation are a part of some program.

    Some statement may stand before them.
    """
    indent, segment = part
    header = "if a:\n" if indent else ""
    if any(
        is_complete(f"{header}{indent}{before.format(indent)}\n{segment}") for before in _BEFORE
    ):
        return True
    return bool(indent) and is_complete("match a:\n" + segment)


def end_places(
    written: Sequence[bytes], healing: int, scores: Sequence[float], most: int
) -> tuple[list[tuple[float, int, int]], str]:
    """Returns the places, highest score first, and the text.

    Args:
        written: the bytes that each token writes.
        healing: the number of bytes that are written again, and are no part of the text.
        scores: see `shoal.constraints.protocol.Cutting.best_end`.
        most: see `shoal.constraints.protocol.Cutting.best_end`.

    Returns:
        Each place as its score, the characters before it and the number of tokens that wrote them;
            and the text.
    """
    places = [(scores[0], 0, 0)] if not healing else []
    decoder, size, text = codecs.getincrementaldecoder("utf-8")(), 0, ""
    for count, own in enumerate(written, start=1):
        text += decoder.decode(own[healing:])
        if 0 < healing <= len(own):
            places.append((scores[count], 0, count))
        healing = max(0, healing - len(own))
        places += [(scores[count], end, count) for end in range(size + 1, min(most, len(text)) + 1)]
        size = len(text)
    return sorted(places, reverse=True), text


NEXT_LINES = 3
"""The number of lines behind the cursor that are read before the whole is."""


class Middle:
    """A middle up to some token; its text never changes.

    The states behind it are computed once, for all rows and drafts that come here.

    Attributes:
        layout: the layout of the program up to here.
        text: the text of the middle.
        rest: the bytes of a character that is not complete.
        healing: the number of bytes of the text before the cursor that are still to be written
            again (`shoal.constraints.alignment`).
        after: the state behind each token, filled on demand; None = the token may not follow.
        refused: beginnings of texts that may not follow.
        ends: `may_end`, once known.
    """

    __slots__ = ("after", "ends", "healing", "layout", "refused", "rest", "text")

    def __init__(self, layout: SourceLayout, text: str, rest: bytes, healing: int = 0) -> None:
        self.layout, self.text, self.rest, self.healing = layout, text, rest, healing
        self.after: dict[int, Middle | None] = {}
        self.ends: bool | None = None
        self.refused: set[str] = set()


class PythonMiddle(Cutting):
    """A check that the whole of two texts and the middle between them is a Python program.

    Args:
        tokenizer: the target's.
        left: the text before the middle.
        right: the text behind the middle.
        healing: the number of bytes of `left`'s end that the new tokens write again.

    Raises:
        RequestError: no program begins with `left`, or none ends with `right` (`ends_program`); or
            this is Python 3.10.
    """

    def __init__(self, tokenizer: Any, left: str, right: str, healing: int = 0) -> None:
        require_parser()
        whole, layout = SourceLayout(forgets=False), SourceLayout()
        if not (all(whole.feed(c) and layout.feed(c) for c in left) and is_viable(whole)):
            raise RequestError(
                "syntax='python': the text before the cursor is not the beginning of a Python "
                "program"
            )
        if not ends_program(right):
            raise RequestError(
                "syntax='python': the text behind the cursor is not the end of a Python program"
            )
        self._bytes, self._left, self._right = token_bytes(tokenizer), left, right
        self._next_lines = "".join(right.splitlines(keepends=True)[:NEXT_LINES])
        self._start = Middle(layout, "", b"", healing)

    def start(self, row: Row) -> Middle:
        return self._start

    def after(self, state: Middle, token: int) -> Middle | None:
        if token not in state.after:
            state.after[token] = self._read(state, token)
        return state.after[token]

    def may_end(self, state: Middle) -> bool:
        if state.ends is None:
            state.ends = not (state.rest or state.healing) and is_complete(
                self._left + state.text + self._right
            )
        return state.ends

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """Returns the best end; see `Cutting`.

        The places of highest score are tried first, each by a parse of the whole.
        """
        own = [bytes_at(self._bytes, token) or b"" for token in tokens]
        places, text = end_places(own, self._start.healing, scores, most)
        ends = (place for place in places if self._may_cut(text[: place[1]]))
        return next(((size, count) for _, size, count in ends), None)

    def _may_cut(self, text: str) -> bool:
        """Returns True if the whole is complete when the middle is cut to this text.

        The first lines of the text behind are read first with the kept layout of the text before:
        this is less to parse and refuses most places.
        """
        layout = self._start.layout.copy()
        for character in text + self._next_lines:
            if not layout.feed(character):
                return False
        return is_viable(layout) and is_complete(self._left + text + self._right)

    def _read(self, state: Middle, token: int) -> Middle | None:
        own = bytes_at(self._bytes, token)
        if own is None:
            return None
        healing = max(0, state.healing - len(own))
        middle = decode(state.rest + own[state.healing :])
        if middle is None:
            return None
        text, rest = middle
        layout = self._write(state, text)
        if layout is None or (
            rest and not (layout.quote or layout.comment or _begins_identifier(rest))
        ):
            return None
        return Middle(layout, state.text + text, rest, healing)

    def _write(self, state: Middle, text: str) -> SourceLayout | None:
        """Returns the layout after more text; None if the text may not follow.

        A refused text is remembered by its shortest refused beginning: no text with this beginning
        is parsed again, so refusals at one place cost a few parses per beginning and not per token.
        """
        if state.refused and any(text[:end] in state.refused for end in range(1, len(text) + 1)):
            return None
        layout = _fed(state.layout, text)
        if layout is None:
            end = (
                bisect_left(
                    range(1, len(text)),
                    True,
                    key=lambda size: _fed(state.layout, text[:size]) is None,
                )
                + 1
            )
            state.refused.add(text[:end])
        return layout


def _fed(layout: SourceLayout, text: str) -> SourceLayout | None:
    """Returns the layout after more text; None if no program begins with it."""
    layout = layout.copy()
    for character in text:
        if (layout.due and not is_viable(layout)) or not layout.feed(character):
            return None
    return None if text and not is_viable(layout) else layout


@lru_cache(maxsize=1024)
def _begins_identifier(rest: bytes) -> bool:
    """Returns True if these bytes begin the UTF-8 of some character that may stand in a name."""
    length = 2 if rest[0] < 0xE0 else 3 if rest[0] < 0xF0 else 4
    missing = length - len(rest)
    if missing == 3:
        return rest[0] in (0xF0, 0xF3)  # planes 1 to 3, and the variation selectors
    return any(_in_names(rest + bytes(tail)) for tail in _tails(missing))


def _tails(count: int) -> list[tuple[int, ...]]:
    tails: list[tuple[int, ...]] = [()]
    for _ in range(count):
        tails = [(*tail, byte) for tail in tails for byte in range(0x80, 0xC0)]
    return tails


def _in_names(encoded: bytes) -> bool:
    try:
        return ("a" + encoded.decode()).isidentifier()
    except UnicodeDecodeError:
        return False
