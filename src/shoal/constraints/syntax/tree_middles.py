"""Middles of languages that tree-sitter reads, as a check of tokens (`shoal.constraints.protocol`).

No token is refused for the text that it makes: tree-sitter does not tell an incomplete text from a
wrong one. A text ends by itself only where the whole file has no error and no missing node that is
not the file's own, and is cut at the best such place that is not inside a word, unless the text
behind begins with the rest of one.

Tree-sitter reads any text: where the grammar does not fit, its tree has error nodes around tokens
and missing nodes for tokens that should be there. A file may have some already, wherever the cursor
is. They are found by short texts put at the cursor: a file's own faults are those that it keeps
with the best of these texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from shoal.constraints.protocol import Cutting
from shoal.constraints.syntax.python import end_places
from shoal.constraints.token_bytes import bytes_at, decode, token_bytes
from shoal.errors import RequestError
from shoal.types.requests import Row

_JOINED = r"[ \t][ \t]|\r\n"
_IN_WORD = r"[\w$][\w$]"
"""Two characters between which no text is cut; those of a word only if no word goes on behind."""


class WrittenText:
    """A middle up to some token; its text never changes.

    Attributes:
        text: the text of the middle.
        rest: the bytes of a character that is not complete.
        healing: the number of bytes of the text before the cursor that are still to be written
            again (`shoal.constraints.alignment`).
        after: the state behind each token, filled on demand; None = the token may not follow.
    """

    __slots__ = ("after", "healing", "rest", "text")

    def __init__(self, text: str, rest: bytes, healing: int) -> None:
        self.text, self.rest, self.healing = text, rest, healing
        self.after: dict[int, WrittenText | None] = {}


class TreeMiddle(Cutting):
    """A check that a middle adds no error and no missing node to a file.

    Args:
        tokenizer: the target's.
        left: the text before the middle.
        right: the text behind the middle.
        healing: the number of bytes of `left`'s end that the new tokens write again.
        language: one of `GRAMMARS`.

    Raises:
        RequestError: tree-sitter or the grammar is not installed.
    """

    def __init__(
        self, tokenizer: Any, left: str, right: str, healing: int = 0, *, language: str
    ) -> None:
        self._bytes = token_bytes(tokenizer)
        self._trees = CursorTrees(language, left, right)
        self._start = WrittenText("", b"", healing)
        goes_on = re.match(r"[\w$]", right) is not None
        self._joined = re.compile(_JOINED if goes_on else f"{_JOINED}|{_IN_WORD}")

    def start(self, row: Row) -> WrittenText:
        return self._start

    def after(self, state: WrittenText, token: int) -> WrittenText | None:
        """Returns the state after a token; None for one that writes nothing, or no UTF-8."""
        if token not in state.after:
            own = bytes_at(self._bytes, token)
            middle = None if own is None else decode(state.rest + own[state.healing :])
            state.after[token] = (
                None
                if own is None or middle is None
                else WrittenText(
                    state.text + middle[0], middle[1], max(0, state.healing - len(own))
                )
            )
        return state.after[token]

    def may_end(self, state: WrittenText) -> bool:
        if state.rest or state.healing:
            return False
        return self._trees.count(state.text) is not None

    def best_end(
        self, tokens: Sequence[int], scores: Sequence[float], most: int
    ) -> tuple[int, int] | None:
        """Returns the best end; see `Cutting`.

        Where the file has faults of its own, ends with the fewest faults come first.
        """
        own = [bytes_at(self._bytes, token) or b"" for token in tokens]
        places, text = end_places(own, self._start.healing, scores, most)
        best, fewest = None, math.inf
        for _, size, count in places:
            if not fewest or self._joined.match(text[max(0, size - 1) : size + 1]):
                continue
            faults = self._trees.count(text[:size], guess=True)
            if faults is not None and faults < fewest:
                faults = self._trees.count(text[:size])
            if faults is not None and faults < fewest:
                best, fewest = (size, count), faults
        return best


GRAMMARS = {
    "javascript": ("tree_sitter_javascript", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "java": ("tree_sitter_java", "language"),
    "go": ("tree_sitter_go", "language"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "rust": ("tree_sitter_rust", "language"),
}
"""The modules and functions of the packages with the grammars, by language."""
_COMPLETING = (
    "%s|x%s|%s;|x%s;|x()%s|x()%s;|%s {}|x%s {}|x() {}%s|\"%s|\"%s;|'%s|'%s;|`%s|%s`|`%s;|%s`;|"
    "*/%s|*/ x%s;|: x%s|: x%s;|= x%s|= x%s;| of x%s {}|if %s|\n%s|\n;%s"
).split("|")
"""Texts that may complete open constructs at a cursor; %s stands for the missing brackets."""
_BRACKET = re.compile(r"[()\[\]{}]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_OPENING = {closing: opening for opening, closing in _CLOSING.items()}
_LEFT, _MIDDLE, _RIGHT = range(3)


class Fault(NamedTuple):
    """An error or missing node, by places that do not depend on the text at the cursor.

    Attributes:
        sides: the texts in which it starts and ends: before the cursor, at it, behind it.
        start: the bytes from the cursor to its start: negative before the cursor, 0 in the text at
            the cursor, counted without that text behind it.
        end: the bytes from the cursor to its end, counted alike.
    """

    sides: tuple[int, int]
    start: int
    end: int

    def is_part_of(self, other: Fault) -> bool:
        """Returns True if both may be one fault, which tree-sitter ends at another place now."""
        return self.sides == other.sides and self.start <= other.end and other.start <= self.end


@lru_cache(maxsize=len(GRAMMARS))
def tree_sitter_language(name: str) -> Any:
    """Returns tree-sitter's language of one of `GRAMMARS`; without it, raises RequestError."""
    module, function = GRAMMARS[name]
    try:
        tree_sitter, grammar = import_module("tree_sitter"), import_module(module)
    except ImportError as error:
        raise RequestError(
            f"syntax={name!r} needs tree-sitter and {module.replace('_', '-')}: "
            f"pip install '.[syntax]'"
        ) from error
    return tree_sitter.Language(getattr(grammar, function)())


