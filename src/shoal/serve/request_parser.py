"""What clients ask -> requests of the engine. Both APIs take one way: they differ in how a prompt is written down."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.config import Grammar, Limits, Sampling
from shoal.constraints.fim import fill_in_middle
from shoal.errors import RequestError
from shoal.sampling.penalties import require_ids
from shoal.serve.api_errors import ApiError
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest, JsonFormat, TextFormat
from shoal.serve.settings import Settings
from shoal.types.requests import Request, occurrences

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
)  # fmt: skip
"""Fields that go to `shoal.Sampling` under their own names."""
COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say; a chat answer is then as long as the server allows."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request, translated.

    Attributes:
        prompts: their token ids. requests: one per prompt, of `drawn` rows each; none if nothing is to be generated.
        kept: how many rows of each prompt come back, the best if not all.
        logprobs: None, or how many most probable tokens to tell beside each token's own log-probability.
        echo: texts of the prompts, if they are to come back. usage: a stream ends with what it took.
        notes: headers that say what was not done as it was asked.
        deadline: when its time is over, by `time.perf_counter`.
    """

    prompts: Sequence[tuple[int, ...]]
    requests: Sequence[Request]
    drawn: int
    kept: int
    logprobs: int | None
    echo: Sequence[str] | None
    stream: bool
    usage: bool
    details: bool
    notes: Mapping[str, str]
    deadline: float


