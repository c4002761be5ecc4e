"""Follows Python source character by character: strings, comments, brackets, lines.

It keeps only the parts that decide which characters may follow: the headers of open blocks and the
statement that is being written. Statements that have ended at the same indentation leave no trace
in a parser's state, so that checks stay short in long files.
"""

from __future__ import annotations

import copy
import re

_WORD = re.compile(r"[^\W\d]\w*")
_PREFIX = re.compile(r"(?<!\w)[rRbBfFuU]{1,2}$")
CONTINUES = frozenset({"else", "elif", "except", "finally"})
"""The words that begin a further clause of the statement before them at the same indentation."""


class SourceLayout:
    """The source up to a place.

    `feed` changes it: copy it first (`copy.copy`; it holds no mutable values).

    Args:
        forgets: True if statements that have ended are dropped.

    Attributes:
        text: the kept source, without comments and blank lines.
        line: the place in `text` where the current logical line begins.
        depth: the number of open brackets.
        quote: the quotes of the string that is open, else "".
        opened: the place where its literal begins, prefix included.
        comment: True inside a comment.
        joined: True if a backslash ends the text so far.
        blank: True if the current line has only indentation so far.
        due: True if the next character drops the statement before this line's: the kept source must
            be checked before.
    """

    def __init__(self, forgets: bool = True) -> None:
        self.text, self.line, self.depth, self.blank, self.due = "", 0, 0, True, False
        self.quote, self.opened, self.comment, self.joined = "", 0, False, False
        self._forgets, self._escaped, self._run, self._empty = forgets, False, 0, ""
        self._first: int | None = None
        self._decorated = False
        self._levels: tuple[tuple[str, int], ...] = ()

    def feed(self, character: str) -> bool:
        """Reads one more character; returns False if no program goes on like this."""
        if self.due:
            self._begin_statement()
        fits = self._read(character)
        self.due = self._first is not None and not (character.isalnum() or character == "_")
        return fits

    def _read(self, character: str) -> bool:
        if self.quote:
            return self._in_string(character)
        if self.comment and character != "\n":
            return True
        if self.joined:
            self.joined = character == "\r"
            self.text += "" if character == "\r" else character
            return character in "\r\n"
        if self._empty == character:  # two quotes side by side and a third one
            self._empty, self.quote, self._run = "", character * 3, 0
            self.text += character
            return True
        self._empty = ""
        if character == "\n":
            self._end_line()
        elif character == "#":
            self.comment = True
        elif character != "\r":
            self._in_line(character)
        return True

    def copy(self) -> SourceLayout:
        return copy.copy(self)

    def _in_string(self, character: str) -> bool:
        self.text += character
        if self._escaped:
            self._escaped, self._run = False, 0
        elif character == "\\":
            self._escaped, self._run = True, 0
        elif character == self.quote[0]:
            self._run += 1
            if self._run == len(self.quote):
                self._empty = (
                    self.quote if len(self.text) - self.opened == 2 + self._prefix_length() else ""
                )
                self._empty = self._empty if len(self.quote) == 1 else ""
                self.quote = ""
        else:
            self._run = 0
            return character != "\n" or len(self.quote) == 3
        return True

    def _prefix_length(self) -> int:
        return len(self.text[self.opened :]) - len(self.text[self.opened :].lstrip("rRbBfFuU"))

    def _in_line(self, character: str) -> None:
        if self.blank and character not in " \t\f":
            self.blank, self._first = False, len(self.text)
        if character in "'\"":
            prefix = _PREFIX.search(self.text, self.line)
            self.quote, self._run, self._escaped = character, 0, False
            self.opened = prefix.start() if prefix else len(self.text)
        self.depth += (character in "([{") - (character in ")]}")
        self.joined = character == "\\"
        self.text += character

    def _end_line(self) -> None:
        self.comment = False
        if self.blank:
            self.text = self.text[: self.line]
            return
        self.text += "\n"
        if self.depth <= 0:
            self._decorated = self.text[self.line :].lstrip().startswith("@")
            self.line, self.blank = len(self.text), True

    def _begin_statement(self) -> None:
        """Begins a statement once the first word of its line is known.

        The statement before it at the same indentation has then ended.
        """
        first, self.due, self._first = self._first, False, None
        if first is None or not self._forgets:
            return
        begun = self.text.rfind("\n", 0, first) + 1
        line = self.text[begun:]
        indent = line[: len(line) - len(line.lstrip())]
        word = _WORD.match(line, len(indent))
        level = next((i for i, (known, _) in enumerate(self._levels) if known == indent), None)
        if level is None:
            self._levels += ((indent, begun),)
            return
        start = self._levels[level][1]
        self._levels = self._levels[: level + 1]
        if not self._decorated and not (word is not None and word[0] in CONTINUES):
            self._levels = (*self._levels[:level], (indent, start))
            self.text = self.text[:start] + line
            self.line, self.opened = self.line + start - begun, self.opened + start - begun
