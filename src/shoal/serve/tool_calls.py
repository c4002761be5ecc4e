"""Calls of tools in the texts of chat models, in the format of the model's chat template.

The formats are those of the templates of Hermes and Qwen (`<tool_call>{"name",
"arguments"}</tool_call>`), Llama 3 (`{"name", "parameters"}`) and Mistral (`[TOOL_CALLS] [{"name",
"arguments"}]`), and the forms of `written_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.serve.written_calls import (
    DECODER,
    LISTED,
    MAY_BE_LISTED,
    end_of_call,
    json_elements,
    json_members,
    written_calls,
)


class CallFormat(NamedTuple):
    """The format in which a family of models writes calls.

    Attributes:
        opening: the text before a call, or before a list of calls.
        closing: the text behind it.
        arguments: the name of the field of the arguments.
        listed: True if the calls are one list.
        bare: True if a text may also begin with the JSON itself: the opening is a special token,
            which texts do not show.
        begun: the text in the prompt before a forced call.
        between: the text between two forced calls; empty if there is only one.
        behind: the text behind the last forced call; empty if there is only one.
        form: the form of the text behind the opening, see `written_calls`; empty for JSON.
        inner: further marks of the form, which may be special tokens.
    """

    opening: str
    closing: str
    arguments: str
    listed: bool
    bare: bool
    begun: str
    between: str = ""
    behind: str = ""
    form: str = ""
    inner: str = ""


HERMES = CallFormat(
    "<tool_call>",
    "</tool_call>",
    "arguments",
    listed=False,
    bare=False,
    begun="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    behind="\n</tool_call>",
)
LLAMA = CallFormat("<|python_tag|>", ";", "parameters", listed=False, bare=True, begun="")
MISTRAL = CallFormat("[TOOL_CALLS]", "", "arguments", listed=True, bare=True, begun="[TOOL_CALLS] ")
MARKS = {
    "<tool_call>": HERMES,
    "[TOOL_CALLS]": MISTRAL,
    "<|python_tag|>": LLAMA,
    '"parameters":': LLAMA,
}
"""The formats by a mark in the text of a chat template; the first mark that is found decides."""
UNREAD = ("<atem:",)
"""The marks of forms that are not read, in templates that may also have a mark of `MARKS`: Muse's,
which stand in a channel."""


def _written(form: str, opening: str, closing: str, inner: str = "", blank: str = "") -> CallFormat:
    return CallFormat(opening, closing, "", False, False, opening + blank, form=form, inner=inner)


WRITTEN = {
    "<seed:tool_call>": _written("xml", "<seed:tool_call>", "</seed:tool_call>", blank="\n"),
    "<parameter=": _written("xml", "<tool_call>", "</tool_call>", blank="\n"),
    "<minimax:tool_call>": _written(
        "invoke", "<minimax:tool_call>", "</minimax:tool_call>", blank="\n"
    ),
    "<arg_key>": _written(
        "keys", "<tool_call>", "</tool_call>", "<arg_key></arg_key><arg_value></arg_value>"
    ),
    "[ARGS]": _written("args", "[TOOL_CALLS]", "", "[ARGS][CALL_ID]"),
    "<function=": _written("function", "<function=", "</function>"),
    "<|tool_call>call:": _written("gemma", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "<|tool_call_start|>": _written("python", "<|tool_call_start|>", "<|tool_call_end|>"),
    "[func_name1(": _written("python", "", "")._replace(bare=True),
}
"""The formats that are not JSON alone, by a mark in the text of a chat template; they go first."""


def format_of(template: str | None) -> CallFormat | None:
    """Returns the format in which a template writes calls; None for none that is read here."""
    return (
        None
        if template is None or any(mark in template for mark in UNREAD)
        else next((found for mark, found in (WRITTEN | MARKS).items() if mark in template), None)
    )


class Call(NamedTuple):
    """A call of a tool; `arguments`: a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallRules:
    """The rules for calls in the samples of one request.

    Attributes:
        format: the format of the calls.
        names: the names of the tools; JSON with another name is text.
        forced: True if the sample is a call from its first character on, behind an opening that
            stands in the prompt.
        parallel: True if a sample may have several calls; otherwise the first one counts.
        reasons: True if a forced sample may reason first, so that nothing of the call stands in the
            prompt.
        told: True if the chat template knows no tools, and a system message tells them.
        schemas: the schemas of the tools' arguments by name, which type arguments that are not
            JSON.
    """

    format: CallFormat
    names: Collection[str]
    forced: bool
    parallel: bool
    reasons: bool = False
    told: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def begun(self) -> str:
        """The text in the prompt before a forced call."""
        return self.format.begun if self.forced and not self.reasons else ""

    @property
    def unstopped(self) -> tuple[tuple[str, str], ...]:
        """The calls of a text, as `Request.unstopped` has them."""
        own = self.format
        if self.forced:
            return ((r"\A", ""),)
        if not own.opening:
            return ((rf"\A{LISTED.pattern}", ""),)
        bare = r"\A\s*\[?\s*\{\s*\"name\""
        ends = own.closing if own is HERMES or own.form else ""  # others close calls by any mark
        return ((re.escape(own.opening), ends), *(((bare, ""),) if own.bare else ()))

    @property
    def begins(self) -> str:
        """The text that a sample writes itself before a forced call.

        A special token is left out: the call is recognised without it.
        """
        return self.format.begun if self.forced and self.reasons and not self.format.bare else ""


