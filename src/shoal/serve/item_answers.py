"""The answers of /v1/responses, for the API's own description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from shoal.serve.response_models import (
    ChoiceUsage,
    ContentLogprob,
    Details,
    DraftUsage,
    PromptUsage,
)


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
    """Why an answer ended."""

    code: str
    message: str


class IncompleteAnswer(BaseModel):
    """Why an answer did not end by itself; `usage.choices` knows more."""

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
