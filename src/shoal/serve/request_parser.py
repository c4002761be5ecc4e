"""Requests of completions and chats as requests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shoal.config import GUIDES_PROMPTS, Grammar
from shoal.serve.api_errors import ApiError
from shoal.serve.message_models import Message
from shoal.serve.prompts import Prompt, require_free
from shoal.serve.reasoning import ReasoningRules, begun_thought
from shoal.serve.reasoning import rules_of as reasoning_of
from shoal.serve.request_builder import (
    ParsedRequest,
    RequestBuilder,
    require_members,
    require_range,
)
from shoal.serve.request_fields import LIMITLESS
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest, SampledRequest
from shoal.serve.tool_calls import CallRules
from shoal.serve.tools import (
    call_rules,
    grammar_with_calls,
    require_choice,
    shown_tools,
    told,
    told_by_user,
)
from shoal.types.arguments import line_end, with_line_feeds
from shoal.types.requests import Request

CONTINUED = "continue_final_message"
OPEN_TURN = {CONTINUED: False, "add_generation_prompt": True}
"""The variables of a template that ends with the beginning of the assistant's turn."""
DEFAULT_MAX_TOKENS = 16
"""The `max_tokens` of a completion without the field; a chat answer may then be as long as the
server allows."""


class RequestParser:
    """A parser of requests of completions and chats; several threads may use it."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder, self._encoder, self._settings = builder, builder.encoder, builder.settings

    def parse(self, request: BaseRequest) -> ParsedRequest:
        """Returns the parsed request. Raises ApiError or RequestError: it cannot be served."""
        if request.stream and request.exact in ("smc", "asap+smc", "distinct"):
            raise ApiError(
                400,
                f"exact {request.exact!r} replaces samples while they run: leave out stream",
                param="exact",
            )
        require_consistent(request)
        if isinstance(request, ChatRequest):
            parsed = self._chat(request)
            requests = [self._encoder.dressed(one, request) for one in parsed.requests]
        else:
            assert isinstance(request, CompletionRequest)
            if request.suffix == "" and not self._encoder.fills_in:
                request = request.model_copy(update={"suffix": None})
            request, line_ends = _as_read(request)
            parsed, given = self._completion(request)
            if not any(one.sampling.grammar for one in parsed.requests):  # whose text is its own
                parsed = replace(parsed, line_ends=line_ends)
            pairs = zip(parsed.requests, given, strict=False)
            requests = [
                self._encoder.dressed(one, request, prompt, request.suffix) for one, prompt in pairs
            ]
        return replace(parsed, requests=requests)

    def _completion(self, request: CompletionRequest) -> tuple[ParsedRequest, Sequence[Prompt]]:
        n = request.n or 1
        drawn = n if request.best_of is None else request.best_of
        given = _as_list(request.prompt)
        self._builder.require_capacity(drawn, len(given), "n" if drawn == n else "best_of")
        encoded = [self._encoder.encode(prompt, request.suffix) for prompt in given]
        limitless = request.max_tokens in LIMITLESS
        wanted = self._settings.max_tokens if limitless else request.max_tokens
        prompts = self._builder.truncated(
            request, encoded, DEFAULT_MAX_TOKENS if wanted is None else wanted
        )
        max_tokens, headers = self._builder.clamped(
            min(DEFAULT_MAX_TOKENS, self._settings.max_tokens) if wanted is None else wanted,
            prompts,
        )
        if limitless:
            max_tokens = max(min(max_tokens, self._builder.context - max(map(len, prompts))), 1)
        self._builder.require_context(
            "prompt", prompts, min(max_tokens, 1) if wanted is None else max_tokens
        )
        read = [
            ids if len(ids) < len(whole) else prompt
            for ids, whole, prompt in zip(prompts, encoded, given, strict=True)
        ]
        echo = [self._encoder.text(one, max_tokens > 0) for one in read] if request.echo else None
        parsed = self._builder.build(
            request,
            prompts,
            max_tokens,
            drawn=drawn,
            returned=n,
            top_logprobs=alternatives(request),
            echo=echo,
            headers=headers,
        )
        require_members(request, self._settings)
        return _led(parsed, request, lambda _, given: self._encoder.encode(given, None)), given

    def _chat(self, request: ChatRequest) -> ParsedRequest:
        given = _limits(request)
        n, top_logprobs = request.n or 1, alternatives(request)
        self._builder.require_capacity(n, 1)
        if self._settings.turn_ends and not request.ignore_eos:
            own = [request.stop] if isinstance(request.stop, str) else request.stop or ()
            request = request.model_copy(update={"stop": [*own, *self._settings.turn_ends]})
        rules, reasoning, ids = self._conversation(request)
        wanted = next(iter(given), None)
        (ids,) = self._builder.truncated(
            request, [ids], self._builder.context // 2 if wanted is None else wanted
        )
        if wanted is None:
            wanted = max(min(self._settings.max_tokens, self._builder.context - len(ids)), 1)
        max_tokens, headers = self._builder.clamped(wanted, [ids])
        own_name = "max_tokens" if request.max_tokens == wanted else "max_completion_tokens"
        require_range(own_name, max_tokens, 1, self._settings.max_tokens)
        if rules and rules.told:
            headers = {"x-shoal-told": "tools", **headers}
        self._builder.require_context("messages", [ids], max_tokens)
        parsed = self._builder.build(
            request,
            [ids],
            max_tokens,
            drawn=n,
            returned=n,
            top_logprobs=top_logprobs,
            echo=None,
            headers=headers,
        )
        parsed = self._called(parsed, request, rules, reasoning)
        parsed = _led(parsed, request, partial(self._under_another, request))
        return parsed if reasoning is None else self._reasoned(parsed, reasoning, rules)

    def _called(
        self,
        parsed: ParsedRequest,
        request: ChatRequest,
        rules: CallRules | None,
        reasoning: ReasoningRules | None,
    ) -> ParsedRequest:
        """Returns the request with the grammar and marks of its calls (`grammar_with_calls`)."""
        special = self._encoder.special if rules else {}
        grammar = (
            grammar_with_calls(request, rules, self._settings.max_grammar, special)
            if rules
            else None
        )
        field = "tools" if rules and rules.forced else parsed.grammar_field
        tags = self._encoder.tokens_within(
            "\n".join((rules.format.opening, rules.format.closing, rules.format.inner))
            if rules
            else ""
        )
        unstopped = (
            *(reasoning.unstopped if reasoning else ()),
            *(rules.unstopped if rules else ()),
        )
        ended = {"min_new_tokens": 0} if request.forced else {}
        requests = [
            replace(one, shown_tokens=one.shown_tokens | tags, unstopped=unstopped)
            for one in parsed.requests
        ]
        requests = [_under(one, grammar, **ended) for one in requests]
        return replace(parsed, rules=rules, requests=requests, grammar_field=field)

    def conversation_ids(self, request: ChatRequest) -> tuple[int, ...]:
        """Returns the ids of a chat's prompt. Raises ApiError or RequestError: see `parse`."""
        return self._conversation(request)[2]

    def _conversation(
        self, request: ChatRequest
    ) -> tuple[CallRules | None, ReasoningRules | None, tuple[int, ...]]:
        """Returns the rules for calls, the rules for reasoning, and the ids of the prompt."""
        encoder = self._encoder
        rules = call_rules(request, encoder.template(tools=bool(request.tools)))
        variables = (request.chat_template_kwargs or {}) | (
            {"tools": shown_tools(request)} if rules and not rules.told else {}
        )
        variables |= _turn(request)
        special = request.split_special_tokens is False
        spelled = (lambda value: value) if special else encoder.spelled
        messages = told(request, spelled) if rules and rules.told else request.messages
        template = encoder.template(tools=rules is not None)
        last = request.messages[-1].plain()["content"] if _turn(request).get(CONTINUED) else ""
        thought = begun_thought(template, last) if len(messages) > 1 else None
        if thought is not None:  # templates leave thoughts out, or close an empty one before them
            messages, variables = messages[:-1], variables | OPEN_TURN
        try:
            written = encoder.write(messages, variables, special)
        except ApiError:
            if not (rules and rules.told):
                raise
            written = encoder.write(told_by_user(messages), variables, special)
        if thought is not None:
            opened = reasoning_of(template, written)
            written += thought.lstrip() if opened and opened.opened else last
        reasoning = reasoning_of(template, written, last)
        if rules is not None:
            rules = replace(rules, reasons=reasoning is not None)
        return (
            rules,
            reasoning,
            encoder.encode_text(written + (rules.begun if rules else ""), special=False),
        )

    def _under_another(self, request: ChatRequest, name: str, text: Prompt) -> tuple[int, ...]:
        """Returns the ids of the conversation under another system message; "" = under none.

        Args:
            request: the request.
            name: the field that has the message.
            text: the message.

        Raises:
            ApiError: the message is no text.
        """
        if not isinstance(text, str):
            raise ApiError(400, f"{name} of a chat must be a text", param=name)
        others = [one for one in request.messages if one.role not in ("system", "developer")]
        system = [Message(role="system", content=text)] if text else []
        _, _, ids = self._conversation(request.model_copy(update={"messages": [*system, *others]}))
        return ids

    def _reasoned(
        self, parsed: ParsedRequest, reasoning: ReasoningRules, rules: CallRules | None
    ) -> ParsedRequest:
        """Returns the request with reasoning in its text, and before the text of a grammar.

        The text shows the ends of the reasoning, also if they are special tokens.
        """
        ends = self._encoder.tokens_within("".join(reasoning.marks))
        requests = []
        for one in parsed.requests:
            grammar = one.sampling.grammar
            if grammar is not None:
                begins = rules.begins if rules else ""
                one = _under(one, reasoning.allowed_before(grammar, begins, special=bool(ends)))
            requests.append(replace(one, shown_tokens=one.shown_tokens | ends))
        return replace(parsed, requests=requests, reasoning=reasoning)


