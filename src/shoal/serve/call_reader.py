"""Calls of tools told from the other text of a sample that comes piece by piece.

It knows the ends of calls as the text grows, and the whole calls of a text that was cut. A text is
read once, however many pieces it comes in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from shoal.serve.tool_calls import Call, CallRules
from shoal.serve.written_calls import (
    BEHIND_JSON,
    DECODER,
    LISTED,
    MAY_BE_LISTED,
    NAME_ENDS,
    TWO_WORDS,
    behind_name,
    json_elements,
    json_members,
    object_text,
    written_calls,
)


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
            text: the text, which begins with the text that was read before.
            start: the place where the value begins.
        """
        at = max(self._at, start)
        while self.end is None:
            match = (self._inside[self._quote] if self._quote else self._outside).search(text, at)
            if match is None:
                self._at = max(at, len(text) - len(self._mark) + 1 if self._mark else len(text))
                break
            self._at = at = self._past(match, text)
            if at > len(text):  # an escape whose second character is to come
                self._at = at - 2
                break
        return self.end

    def _past(self, match: re.Match[str], text: str) -> int:
        """Returns the place behind a bracket, a quotation mark, an escape or the mark."""
        sign, at = match[0], match.end()
        if self._quote:
            self._quote = "" if sign == self._quote else self._quote
            return at + (sign == "\\")
        if sign in self._inside:
            self._quote = sign
        elif sign == self._mark:
            self.broken = self.broken or at
        else:
            self._depth += 1 if sign in "[({" else -1
            self.end = at if self._depth <= 0 and sign in "])}" else None
            self.inner = at if self._depth == 1 and sign in "])}" else self.inner
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
            text: the text behind the opening, which begins with the text that was read before.
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
            self._name = behind_name(self._form, text)
        if self._name < 0:
            words = TWO_WORDS.match(text)
            return words and (words.end(), words.end())
        end, broken = self._value.read(text, self._name), self._value.broken
        if broken is not None:
            return broken, broken
        place = -1 if end is None else text.find(self._closing, end)
        return None if place < 0 else (place, place + len(self._closing))


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
    start = behind_name(form, text)
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


def _begun(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest beginning of a mark that a text ends with."""
    first, longest = {mark[0] for mark in marks}, max(map(len, marks))
    for at in range(max(len(text) - longest + 1, 0), len(text)):
        if text[at] in first and any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


class CallReader:
    """A reader that takes one sample's text piece by piece, and separates calls from other text.

    A call is returned when it is complete; one that the sample's end cuts is neither call nor text.
    A text that begins like a call and is none comes out as text, character for character.

    Attributes:
        found: the number of calls so far.
    """

    def __init__(self, rules: CallRules) -> None:
        self._rules, self._format = rules, rules.format
        self._openings = (rules.format.opening, *rules.starts)
        self._opening_of = re.compile("|".join(map(re.escape, self._openings))).search
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
        parts: list[str | Call] = []
        while True:
            if not self._inside:
                parts.append(self._before_opening(ended))
            if not self._inside:
                break
            done, calls = self._inside_step(ended)
            parts += [*calls, done]
            if self._inside and not calls:
                break
        shown: list[str | Call] = []
        for i, piece in enumerate(parts):  # the last one is a text
            if isinstance(piece, str):
                shown.append(self._without_margins(piece, ended and i == len(parts) - 1))
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
        start = self._opening_of(text)
        bare = (
            self._format.bare
            and self._at_start
            and text.lstrip()[:1] in (("[",) if self._format.listed else ("{", "["))
        )
        if start and not (bare and text[: start.start()].strip()):
            raw = start[0] if start[0] == opening else ""
            self._enter(raw, text[start.start() + len(raw) :])
            return text[: start.start()]
        if bare and (ended or not opening.startswith(text.lstrip())):
            self._enter("", text)
            return ""
        if self._at_start and not text.strip() and not ended:
            return ""
        kept = _begun(text, self._openings)
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
        blanks = BEHIND_JSON.sub("", text[end:], 1) if end else ""
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
        blanks = BEHIND_JSON.sub("", rest, 1)
        if closing and not self._format.bare and blanks[:1] == "{":  # between the same marks
            self._enter("", blanks)
            self._called = True
            return "", calls
        cut = ended and closing.startswith(blanks)  # of the closing there is the beginning at most
        if closing:
            closed = blanks.startswith((closing, "{"))
            rest = blanks.removeprefix(closing) if closed else rest.lstrip()
        self._leave("" if cut else rest)
        return "", calls

    def _unread(self, body: str, error: Exception, end: int | None) -> tuple[str, list[Call]]:
        """Returns the text or the calls of JSON that is not whole, or none."""
        cut = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(body.rstrip()) or error.msg.startswith("Unterminated")
        )
        if cut and body[:1] == "[" and self._value.inner:
            before = len(self._waiting) - len(body)
            listed = body[: self._value.inner - before] + "]"
            calls = self._calls_of(DECODER.decode(listed), listed)
            if calls is not None:
                self._leave("")
                return "", calls
        if self._rules.forced or (cut and (self._called or (self._raw and body))):
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
        written = written_calls(form, whole, self._rules.schemas)
        calls = [Call(*one) for one in written] if written else self._json_calls(whole or text)
        if ends is None:
            bare = not (self._raw or self._rules.forced) and text.startswith(self._rules.starts)
            rest = text[len(whole) :] if whole and bare else ""
            self._leave("" if closing.startswith(rest.strip()) else rest)
        elif calls is None:
            return self._refused(ends[1]), []
        else:
            self._leave(text[ends[1] :])
        return "", calls or []

    def _json_calls(self, text: str) -> list[Call] | None:
        """Returns the calls of a text that is JSON in the place of the model's own form."""
        try:
            return self._calls_of(DECODER.decode(text.strip()), text.strip())
        except (ValueError, RecursionError):
            return None

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
        listed = isinstance(value, list)
        given, written = (value, json_elements(text)) if listed else ([value], [text])
        calls = []
        for one, own in zip(given, written, strict=True):
            if isinstance(one, dict) and isinstance(one.get("function"), dict):
                one, own = one["function"], json_members(own)["function"]
            name = one.get("name") if isinstance(one, dict) else None
            if not isinstance(name, str) or name not in self._rules.names:
                return None
            fields = (self._format.arguments, "arguments", "parameters")
            field = next((field for field in fields if one.get(field) is not None), None)
            arguments = None if field is None else object_text(one[field], json_members(own)[field])
            if field is not None and arguments is None:
                return None
            calls.append(Call(name, arguments or "{}"))
        return calls or None

    def _without_margins(self, shown: str, ended: bool) -> str:
        """Returns a text without blanks before calls and at the end, which wait for more text."""
        text = self._blank + shown
        if ended and not self.found:
            return text
        body = text.rstrip()
        self._blank = text[len(body) :]
        return body
