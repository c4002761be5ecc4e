"""The ends of calls in texts that grow piece by piece, and the whole calls of a text that was cut.

A text is read once, however many pieces it comes in.
"""

from __future__ import annotations

import re

NAME_ENDS = {"args": "[ARGS]", "function": ">"}
"""The texts between a name and JSON, by the forms that have both."""

MARKED = ("args", "function")
"""The forms with JSON behind a name and a mark."""


class Nesting:
    """The brackets outside of quotes of a text that grows.

    Args:
        quotes: the quotation marks.
        mark: a text that breaks the value off where it stands outside of quotes; empty for none.

    Attributes:
        end: the place behind the bracket that closes the first one; None while there is none.
        inner: the place behind the last bracket that closes a value directly within the first one.
        broken: the place behind a mark outside of quotes, before the end; None while there is none.
    """

    def __init__(self, quotes: str, mark: str = "") -> None:
        self._outside = re.compile(
            "|".join(filter(None, (f"[{quotes}[\\](){{}}]", re.escape(mark))))
        )
        self._inside = {quote: re.compile(rf"[\\{quote}]") for quote in quotes}
        self._mark, self._depth, self._quote, self._at = mark, 0, "", 0
        self.end: int | None = None
        self.broken: int | None = None
        self.inner = 0

    def read(self, text: str, start: int = 0) -> int | None:
        """Returns `end`, by the text so far.

        Args:
            text: the text, which goes on with what was read before.
            start: the place where the value begins.
        """
        at = max(self._at, start)
        while self.end is None:
            found = (self._inside[self._quote] if self._quote else self._outside).search(text, at)
            if found is None:
                self._at = max(at, len(text) - len(self._mark) + 1 if self._mark else len(text))
                break
            self._at = at = self._past(found, text)
            if at > len(text):  # an escape whose second character is to come
                self._at = at - 2
                break
        return self.end

    def _past(self, found: re.Match[str], text: str) -> int:
        """Returns the place behind a bracket, a quotation mark, an escape or the mark."""
        what, at = found[0], found.end()
        if self._quote:
            self._quote = "" if what == self._quote else self._quote
            return at + (what == "\\")
        if what in self._inside:
            self._quote = what
        elif what == self._mark:
            self.broken = self.broken or at
        else:
            self._depth += 1 if what in "[({" else -1
            self.end = at if self._depth <= 0 and what in "])}" else None
            self.inner = at if self._depth == 1 and what in "])}" else self.inner
        return at


class CallEnd:
    """The end of the calls behind an opening, in a form of `written_calls`.

    JSON may hold the closing inside of texts, and lists in Python without a closing end by
    themselves.

    Args:
        form: the form.
        closing: the text behind the calls.
    """

    def __init__(self, form: str, closing: str) -> None:
        self._form, self._closing = form, closing
        self._name, self._searched = -1, 0
        self._value = Nesting("\"'") if form == "python" else Nesting('"', closing)

    def find(self, text: str) -> tuple[int, int] | None:
        """Returns the end of the calls, and the place behind their closing; None without one.

        Args:
            text: the text behind the opening, which goes on with what was read before.
        """
        if self._form in NAME_ENDS:
            return self._behind_json(text)
        if not self._closing:
            end = self._value.read(text)
            return None if end is None else (end, end)
        end = text.find(self._closing, self._searched)
        self._searched = max(len(text) - len(self._closing) + 1, 0)
        return None if end < 0 else (end, end + len(self._closing))

    def _behind_json(self, text: str) -> tuple[int, int] | None:
        if self._name < 0:
            self._name = _behind_name(self._form, text)
        if self._name < 0:
            return None
        end, broken = self._value.read(text, self._name), self._value.broken
        if broken is not None:
            return broken, broken
        found = -1 if end is None else text.find(self._closing, end)
        return None if found < 0 else (found, found + len(self._closing))


def _behind_name(form: str, text: str) -> int:
    """Returns the place behind the text between a name and JSON; -1 while it is not there."""
    at = text.find(NAME_ENDS[form])
    return at if at < 0 else at + len(NAME_ENDS[form])


def whole_calls(form: str, text: str, closing: str) -> str:
    """Returns the whole calls at the beginning of a text that was cut behind an opening.

    The text is as `written_calls` reads it; it is empty if the first call is not whole.
    """
    if form in ("xml", "invoke"):
        return _elements(text, "function" if form == "xml" else "invoke")
    if form == "keys":
        cut = next((k for k in range(len(closing) - 1, 1, -1) if text.endswith(closing[:k])), 0)
        head = text[: len(text) - cut].rstrip()
        return head if cut and ("<" not in head or head.endswith("</arg_value>")) else ""
    if form == "gemma":
        return text[: text.rfind("}") + 1]
    if form == "python":
        value = Nesting("\"'")
        end = value.read(text)
        return text[:end] if end else text[: value.inner] + "]" if value.inner else ""
    start = _behind_name(form, text)
    return text[: Nesting('"').read(text, start) or 0] if start >= 0 else ""


def _elements(text: str, call: str) -> str:
    """Returns a text up to the last end of an element that stands behind whole arguments.

    Within an argument such an end is a part of its text.
    """
    end, bare = f"</{call}>", re.compile(rf"<{call}[= ][^>\n]*>\s*\Z")
    at = text.rfind(end)
    while at >= 0:
        head = text[:at].rstrip()
        if head.endswith("</parameter>") or bare.search(head, max(head.rfind("<"), 0)):
            return text[: at + len(end)]
        at = text.rfind(end, 0, at)
    return ""
