"""Grammars of forced calls in the forms of `written_calls`: arguments in the model's own
form, bound by the tool's schema.

A call that `written_calls` reads back is valid by the schema: a string that it would read as a
value of another type is left out where the schema does not allow that value. Arguments that a tool
does not list are not written. `own_calls` returns None for a schema that a form cannot express.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shoal.config import Grammar
from shoal.errors import RequestError
from shoal.serve.call_texts import (
    Rules,
    Unwritable,
    escaped,
    require_free,
    string,
    string_bounds,
    text_before,
)
from shoal.serve.call_values import INTEGER, NAME, NUMBER, STYLES, Values, ValueStyle, alternatives
from shoal.serve.tool_calls import CallFormat
from shoal.serve.written_calls import GEMMA_QUOTE, typed, types_of

JSON_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
READ_AS = {
    "null": "(null|None)",
    "boolean": "(true|false|True|False)",
    "number": JSON_NUMBER,
    "integer": JSON_NUMBER,
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
"""The strings, as expressions, that the reader takes for a value of a type in the schema."""
BARE = {"integer": INTEGER, "number": NUMBER, "boolean": "(?:true|false)", "null": "null"}
"""The expressions of the values of types without further words."""


class CallShape(NamedTuple):
    """The texts around the parts of calls; `{}` stands for a name.

    Attributes:
        call: before the arguments of a call.
        argument: before a value.
        value: behind a value; no string contains it.
        end: behind the arguments.
        between: between two calls.
        last: behind the last call.
        first: before the first call, behind the opening of a call.
        comma: between two arguments.
        banned: further texts that no string contains, as the reader would take them for a mark.
        trimmed: True if the reader drops a line break at either end of a string.
    """

    call: str
    argument: str
    value: str
    end: str
    between: str
    last: str
    first: str = ""
    comma: str = ""
    banned: tuple[str, ...] = ()
    trimmed: bool = False


_XML_MARKS = ("</parameter>", "<parameter=", "<function=", "</function>")
SHAPES = {
    "<tool_call>xml": CallShape(
        "<function={}>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        "</function>\n",
        "</tool_call>\n<tool_call>\n",
        "</tool_call>",
        banned=(*_XML_MARKS, "</tool_call>"),
    ),
    "<seed:tool_call>xml": CallShape(
        "<function={}>\n",
        "<parameter={}>",
        "</parameter>\n",
        "</function>\n",
        "</seed:tool_call>\n<seed:tool_call>\n",
        "</seed:tool_call>",
        banned=(*_XML_MARKS, "</seed:tool_call>"),
        trimmed=True,
    ),
    "<minimax:tool_call>invoke": CallShape(
        '<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n",
        "",
        "</minimax:tool_call>",
        banned=("</parameter>", "</invoke>", "</minimax:tool_call>"),
    ),
    "<tool_call>keys": CallShape(
        "{}\n",
        "<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "",
        "</tool_call>\n<tool_call>",
        "</tool_call>",
        banned=("</arg_value>", "</tool_call>"),
    ),
    "<|tool_call>gemma": CallShape(
        "call:{}{",
        "{}:",
        GEMMA_QUOTE,
        "}",
        "<tool_call|><|tool_call>",
        "<tool_call|>",
        comma=",",
        banned=(GEMMA_QUOTE, "<tool_call|>"),
    ),
    "<|tool_call_start|>python": CallShape(
        "{}(",
        "{}=",
        "",
        ")",
        ", ",
        "]<|tool_call_end|>",
        first="[",
        comma=", ",
        banned=("<|tool_call_end|>",),
    ),
    "python": CallShape("{}(", "{}=", "", ")", ", ", "]", first="[", comma=", "),
}
"""The shapes by the opening and the form of a `CallFormat`."""


def own_calls(
    form: CallFormat,
    tools: Mapping[str, Any],
    several: bool,
    special: Mapping[str, int] | None = None,
) -> Grammar | None:
    """Returns the grammar of calls in a form of `written_calls`, behind the opening of a call.

    Args:
        form: the form.
        tools: the schemas of the tools' arguments by name.
        several: True if there may be several calls, where the form has them.
        special: the numbers of special tokens by name.

    Returns:
        None if the form cannot express a schema.
    """
    try:
        if not all(NAME.fullmatch(name) for name in tools):
            return None
        if form.form in ("args", "function"):
            return _named(form, tools, several)
        return _Calls(form, tools, special or {}).grammar(several)
    except (Unwritable, RequestError, RecursionError, ValueError):
        return None


def _named(form: CallFormat, tools: Mapping[str, Any], several: bool) -> Grammar:
    """Returns the grammar of calls that are a name before JSON."""
    mark = "[ARGS]" if form.form == "args" else ">"
    again = form.opening if several and form.form == "args" else ""
    reference = None
    for name, schema in reversed([*tools.items()]):
        text = json.dumps({"type": "object", **(schema or {})})
        reference = Grammar(
            "json_schema", text, opening=name + mark, behind=form.closing, instead=reference
        )
    assert reference is not None
    return replace(reference, again=again)


class _Calls:
    """A writer of the grammar of calls in one form."""

    def __init__(
        self, form: CallFormat, tools: Mapping[str, Any], special: Mapping[str, int]
    ) -> None:
        self._kind, self._tools = form.form, tools
        self._shape, self._rules = SHAPES[form.opening + form.form], Rules(special)
        style = STYLES.get(self._kind, ValueStyle())
        self._values = Values(self._rules, style, self._shape.banned)

    def grammar(self, several: bool) -> Grammar:
        """Returns the grammar of the calls. Raises Unwritable: see `own_calls`."""
        shape, text = self._shape, self._rules.text
        calls = " | ".join(self._call(name, schema) for name, schema in self._tools.items())
        between = shape.between if several else ""
        # MiniMax' calls stand in one pair of marks.
        several = several and (bool(between) or self._kind == "invoke")
        more = f"({text(between)} call)*" if several else ""
        start = f"start: {text(shape.first)} call {more} {text(shape.last)}"
        return Grammar("lark", "\n".join((start, f"call: {calls}", *self._rules.lines)))

    def _call(self, name: str, schema: Any) -> str:
        schema = {"properties": {}} if schema is None else schema
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise Unwritable
        free = schema.get("additionalProperties", "properties" not in schema)
        if not schema.get("properties") and free is not False:
            raise Unwritable  # any arguments
        members = self._values.members(schema, schema, 0, partial(self._argument, schema))
        shape, text = self._shape, self._rules.text
        if shape.comma:
            arguments = self._values.separated(members, text(shape.comma))
        else:
            arguments = " ".join(one if needed else f"({one})?" for one, needed in members)
        head = text(shape.call.replace("{}", name))
        return self._rules.rule(f"{head} {arguments} {text(shape.end)}")

    def _argument(self, root: Any, name: str, schema: Any) -> str:
        """Returns an argument with its name and the text behind it."""
        if not NAME.fullmatch(name):
            raise Unwritable
        head = self._rules.text(self._shape.argument.replace("{}", name))
        if self._kind in ("python", "gemma"):
            return f"{head} {self._values.any_of(schema, root)}"
        return f"{head} {self._value(schema, root, name)}"

    def _value(self, schema: Any, root: Any, key: str) -> str:
        """Returns the value of an argument without quotes, with the text behind it."""
        rules, kinds, behind = list[str](), types_of(schema, root), self._shape.value
        choices = [*alternatives(schema, root)]
        # Only its end tells a string from another value.
        beside_texts = any(one.get("type") == "string" for one in choices)
        for one in choices:
            kind = str(one.get("type"))
            if "enum" in one:
                rules += [self._listed(value, root, key) for value in one["enum"]]
            elif kind == "string" or not one:
                others = sorted(kinds - {"string"}) if one else ()
                rules.append(self._text(one, [READ_AS[kind] for kind in others]))
            elif kind in BARE and not {*one} - {"type"}:
                rules.append(text_before(self._rules, BARE[kind], behind))
            elif kind in BARE and beside_texts:
                raise Unwritable
            else:
                rules.append(f"({self._values.one(one, root)}) {self._rules.text(behind)}")
        return self._rules.rule(" | ".join(rules))

    def _text(self, one: dict[str, Any], read_as: list[str]) -> str:
        shape, bounds = self._shape, string_bounds(one)
        return string(
            self._rules, bounds, shape.banned, shape.value, read_as=read_as, trimmed=shape.trimmed
        )

    def _listed(self, value: Any, root: Any, key: str) -> str:
        """Returns a value that a schema lists, without quotes. Raises Unwritable."""
        written = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        read = json.loads(typed(written, root, key))
        if read != value or isinstance(read, bool) != isinstance(value, bool):
            raise Unwritable
        require_free(written, self._shape.banned)
        if self._shape.trimmed and written.strip("\n") != written:
            raise Unwritable
        return text_before(self._rules, escaped(written), self._shape.value)
