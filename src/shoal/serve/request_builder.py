"""Requests of the engine, within the limits of one server: the context, the number of samples, the
length of a sample.

A `ParsedRequest` has the prompts, the requests of the engine, and the fields of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config import Grammar
from shoal.constraints.json_schemas import remarks
from shoal.serve.api_errors import ApiError, out_of_range
from shoal.serve.message_models import InfillRequest
from shoal.serve.prompts import PromptEncoder
from shoal.serve.reasoning import ReasoningRules
from shoal.serve.request_fields import MOST_NAMED, NOT_IN_HEADERS
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest
from shoal.serve.settings import Settings, given_grammar, limits_of, sampling_of
from shoal.serve.tool_calls import CallRules
from shoal.types.requests import Request, occurrences


@dataclass(frozen=True)
class ParsedRequest:
    """A request within the server's limits, made from a body.

    Attributes:
        prompts: the token ids of the prompts.
        requests: one per prompt, of `drawn` rows each; none if nothing is to be generated.
        drawn: samples drawn per prompt.
        returned: samples returned per prompt; fewer than `drawn` with `best_of`.
        top_logprobs: alternatives per token; None = no log-probabilities.
        echo: texts of the prompts, if they are returned.
        headers: headers of the answer: fields that were ignored or clamped.
        deadline: the end of the request's time, by `time.perf_counter`.
        rules: the rules for calls of tools; None = there are no calls.
        token_ids: True if ids of prompts and samples are returned.
        prompt_logprobs: alternatives per token of the prompts, if these are scored for the answer.
        grammar_field: the field of the request that its grammar came from.
        reasoning: the rules for the samples' reasoning; None = they do not reason.
        continuous_usage: True if each chunk has the usage so far, if there is usage at all.
        named_by_id: True if log-probabilities name tokens by their ids.
        line_ends: the end of a line in the file of each prompt; empty = texts stay as written.
    """

    prompts: Sequence[tuple[int, ...]]
    requests: Sequence[Request]
    drawn: int
    returned: int
    top_logprobs: int | None
    echo: Sequence[str] | None
    stream: bool
    include_usage: bool
    details: bool
    rounds: bool
    headers: Mapping[str, str]
    deadline: float
    rules: CallRules | None = None
    token_ids: bool = False
    prompt_logprobs: int | None = None
    grammar_field: str = "grammar"
    reasoning: ReasoningRules | None = None
    continuous_usage: bool = False
    named_by_id: bool = False
    line_ends: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """The number of samples of all prompts."""
        return self.drawn * len(self.prompts)

    @property
    def scored(self) -> int | None:
        """The number of alternatives per token for scoring the prompts; None = no scoring."""
        wanted = [self.prompt_logprobs, self.top_logprobs if self.echo is not None else None]
        return max((each for each in wanted if each is not None), default=None)


class RequestBuilder:
    """A builder of requests for one model and one server; several threads may use it.

    Args:
        encoder: the encoder of prompts.
        eos: end-of-text tokens of the model.
        vocab_size: the size of the model's vocabulary.
        context: the number of tokens of the model's context.
        capacity: the most rows of a request.
        settings: the server's.
        defaults: the sampling parameters of chats that do not say them.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        eos: Sequence[int],
        vocab_size: int,
        context: int,
        capacity: int,
        settings: Settings,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.encoder, self.context, self.settings = encoder, context, settings
        self._defaults = defaults or {}
        self._eos, self._vocab_size, self._capacity = tuple(eos), vocab_size, capacity

    def build(
        self,
        request: BaseRequest,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
        drawn: int,
        returned: int,
        top_logprobs: int | None,
        echo: Sequence[str] | None,
        headers: Mapping[str, str],
    ) -> ParsedRequest:
        """Returns the request (see `ParsedRequest`), with one of the engine for each prompt.

        Args:
            prompts: the token ids of the prompts.
            max_tokens: 0 = nothing is to be generated.

        Raises:
            ApiError: a number is out of range, or fields contradict each other.
            RequestError: a value is not allowed.
        """
        require_range("max_tokens", max_tokens, 1 if echo is None else 0, self.settings.max_tokens)
        require_logprobs(request, top_logprobs, self.settings)
        seconds = min(request.time_budget or self.settings.timeout, self.settings.timeout)
        requests = [
            self._engine_request(
                request,
                ids,
                drawn,
                max_tokens=max_tokens,
                top_logprobs=top_logprobs or 0,
                occurrence=occurrence,
                seconds=seconds,
            )
            for ids, occurrence in zip(prompts, occurrences(prompts), strict=True)
            if max_tokens
        ]
        options = request.stream_options
        ignored = [*request.ignored, *_passed_over(given_grammar(request))]
        return ParsedRequest(
            prompts,
            requests,
            drawn,
            returned,
            top_logprobs,
            echo,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            details=bool(request.shoal and (request.shoal.details or request.shoal.rounds)),
            rounds=bool(request.shoal and request.shoal.rounds),
            headers={"x-shoal-ignored": ", ".join(ignored), **headers} if ignored else headers,
            deadline=time.perf_counter() + seconds,
            token_ids=bool(request.return_token_ids),
            prompt_logprobs=request.prompt_logprobs,
            named_by_id=bool(request.return_tokens_as_token_ids),
            grammar_field=(given_grammar(request) or ("grammar",))[0],
        )

    def _engine_request(
        self,
        request: BaseRequest,
        ids: tuple[int, ...],
        n: int,
        max_tokens: int,
        top_logprobs: int,
        occurrence: int,
        seconds: float,
    ) -> Request:
        draft, shown = request.speculation, bool(request.include_stop_str_in_output)
        limits = limits_of(request, max_tokens, self._eos, self._vocab_size, seconds)
        return Request(
            ids,
            n,
            sampling_of(
                request,
                self._vocab_size,
                self.settings,
                self._defaults if isinstance(request, ChatRequest) else {},
            ),
            limits,
            top_logprobs=top_logprobs,
            occurrence=occurrence,
            max_draft=0 if draft == "off" else draft if isinstance(draft, int) else None,
            submitted_at=time.perf_counter(),
            shown_tokens=self.encoder.shown_tokens(request),
            shows_end=shown,
            shows_cut=isinstance(request, CompletionRequest) and bool(request.echo),
            shown_stops=frozenset(limits.stop) - {*self.settings.turn_ends}
            if shown
            else frozenset(),
            ends=frozenset() if shown else frozenset(request.stop_token_ids or ()),
        )

    def truncated(
        self, request: BaseRequest, prompts: Sequence[tuple[int, ...]], new: int
    ) -> Sequence[tuple[int, ...]]:
        """Returns the last tokens of each prompt, as many as the request wants to be read.

        Args:
            prompts: the token ids of the prompts.
            new: the number of tokens that will follow, for requests that want as many tokens read
                as the context leaves.

        Raises:
            ApiError: the number is 0, or the request has a suffix.
        """
        most = request.truncate_prompt_tokens
        if most is None:
            return prompts
        require_truncation(request)
        if most == -1:
            most = max(self.context - min(new, self.settings.max_tokens), 1)
        return [ids[-most:] for ids in prompts]

    def clamped(
        self, max_tokens: int, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[int, dict[str, str]]:
        """Returns at most the tokens that the server and then the context allow.

        If the number was lowered, the header that says so is returned, too.
        """
        if max_tokens <= self.settings.max_tokens:
            return max_tokens, {}
        most = max(1, min(self.settings.max_tokens, self.context - max(map(len, prompts))))
        return most, {"x-shoal-clamped": f"max_tokens={most}"}

    def require_context(self, param: str, prompts: Sequence[tuple[int, ...]], new: int) -> None:
        """Raises ApiError: prompts and their new tokens do not fit the model's context.

        The message is OpenAI's, which clients search for.
        """
        longest = max(map(len, prompts))
        if longest + new > self.context:
            message = (
                f"This model's maximum context length is {self.context} tokens. However, you "
                f"requested {longest + new} tokens ({longest} in the {param}, {new} in the "
                f"completion). Please reduce the length of the {param} or completion."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def require_capacity(self, drawn: int, prompts: int, name: str = "n") -> None:
        """Raises ApiError: the server takes fewer samples.

        It is called before the prompts are encoded.

        Args:
            name: the field that `drawn` comes from.
        """
        require_range(name, drawn, 1, min(self.settings.max_n, self._capacity))
        if drawn * prompts > self._capacity:
            param = "prompt" if prompts > drawn else name
            message = (
                f"Invalid '{param}': {prompts} prompts of {drawn} samples are {drawn * prompts} "
                f"samples at once. Expected at most {self._capacity} on this server."
            )
            raise ApiError(400, message, param=param, code="invalid_value")


def require_logprobs(request: BaseRequest, top_logprobs: int | None, settings: Settings) -> None:
    """Raises ApiError if numbers of log-probabilities are out of range, or not to stream."""
    name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    require_range(name, top_logprobs or 0, 0, settings.max_logprobs)
    require_range("prompt_logprobs", request.prompt_logprobs or 0, 0, settings.max_logprobs)
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(
            400, "prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs"
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def require_truncation(request: BaseRequest) -> None:
    """Raises ApiError if a request wants no token of its prompt read, or has a suffix beside it."""
    most, suffixed = request.truncate_prompt_tokens, getattr(request, "suffix", None) is not None
    if most == 0 or (most is not None and suffixed):
        message = "truncate_prompt_tokens must be at least 1, or -1, and does not go with suffix"
        raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")


def require_members(request: CompletionRequest | InfillRequest, settings: Settings) -> None:
    """Raises ApiError if a request wants members of objects, and the server has none."""
    if request.members and not settings.members:
        raise ApiError(
            400, "members after a dot are off: start the server with --members", param="members"
        )


def _passed_over(given: tuple[str, Grammar] | None) -> list[str]:
    """Returns the formats in a request's schema that say nothing, as headers name them."""
    if given is None or given[1].kind != "json_schema":
        return []
    names = (NOT_IN_HEADERS.sub("?", name)[:64] for name in remarks(given[1].text))
    return [f"{given[0]}.format={name}" for name in names][:MOST_NAMED]


def require_range(name: str, value: int, least: int, most: int) -> None:
    """Raises ApiError: a number is beyond the limits of this server."""
    bound, limit = ("ge", least) if value < least else ("le", most)
    if not least <= value <= most:
        message = out_of_range(name, value, bound, limit, " on this server")
        raise ApiError(400, message, param=name, code="invalid_value")
