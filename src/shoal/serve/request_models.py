"""The requests of both APIs, field by field. Other fields are rejected by name; null means the
default.

Docstrings and descriptions of the models are part of `/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model

from shoal.config import PARAMETERS, Sampling
from shoal.serve.message_models import Function, Message, NamedTool, Tool, ToolName
from shoal.serve.request_fields import (
    MOST_NAMED,
    NOT_IN_HEADERS,
    Bias,
    CheckedFields,
    GuidesPrompt,
    Ignored,
    Limit,
    NonNegative,
    OpenModel,
    Positive,
    Prompts,
    Stops,
    StrictModel,
    Text,
    VllmFields,
    optional,
    passed_over,
)
from shoal.values import Parameter


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = optional("End with a chunk that has no choices but the usage.")
    continuous_usage_stats: bool | None = optional("And every chunk has the usage so far.")
    include_obfuscation: Ignored = None


class Extension(StrictModel):
    """The fields that only shoal has."""

    details: bool | None = optional(
        "Every choice also tells its tokens, which of them were accepted drafts, and how it fares."
    )
    rounds: bool | None = optional(
        "The details also tell each round: which drafts were accepted, and which rejected."
    )


class GivenGrammar(StrictModel):
    """The grammar that a sample must match as a whole."""

    type: Literal["regex", "lark"] = Field(
        description="A regular expression, or a grammar in EBNF as Lark writes it."
    )
    text: Text = Field(min_length=1)


class JsonSchema(StrictModel):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class TextFormat(StrictModel):
    """Any text: the default."""

    type: Literal["text"]


class JsonText(StrictModel):
    """The fields that every kind of JSON may have."""

    whitespace: Literal["bounded", "compact", "any"] | None = optional(
        "Between the symbols of the JSON: a space or a line break with its indent at most, "
        "nothing, any."
    )


class JsonFormat(JsonText):
    """Some JSON object."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="A schema that it fits, as llama.cpp's server takes it."
    )


class SchemaFormat(JsonText):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


MOST_TEMPERATURE = 100.0
"""The highest temperature of requests: texts of higher ones are noise, and a slip of a unit."""


def _above_zero(value: Any) -> Any:
    """Returns the smallest mass, which only the most probable token has, for 0."""
    return 1e-9 if type(value) in (int, float) and value == 0 else value


def _field_of(parameter: Parameter, default: float) -> tuple[Any, Any]:
    """Returns the type and the field of a request for a parameter of `shoal.Sampling`."""
    least = parameter.least if parameter.off is None else parameter.off
    most = MOST_TEMPERATURE if parameter.api == "temperature" else parameter.most
    bounds = Field(ge=least, gt=parameter.above, le=most, lt=2**63 if parameter.whole else None)
    number: Any = int if parameter.whole else float
    if parameter.api == "top_p":
        number = Annotated[number, BeforeValidator(_above_zero)]
    also = "" if parameter.off is None else f" {parameter.off} = the default, which is {default:g}."
    shown = parameter.help if "= off" in parameter.help else f"{parameter.help[:-1]}; {default:g}."
    return Annotated[number, bounds] | None, optional(shown + also)


if TYPE_CHECKING:

    class SamplingFields(StrictModel):
        """The fields that are read by name; all others are read by the declarations of
        `shoal.Sampling`."""

        temperature: float | None
        top_p: float | None
        min_tokens: int | None
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=StrictModel,
        **{
            one.api: _field_of(one, getattr(Sampling, name))
            for name, one in PARAMETERS.items()
            if one.api
        },
    )


