"""Requests of both APIs as requests of the engine, within the server's limits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.config import Grammar
from shoal.constraints.weights import weighed
from shoal.serve.api_errors import ApiError, naming
from shoal.serve.bodies import validated
from shoal.serve.given_grammars import given_grammar
from shoal.serve.infill_models import InfillRequest
from shoal.serve.prompts import Prompt, PromptEncoder
from shoal.serve.reasoning import CLOSING, OPENING, ReasoningRules
from shoal.serve.reasoning import rules_of as reasoning_of
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest
from shoal.serve.sampling_params import limits_of, sampling_of
from shoal.serve.settings import Settings
from shoal.serve.tool_calls import CallRules
from shoal.serve.tools import call_rules, forced_grammar, shown_tools
from shoal.types.requests import Request, occurrences

DEFAULT_MAX_TOKENS = 16
"""`max_tokens` of a completion without the field; a chat answer may then be as long as the server allows."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request that the server can serve.

    Attributes:
        prompts: their token ids. requests: one per prompt, of `drawn` rows each; none if nothing is to be generated.
        drawn, returned: samples per prompt; fewer are returned than drawn with `best_of`.
        top_logprobs: alternatives per token; None = no log-probabilities. echo: texts of the prompts, if they are returned.
        headers: of the answer: what was ignored or clamped. deadline: end of the request's time, by `time.perf_counter`.
        rules: what counts as a call of a tool; None = nothing does.
        token_ids: whether ids of prompts and samples are returned. prompt_logprobs: alternatives per token of the prompts, if these
            are scored for the answer.
        grammar_field: of the request, which its grammar came from. reasoning: where samples reason; None = they do not.
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

    @property
    def rows(self) -> int:
        """Samples of all prompts."""
        return self.drawn * len(self.prompts)

    @property
    def scored(self) -> int | None:
        """Alternatives per token that the prompts are scored for; None = they need not be."""
        wanted = [self.prompt_logprobs, self.top_logprobs if self.echo is not None else None]
        return max((each for each in wanted if each is not None), default=None)


