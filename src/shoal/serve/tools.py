"""The fields `tools` and `tool_choice` of a chat request: the rules for calls, and the grammar of a
forced call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.config import Grammar
from shoal.constraints.filters import matching
from shoal.constraints.schema_checks import require_levels
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.call_grammars import own_calls
from shoal.serve.message_models import Function, Message, NamedTool
from shoal.serve.reasoning import opened
from shoal.serve.request_models import ChatRequest
from shoal.serve.settings import given_grammar, require_size
from shoal.serve.tool_calls import HERMES, CallRules, forced_schema, format_of

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without `parameters`."""


def call_rules(request: ChatRequest, template: str | None) -> CallRules | None:
    """Returns the rules for calls in the request's samples; None if the samples have no calls.

    Raises:
        ApiError: see `require_choice`; or the chat template writes no calls and none is forced.
    """
    require_choice(request)
    if not request.tools or request.tool_choice == "none":
        return None
    forced, call_format, chosen = request.forced, format_of(template), request.callable_names
    if call_format is None and not forced:
        message = (
            "this model's chat template writes no calls of tools in a form that is read here; one "
            "that does is --chat-template hermes"
        )
        raise ApiError(400, message, param="tools", code="invalid_value")
    several = request.parallel_tool_calls is not False
    functions = [tool.function for tool in request.tools or ()]
    schemas = {one.name: one.parameters for one in functions if one.name in chosen}
    rules = CallRules(call_format or HERMES, frozenset(chosen), forced, several, schemas=schemas)
    if call_format is None or (forced and call_format.form and _own(request, rules, None) is None):
        return replace(rules, format=HERMES, told=True)
    return rules


def require_choice(request: ChatRequest) -> None:
    """Raises ApiError if a chat's choice of tools names none that there is, or not one alone."""
    names = [tool.function.name for tool in request.tools or ()]
    choice, chosen = request.tool_choice, request.callable_names
    if choice == "required" and not names:
        raise ApiError(
            400,
            "tool_choice is 'required', but there are no tools",
            param="tool_choice",
            code="invalid_value",
        )
    unknown = [repr(name) for name in dict.fromkeys(chosen) if name not in names]
    if unknown:
        message = (
            f"tool_choice names {', '.join(unknown)}, which {'is' if len(unknown) == 1 else 'are'} "
            f"not among tools: {', '.join(names) or 'there are none'}"
        )
        raise ApiError(400, message, param="tool_choice", code="invalid_value")
    if names and choice != "none" and len(set(names)) < len(names):
        raise ApiError(400, "two tools have the same name", param="tools", code="invalid_value")
    field = (given_grammar(request) or ("",))[0]
    if request.forced and field not in ("", "response_format"):  # which says nothing of a call
        raise ApiError(
            400, "a forced call of a tool does not go with another grammar", param="tool_choice"
        )