class SampledRequest(SamplingFields):
    """Fields of all APIs: how texts are drawn, and when they end."""

    model: str | None = optional("The served model's name, as /v1/models tells it.")
    exact: Literal["weights", "smc", "asap", "asap+smc", "distinct"] | None = optional(
        "Weigh samples so that they are samples of p given that all of the text is allowed (by a "
        "grammar, or `align`): `usage.choices[].log_weight`. smc: and resample them while they "
        "run; it needs n of at least 2, and no stream. asap: and draw them by what earlier samples "
        "have shown. asap+smc: both. distinct: draw whole texts without replacement, also without "
        "limits, and not as a stream."
    )
    logit_bias: Bias | None = optional("Token id, as a string -> value added to its score.")
    stop: Stops | None = optional("Strings that end a sample; the text is cut before them.")
    stop_token_ids: Annotated[list[NonNegative], Field(max_length=1024, fail_fast=True)] | None = (
        optional("Token ids that end a sample, beside the model's own.")
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = optional(
        "The same seed and prompt give the same tokens, whoever else is served."
    )
    stream: bool | None = optional("Send what there is as it comes, as server-sent events.")
    negative_prompt: GuidesPrompt | None = optional(
        "With guidance, what the guide reads in place of the prompt: a text or token ids; in a "
        "chat the text of the system message, empty = no system message."
    )
    positive_prompt: GuidesPrompt | None = optional("The same for the expert.")
    grammar: GivenGrammar | None = optional("What a sample must match as a whole.")
    time_budget: Annotated[float, Field(gt=0)] | None = optional(
        "Seconds; samples unfinished then are returned as they are."
    )
    speculation: Literal["auto", "off"] | NonNegative | None = optional(
        "Drafts per round: as the server decides (auto), none (off), or at most so many."
    )
    shoal: Extension | None = None
    user: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None


class BaseRequest(VllmFields, SampledRequest):
    """Fields of completions and chats: OpenAI's, vLLM's and shoal's own."""

    n: Positive | None = optional("Samples per prompt; 1.")
    max_tokens: Limit | None = optional(
        "Most new tokens of a sample; clamped to what the server allows. -1, -2 = as many as it "
        "allows."
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = optional(
        "Text, some JSON object, or JSON that fits a schema."
    )
    metadata: Ignored = None
    store: Ignored = None
    prediction: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    parallel_tool_calls: Ignored = None

    @property
    def ignored(self) -> list[str]:
        """The names of fields without effect that were sent, `stream_options` included."""
        options = self.stream_options.ignored_fields() if self.stream_options else ()
        structured = self.structured_outputs.ignored_fields() if self.structured_outputs else ()
        parts = {name: getattr(self, name, None) for name in ("messages", "tools")}
        sent = {path for name, part in parts.items() for path in passed_over(name, part)}
        return [
            *self.ignored_fields(),
            *sorted(sent)[:MOST_NAMED],
            *(f"stream_options.{name}" for name in options),
            *(f"structured_outputs.{name}" for name in structured),
        ]


class CompletionRequest(CheckedFields, BaseRequest):
    """POST /v1/completions."""

    prompt: Prompts = Field(description="A text, texts, token ids, or lists of token ids.")
    suffix: Text | None = optional(
        "Fill in between prompt and suffix, with a model that was trained to."
    )
    align: bool | None = optional(
        "The prompt may end inside a token, whose bytes every sample writes again; the default "
        "is true with a suffix."
    )
    echo: bool | None = optional("The prompt comes back before each sample's text.")
    best_of: Positive | None = optional(
        "Draw so many samples; the best n come back, best first: those not cut off, then by "
        "mean log-probability."
    )
    logprobs: NonNegative | None = optional(
        "Log-probabilities, and of that many most probable tokens."
    )


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class OtherTool(OpenModel):
    """A tool that is no function: the model is not told of it."""

    type: Text

    def passed_over(self, path: str) -> Iterator[str]:
        """Yields the path of the tool's type, with the type."""
        yield f"{path}.type={NOT_IN_HEADERS.sub('?', self.type)[:64]}"


def tool_kind(value: Any) -> str:
    """Returns the tag of a tool: a function, or another one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


def _within(value: Any) -> Any:
    """Returns a choice whose fields lie flat, as in /v1/responses, in the form of a chat."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("function", "allowed_tools") or kind in value or len(value) == 1:
        return value
    return {"type": kind, kind: {name: one for name, one in value.items() if name != "type"}}


ChosenTool = Annotated[NamedTool, BeforeValidator(_within)]


class Subset(StrictModel):
    """Some of the tools."""

    mode: Literal["auto", "required"] = Field(
        description="auto: as the model likes; required: some of them."
    )
    tools: Annotated[list[ChosenTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(StrictModel):
    """The tools that may be called; the model is told of all."""

    type: Literal["allowed_tools"]
    allowed_tools: Subset


def choice_kind(value: Any) -> str:
    """Returns the tag of a choice of tools: a text, some tools, or one tool."""
    if isinstance(value, str):
        return "text"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(tool_kind),
]


class NamedFunction(StrictModel):
    """The one function that has to be called."""

    type: Literal["function"]
    name: ToolName


NamedAny = Annotated[
    Annotated[NamedFunction, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(tool_kind),
]


class AllowedFunctions(StrictModel):
    """The functions that may be called; the model is told of all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field(
        description="auto: as the model likes; required: some of them."
    )
    tools: Annotated[list[NamedAny], Field(min_length=1, fail_fast=True)]


class ChatRequest(BaseRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = optional(
        "Text is all there is."
    )
    max_completion_tokens: Limit | None = optional("Another name of max_tokens.")
    logprobs: bool | None = optional("Log-probabilities of the tokens.")
    top_logprobs: NonNegative | None = optional(
        "And of that many most probable tokens; with logprobs."
    )
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Further variables of the chat template."
    )
    split_special_tokens: bool | None = optional(
        "Names of special tokens in the texts of users and tools are text; true."
    )
    add_generation_prompt: bool | None = optional(
        "False: the prompt ends behind the last message; true, unless that message is continued."
    )
    continue_final_message: bool | None = optional(
        "The samples go on with the last message, whose turn the prompt leaves open."
    )
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = optional(
        "What the model may call."
    )
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("text")]
            | Annotated[ChosenTool, Tag("named")]
            | Annotated[AllowedTools, BeforeValidator(_within), Tag("allowed")],
            Discriminator(choice_kind),
        ]
        | None
    ) = optional(
        "auto: as the model likes; none; required: some tool; one by its name; or some by theirs."
    )
    parallel_tool_calls: bool | None = optional(
        "A sample may call several tools; true. Otherwise its first call counts."
    )

    @property
    def forced(self) -> bool:
        """True if each sample is a call."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return mode == "required" or isinstance(choice, NamedTool)

    @property
    def callable_names(self) -> list[str]:
        """The names of the tools that the choice leaves."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [choice.function.name]
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return [tool.function.name for tool in self.tools or ()]

    @property
    def ignored(self) -> list[str]:
        """The names of fields without effect that were sent; a forced call ends by itself."""
        return [*super().ignored, *(["min_tokens"] if self.forced and self.min_tokens else [])]