class CursorTrees:
    """The trees of a file with texts at its cursor, and the faults in them.

    A guess is a tree made from that of the file without a text, whose unchanged parts are
    kept. This takes a tenth of the time, but tree-sitter may then see faults otherwise, so texts
    that seem to fit are read once more from the beginning.

    Args:
        name: one of `GRAMMARS`.
        left: the text before the cursor.
        right: the text behind the cursor.

    Raises:
        RequestError: see `tree_sitter_language`.
    """

    def __init__(self, name: str, left: str, right: str) -> None:
        language = tree_sitter_language(name)
        self._parser = import_module("tree_sitter").Parser(language)
        self._left, self._right = (text.encode(errors="surrogatepass") for text in (left, right))
        self._cursor = len(self._left)
        self._point = _end_point((0, 0), self._left)
        self._base = self._parser.parse(self._left + self._right)
        self._counts: dict[tuple[str, bool], int | None] = {}

    @cached_property
    def own(self) -> Sequence[Fault]:
        """The faults that the file has whatever stands at the cursor."""
        pairs: list[tuple[bytes, list[Fault]]] = []
        for text in self._completing() if self._base.root_node.has_error else (b"",):
            pairs.append((text, self._faults(self._parse_edit(text), len(text))))
            if not pairs[-1][1]:
                return ()
        text, _ = min(pairs, key=lambda one: len(one[1]))
        faults = self._faults(self._whole(text), len(text))
        return [fault for fault in faults if fault.sides[0] != _MIDDLE]

    def count(self, middle: str, *, guess: bool = False) -> int | None:
        """Returns the number of faults with a text at the cursor; None if there is a new one.

        Args:
            middle: the text.
            guess: True = by a tree made from that of the file without a text.
        """
        key = middle, guess
        if key not in self._counts:
            text = middle.encode(errors="surrogatepass")
            tree = self._parse_edit(text) if guess else self._whole(text)
            self._counts[key] = self._count_faults(tree, len(text))
        return self._counts[key]

    def _count_faults(self, tree: Any, size: int) -> int | None:
        """Returns the number of faults in a tree; None if one is not the file's own."""
        if not tree.root_node.has_error:
            return 0
        if not self.own:
            return None
        faults = self._faults(tree, size)
        known = all(any(fault.is_part_of(own) for own in self.own) for fault in faults)
        return len(faults) if known else None

    def _whole(self, text: bytes) -> Any:
        return self._parser.parse(self._left + text + self._right) if text else self._base

    def _parse_edit(self, text: bytes) -> Any:
        if not text:
            return self._base
        old, end = self._base.copy(), self._cursor + len(text)
        old.edit(
            start_byte=self._cursor,
            old_end_byte=self._cursor,
            new_end_byte=end,
            start_point=self._point,
            old_end_point=self._point,
            new_end_point=_end_point(self._point, text),
        )
        return self._parser.parse(self._left + text + self._right, old)

    def _faults(self, tree: Any, size: int) -> list[Fault]:
        """Returns the faults of a tree with a text of `size` bytes at the cursor.

        A missing token without a node, such as the end of a line in Go, is at its parent's end.
        """
        faults, open_ = [], [tree.root_node]
        while open_:
            node = open_.pop()
            below = [child for child in node.children if child.has_error or child.is_missing]
            open_ += below
            if node.is_error or node.is_missing:
                faults.append(self._place(node.start_byte, node.end_byte, size))
            elif node.has_error and not below:
                faults.append(self._place(node.end_byte, node.end_byte, size))
        return faults

    def _place(self, start: int, end: int, size: int) -> Fault:
        """Returns the fault between two offsets; an empty fault belongs to the text before it."""
        behind = self._cursor + size
        first = _LEFT if start < self._cursor else _RIGHT if start >= behind else _MIDDLE
        last = _LEFT if end <= self._cursor else _RIGHT if end > behind else _MIDDLE
        if start == end:
            first = last
        offsets = (
            min(offset - self._cursor, 0) + max(offset - behind, 0) for offset in (start, end)
        )
        return Fault((first, last), *offsets)

    def _completing(self) -> Iterator[bytes]:
        """Yields short texts that may complete the constructs that are open at the cursor."""
        sides = (side.decode(errors="replace") for side in (self._left, self._right))
        brackets = _brackets(*sides)
        for one in dict.fromkeys((brackets, brackets.replace("}", ";}"))):
            yield from ((text % one).encode() for text in _COMPLETING)


def _end_point(start: tuple[int, int], text: bytes) -> tuple[int, int]:
    """Returns the line and the column, in bytes, behind a text that starts at a point."""
    lines = text.count(b"\n")
    column = len(text) - (text.rfind(b"\n") + 1)
    return start[0] + lines, column if lines else start[1] + column


def _brackets(left: str, right: str) -> str:
    """Returns the brackets that are missing at the cursor.

    They close those open before it and not closed behind it, then open those closed behind it
    alone. All brackets count, in strings and comments too: it is a guess.
    """
    open_: list[str] = []
    for bracket in _BRACKET.findall(left):
        if bracket in _CLOSING:
            open_.append(_CLOSING[bracket])
        elif bracket in open_:
            del open_[len(open_) - 1 - open_[::-1].index(bracket) :]
    closing, opening, inner = "", "", 0
    for bracket in _BRACKET.findall(right):
        inner += 1 if bracket in _CLOSING else -1
        if inner < 0:
            inner = 0
            if bracket in open_:
                while (missing := open_.pop()) != bracket:
                    closing += missing
            else:
                opening = _OPENING[bracket] + opening
    return closing + "".join(reversed(open_)) + opening
