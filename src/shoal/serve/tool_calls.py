"""Calls of tools in the texts of chat models, in the format of the model's chat template.

The formats are those of the templates of Hermes and Qwen (`<tool_call>{"name",
"arguments"}</tool_call>`), Llama 3 (`{"name", "parameters"}`) and Mistral (`[TOOL_CALLS] [{"name",
"arguments"}]`), and the forms of `written_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.serve.written_calls import LISTED
from shoal.types.requests import Closing


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
        start: the text before a tool's name where a model leaves the opening out; empty for none.
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
    start: str = ""


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
UNREAD = (
    "<atem:",
    "<|START_ACTION|>",
    "<|action_start|>",
    "<tool_calls>",
    "<|tool_call_begin|>",
    "<｜tool▁call▁begin｜>",
    "<|channel|>commentary",
    "functools[",
)
"""The marks of forms that are not read, in templates that may also have a mark of `MARKS`: those of
Muse and gpt-oss, which stand in a channel, Command, InternLM, Hunyuan, Kimi, DeepSeek and Phi."""


def _written(form: str, opening: str, closing: str, inner: str = "", blank: str = "") -> CallFormat:
    call_format = CallFormat(
        opening, closing, "", False, False, opening + blank, form=form, inner=inner
    )
    return call_format._replace(
        start={"xml": "<function=", "invoke": '<invoke name="'}.get(form, "")
    )


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
    if template is None or any(mark in template for mark in UNREAD):
        return None
    return next(
        (own_format for mark, own_format in (WRITTEN | MARKS).items() if mark in template), None
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
    def starts(self) -> tuple[str, ...]:
        """The texts that calls begin with where a model leaves the opening out."""
        start, end = self.format.start, {"xml": ">", "invoke": '"'}.get(self.format.form, "")
        return tuple(f"{start}{name}{end}" for name in self.names) if start else ()

    @property
    def unstopped(self) -> tuple[tuple[str, Closing], ...]:
        """The calls of a text, as `Request.unstopped` has them.

        Beside an expression stand its commonest texts, within which no stop string ends a row.
        """
        own = self.format
        if self.forced:
            return ((r"\A", ""),)
        if not own.opening:
            written = (re.escape(f"[{name}(") for name in self.names)
            return (*((rf"\A\s*{one}", "") for one in written), (rf"\A{LISTED.pattern}", ""))
        texts = map(re.escape, ('{"name"', '{ "name"', '[{"name"'))
        bare = (*(rf"\A\s*{one}" for one in texts), r"\A\s*\[?\s*\{\s*\"name\"")
        ends = own.closing if own is HERMES or own.form else ""  # others close calls by any mark
        started = ((re.escape(one), own.closing) for one in self.starts)
        return (
            (re.escape(own.opening), ends),
            *started,
            *(((one, "") for one in bare) if own.bare else ()),
        )

    @property
    def begins(self) -> str:
        """The text that a sample writes itself before a forced call.

        A special token is left out: the call is recognised without it.
        """
        return self.format.begun if self.forced and self.reasons and not self.format.bare else ""


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
