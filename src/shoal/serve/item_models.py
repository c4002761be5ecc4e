"""The requests of /v1/responses, and the chat requests with the same meaning.

Docstrings and descriptions of the models are part of `/openapi.json`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shoal.serve.api_errors import ApiError
from shoal.serve.message_models import Function, Message, SentCall, SentFunction, Tool
from shoal.serve.request_fields import (
    MOST_NAMED,
    OF_OTHER_TOOLS,
    Ignored,
    Included,
    Limit,
    NonNegative,
    OpenModel,
    Passed,
    StrictModel,
    Text,
    error_at,
    optional,
    passed_over,
    text_or_list,
)
from shoal.serve.request_models import (
    AllowedFunctions,
    AnyTool,
    ChatRequest,
    FunctionTool,
    JsonFormat,
    JsonSchema,
    JsonText,
    NamedFunction,
    SampledRequest,
    SchemaFormat,
    TextFormat,
    choice_kind,
)

NOT_KEPT = "This server keeps no answers: send the whole conversation as input"
ABSENT = {
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
    "background": "This server keeps no answers to fetch later",
    "prompt": "This server keeps no prompts: send the text as input",
    "n": "An answer has one sample: /v1/chat/completions takes n",
}
"""The fields that a client may know and this server does not have, with the reasons."""
LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}
"""The fields of /v1/responses by their names in /v1/chat/completions."""
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
"""The limits of `metadata`: the number of pairs, the characters of a name, and those of a value."""


def _pairs(value: Any) -> Any:
    """Rejects the first pair of `metadata` that is not allowed."""
    for i, (name, text) in enumerate(value.items() if isinstance(value, dict) else ()):
        if (
            i == MAX_PAIRS
            or len(name) > MAX_NAME
            or not isinstance(text, str)
            or len(text) > MAX_VALUE
        ):
            limits = f"At most {MAX_PAIRS} texts of {MAX_VALUE} characters, by names of {MAX_NAME}"
            raise error_at(name, "metadata", limits)
    return value


class ContentPart(OpenModel):
    """A piece of a message, of a request or of an answer that is sent back."""

    type: Literal["input_text", "output_text", "refusal"]
    text: Text
    annotations: Passed = None
    logprobs: Passed = None

    @model_validator(mode="before")
    @classmethod
    def _text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else "input_text"
        if kind == "refusal":
            return {"type": kind, "text": given.get("refusal")}
        if kind not in ("input_text", "output_text"):
            raise error_at(
                "type",
                "unknown_part",
                "This server takes text: parts of the types input_text and output_text",
            )
        return given


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("list")],
    Discriminator(text_or_list),
]
Status = Literal["in_progress", "completed", "incomplete"]


def _joined(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(OpenModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Text | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def message(self) -> Message:
        """Returns the message of a chat with the same content."""
        return Message(role=self.role, content=_joined(self.content))


class CallItem(SentFunction):
    """A call of a function that the model made."""

    type: Literal["function_call"]
    call_id: Text
    id: Text | None = None
    status: Status | None = None

    def message(self) -> Message:
        """Returns the message of a chat with the same call."""
        function = SentFunction(name=self.name, arguments=self.arguments)
        return Message(role="assistant", tool_calls=[SentCall(id=self.call_id, function=function)])


class CallOutputItem(OpenModel):
    """The result of a called function."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: Text | None = None
    status: Status | None = None

    def message(self) -> Message:
        """Returns the message of a chat with the same output."""
        return Message(role="tool", tool_call_id=self.call_id, content=_joined(self.output))


class SentReasoning(OpenModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(OpenModel):
    """Reasoning of the assistant, as an answer has it."""

    type: Literal["reasoning"]
    content: Annotated[list[SentReasoning], Field(fail_fast=True)] | None = None
    summary: Passed = None
    id: Text | None = None
    status: Status | None = None

    def message(self) -> Message:
        """Returns the message of a chat with this reasoning.

        The reasoning belongs to the message that follows.
        """
        return Message(
            role="assistant", reasoning_content="".join(part.text for part in self.content or ())
        )


def _kind(value: Any) -> str:
    kind = value.get("type") or "message" if isinstance(value, dict) else ""
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="This server takes items of the types message, function_call, "
        "function_call_output and reasoning",
    ),
]


def _flat(tool: Any) -> Any:
    """Returns a function in the form of a chat, `{"function": {...}}`, in that of this API."""
    inner = tool.get("function") if isinstance(tool, dict) and "name" not in tool else None
    return {**inner, "type": tool.get("type")} if isinstance(inner, dict) else tool


FlatTool = Annotated[AnyTool, BeforeValidator(_flat)]


class FlatSchema(JsonSchema, JsonText):
    """JSON that fits a schema."""

    type: Literal["json_schema"]


class TextOptions(StrictModel):
    """The form that the text must have."""

    format: Annotated[TextFormat | JsonFormat | FlatSchema, Field(discriminator="type")] | None = (
        optional("Text, some JSON object, or JSON that fits a schema.")
    )
    verbosity: Ignored = None


class ItemStreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_obfuscation: Ignored = None


