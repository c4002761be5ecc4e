"""The routes `/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer, in the form of vLLM's
server, for clients such as lm-eval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from shoal.serve import bodies
from shoal.serve.api_errors import ApiError
from shoal.serve.handler import ApiHandler
from shoal.serve.message_models import Message
from shoal.serve.openapi import REFUSALS, described
from shoal.serve.request_fields import NonNegative, StrictModel, Text, optional
from shoal.types.prompt_forms import chat_template_of

TOKENIZE, DETOKENIZE, TOKENIZER_INFO = "/tokenize", "/detokenize", "/tokenizer_info"


class TokenizeRequest(StrictModel):
    """POST /tokenize: a text, or a conversation as the chat template writes it."""

    model: str | None = optional("The served model's name, as /v1/models tells it.")
    prompt: Text | None = optional("A text; or `messages`.")
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = optional(
        "A conversation."
    )
    add_special_tokens: bool | None = optional(
        "Those that the tokenizer adds to a text; true. Chat templates write their own."
    )
    add_generation_prompt: bool | None = optional(
        "With messages: the beginning of an answer; true."
    )
    return_token_strs: bool | None = optional("The tokens as the vocabulary writes them, too.")
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Further variables of the chat template."
    )


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int = Field(description="Tokens of the model's context.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = optional("The served model's name, as /v1/models tells it.")
    tokens: Annotated[list[NonNegative], Field(fail_fast=True)]


class Detokenized(BaseModel):
    """Answer of /detokenize."""

    prompt: str


def token_routes(handler: ApiHandler) -> APIRouter:
    """Returns the three routes.

    Encoding and decoding run on another thread, because long texts take time.
    """
    router, most = APIRouter(), handler.settings.max_body

    @router.post(
        TOKENIZE, response_model=Tokens, **described(TokenizeRequest, Tokens, stream=False)
    )
    async def tokenize(request: Request) -> Tokens:
        """The token ids of a text or a conversation."""
        fields = bodies.validated(TokenizeRequest, await bodies.read(request, most))
        return await run_in_threadpool(_tokenized, handler, fields)

    @router.post(
        DETOKENIZE,
        response_model=Detokenized,
        **described(DetokenizeRequest, Detokenized, stream=False),
    )
    async def detokenize(request: Request) -> Detokenized:
        """The text of token ids."""
        fields = bodies.validated(DetokenizeRequest, await bodies.read(request, most))
        handler.require_model(fields.model)
        return await run_in_threadpool(
            lambda: Detokenized(prompt=handler.encoder.decode(fields.tokens, "tokens"))
        )

    @router.get(TOKENIZER_INFO, responses={401: REFUSALS[401]})
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template."""
        return information(handler.shoal.tokenizer, handler.settings.chat_template)

    return router


def _tokenized(handler: ApiHandler, fields: TokenizeRequest) -> Tokens:
    handler.require_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "either prompt or messages is needed, and not both", param="prompt")
    encoder = handler.encoder
    if fields.messages is not None:
        variables = {
            "add_generation_prompt": fields.add_generation_prompt is not False,
            **(fields.chat_template_kwargs or {}),
        }
        ids = encoder.encode_messages(fields.messages, variables)
    else:
        ids = encoder.encode_text(
            fields.prompt or "", special=fields.add_special_tokens is not False
        )
    names = encoder.names(ids) if fields.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=handler.context, tokens=list(ids), token_strs=names)


def information(tokenizer: Any, chat_template: str | None) -> dict[str, Any]:
    """Returns the fields that clients need to write prompts themselves.

    Args:
        tokenizer: the target's.
        chat_template: replaces the tokenizer's.
    """
    special: Mapping[str, Any] = tokenizer.special_tokens_map
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "chat_template": chat_template or chat_template_of(tokenizer),
        **{
            name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        },
    }