def shown_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Returns the tools in the form of chat templates."""
    known = Function.model_fields
    return [
        {
            "type": "function",
            "function": {k: v for k, v in tool.function if k in known and v is not None},
        }
        for tool in request.tools or ()
    ]


def told(request: ChatRequest, spelled: Callable[[Any], Any]) -> list[Message]:
    """Returns the messages for a chat template that knows no tools.

    The tools are told in a system message; calls and their results are texts.

    Args:
        request: the request.
        spelled: gives texts within a value that spell no special tokens.
    """
    shown = map(spelled, shown_tools(request))
    tools = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in shown)
    call = f'{HERMES.begun}{{"name": FUNCTION, "arguments": OBJECT}}{HERMES.behind}'
    text = f"Functions that may be called:\n<tools>\n{tools}</tools>\nA call is written so:\n{call}"
    messages = [_as_text(message, spelled) for message in request.messages]
    if messages[0].role in ("system", "developer"):
        text = f"{messages.pop(0).plain()['content']}\n\n{text}"
    return _in_turns([Message(role="system", content=text), *messages])


def told_by_user(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages of `told` for a template that takes no system message."""
    system, *others = messages
    return _in_turns([system.model_copy(update={"role": "user"}), *others])


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Joins consecutive messages of a user: many templates allow no two in a row."""
    turns = list[Message]()
    for message in messages:
        if turns and message.role == turns[-1].role == "user":
            texts = [one.plain()["content"] for one in (turns.pop(), message)]
            message = Message(role="user", content="\n\n".join(texts))
        turns.append(message)
    return turns


def _as_text(message: Message, spelled: Callable[[Any], Any]) -> Message:
    content = message.plain()["content"]
    if message.role == "tool":
        response = f"<tool_response>\n{content}\n</tool_response>"
        return Message(role="user", content=response)
    calls = [
        f'{HERMES.begun}{{"name": "{call.function.name}", '
        f'"arguments": {spelled(call.function.arguments)}}}'
        f"{HERMES.behind}"
        for call in message.tool_calls or ()
    ]
    fields = {"content": "\n".join(filter(None, [content, *calls])), "tool_calls": None}
    return message.model_copy(update=fields) if calls else message


def grammar_with_calls(
    request: ChatRequest,
    rules: CallRules,
    max_characters: int,
    special: Mapping[str, int] | None = None,
) -> Grammar | None:
    """Returns the grammar of a sample that is a call, or may be one in the place of its text.

    It is None if the sample may be any text.

    Args:
        request: the request.
        rules: its rules for calls.
        max_characters: the length of the longest grammar.
        special: the numbers of special tokens by name.

    Raises:
        ApiError: the grammar is too long, or cannot hold the calls.
    """
    _, given = given_grammar(request) or ("", None)
    if rules.forced:
        given = None  # it says nothing of a call, and there is no text
    elif given is None:
        return None
    if rules.format.form:
        calls = _own(request, rules, special)
        if calls is None:
            raise ApiError(
                400,
                "this model's chat template writes calls in a form that cannot hold what a tool's "
                "schema says, so tools do not go with a grammar unless tool_choice is 'none' or "
                "forces a call",
                param="tools",
                code="invalid_value",
            )
        require_size(calls.text, max_characters, "tools")
    else:
        calls = _calls(request, rules, max_characters)
    if given is None:
        return calls
    marked = opened(calls, rules.format.begun or rules.format.opening)
    twice = rules.format.bare and marked != calls
    if given.kind == "regex":
        given = matching(given.text).grammar
    return replace(given, instead=replace(marked, instead=calls) if twice else marked)


def _parameters(request: ChatRequest, rules: CallRules) -> dict[str, Any]:
    """Returns the schemas of the arguments of the tools that may be called, by name."""
    functions = [tool.function for tool in request.tools or () if tool.function.name in rules.names]
    return {one.name: one.parameters or NO_ARGUMENTS for one in functions}


def _several(request: ChatRequest, rules: CallRules) -> bool:
    return rules.parallel and not isinstance(request.tool_choice, NamedTool)


def _own(
    request: ChatRequest, rules: CallRules, special: Mapping[str, int] | None
) -> Grammar | None:
    """Returns the grammar of calls that are not JSON alone; None if no such call can be bound."""
    parameters = _parameters(request, rules)
    return own_calls(rules.format, parameters, _several(request, rules), special)


def _calls(request: ChatRequest, rules: CallRules, max_characters: int) -> Grammar:
    """Returns the grammar of calls, of several if the choice and the format leave them possible.

    Raises:
        ApiError: the grammar is too long, or a schema nested too deeply.
    """
    parameters = _parameters(request, rules)
    with naming("tools"):
        for one in parameters.values():
            require_levels(one)
    schema = forced_schema(rules, parameters)
    text = json.dumps(schema)
    require_size(text, max_characters, "tools")
    if _several(request, rules):
        return Grammar(
            "json_schema", text, between=rules.format.between, behind=rules.format.behind
        )
    return Grammar("json_schema", text)