class CallReader:
    """A reader that takes one sample's text piece by piece, and separates calls from other text.

    A call is returned when it is complete; one that the sample's end cuts is neither call nor text.
    A text that begins like a call and is none comes out as text, character for character.

    Attributes:
        found: the number of calls so far.
    """

    def __init__(self, rules: CallRules) -> None:
        self._rules, self._format = rules, rules.format
        self._waiting, self._inside, self._at_start = "", rules.forced and not rules.begins, True
        self._raw, self._blank = "", ""
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
            self._raw, self._waiting, self._inside = opening, text[start + len(opening) :], True
            return text[:start]
        if bare and (ended or not opening.startswith(text.lstrip())):
            self._raw, self._waiting, self._inside = "", text, True
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
            self._raw, self._inside = "", True
            return ""
        if self._at_start and MAY_BE_LISTED.match(text) and not ended:
            return ""
        self._waiting, self._at_start = "", self._at_start and not text.strip()
        return text

    def _inside_step(self, ended: bool) -> tuple[str, list[Call]]:
        """Reads the JSON behind an opening; incomplete JSON leaves the reader inside."""
        if self._format.form:
            return self._written_step(ended)
        body = self._waiting.lstrip()
        try:
            value, size = DECODER.raw_decode(body)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ValueError) and not ended and body[:1] in ("", "{", "["):
                return "", []
            if ended and self._is_cut(body, error):
                self._waiting, self._inside = "", False
                return "", []
            return self._refused(), []
        calls = self._calls_of(value, body)
        if calls is None:
            return self._refused(), []
        rest = body[size:]
        closing = self._format.closing
        blanks = rest.lstrip()
        if closing and not ended and len(blanks) < len(closing) and closing.startswith(blanks):
            return "", []  # the closing may follow
        cut = ended and closing.startswith(blanks)  # of the closing there is the beginning at most
        self._waiting = "" if cut else blanks.removeprefix(closing) if closing else rest
        self._inside, self._at_start, self._called = False, True, True
        return "", calls

    def _written_step(self, ended: bool) -> tuple[str, list[Call]]:
        """Reads the text between the marks of a form that is not JSON alone."""
        form, text = self._format.form, self._waiting
        ends = end_of_call(form, text, self._format.closing)
        if ends is None:
            if ended:
                self._waiting, self._inside = "", False
            return "", []
        found = written_calls(form, text[: ends[0]], self._rules.schemas)
        if found is None:
            return self._refused(), []
        self._waiting = text[ends[1] :]
        self._inside, self._at_start, self._called = False, True, True
        return "", [Call(*one) for one in found]

    def _is_cut(self, body: str, error: Exception) -> bool:
        """Returns True if a text is the beginning of a call, by the error of reading it."""
        unread = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(body.rstrip()) or error.msg.startswith("Unterminated")
        )
        return self._rules.forced or bool(unread and self._raw and (body or self._called))

    def _refused(self) -> str:
        """Returns the text that was held back, which is no call."""
        text, self._waiting = self._raw + self._waiting, ""
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


def forced_schema(rules: CallRules, parameters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schema of a forced call of some tool, given their parameters by name.

    Each tool's own schema stands under `$defs`, and its references lead there.
    """
    own = {
        f"tool{i}": moved(schema, f"#/$defs/tool{i}")
        for i, schema in enumerate(parameters.values())
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                rules.format.arguments: {"$ref": f"#/$defs/tool{i}"},
            },
            "required": ["name", rules.format.arguments],
            "additionalProperties": False,
        }
        for i, name in enumerate(parameters)
    ]
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if rules.format.listed:
        one = {"type": "array", "items": one, "minItems": 1} | (
            {} if rules.parallel else {"maxItems": 1}
        )
    return {**one, "$defs": own}


LITERAL = ("const", "enum", "default", "examples")
LOCAL = re.compile("#(?:$|/)")


def moved(schema: Any, place: str) -> Any:
    """Returns a schema whose references to itself lead to its new place."""
    if isinstance(schema, list):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and LOCAL.match(value)
        else value
        if name in LITERAL
        else moved(value, place)
        for name, value in schema.items()
    }
