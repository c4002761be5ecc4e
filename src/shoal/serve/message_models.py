"""Messages of a chat, calls of tools in them, the tools of a request, and /infill, field by field.

Docstrings and descriptions of the models are part of `/openapi.json`.

The requests of /infill have the form of llama.cpp's server; their meaning here stands beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from shoal.serve.api_errors import ApiError, read_json
from shoal.serve.request_fields import (
    CheckedFields,
    Limit,
    NonNegative,
    OpenModel,
    Passed,
    Stops,
    StrictModel,
    Text,
    error_at,
    optional,
    text_or_list,
)

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


PARTS = {"input_text": "text", "output_text": "text", "reasoning": "thinking"}
"""The types of parts in other APIs by those that mean the same here."""


class TextPart(OpenModel):
    """A piece of a message; thinking is reasoning of the assistant."""

    type: Literal["text", "refusal", "thinking"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"type": "text", "text": given}
        if not isinstance(given, dict) or not isinstance(given.get("type", "text"), str):
            return given
        kind = given.get("type", "text")
        kind = PARTS.get(kind, kind)
        if kind not in ("text", "refusal", "thinking"):
            message = "This server takes text, no images, sounds or files: leave this part out"
            raise error_at("type", "unknown_part", message)
        text = given.get(kind, given.get("text"))
        if isinstance(text, list):  # as Mistral has its thoughts
            text = "".join(str(one.get("text")) for one in text if isinstance(one, dict))
        return {k: v for k, v in given.items() if k != kind} | {"type": kind, "text": text}


def _written(arguments: Any) -> Any:
    """Returns arguments that are no text as one."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


