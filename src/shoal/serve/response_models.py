"""The answers of the API, for its own description and for generators of clients."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Ending = Literal["stop", "length", "error", "tool_calls"]


class Error(BaseModel):
    """The error of a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer with a status of 400 or more."""

    error: Error


class DraftUsage(BaseModel):
    """The counts of the tokens that a drafter proposed, and that were accepted."""

    drafted: int
    accepted: int


class ChoiceUsage(BaseModel):
    """The usage of one choice."""

    index: int
    completion_tokens: int
    drafted: int
    accepted: int
    by_drafter: dict[str, DraftUsage] = Field(
        description="The two counts, by the name of the drafter; empty without drafts."
    )
    rounds: int
    mean_logprob: float | None
    ended_by: str = Field(description="eos, stop, length, time, not started, cancelled or error.")
    finished: bool = Field(
        description="True if it came to an end, max_tokens included, within its time budget; "
        "`best_of` prefers those that did."
    )
    syntax: str | None = Field(
        None,
        description="With `syntax`: complete (it ended by itself), cut (where it parses) or "
        "incomplete (it parses nowhere).",
    )
    log_weight: float | None = Field(None, description="With `exact`: natural log of its weight.")
    error: str | None = None


class PromptUsage(BaseModel):
    """The usage of the prompts' tokens."""

    cached_tokens: int = Field(
        description="Copied from earlier requests that begin with the same tokens."
    )


class CompletionUsage(BaseModel):
    """The usage of the new tokens."""

    reasoning_tokens: int


class Usage(BaseModel):
    """The usage of a request; tokens are those of all samples drawn, `choices` those returned."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptUsage
    completion_tokens_details: CompletionUsage | None = Field(
        None, description="Of chats with models that reason."
    )
    by_drafter: dict[str, DraftUsage] = Field(description="Of all samples drawn.")
    lossy: str | None = Field(None, description="Only under a lossy --rule: what it changes.")
    choices: list[ChoiceUsage]


class Token(BaseModel):
    """One token of a choice."""

    id: int
    text: str
    logprob: float | None
    from_draft: bool
    drafter: str | None = Field(description="The name of the drafter whose draft it is.")


class RejectedDraft(BaseModel):
    """A drafted token that was not kept."""

    id: int
    text: str = Field(description="Of this token alone.")
    drafter: str


class Round(BaseModel):
    """One draft, verify, accept cycle of a choice."""

    start: int = Field(description="Place of its first token in the choice.")
    committed: int = Field(
        description="Tokens it added; a stop string may have cut the last ones from the answer."
    )
    accepted: int = Field(
        description="So many of them, the first, were drafts; the one after them is the "
        "target's own."
    )
    rejected: list[RejectedDraft]


class Details(BaseModel):
    """The state of a choice so far, and the tokens that this answer or chunk brings."""

    tokens: list[Token]
    mean_logprob: float | None
    committed: int
    drafted: int
    accepted: int
    rounds: int
    by_round: list[Round] | None = Field(
        None, description="Only if asked for: the rounds that this answer or chunk brings."
    )


class PromptLogprob(BaseModel):
    """A token at a place of the prompt."""

    logprob: float
    rank: int = Field(description="1 = no token is more probable there.")
    decoded_token: str


class OfPrompt(BaseModel):
    """The details of a prompt, if asked for."""

    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(
        None, description="By token id; null for the first token, which has no probability."
    )


class Choice(BaseModel):
    """The fields that both kinds of choices have."""

    index: int
    token_ids: list[int] | None = Field(
        None, description="Only with return_token_ids: of this answer or chunk."
    )
    finish_reason: Ending | None
    error: str | None = Field(
        None, description="Why this sample failed, if it did; its text is what there was before."
    )
    shoal: Details | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice, OfPrompt):
    """A sample."""

    text: str
    logprobs: CompletionLogprobs | None


class Alternative(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ContentLogprob(Alternative):
    """One token of a message."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    """Log-probabilities by token."""

    content: list[ContentLogprob]


class CalledFunction(BaseModel):
    """The called function."""

    name: str
    arguments: str = Field(description="A JSON object, as a text.")


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = Field(
        None, description="What stands before the content, between <think> and </think>."
    )
    reasoning: str | None = Field(None, description="The same.")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """A sample."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class Answer(BaseModel):
    """The fields that both kinds of answers have."""

    id: str
    created: int
    model: str
    usage: Usage


class Completion(Answer):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Answer, OfPrompt):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Tokens of the model's context.")
    shoal: dict[str, Any]


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """Answer of /health and /ready."""

    status: str


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[ContentLogprob]


class MessageOutput(BaseModel):
    """A message of an answer of /v1/responses."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class CallOutput(BaseModel):
    """A call of a function in an answer of /v1/responses."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object, as a text.")
    status: Literal["in_progress", "completed"]


class InputUsage(PromptUsage):
    """The usage of the tokens of the input."""

    cache_write_tokens: int = Field(description="Always 0: what is kept is not counted.")


class OutputUsage(BaseModel):
    """The usage of the tokens of the output."""

    reasoning_tokens: int = Field(description="Of the output tokens.")


class ItemUsage(BaseModel):
    """The usage of a request of /v1/responses."""

    input_tokens: int
    input_tokens_details: InputUsage
    output_tokens: int
    output_tokens_details: OutputUsage
    total_tokens: int
    by_drafter: dict[str, DraftUsage]
    lossy: str | None = Field(None, description="Only under a lossy --rule: what it changes.")
    choices: list[ChoiceUsage] = Field(description="The one sample that there is.")


class FailedAnswer(BaseModel):
    """The error that ended an answer."""

    code: str
    message: str


class IncompleteAnswer(BaseModel):
    """The reason for which an answer was cut; `usage.choices` has more."""

    reason: Literal["max_output_tokens"]


class ReasoningPart(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(BaseModel):
    """The reasoning before a message, between <think> and </think>."""

    id: str
    type: Literal["reasoning"]
    summary: list[str] = Field(description="Always empty.")
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ReasoningPart]


class ItemAnswer(BaseModel):
    """Answer of /v1/responses; of a stream the last event has it. Beside these it has the fields of
    the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: FailedAnswer | None
    incomplete_details: IncompleteAnswer | None
    model: str
    output: list[ReasoningOutput | MessageOutput | CallOutput]
    usage: ItemUsage | None
    shoal: Details | None = None
