"""Calls of tools told from the other text of a sample that comes piece by piece."""

from __future__ import annotations

import json
from typing import Any

from shoal.serve.call_ends import CallEnd, Nesting, whole_calls
from shoal.serve.tool_calls import Call, CallRules
from shoal.serve.written_calls import (
    DECODER,
    LISTED,
    MAY_BE_LISTED,
    json_elements,
    json_members,
    written_calls,
)


class CallReader:
    """A reader that takes one sample's text piece by piece, and separates calls from other text.

    A call is returned when it is complete; one that the sample's end cuts is neither call nor text.
    A text that begins like a call and is none comes out as text, character for character.

    Attributes:
        found: the number of calls so far.
    """

    def __init__(self, rules: CallRules) -> None:
        self._rules, self._format = rules, rules.format
        self._waiting, self._blank = "", ""
        self._enter("", "")
        self._inside, self._at_start = rules.forced and not rules.begins, True
        self._called = rules.forced  # behind it nothing but calls can be meant
        self.found = 0

    def feed(self, text: str, ended: bool) -> tuple[str, list[Call]]:
        """Returns the text of a piece that belongs to no call, and the calls that are complete.

        Args:
            ended: True if it is the last piece.
        """
        pieces = self.pieces(text, ended)
        shown = "".join(piece for piece in pieces if isinstance(piece, str))
        return shown, [piece for piece in pieces if isinstance(piece, Call)]

    def pieces(self, text: str, ended: bool) -> list[str | Call]:
        """Returns texts, none of them empty, and calls, in the order of the sample; see `feed`."""
        self._waiting += text
        found: list[str | Call] = []
        while True:
            if not self._inside:
                found.append(self._before_opening(ended))
            if not self._inside:
                break
            done, calls = self._inside_step(ended)
            found += [*calls, done]
            if self._inside:
                break
        shown: list[str | Call] = []
        for i, piece in enumerate(found):  # the last one is a text
            if isinstance(piece, str):
                shown.append(self._without_margins(piece, ended and i == len(found) - 1))
                continue
            self._blank = ""
            if self._rules.parallel or not self.found:
                self.found += 1
                shown.append(piece)
        return [piece for piece in shown if piece]

    def _before_opening(self, ended: bool) -> str:
        """Returns the text up to the next opening, without an end that may become an opening."""
        opening, text = self._format.opening, self._waiting
        if not opening:
            return self._before_list(ended)
        start = text.find(opening)
        bare = (
            self._format.bare
            and self._at_start
            and text.lstrip()[:1] == ("[" if self._format.listed else "{")
        )
        if start >= 0 and not (bare and text.lstrip()[: len(opening)] != opening):
            self._enter(opening, text[start + len(opening) :])
            return text[:start]
        if bare and (ended or not opening.startswith(text.lstrip())):
            self._enter("", text)
            return ""
        if self._at_start and not text.strip() and not ended:
            return ""
        sizes = range(min(len(opening) - 1, len(text)), 0, -1)
        kept = next((k for k in sizes if opening.startswith(text[-k:])), 0)
        if ended:
            begun = kept if self._called else 0  # behind a call another one
            text, kept = text[: len(text) - begun], 0
        self._waiting = text[len(text) - kept :]
        self._at_start = self._at_start and not text[: len(text) - kept].strip()
        return text[: len(text) - kept]

    def _before_list(self, ended: bool) -> str:
        """Returns a text that does not begin with a list of calls in Python."""
        text, called = self._waiting, LISTED.match(self._waiting)
        if self._at_start and called and called[1] in self._rules.names:
            self._enter("", text)
            return ""
        if self._at_start and MAY_BE_LISTED.match(text) and not ended:
            return ""
        self._waiting, self._at_start = "", self._at_start and not text.strip()
        return text

    def _inside_step(self, ended: bool) -> tuple[str, list[Call]]:
        """Reads the JSON behind an opening; incomplete JSON leaves the reader inside."""
        if self._format.form:
            return self._written_step(ended)
        text, closing = self._waiting, self._format.closing
        body = text.lstrip()
        end = self._value.read(text) if body[:1] in ("{", "[") else None
        if not ended and (not body or (end is None and body[0] in "{[")):
            return "", []
        blanks = text[end:].lstrip() if end else ""
        if closing and not ended and len(blanks) < len(closing) and closing.startswith(blanks):
            return "", []  # the closing may follow
        try:
            value, size = DECODER.raw_decode(body)
        except (ValueError, RecursionError) as error:
            return self._unread(body, error, end)
        size += len(text) - len(body)
        calls = self._calls_of(value, body)
        if calls is None:
            return self._refused(size), []
        rest = text[size:]
        blanks = rest.lstrip()
        cut = ended and closing.startswith(blanks)  # of the closing there is the beginning at most
        self._leave("" if cut else blanks.removeprefix(closing) if closing else rest)
        return "", calls

    def _unread(self, body: str, error: Exception, end: int | None) -> tuple[str, list[Call]]:
        """Returns the text or the calls of JSON that is not whole, or none."""
        cut = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(body.rstrip()) or error.msg.startswith("Unterminated")
        )
        if cut and self._format.listed and self._value.inner:
            before = len(self._waiting) - len(body)
            listed = body[: self._value.inner - before] + "]"
            calls = self._calls_of(DECODER.decode(listed), listed)
            if calls is not None:
                self._leave("")
                return "", calls
        if self._rules.forced or (cut and self._raw and (body or self._called)):
            self._waiting, self._inside = "", False
            return "", []
        return self._refused(end or 0), []

    def _written_step(self, ended: bool) -> tuple[str, list[Call]]:
        """Reads the text between the marks of a form that is not JSON alone."""
        form, text, closing = self._format.form, self._waiting, self._format.closing
        ends = self._end.find(text)
        if ends is None and not ended:
            return "", []
        whole = whole_calls(form, text, closing) if ends is None else text[: ends[0]]
        found = written_calls(form, whole, self._rules.schemas)
        if ends is None:
            self._leave("")
        elif found is None:
            return self._refused(ends[1]), []
        else:
            self._leave(text[ends[1] :])
        return "", [Call(*one) for one in found or ()]

    def _enter(self, raw: str, text: str) -> None:
        """Goes behind an opening, which is empty where a text begins with a call itself."""
        self._raw, self._waiting, self._inside = raw, text, True
        self._value = Nesting('"')
        self._end = CallEnd(self._format.form, self._format.closing)

    def _leave(self, text: str) -> None:
        """Goes on with the text behind calls."""
        self._waiting, self._inside, self._at_start, self._called = text, False, True, True

    def _refused(self, size: int) -> str:
        """Returns the beginning of the text that was held back, which is no call."""
        text, self._waiting = self._raw + self._waiting[:size], self._waiting[size:]
        self._inside, self._raw, self._at_start = False, "", False
        return text

    def _calls_of(self, value: Any, text: str) -> list[Call] | None:
        """Returns the calls of a value, with their arguments as the text of the value has them."""
        listed = self._format.listed and isinstance(value, list)
        given, written = (value, json_elements(text)) if listed else ([value], [text])
        calls = []
        for one, own in zip(given, written, strict=True):
            if not isinstance(one, dict) or one.get("name") not in self._rules.names:
                return None
            fields = (self._format.arguments, "arguments", "parameters")
            field = next((name for name in fields if name in one), None)
            if field is not None and not isinstance(one[field], dict):
                return None
            calls.append(Call(one["name"], "{}" if field is None else json_members(own)[field]))
        return calls or None

    def _without_margins(self, shown: str, ended: bool) -> str:
        """Returns a text without the blanks before calls and at the end.

        The blanks wait until other text follows.
        """
        text = self._blank + shown
        if ended and not self.found:
            return text
        body = text.rstrip()
        self._blank = text[len(body) :]
        return body