class RequestParser:
    """Parses requests for one model and the limits of one server; may be used by several threads.

    Args:
        eos: end-of-text tokens of the model. vocab_size, context: numbers of tokens. capacity: most rows of a request.
    """

    def __init__(
        self, encoder: PromptEncoder, eos: Sequence[int], vocab_size: int, context: int, capacity: int, settings: Settings
    ) -> None:
        self._encoder = encoder
        self._eos, self._vocab_size, self._context, self._capacity = tuple(eos), vocab_size, context, capacity
        self._settings = settings

    def parse(self, request: BaseRequest) -> ParsedRequest:
        """Raises ApiError or RequestError for what cannot be served."""
        parsed = self._chat(request) if isinstance(request, ChatRequest) else self._completion(request)
        return parsed if request.exact is None else _weighed(request, request.exact, parsed)

    def _completion(self, request: BaseRequest) -> ParsedRequest:
        assert isinstance(request, CompletionRequest)
        n = request.n or 1
        drawn = n if request.best_of is None else request.best_of
        _require_compatible(request, n, drawn)
        given = _as_list(request.prompt)
        self._require_capacity(drawn, len(given))
        encoded = [self._encoder.encode(prompt, request.suffix) for prompt in given]
        wanted = request.max_tokens
        prompts = self._truncated(request, encoded, DEFAULT_MAX_TOKENS if wanted is None else wanted)
        max_tokens, headers = self._clamped(
            min(DEFAULT_MAX_TOKENS, self._settings.max_tokens) if wanted is None else wanted, prompts
        )
        self._require_context("prompt", prompts, min(max_tokens, 1) if wanted is None else max_tokens)
        read = [ids if len(ids) < len(whole) else prompt for ids, whole, prompt in zip(prompts, encoded, given, strict=True)]
        echo = [self._encoder.text(prompt) for prompt in read] if request.echo else None
        parsed = self._parsed(request, prompts, max_tokens, drawn, n, request.logprobs, echo, headers)
        return self._checked(request, given, self._aligned(request, given, parsed))

    def infill(self, request: InfillRequest) -> tuple[ParsedRequest, bool]:
        """The request, and whether text was left out that the context does not hold.

        Raises:
            ApiError, RequestError: what cannot be served.
        """
        self._require_members(request)
        wanted = request.n_predict if request.n_predict is not None and request.n_predict >= 0 else self._settings.max_tokens
        max_tokens = min(wanted, self._settings.max_tokens, self._context // 2)
        prompt, truncated = self._encoder.middle(request, self._context - max_tokens)
        fields = {"prompt": "", "max_tokens": max_tokens, **request.completion()}
        headers = (
            {"x-shoal-clamped": f"n_predict={max_tokens}"} if max_tokens < wanted and request.n_predict is not None else {}
        )
        if ignored := ", ".join(request.ignored):
            headers["x-shoal-ignored"] = ignored
        top_logprobs = min(request.n_probs, self._settings.max_logprobs) if request.n_probs else None
        completion = validated(CompletionRequest, fields)
        parsed = self._parsed(
            completion, [prompt.ids], max_tokens, 1, 1, top_logprobs, () if max_tokens == 0 else None, headers
        )
        own = parsed.requests
        if request.align is not False:
            own = [self._encoder.aligned_at(one, prompt.end) for one in own]
        own = [self._encoder.checked(one, request, request.before_cursor, request.input_suffix) for one in own]
        return replace(parsed, requests=own), truncated

    def _aligned(self, request: CompletionRequest, given: Sequence[Prompt], parsed: ParsedRequest) -> ParsedRequest:
        """With a suffix unless the request says otherwise; without one, or beside a grammar, only if it asks for it."""
        wanted = request.align
        if wanted is None:
            wanted = request.suffix is not None and all(one.sampling.grammar is None for one in parsed.requests)
        if not wanted:
            return parsed
        pairs = zip(parsed.requests, given, strict=False)
        return replace(parsed, requests=[self._encoder.aligned(one, prompt, request.suffix) for one, prompt in pairs])

    def _checked(self, request: CompletionRequest, given: Sequence[Prompt], parsed: ParsedRequest) -> ParsedRequest:
        self._require_members(request)
        pairs = zip(parsed.requests, given, strict=False)
        checked = [self._encoder.checked(one, request, prompt, request.suffix or "") for one, prompt in pairs]
        return replace(parsed, requests=checked)

    def _require_members(self, request: CompletionRequest | InfillRequest) -> None:
        if request.members and not self._settings.members:
            raise ApiError(400, "members after a dot are off: start the server with --members", param="members")

    def _chat(self, request: ChatRequest) -> ParsedRequest:
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        given = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        n, top_logprobs = request.n or 1, (request.top_logprobs or 0) if request.logprobs else None
        self._require_capacity(n, 1)
        if self._settings.turn_ends and not request.ignore_eos:
            own = [request.stop] if isinstance(request.stop, str) else request.stop or ()
            request = request.model_copy(update={"stop": [*own, *self._settings.turn_ends]})
        rules, reasoning, ids = self._conversation(request)
        wanted = next(iter(given), None)
        (ids,) = self._truncated(request, [ids], self._context // 2 if wanted is None else wanted)
        if wanted is None:
            wanted = max(min(self._settings.max_tokens, self._context - len(ids)), 1)
        max_tokens, headers = self._clamped(wanted, [ids])
        self._require_context("messages", [ids], max_tokens)
        parsed = self._parsed(request, [ids], max_tokens, n, n, top_logprobs, None, headers)
        grammar = forced_grammar(request, rules, self._settings.max_grammar) if rules and rules.forced else None
        field = "tools" if grammar is not None else parsed.grammar_field
        requests = [_under(one, grammar) for one in parsed.requests]
        parsed = replace(parsed, rules=rules, requests=requests, grammar_field=field)
        return parsed if reasoning is None else self._reasoned(parsed, reasoning, rules)

    def _conversation(self, request: ChatRequest) -> tuple[CallRules | None, ReasoningRules | None, tuple[int, ...]]:
        """What counts as a call, where samples reason, and the ids of the prompt."""
        template, encoder = self._encoder.template, self._encoder
        rules = call_rules(request, template)
        variables = (request.chat_template_kwargs or {}) | ({"tools": shown_tools(request)} if rules else {})
        written = encoder.write(request.messages, variables)
        reasoning = reasoning_of(template, written)
        if rules is not None:
            rules = replace(rules, reasons=reasoning is not None)
        return rules, reasoning, encoder.encode_text(written + (rules.begun if rules else ""), special=False)

    def _reasoned(self, parsed: ParsedRequest, reasoning: ReasoningRules, rules: CallRules | None) -> ParsedRequest:
        """With reasoning in the text, also where its ends are special tokens, and before what a grammar is about.

        Raises:
            ApiError: a grammar would have to write special tokens.
        """
        ends = self._encoder.tokens_of(OPENING, CLOSING)
        requests = []
        for one in parsed.requests:
            grammar = one.sampling.grammar
            if grammar is not None and ends:
                message = (
                    "this model reasons between special tokens, which no grammar can follow: let the template close them"
                )
                raise ApiError(400, message, param=parsed.grammar_field, code="invalid_value")
            if grammar is not None:
                one = _under(one, reasoning.allowed_before(grammar, rules.begins if rules else ""))
            requests.append(replace(one, shown_tokens=one.shown_tokens | ends))
        return replace(parsed, requests=requests, reasoning=reasoning)

    def _parsed(
        self, request: BaseRequest, prompts: Sequence[tuple[int, ...]], max_tokens: int, drawn: int, returned: int,
        top_logprobs: int | None, echo: Sequence[str] | None, headers: Mapping[str, str],
    ) -> ParsedRequest:  # fmt: skip
        _require_range("max_tokens", max_tokens, 1 if echo is None else 0, self._settings.max_tokens)
        _require_range("n" if drawn == returned else "best_of", drawn, 1, self._settings.max_n)
        _require_range("logprobs", top_logprobs or 0, 0, self._settings.max_logprobs)
        _require_range("prompt_logprobs", request.prompt_logprobs or 0, 0, self._settings.max_logprobs)
        if request.prompt_logprobs is not None and request.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs")
        seconds = min(request.time_budget or self._settings.timeout, self._settings.timeout)
        requests = [
            self._engine_request(request, ids, drawn, max_tokens, top_logprobs or 0, occurrence, seconds)
            for ids, occurrence in zip(prompts, occurrences(prompts), strict=True)
            if max_tokens
        ]
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return ParsedRequest(
            prompts, requests, drawn, returned, top_logprobs, echo, stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            details=bool(request.shoal and (request.shoal.details or request.shoal.rounds)),
            rounds=bool(request.shoal and request.shoal.rounds),
            headers={"x-shoal-ignored": ", ".join(request.ignored), **headers} if request.ignored else headers,
            deadline=time.perf_counter() + seconds, token_ids=bool(request.return_token_ids),
            prompt_logprobs=request.prompt_logprobs, grammar_field=(given_grammar(request) or ("grammar",))[0],
        )  # fmt: skip

    def _engine_request(
        self, request: BaseRequest, ids: tuple[int, ...], n: int, max_tokens: int, top_logprobs: int, occurrence: int,
        seconds: float,
    ) -> Request:  # fmt: skip
        draft = request.speculation
        return Request(
            ids, n, sampling_of(request, self._vocab_size, self._settings),
            limits_of(request, max_tokens, self._eos, self._vocab_size, seconds), top_logprobs=top_logprobs,
            occurrence=occurrence, max_draft=0 if draft == "off" else draft if isinstance(draft, int) else None,
            submitted_at=time.perf_counter(), shown_tokens=self._encoder.shown_tokens(request),
        )  # fmt: skip

    def _truncated(
        self, request: BaseRequest, prompts: Sequence[tuple[int, ...]], new: int
    ) -> Sequence[tuple[int, ...]]:  # fmt: skip
        """The last tokens of each prompt, as many as the request wants to be read.

        Args:
            new: tokens that will follow, where that is as many as the context leaves. Raises ApiError.
        """
        most = request.truncate_prompt_tokens
        if most is None:
            return prompts
        if most == 0 or (isinstance(request, CompletionRequest) and request.suffix is not None):
            message = "truncate_prompt_tokens must be at least 1, or -1, and does not go with suffix"
            raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
        if most == -1:
            most = max(self._context - min(new, self._settings.max_tokens), 1)
        return [ids[-most:] for ids in prompts]

    def _clamped(self, max_tokens: int, prompts: Sequence[tuple[int, ...]]) -> tuple[int, dict[str, str]]:
        """At most what the server and then the context allow, and the header that says so if it was lowered."""
        if max_tokens <= self._settings.max_tokens:
            return max_tokens, {}
        most = max(1, min(self._settings.max_tokens, self._context - max(map(len, prompts))))
        return most, {"x-shoal-clamped": f"max_tokens={most}"}

    def _require_context(self, param: str, prompts: Sequence[tuple[int, ...]], new: int) -> None:
        """Prompts and their new tokens fit the model's context; the message is OpenAI's, which clients search for."""
        longest = max(map(len, prompts))
        if longest + new > self._context:
            message = (
                f"This model's maximum context length is {self._context} tokens. However, you requested {longest + new} tokens "
                f"({longest} in the {param}, {new} in the completion). Please reduce the length of the {param} or completion."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _require_capacity(self, drawn: int, prompts: int) -> None:
        """Checked before the prompts are encoded."""
        rows = drawn * prompts
        if rows > self._capacity:
            param = "prompt" if prompts > drawn else "n"
            raise ApiError(400, f"{rows} samples were asked for at once; this server takes {self._capacity}", param=param)


def _weighed(request: BaseRequest, exact: str, parsed: ParsedRequest) -> ParsedRequest:
    """With weights, whose requests are aligned already. Raises ApiError: nothing limits their tokens, or they cannot be weighed."""
    if "smc" in exact and request.stream:
        raise ApiError(400, f"exact {exact!r} replaces samples while they run: leave out stream", param="exact")
    aligned = isinstance(request, CompletionRequest) and (
        request.align or (request.align is None and request.suffix is not None)
    )
    with naming("exact"):
        return replace(parsed, requests=[weighed(one, exact, aligned=bool(aligned)) for one in parsed.requests])


def _under(request: Request, grammar: Grammar | None) -> Request:
    """The request under a grammar, if there is one."""
    return request if grammar is None else replace(request, sampling=replace(request.sampling, grammar=grammar))


def _require_compatible(request: CompletionRequest, n: int, drawn: int) -> None:
    if drawn < n:
        raise ApiError(400, f"best_of must be at least n = {n}, got {drawn}", param="best_of")
    if drawn > n and request.stream:
        raise ApiError(400, "best_of cannot be streamed: which samples are best is known at the end", param="best_of")
    if request.echo and request.suffix is not None:
        raise ApiError(400, "echo does not go with suffix", param="echo")


def _require_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        message = f"{name} must be in {least}..{most} on this server, got {value}"
        raise ApiError(400, message, param=name, code="invalid_value")


def _as_list(prompt: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """One prompt or several, as several."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