class ResponsesRequest(SampledRequest):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("list")],
        Discriminator(text_or_list),
    ] = Field(description="A message of the user, or the items of a conversation.")
    instructions: Text | None = optional("A message of the system, before all others.")
    max_output_tokens: Limit | None = optional(
        "Most new tokens; clamped to what the server allows. -1, -2 = as many as it allows."
    )
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128, fail_fast=True)] | None = optional(
        "What the model may call: functions. Tools of other types are passed over."
    )
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("text")]
            | Annotated[NamedFunction, Tag("named")]
            | Annotated[AllowedFunctions, Tag("allowed")],
            Discriminator(choice_kind),
        ]
        | None
    ) = optional(
        "auto: as the model likes; none; required: some tool; one by its name; or some by theirs."
    )
    parallel_tool_calls: bool | None = optional(
        "There may be several calls; true. Otherwise the first call counts."
    )
    include: Annotated[list[Included], Field(max_length=64, fail_fast=True)] | None = optional(
        "Log-probabilities of the tokens; the other values have no effect."
    )
    top_logprobs: NonNegative | None = optional(
        "And of that many most probable tokens; with the former."
    )
    metadata: Annotated[dict[str, str], BeforeValidator(_pairs)] | None = optional(
        "The answer has it too."
    )
    store: bool | None = optional("Answers are not kept, whatever this says.")
    background: Literal[False] | None = optional("Only false.")
    truncation: Literal["disabled"] | None = optional("What does not fit the context is refused.")
    stream_options: ItemStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Further variables of the chat template."
    )
    reasoning: Ignored = None
    max_tool_calls: Ignored = None
    client_metadata: Ignored = None
    context_management: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: Any) -> Any:
        """Rejects known fields that this server does not have, with the reason."""
        for name, why in ABSENT.items() if isinstance(given, dict) else ():
            if given.get(name) not in (None, False):
                raise error_at(name, "absent_field", why)
        return given

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model may call."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def ignored(self) -> list[str]:
        """The names of fields that were sent and have no effect."""
        parts = {"text": self.text, "stream_options": self.stream_options}
        inner = [
            f"{name}.{field}"
            for name, part in parts.items()
            if part is not None
            for field in part.ignored_fields()
        ]
        allowed = getattr(self.tool_choice, "tools", ())
        places = {"input": self.input, "tools": self.tools, "tool_choice.tools": allowed}
        sent = {path for name, part in places.items() for path in passed_over(name, part)}
        include = self.include or ()
        vain = [
            *(["store"] if self.store else []),
            *(["top_logprobs"] if self.top_logprobs and LOGPROBS not in include else []),
            *(f"include.{name}" for name in OF_OTHER_TOOLS if name in include),
        ]
        return [*self.ignored_fields(), *inner, *vain, *sorted(sent)[:MOST_NAMED]]

    def messages(self) -> list[Message]:
        """Returns the conversation; calls belong to the assistant's message before them, if any."""
        said = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*said, Message(role="user", content=self.input)]
        for item in self.input:
            message = item.message()
            last = said[-1] if said and said[-1].role == message.role == "assistant" else None
            reasoned = last is not None and last.content is None and not last.tool_calls
            if last is not None and (
                isinstance(item, CallItem) or (isinstance(item, MessageItem) and reasoned)
            ):
                calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
                content = message.content if isinstance(item, MessageItem) else last.content
                said[-1] = Message(
                    role="assistant",
                    content=content,
                    reasoning_content=last.reasoned,
                    tool_calls=calls or None,
                )
            else:
                said.append(message)
        return said

    def chat(self) -> ChatRequest:
        """Returns the request of /v1/chat/completions with the same meaning.

        Raises:
            ApiError: it asks for log-probabilities beside calls.
        """
        logprobs = LOGPROBS in (self.include or ())
        if logprobs and self.functions and self.tool_choice != "none":
            raise ApiError(
                400,
                "log-probabilities of a text with calls: /v1/chat/completions has them",
                param="include",
            )
        common = {name: getattr(self, name) for name in SampledRequest.model_fields}
        tools = [Tool(type="function", function=_function(tool)) for tool in self.functions]
        return ChatRequest(
            **common,
            messages=self.messages(),
            max_tokens=self.max_output_tokens,
            response_format=self._format(),
            logprobs=logprobs,
            top_logprobs=self.top_logprobs if logprobs else None,
            tools=tools or None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _format(self) -> TextFormat | JsonFormat | SchemaFormat | None:
        wanted = self.text.format if self.text else None
        if not isinstance(wanted, FlatSchema):
            return wanted
        return SchemaFormat(
            type="json_schema",
            whitespace=wanted.whitespace,
            json_schema=JsonSchema(schema=wanted.json_schema),
        )

    def _choice(self) -> Any:
        """Returns the choice of tools as a chat's request has it."""
        choice = self.tool_choice
        if isinstance(choice, AllowedFunctions):
            own = [one for one in choice.tools if isinstance(one, NamedFunction)]
            if not own:
                message = "tool_choice allows no function, and other tools are not there"
                raise ApiError(400, message, param="tool_choice", code="invalid_value")
            choice = choice.model_copy(update={"tools": own})
        return choice.model_dump() if isinstance(choice, StrictModel) else choice


def _function(tool: FunctionTool) -> Function:
    return Function(**{name: getattr(tool, name) for name in Function.model_fields})
