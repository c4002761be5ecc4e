"""The limits and defaults of a server, and the sampling fields of requests within them.

The fields become `shoal.Sampling` and `shoal.Limits`. The one grammar of a request comes from any
of the fields that can give it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config import PARAMETERS, Grammar, Limits, Sampling
from shoal.constraints.grammar_sources import as_lark, quote
from shoal.constraints.members import jedi_analyser
from shoal.errors import RequestError
from shoal.sampling.penalties import require_ids
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.request_models import BaseRequest, JsonFormat, TextFormat


@dataclass(frozen=True)
class Settings:
    """The limits and defaults of a server, validated on creation.

    Attributes:
        model: the name of the model in requests and answers.
        aliases: further names under which requests may ask for it.
        queue: the number of rows that may wait beside the decoded ones.
        max_n: the most samples of a prompt, `best_of` included.
        max_tokens: the most new tokens of a sample.
        max_logprobs: the most alternatives per token.
        max_body: the most bytes of a request.
        max_grammar: the most characters of a grammar or schema. The time and the memory to read one
            are bounded by themselves (`shoal.serve.compiled_grammars`).
        timeout: seconds from a request's arrival after which its unfinished rows are returned as
            they are.
        seeds: True if seeds are accepted: with the coupled rule the same seed gives the same
            tokens, whatever else is served.
        keys: valid API keys of /v1; empty = no key is needed.
        weights: the weights of the keys' owners (`shoal.serve.access`), if other than 1.
        origins: origins of pages that may send requests from a browser (CORS).
        hosts: allowed names beside addresses and localhost, see `shoal.serve.access`; "*" = any.
        chat_template: replaces the tokenizer's.
        turn_ends: stop strings of all chats, beside their own.
        generation_config: True if the sampling parameters of the model's generation config hold
            for chats that do not say them.
        members: True if requests may ask for `shoal.constraints.members`. This analyses the texts
            of requests together with the packages of this environment, and the other rows wait
            meanwhile.
    """

    model: str
    queue: int = 256
    max_n: int = 256
    max_tokens: int = 1024
    max_logprobs: int = 20
    max_body: int = 2 * 2**20
    max_grammar: int = 2**18
    timeout: float = 600.0
    seeds: bool = True
    keys: tuple[str, ...] = field(default=(), repr=False)  # a repr may be logged
    weights: Mapping[str, float] = field(default_factory=dict, repr=False)
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("*",)
    chat_template: str | None = None
    turn_ends: tuple[str, ...] = ()
    generation_config: bool = True
    members: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, its own first."""
        return tuple(dict.fromkeys((self.model, *self.aliases)))

    def __post_init__(self) -> None:
        if self.members:
            jedi_analyser()
        for name in ("max_n", "max_tokens", "max_logprobs", "max_body", "max_grammar", "timeout"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} must be > 0, got {getattr(self, name)!r}")
        if self.queue < 0:
            raise RequestError(f"queue must be >= 0, got {self.queue!r}")


def given_grammar(request: BaseRequest) -> tuple[str, Grammar] | None:
    """Returns the field that gives a grammar, and the grammar, which is not compiled yet.

    Raises:
        ApiError: two fields give a grammar, or a field's value cannot be one.
    """
    grammars = list(_given(request))
    if len(grammars) > 1:
        first, second = grammars[0][0], grammars[1][0]
        raise ApiError(
            400,
            f"{second} does not go with {first}: a request has one grammar at most",
            param=second,
        )
    return grammars[0] if grammars else None


def _given(request: BaseRequest) -> Iterator[tuple[str, Grammar]]:
    wanted = request.response_format
    if wanted is not None and not isinstance(wanted, TextFormat):
        held = wanted if isinstance(wanted, JsonFormat) else wanted.json_schema
        given = held.json_schema is not None
        kind, text = ("json_schema", json.dumps(held.json_schema)) if given else ("json_object", "")
        yield "response_format", Grammar(kind, text, wanted.whitespace or "bounded")
    if request.grammar is not None:
        yield "grammar", Grammar(request.grammar.type, request.grammar.text)
    yield from _structured(request)
    for kind, value in (
        ("json", request.guided_json),
        ("regex", request.guided_regex),
        ("choice", request.guided_choice),
        ("grammar", request.guided_grammar),
    ):
        if value is not None:
            yield f"guided_{kind}", _of(kind, value, f"guided_{kind}")


def _structured(request: BaseRequest) -> Iterator[tuple[str, Grammar]]:
    outputs = request.structured_outputs
    if outputs is None:
        return
    values = {
        "json": outputs.json_schema,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
        "json_object": outputs.json_object,
    }
    given = {kind: value for kind, value in values.items() if value is not None}
    if not given:
        message = f"structured_outputs says nothing: it needs one of {', '.join(values)}"
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    compact = outputs.disable_any_whitespace is True
    for kind, value in given.items():
        yield f"structured_outputs.{kind}", _of(kind, value, f"structured_outputs.{kind}", compact)


def _of(kind: str, value: Any, field: str, compact: bool = False) -> Grammar:
    """Returns the grammar of one of vLLM's fields. Raises ApiError: the value is no grammar."""
    with naming(field):
        if kind == "regex":
            return Grammar("regex", value)
        if kind == "choice":
            return Grammar("lark", "start: " + " | ".join(map(quote, value)))
        if kind == "grammar":
            return Grammar("lark", as_lark(value))
        whitespace = "compact" if compact else "bounded"
        if kind == "json_object":
            return Grammar("json_object", "", whitespace)
        return _schema(value, whitespace)


def _schema(value: Any, whitespace: str) -> Grammar:
    return Grammar(
        "json_schema", value if isinstance(value, str) else json.dumps(value), whitespace
    )


CUTS = ("top_p", "top_k", "min_p", "typical_p")
"""The parameters that leave out tokens."""


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
    if request.exact is not None:  # samples of the whole distribution
        defaults = {name: value for name, value in defaults.items() if name not in CUTS}
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
