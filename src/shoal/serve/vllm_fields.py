"""The fields of requests that vLLM's API has beside OpenAI's, if they mean the same here.

Its other fields are unknown. Docstrings and descriptions of the models are part of `/openapi.json`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from shoal.serve.request_fields import Ignored, NonNegative, StrictModel, Text, optional

Schema = Annotated[
    Annotated[Text, Tag("text")] | Annotated[dict[str, Any], Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
Pattern = Annotated[Text, Field(min_length=1)]


class StructuredOutputs(StrictModel):
    """What a sample must match as a whole, as vLLM says it: one of these."""

    json_schema: Schema | None = Field(
        None, alias="json", description="A JSON schema, as an object or a text."
    )
    regex: Pattern | None = optional("A regular expression, as of `grammar`.")
    choice: Choices | None = optional("One of these texts.")
    grammar: Pattern | None = optional("A grammar as Lark writes it, or llama.cpp (GBNF).")
    json_object: Literal[True] | None = optional("Some JSON object.")
    disable_any_whitespace: bool | None = optional(
        "No white space between the symbols of the JSON."
    )
    disable_additional_properties: Literal[False] | None = optional(
        "A schema says by itself which properties there are."
    )
    disable_fallback: Ignored = None


class VllmFields(StrictModel):
    """Fields of both APIs."""

    structured_outputs: StructuredOutputs | None = optional(
        "What a sample must match as a whole, as vLLM says it."
    )
    guided_json: Schema | None = optional("`structured_outputs.json`.")
    guided_regex: Pattern | None = optional("`structured_outputs.regex`.")
    guided_choice: Choices | None = optional("`structured_outputs.choice`.")
    guided_grammar: Pattern | None = optional("`structured_outputs.grammar`.")
    guided_decoding_backend: Ignored = None
    ignore_eos: bool | None = optional(
        "The model's own end-of-text tokens end no sample; `stop_token_ids`, stop strings, "
        "limits and a grammar do."
    )
    skip_special_tokens: bool | None = optional(
        "False: texts show special tokens, but for the one that ended a sample; true."
    )
    spaces_between_special_tokens: bool | None = optional(
        "False only where the tokenizer writes none anyway; true."
    )
    return_token_ids: bool | None = optional("The ids of the prompt and of each choice, too.")
    prompt_logprobs: NonNegative | None = optional(
        "Log-probabilities and ranks of the prompt's tokens, and of that many most probable "
        "ones; not with stream."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = optional(
        "Only so many tokens of a longer prompt are read, the last ones; -1 = as many as the "
        "context leaves."
    )