def _led(
    parsed: ParsedRequest, request: SampledRequest, ids_of: Callable[[str, Prompt], tuple[int, ...]]
) -> ParsedRequest:
    """Returns the request with the prompts that the guide and the expert have for themselves.

    Args:
        parsed: the request.
        request: its body.
        ids_of: returns the ids that a field's value stands for.
    """
    given = {name: getattr(request, name) for name in GUIDES_PROMPTS.values()}
    own: dict[str, Any] = {
        name: ids_of(name, value) for name, value in given.items() if value is not None
    }
    requests = [replace(one, sampling=replace(one.sampling, **own)) for one in parsed.requests]
    return replace(parsed, requests=requests)


def _under(request: Request, grammar: Grammar | None, **more: Any) -> Request:
    """Returns the request under a grammar and more of its sampling, if there is a grammar."""
    if grammar is None:
        return request
    return replace(request, sampling=replace(request.sampling, grammar=grammar, **more))


def require_consistent(request: BaseRequest) -> None:
    """Raises ApiError if fields of a completion or a chat contradict each other."""
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if len(_limits(request)) > 1:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ", param="max_completion_tokens"
            )
        require_free(request.chat_template_kwargs or {})
        require_choice(request)
        _turn(request)
        return
    assert isinstance(request, CompletionRequest)
    if request.suffix and not all(isinstance(one, str) for one in _as_list(request.prompt)):
        raise ApiError(400, "suffix needs a prompt that is a text", param="suffix")
    n = request.n or 1
    drawn = n if request.best_of is None else request.best_of
    if drawn < n:
        raise ApiError(400, f"best_of must be at least n = {n}, got {drawn}", param="best_of")
    if drawn > n and request.stream:
        raise ApiError(
            400,
            "best_of cannot be streamed: which samples are best is known at the end",
            param="best_of",
        )
    if request.echo and request.suffix is not None:
        raise ApiError(400, "echo does not go with suffix", param="echo")