class SentFunction(OpenModel):
    """The function that a call called."""

    name: Text
    arguments: Annotated[Text, BeforeValidator(_written)] = Field(
        "{}", description="A JSON object, as a text; templates get {} for any other text."
    )

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as an object, which is empty if the model wrote no object."""
        try:
            arguments = read_json(self.arguments or "{}")
            if not isinstance(arguments, dict):
                return {}
            # Half a surrogate pair becomes a question mark: no prompt has it.
            return dict(
                json.loads(json.dumps(arguments, ensure_ascii=False).encode(errors="replace"))
            )
        except (ValueError, RecursionError):
            return {}


class SentCall(OpenModel):
    """A call of a tool, as an answer has it."""

    id: Text | None = None
    type: Annotated[Literal["function"], BeforeValidator(lambda it: it or "function")] = "function"
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
    annotations: Passed = None
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
        """The reasoning, from whichever field has it, or from parts of the content."""
        thoughts = "".join(part.text for part in self._parts if part.type == "thinking")
        fields = (self.reasoning_content, self.reasoning, thoughts or None)
        return next((field for field in fields if field is not None), None)

    @property
    def _parts(self) -> list[TextPart]:
        return self.content if isinstance(self.content, list) else []

    def plain(self) -> dict[str, Any]:
        """Returns the message in the form of chat templates: the arguments of calls are objects."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self._parts if part.type != "thinking")
        )
        fields = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoned,
        }
        calls = [
            {
                "id": call.id or "",
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


SAMPLERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typ_p": "typical_p",
    "typical_p": "typical_p",
}
"""The names in `samplers`, and the fields that they read."""
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""The defaults of llama.cpp's server, for fields that are missing."""
MAX_IGNORED = 32
"""The most names in x-shoal-ignored."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_EFFECT = ("cache_prompt", "id_slot", "model")
"""The fields without an effect whose absence no answer shows."""


class Excerpt(BaseModel):
    """A part of another file; further fields, such as its time, are passed over."""

    model_config = ConfigDict(strict=True)
    text: Text
    filename: Text | None = None


class InfillRequest(CheckedFields):
    """POST /infill. Unknown fields are passed over and named in x-shoal-ignored: clients send
    the fields that their llama.cpp knew."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    input_prefix: Text = Field(
        description="The text before the cursor, up to its line or to the cursor."
    )
    input_suffix: Text = Field(description="The text behind the cursor.")
    input_extra: Annotated[list[Excerpt], Field(max_length=1024, fail_fast=True)] | None = optional(
        "Parts of other files, which stand before all; the last ones are kept where not all fit."
    )
    prompt: Text | None = optional("What follows `input_prefix` up to the cursor.")
    n_predict: Limit | None = optional(
        "Most new tokens; -1, -2 or nothing: as many as the server allows."
    )
    n_indent: NonNegative | None = optional(
        "A line that is indented by fewer blanks ends the text, and is no part of it."
    )
    n_probs: NonNegative | None = optional(
        "Log-probabilities, and of that many most probable tokens."
    )
    t_max_prompt_ms: Annotated[float, Field(ge=0)] | None = optional(
        "Milliseconds for the prompt; added to those for the text."
    )
    t_max_predict_ms: Annotated[float, Field(ge=0)] | None = optional(
        "Milliseconds for the text; what there is then is returned."
    )
    samplers: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = optional(
        "Those of temperature, top_k, top_p, min_p, typ_p that apply; all, if the field is "
        "missing. Their order is ours."
    )
    temperature: float | None = optional("0.8; 0 or less: greedy.")
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = optional("40; 0 = off.")
    top_p: float | None = optional("0.95; 1 = off.")
    min_p: float | None = optional("0.05; 0 = off.")
    typical_p: float | None = optional("1 = off.")
    repeat_penalty: float | None = optional("Of tokens in prompt or output; 1.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stops | None = optional("Strings that end the text.")
    seed: int | None = optional("-1: another one each time.")
    stream: bool | None = optional("Send the text as it comes, as server-sent events.")
    response_fields: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = optional(
        "The fields of the answer, as paths such as timings/prompt_n, by which they are then named."
    )
    align: bool | None = optional("The cursor may stand inside a token; true.")

    @property
    def before_cursor(self) -> str:
        """The text before the cursor."""
        return self.input_prefix + (self.prompt or "")

    @property
    def seconds(self) -> float | None:
        """The time budget, if there is one."""
        given = (self.t_max_prompt_ms or 0.0) + (self.t_max_predict_ms or 0.0)
        return given / 1000 if self.t_max_predict_ms else None

    @property
    def ignored(self) -> Iterable[str]:
        """The names of fields and samplers that were sent and have no effect.

        They are limited in number and form to those that a header can hold.
        """
        unknown = [
            name
            for name, value in (self.model_extra or {}).items()
            if value is not None and name not in NO_EFFECT
        ]
        samplers = [f"samplers.{name}" for name in self.samplers or () if name not in SAMPLERS]
        return [name for name in (*unknown, *samplers) if PLAIN_NAME.fullmatch(name)][:MAX_IGNORED]

    def completion(self) -> dict[str, Any]:
        """Returns the fields of /v1/completions with the same meaning, without the prompt.

        Raises:
            ApiError: the request asks for a grammar.
        """
        for name in ("grammar", "json_schema"):
            if (self.model_extra or {}).get(name):
                raise ApiError(
                    400,
                    f"/infill takes no {name}: use /v1/completions",
                    param=name,
                    code="unknown_field",
                )
        chosen = (
            {*SAMPLERS.values()}
            if self.samplers is None
            else {SAMPLERS[name] for name in self.samplers if name in SAMPLERS}
        )
        fields = {name: value for name in chosen if (value := self._given(name)) is not None}
        fields |= {
            name: value
            for name in ("presence_penalty", "frequency_penalty", "stop", "stream")
            if (value := getattr(self, name)) is not None
        }
        if self.repeat_penalty is not None:
            fields["repetition_penalty"] = self.repeat_penalty
        if self.seed is not None and self.seed >= 0:
            fields["seed"] = self.seed
        if self.temperature is not None and self.temperature <= 0:
            fields["temperature"] = 0.0
        if self.seconds is not None:
            fields["time_budget"] = self.seconds
        return fields

    def _given(self, name: str) -> Any:
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value


def _selected(schema: dict[str, Any]) -> None:
    """Removes the schema's required fields: an answer may lack any field."""
    del schema["required"]


class Infill(BaseModel):
    """Answer of /infill; of a stream the last event, before which others bring the text.
    `response_fields` selects fields."""

    model_config = ConfigDict(json_schema_extra=_selected)
    index: int
    content: str
    tokens: list[int] = Field(description="Always empty.")
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int = Field(
        description="Those that write removed characters of a partial token again included."
    )
    tokens_evaluated: int
    has_new_line: bool
    truncated: bool = Field(description="The context did not hold all text that was sent.")
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str = Field(description="Always empty.")
    tokens_cached: int
    timings: dict[str, float]
    syntax: Literal["complete", "cut", "incomplete"] | None = Field(
        None,
        description="Of a checked text: it ended by itself, was cut where the file parses, or the "
        "file does not parse with it.",
    )
    completion_probabilities: list[dict[str, Any]] | None = None
