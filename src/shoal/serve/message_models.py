"""Messages of a chat, calls of tools in them, and the tools that a request names, field by field.

Docstrings and descriptions of the models are part of `/openapi.json`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shoal.serve.api_paths import read_json
from shoal.serve.request_fields import (
    EmptyList,
    OpenModel,
    StrictModel,
    Text,
    error_at,
    optional,
    text_or_list,
)

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(OpenModel):
    """A piece of a message."""

    type: Literal["text", "refusal"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "refusal":
            return {"type": "refusal", "text": given.get("refusal", given.get("text"))}
        if isinstance(given, dict) and given.get("type", "text") != "text":
            message = "This server takes text, no images, sounds or files: leave this part out"
            raise error_at("type", "unknown_part", message)
        return given


def _written(arguments: Any) -> Any:
    """Returns arguments that came as an object as a text."""
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class SentFunction(OpenModel):
    """The function that a call called."""

    name: Text
    arguments: Annotated[Text, BeforeValidator(_written)] = Field(
        description="A JSON object, as a text; templates get {} for any other text."
    )

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as an object, which is empty if the model wrote no object."""
        try:
            found = read_json(self.arguments or "{}")
            if not isinstance(found, dict):
                return {}
            # Half a surrogate pair becomes a question mark: no prompt has it.
            return dict(json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace")))
        except (ValueError, RecursionError):
            return {}


class SentCall(OpenModel):
    """A call of a tool, as an answer has it."""

    id: Text
    type: Literal["function"] = "function"
    function: SentFunction


def _writable(value: Any) -> Any:
    """Rejects a schema that no prompt can show."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which no text has") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


class Function(OpenModel):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_writable)] | None = optional(
        "A JSON schema of the arguments; none = there are no arguments."
    )
    strict: bool | None = optional(
        "Forced calls keep to the schema in any case; other calls are not forced to."
    )


class Tool(OpenModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    """The name of a function."""

    name: ToolName


class NamedTool(StrictModel):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class Message(OpenModel):
    """One message of a conversation, in the form of an answer's message too: clients send those
    back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[Text, Tag("text")]
            | Annotated[list[TextPart], Field(fail_fast=True), Tag("list")],
            Discriminator(text_or_list),
        ]
        | None
    ) = optional("May be missing in messages of the assistant and of tools.")
    name: Text | None = None
    tool_calls: Annotated[list[SentCall], Field(fail_fast=True)] | None = optional(
        "Calls that the assistant made."
    )
    tool_call_id: Text | None = optional("Of a tool's message: the call that it answers.")
    reasoning_content: Text | None = optional(
        "Reasoning of the assistant; templates show it where their models want it."
    )
    reasoning: Text | None = optional("Another name of reasoning_content.")
    annotations: EmptyList | None = None
    prefix: bool | None = optional(
        "True in the last message, of the assistant: it goes on, as with continue_final_message."
    )

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise error_at("content", "missing", "Field required")
        if self.tool_calls and self.role != "assistant":
            raise error_at("tool_calls", "not_allowed", "Only messages of the assistant have calls")
        return self

    @property
    def reasoned(self) -> str | None:
        """The reasoning, from whichever field has it."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def plain(self) -> dict[str, Any]:
        """Returns the message in the form of chat templates: the arguments of calls are objects."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content or ())
        )
        fields = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoned,
        }
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.parsed},
            }
            for call in self.tool_calls or ()
        ]
        sent = {name: value for name, value in fields.items() if value is not None}
        return {
            "role": self.role,
            "content": content,
            **sent,
            **({"tool_calls": calls} if calls else {}),
        }