def alternatives(request: BaseRequest) -> int | None:
    """Returns the alternatives per token that a request wants; None = no log-probabilities."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _limits(request: ChatRequest) -> set[int | None]:
    """Returns the limits of new tokens that a chat names."""
    return {request.max_tokens, request.max_completion_tokens} - {None, *LIMITLESS}


def _as_read(request: CompletionRequest) -> tuple[CompletionRequest, Sequence[str]]:
    """Returns the request as the model reads it, and the ends of lines in the file of each prompt.

    With a suffix, prompts are parts of files, whose lines models know with line feeds.
    """
    suffix, prompts = request.suffix, _as_list(request.prompt)
    if suffix is None or not all(isinstance(prompt, str) for prompt in prompts):
        return request, ()
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    read = {
        "prompt": [with_line_feeds(prompt) for prompt in prompts],
        "suffix": with_line_feeds(suffix),
        "stop": stops and [with_line_feeds(stop) for stop in stops],
    }
    return request.model_copy(update=read), [line_end(prompt, suffix) for prompt in prompts]


def _turn(request: ChatRequest) -> dict[str, bool]:
    """Returns the variables of the chat template that say whose turn the prompt ends in.

    Raises:
        ApiError: they contradict each other, or there is no message to go on with.
    """
    last, begins = request.messages[-1], request.add_generation_prompt
    if not (request.continue_final_message or (last.prefix and last.role == "assistant")):
        return {} if begins is None else {"add_generation_prompt": begins}
    if begins:
        message = "continue_final_message does not go with add_generation_prompt: leave one out"
        raise ApiError(400, message, param="continue_final_message", code="invalid_value")
    return {CONTINUED: True, "add_generation_prompt": False}


def _as_list(prompt: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """Returns a list of prompts from one prompt or several."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
