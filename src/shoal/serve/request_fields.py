"""The types of request fields, and the fields that vLLM's API has beside OpenAI's.

Types are validated strictly, in bounded time. Validation stops at the first invalid item of a list
or object, and a union's member is chosen by the first element of the value: neither the cost of an
invalid body nor the number of its errors grows with its size.

Fields of vLLM's API are those that mean the same here; its others are unknown. Docstrings and
descriptions of the models are part of `/openapi.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shoal.constraints.syntax import Language

IGNORED = "Accepted and ignored."
MOST_NAMED = 32
"""The most unknown fields that a header names."""
NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.-]")


def _encodable(text: str) -> str:
    """Rejects the halves of surrogate pairs, which JSON can contain and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not a text: {error.reason}") from error
    return text


def _prompt_type(value: Any) -> str:
    """Returns the tag of the member of `Prompts` that a value is validated as."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


def optional(description: str) -> Any:
    """Returns a field whose default is None."""
    return Field(None, description=description)


def text_or_list(value: Any) -> str:
    """Returns the tag of the member of a union of texts and lists."""
    return "list" if isinstance(value, list) else "text"


def error_at(name: str, kind: str, message: str) -> PydanticCustomError:
    """Returns an error in a field of the object that is being validated.

    Halves of surrogate pairs in its name are written as escapes: pydantic encodes them.
    """
    at = name.encode(errors="backslashreplace").decode()
    return PydanticCustomError(kind, "{message}", {"message": message, "at": at})


def _numbers(value: Any) -> Any:
    """Rejects the first entry of an object that is not a number."""
    for name, number in value.items() if isinstance(value, dict) else ():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise error_at(name, "float_type", "Input should be a valid number")
    return value


LIMITLESS = (-1, -2)
"""The numbers of new tokens that stand for as many as the server allows, as of llama.cpp: without
end, and until the context is full."""


def _limit(value: Any) -> Any:
    """Rejects negative numbers of tokens with another meaning than `LIMITLESS`."""
    if type(value) is int and value < 0 and value not in LIMITLESS:
        raise ValueError(
            f"must be 1 or more, or -1 or -2 for as many as the server allows, got {value}"
        )
    return value


def _without_empty(value: Any) -> Any:
    """Leaves empty stop strings out of a list: alone, one is none too."""
    return [one for one in value if one != ""] if isinstance(value, list) else value


Text = Annotated[str, AfterValidator(_encodable)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(ge=-2, lt=2**63), BeforeValidator(_limit)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Bias = Annotated[dict[str, float], BeforeValidator(_numbers)]
Stop = Annotated[Text, Field(max_length=512)]
Stops = Annotated[
    Annotated[Stop, Tag("text")]
    | Annotated[
        list[Stop],
        Field(max_length=64, fail_fast=True),
        BeforeValidator(_without_empty),
        Tag("list"),
    ],
    Discriminator(text_or_list),
]
Ids = Annotated[list[NonNegative], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("texts")]
    | Annotated[list[Ids], Field(min_length=1, fail_fast=True), Tag("lists")],
    Discriminator(_prompt_type),
]
GuidesPrompt = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Ids, Tag("list")], Discriminator(text_or_list)
]
NoneOf = Annotated[list[Any] | None, Field(max_length=0, description=IGNORED)]
Off = Annotated[Literal[False] | None, Field(description=IGNORED)]
On = Annotated[Literal[True] | None, Field(description=IGNORED)]
"""The values of fields by which a client asks for nothing that is not so anyway."""
Passed = Annotated[list[Any] | None, Field(description="Passed over.")]
Ignored = Annotated[Any, Field(description=IGNORED)]
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
OF_OTHER_TOOLS = get_args(Included)[2:]
"""The parts of answers that tools of OpenAI's servers add."""


class StrictModel(BaseModel):
    """A JSON object. Unknown fields are rejected unless they are null, and values are not converted
    between types."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        """Removes unknown fields that are null; any other unknown field ends the validation."""
        if not isinstance(given, dict):
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in given.items():
            if name not in names and value is not None:
                raise error_at(name, "unknown_field", "Unknown or unsupported field")
        return {name: value for name, value in given.items() if name in names}

    def ignored_fields(self) -> Iterable[str]:
        """Returns the names of the fields that were sent and have no effect."""
        fields = type(self).model_fields.items()
        return (
            name
            for name, field in fields
            if field.description == IGNORED and getattr(self, name) is not None
        )


class OpenModel(StrictModel):
    """A JSON object whose unknown fields are passed over, and kept for `passed_over`.

    Clients send back fields of other servers' answers: marks of caches, ids, times.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={})

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        """Removes unknown fields that are null."""
        if not isinstance(given, dict):
            return given
        names = cls.model_fields
        return {name: value for name, value in given.items() if name in names or value is not None}

    def passed_over(self, path: str) -> Iterator[str]:
        """Yields the paths of the unknown fields that were sent, without numbers of list items."""
        for name in self.model_extra or ():
            yield f"{path}.{NOT_IN_HEADERS.sub('?', name)[:64]}"
        for name in type(self).model_fields:
            yield from passed_over(f"{path}.{name}", getattr(self, name))


def passed_over(path: str, value: Any) -> Iterator[str]:
    """Yields the paths of the unknown fields of a value, which may be a list; see `OpenModel`."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, OpenModel):
            yield from one.passed_over(path)


Schema = Annotated[
    Annotated[Text, Tag("text")] | Annotated[dict[str, Any], Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
Pattern = Annotated[Text, Field(min_length=1)]


class StructuredOutputs(StrictModel):
    """The grammar that a sample must match as a whole, as vLLM says it: one of these."""

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


class CheckedFields(BaseModel):
    """The fields of requests whose text stands in a file of code."""

    syntax: Language | None = optional(
        "A text ends only where it parses between the texts around it, and one that does not end "
        "by itself is cut where it does; a stream has it in the last chunk. Python and JSON: no "
        "token is written after which that is impossible."
    )
    filename: Text | None = optional(
        "The name of the file around the cursor: its end says the `syntax`, unless that is given "
        "or the check cannot be made."
    )
    members: bool | None = optional(
        "Python: only names that the value before it has follow a dot. Servers allow it with "
        "`--members` only."
    )


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
    bad_words: NoneOf = None
    use_beam_search: Off = None
    early_stopping: Ignored = None
    length_penalty: Ignored = None
    include_reasoning: On = None
    priority: Ignored = None
    request_id: Ignored = None
    cache_salt: Ignored = None
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    include_stop_str_in_output: bool | None = optional(
        "Texts end behind the stop string or token that ended them, not before it; a special token "
        "shows where `skip_special_tokens` is false; false."
    )
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
    return_tokens_as_token_ids: bool | None = optional(
        'Log-probabilities name each token "token_id:" and its id.'
    )
    prompt_logprobs: NonNegative | None = optional(
        "Log-probabilities and ranks of the prompt's tokens, and of that many most probable "
        "ones; not with stream."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = optional(
        "Only so many tokens of a longer prompt are read, the last ones; -1 = as many as the "
        "context leaves."
    )
