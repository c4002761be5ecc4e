"""The sampling fields of a request as `shoal.Sampling` and `shoal.Limits`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.config import Grammar, Limits, Sampling
from shoal.sampling.penalties import require_ids
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.request_models import BaseRequest, JsonFormat, TextFormat
from shoal.serve.settings import Settings

SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
)  # fmt: skip
"""Fields that `shoal.Sampling` has under the same name."""


def sampling_of(request: BaseRequest, vocab_size: int, settings: Settings) -> Sampling:
    """How the request's tokens are drawn. Raises ApiError or RequestError for a value that is not allowed."""
    given: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(request, name)) is not None}
    if given.get("top_k") == -1:  # off, as in vLLM
        del given["top_k"]
    if "seed" in given and not settings.seeds and request.temperature != 0:
        raise ApiError(400, "this server runs under a --rule by which a seed cannot bring the same tokens", param="seed")
    bias = {_token_id(token): value for token, value in (request.logit_bias or {}).items()}
    grammar = _grammar(request, settings.max_grammar)
    sampling = Sampling(**given, logit_bias=bias, min_new_tokens=request.min_tokens or 0, grammar=grammar)
    with naming("logit_bias"):
        require_ids(sampling, vocab_size)
    return sampling


def limits_of(request: BaseRequest, max_tokens: int, eos: Sequence[int], vocab_size: int, seconds: float) -> Limits:
    """When the request's samples end. Raises ApiError for a value that is not allowed.

    Args:
        eos: end-of-text tokens of the model. seconds: time budget.
    """
    stop_ids = request.stop_token_ids or ()
    if unknown := [token for token in stop_ids if token >= vocab_size]:
        message = f"stop_token_ids names token id {unknown[0]}; the model's are below {vocab_size}"
        raise ApiError(400, message, param="stop_token_ids", code="invalid_value")
    with naming("stop"):
        return Limits(max_new_tokens=max_tokens, stop=request.stop or (), eos=(*eos, *stop_ids), time_budget=seconds)


def _grammar(request: BaseRequest, max_characters: int) -> Grammar | None:
    """The request's grammar. It is compiled after admission, which takes up to a second."""
    grammar = _given_grammar(request)
    if grammar is not None and len(grammar.text) > max_characters:
        param = "grammar" if request.grammar else "response_format"
        raise ApiError(400, f"{param} has {len(grammar.text)} characters; this server takes {max_characters}", param=param)
    return grammar


def _given_grammar(request: BaseRequest) -> Grammar | None:
    wanted = request.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return Grammar(request.grammar.type, request.grammar.text) if request.grammar else None
    if request.grammar is not None:
        raise ApiError(400, "grammar does not go with a response_format other than text", param="grammar")
    schema = "" if isinstance(wanted, JsonFormat) else json.dumps(wanted.json_schema.json_schema)
    return Grammar(wanted.type, schema, wanted.whitespace or "bounded")


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ApiError(400, f"logit_bias: {text!r} is no token id", param="logit_bias", code="invalid_value")
    return int(text)
