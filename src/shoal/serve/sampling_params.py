"""The sampling fields of a request as `shoal.Sampling` and `shoal.Limits`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config import PARAMETERS, Limits, Sampling
from shoal.sampling.penalties import require_ids
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.given_grammars import given_grammar
from shoal.serve.request_models import BaseRequest
from shoal.serve.settings import Settings


def own_sampling(hf: Any) -> dict[str, Any]:
    """Returns the sampling parameters that a model's generation config sets, as vLLM reads them."""
    config: Any = getattr(hf, "generation_config", None)
    given = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    return {name: given[name] for name in names if PARAMETERS[name].allows(given.get(name))}


def sampling_of(
    request: BaseRequest, vocab_size: int, settings: Settings, defaults: Mapping[str, Any]
) -> Sampling:
    """Returns the request's `Sampling`.

    Args:
        request: the request.
        vocab_size: the size of the model's vocabulary.
        settings: the server's.
        defaults: the parameters that hold where the request says nothing.

    Raises:
        ApiError: a value is not allowed.
        RequestError: a value is not allowed.
    """
    said = {n for n, one in PARAMETERS.items() if one.api and getattr(request, one.api) is not None}
    given = {name: value for name, value in defaults.items() if name not in said} | {
        name: value
        for name, one in PARAMETERS.items()
        if one.api and (value := getattr(request, one.api)) is not None and value != one.off
    }
    seed = None if request.seed == -1 else request.seed  # as vLLM and llama.cpp read it
    if seed is not None and not settings.seeds and request.temperature != 0:
        raise ApiError(
            400,
            "this server runs under a --rule by which a seed cannot bring the same tokens",
            param="seed",
        )
    bias = {_token_id(token): value for token, value in (request.logit_bias or {}).items()}
    param, grammar = given_grammar(request) or ("", None)
    if grammar is not None:
        require_size(grammar.text, settings.max_grammar, param)
    sampling = Sampling(**given, logit_bias=bias, grammar=grammar, seed=seed)
    with naming("logit_bias"):
        require_ids(sampling, vocab_size)
    return sampling


def limits_of(
    request: BaseRequest, max_tokens: int, eos: Sequence[int], vocab_size: int, seconds: float
) -> Limits:
    """Returns the limits of the request's samples. Raises ApiError for a value that is not allowed.

    Args:
        max_tokens: the most new tokens of a sample.
        eos: end-of-text tokens of the model.
        vocab_size: the size of the model's vocabulary.
        seconds: time budget.
    """
    stop_ids = request.stop_token_ids or ()
    if unknown := [token for token in stop_ids if token >= vocab_size]:
        message = f"stop_token_ids names token id {unknown[0]}; the model's are below {vocab_size}"
        raise ApiError(400, message, param="stop_token_ids", code="invalid_value")
    ends = stop_ids if request.ignore_eos else (*eos, *stop_ids)
    with naming("stop"):
        return Limits(
            max_new_tokens=max_tokens, stop=request.stop or (), eos=ends, time_budget=seconds
        )


def require_size(text: str, most: int, param: str) -> None:
    """Raises ApiError for a grammar of more characters than the server takes.

    A grammar is compiled after admission, which takes up to a second.
    """
    if len(text) > most:
        message = f"{param} has {len(text)} characters; this server takes {most} (--max-grammar)"
        raise ApiError(400, message, param=param)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ApiError(
            400, f"logit_bias: {text!r} is no token id", param="logit_bias", code="invalid_value"
        )
    return int(text)