class RequestParser:
    """Knows the model's tokenizer and the server's limits; may be used by several threads.

    Args:
        eos: the model's own. vocab_size, context: its tokens, and how many fit. most: rows of one request.
    """

    def __init__(
        self, tokenizer: Any, eos: Sequence[int], vocab_size: int, context: int, most: int, settings: Settings
    ) -> None:  # fmt: skip
        self.tokenizer, self.eos, self.settings = tokenizer, tuple(eos), settings
        self.vocab_size, self.context, self.most = vocab_size, context, most

    # ── the two APIs ────────────────────────────────────────────────────────────────────────────────────────────────

    def completion(self, asked: CompletionRequest) -> ParsedRequest:
        """Of /v1/completions. Raises ApiError or RequestError for what cannot be done."""
        n = asked.n or 1
        drawn = n if asked.best_of is None else asked.best_of
        if drawn < n:
            raise ApiError(400, f"best_of must be at least n = {n}, got {drawn}", param="best_of")
        if drawn > n and asked.stream:
            raise ApiError(400, "best_of cannot be streamed: which samples are best is known at the end", param="best_of")
        if asked.echo and asked.suffix is not None:
            raise ApiError(400, "echo does not go with suffix", param="echo")
        self._require_room(drawn, len(_prompts(asked.prompt)))
        prompts = [self._prompt(prompt, asked.suffix) for prompt in _prompts(asked.prompt)]
        wanted = min(COMPLETION_TOKENS, self.settings.max_tokens) if asked.max_tokens is None else asked.max_tokens
        wanted, notes = self._clamped(wanted, prompts)
        self._require_context("prompt", prompts, wanted if asked.max_tokens is not None else min(wanted, 1))
        echo = [self._text(prompt) for prompt in _prompts(asked.prompt)] if asked.echo else None
        return self._order(asked, prompts, wanted, drawn, n, asked.logprobs, echo, notes)

    def chat(self, asked: ChatRequest) -> ParsedRequest:
        """Of /v1/chat/completions. Raises ApiError or RequestError for what cannot be done."""
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {asked.max_tokens, asked.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        n, logprobs = asked.n or 1, (asked.top_logprobs or 0) if asked.logprobs else None
        self._require_room(n, 1)
        ids = self._conversation(asked)
        wanted = next(iter(limits), None)
        if wanted is None:
            wanted = max(min(self.settings.max_tokens, self.context - len(ids)), 1)
        wanted, notes = self._clamped(wanted, [ids])
        self._require_context("messages", [ids], wanted)
        return self._order(asked, [ids], wanted, n, n, logprobs, None, notes)

    def _order(
        self, asked: BaseRequest, prompts: Sequence[tuple[int, ...]], max_tokens: int, drawn: int, kept: int, logprobs: int | None,
        echo: Sequence[str] | None, notes: Mapping[str, str],
    ) -> ParsedRequest:  # fmt: skip
        notes = {"x-shoal-ignored": ", ".join(asked.ignored), **notes} if asked.ignored else notes
        self._require("max_tokens", max_tokens, 0 if echo else 1, self.settings.max_tokens)
        self._require("n" if drawn == kept else "best_of", drawn, 1, self.settings.max_n)
        self._require("logprobs", logprobs or 0, 0, self.settings.max_logprobs)
        requests = [
            self._request(asked, ids, drawn, max_tokens, logprobs or 0, occurrence)
            for ids, occurrence in zip(prompts, occurrences(prompts), strict=True)
            if max_tokens
        ]
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        details = bool(asked.shoal and asked.shoal.details)
        deadline = time.perf_counter() + self._seconds(asked)
        return ParsedRequest(
            prompts, requests, drawn, kept, logprobs, echo, bool(asked.stream), usage, details, notes, deadline
        )

    # ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prompt(self, prompt: str | Sequence[int], suffix: str | None) -> tuple[int, ...]:
        if suffix is not None:
            if not isinstance(prompt, str):
                raise ApiError(400, "suffix needs a prompt that is a text", param="suffix")
            with _blaming("suffix"):
                return tuple(fill_in_middle(self.tokenizer, prompt, suffix))
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if max(prompt) >= self.vocab_size:  # before anybody decodes it
            message = f"prompt ids must be in 0..{self.vocab_size - 1}, got {max(prompt)}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return tuple(prompt)

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))

    def _conversation(self, asked: ChatRequest) -> tuple[int, ...]:
        template = self.settings.chat_template or self.tokenizer.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
            )
        messages = [message.plain() for message in asked.messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **(asked.chat_template_kwargs or {}),
            )
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # templates are programs of others, and raise what they like
            raise ApiError(400, f"the chat template refused the messages: {error}", param="messages") from error

    # ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(
        self, asked: BaseRequest, ids: tuple[int, ...], n: int, max_tokens: int, logprobs: int, occurrence: int
    ) -> Request:
        draft = asked.speculation
        return Request(
            ids, n, self._sampling(asked), self._limits(asked, max_tokens), top_logprobs=logprobs, occurrence=occurrence,
            max_draft=0 if draft == "off" else draft if isinstance(draft, int) else None, submitted_at=time.perf_counter(),
        )  # fmt: skip

    def _require(self, name: str, value: int, least: int, most: int) -> None:
        if not least <= value <= most:
            raise ApiError(
                400, f"{name} must be in {least}..{most} on this server, got {value}", param=name, code="invalid_value"
            )

    def _clamped(self, max_tokens: int, prompts: Sequence[tuple[int, ...]]) -> tuple[int, dict[str, str]]:
        """As many as this server allows, and the header that says so if they were more; then what the context leaves is enough."""
        if max_tokens <= self.settings.max_tokens:
            return max_tokens, {}
        most = max(1, min(self.settings.max_tokens, self.context - max(map(len, prompts))))
        return most, {"x-shoal-clamped": f"max_tokens={most}"}

    def _require_context(self, param: str, prompts: Sequence[tuple[int, ...]], new: int) -> None:
        """Prompts and their new tokens fit the model's context; in OpenAI's words, as clients look for them."""
        longest = max(map(len, prompts))
        if longest + new > self.context:
            message = (
                f"This model's maximum context length is {self.context} tokens. However, you requested {longest + new} tokens "
                f"({longest} in the {param}, {new} in the completion). Please reduce the length of the {param} or completion."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _require_room(self, drawn: int, prompts: int) -> None:
        """Before anything is done for so many."""
        rows = drawn * prompts
        if rows > self.most:
            param = "prompt" if prompts > drawn else "n"
            raise ApiError(400, f"{rows} samples were asked for at once; this server takes {self.most}", param=param)

    def _sampling(self, asked: BaseRequest) -> Sampling:
        given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(asked, name)) is not None}
        if given.get("top_k") == -1:  # as vLLM says it
            del given["top_k"]
        if "seed" in given and not self.settings.seeds and asked.temperature != 0:
            raise ApiError(
                400, "this server runs under --rule rejection, where a seed cannot bring the same tokens", param="seed"
            )
        bias = {_token_id(token): value for token, value in (asked.logit_bias or {}).items()}
        sampling = Sampling(
            **given, logit_bias=bias, min_new_tokens=asked.min_tokens or 0, grammar=self._grammar(asked)
        )  # fmt: skip
        with _blaming("logit_bias"):
            require_ids(sampling, self.vocab_size)
        return sampling

    def _grammar(self, asked: BaseRequest) -> Grammar | None:
        """Not read yet: that takes a second, and whoever asks must have been admitted before."""
        grammar = _grammar(asked)
        if grammar is None:
            return None
        param = "grammar" if asked.grammar else "response_format"
        if len(grammar.text) > self.settings.max_grammar:
            most = self.settings.max_grammar
            raise ApiError(400, f"{param} has {len(grammar.text)} characters; this server takes {most}", param=param)
        return grammar

    def _limits(self, asked: BaseRequest, max_tokens: int) -> Limits:
        ends = asked.stop_token_ids or ()
        if unknown := [token for token in ends if token >= self.vocab_size]:
            message = f"stop_token_ids names token id {unknown[0]}; the model's are below {self.vocab_size}"
            raise ApiError(400, message, param="stop_token_ids", code="invalid_value")
        with _blaming("stop"):
            return Limits(
                max_new_tokens=max_tokens, stop=asked.stop or (), eos=(*self.eos, *ends),
                time_budget=self._seconds(asked),
            )  # fmt: skip

    def _seconds(self, asked: BaseRequest) -> float:
        return min(asked.time_budget or self.settings.timeout, self.settings.timeout)


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Whatever is refused meanwhile is refused for that field."""
    try:
        yield
    except RequestError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error


def require_model(name: str, settings: Settings) -> None:
    """Raises ApiError for a name that is not the served model's."""
    if name != settings.model:
        message = f"there is no model {name!r} here; this server has {settings.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _grammar(asked: BaseRequest) -> Grammar | None:
    wanted = asked.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return Grammar(asked.grammar.type, asked.grammar.text) if asked.grammar else None
    if asked.grammar is not None:
        raise ApiError(400, "grammar does not go with a response_format other than text", param="grammar")
    schema = "" if isinstance(wanted, JsonFormat) else json.dumps(wanted.json_schema.json_schema)
    return Grammar(wanted.type, schema, wanted.whitespace or "bounded")


def _prompts(prompt: str | Sequence[Any]) -> Sequence[Any]:
    """One prompt or several, as several."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ApiError(400, f"logit_bias: {text!r} is no token id", param="logit_bias", code="invalid_value")
    return int(text)
