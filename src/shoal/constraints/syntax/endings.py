"""Decides from the lines of a text whether it can be the end of some Python program.

A text begins in one of a few lexical states: in code, in a string, in a comment, behind a
backslash. If the text goes on to the end of the file, the brackets that it closes and does not open
are open before it, so each state determines the ends of its lines. The lines after the first stand
at known indentations, and the parser reads them behind headers of blocks.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator, Sequence

from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.viable import is_complete

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
    """Returns True if the text may end a program when it begins behind these characters."""
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


def _parses(found: tuple[str, str]) -> bool:
    """Returns True if statements at an indentation are a part of some program.

    Some statement may stand before them.
    """
    indent, segment = found
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
