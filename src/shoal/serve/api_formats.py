"""The formats of the two APIs: a sample as a choice of an answer, whole or as chunks of a stream.

`shoal.serve.token_details` has the details of single tokens.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from shoal.serve.api_errors import CHAT, COMPLETIONS, Json, public, spoken
from shoal.serve.call_reader import CallReader
from shoal.serve.reasoning import ReasoningReader
from shoal.serve.request_builder import ParsedRequest
from shoal.serve.request_models import BaseRequest, ChatRequest, CompletionRequest
from shoal.serve.token_details import ChoiceDetails, finite, name_and_bytes
from shoal.serve.tool_calls import Call
from shoal.serve.worker import RowUpdate, TokenUpdate

FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "time": "length",
    "not started": "length",
    "cancelled": "length",
    "error": "error",
}
"""The API's `finish_reason` by `Sample.finish_reason`; `usage.choices` has the latter."""


class TextPlaces:
    """The places in a choice's text where its tokens begin, behind an echo of the prompt."""

    def __init__(self) -> None:
        self._begin = 0  # of the next token, if no prompt is echoed
        self._echoed, self._echo_length = 0, 0

    def echo(self, text: str, tokens: int) -> None:
        """Notes that the choice begins with the text of a prompt of `tokens` tokens."""
        self._echoed, self._echo_length = tokens, len(text)

    def leave_echo(self) -> None:
        """Notes that the echo has been sent: the next tokens begin behind it."""
        self._begin, self._echoed = self._echo_length, 0

    def add(self, tokens: Sequence[TokenUpdate]) -> None:
        """Goes on behind these tokens."""
        self._begin += sum(len(token.text) for token in tokens)

    def of(self, tokens: Sequence[TokenUpdate]) -> list[int]:
        """Returns the places of tokens.

        The tokens of an echoed prompt lie within the prompt, and the others behind it. This also
        holds if the prompt's text differs from the text of its tokens: it has special tokens, or
        begins a character that the sample completes.
        """
        prompt, own = tokens[: self._echoed], tokens[self._echoed :]
        starts = accumulate((len(token.text) for token in prompt), initial=0)
        places = [min(start, self._echo_length) for start in starts][:-1]
        begin = self._echo_length if prompt else self._begin
        return [*places, *accumulate((len(token.text) for token in own), initial=begin)][
            : len(tokens)
        ]


class ApiFormat(ABC):
    """The writer of one choice of an answer, whole or chunk by chunk.

    Args:
        tokenizer: the target's.
        index: the number of the choice.
        parsed: the request, which determines the fields of its choices.

    Attributes:
        prompt_in_choice: True if the details of a prompt stand in its choices; else they stand in
            the answer.
    """

    request_model: ClassVar[type[BaseRequest]]
    prompt_field: ClassVar[str]
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    prompt_in_choice: ClassVar[bool]

    def __init__(self, tokenizer: Any, index: int, parsed: ParsedRequest) -> None:
        self._tokenizer, self._index, self._parsed = tokenizer, index, parsed
        self._details = ChoiceDetails(tokenizer, parsed.rounds)
        self._calls = None if parsed.rules is None else CallReader(parsed.rules)
        self._reasoning = None if parsed.reasoning is None else ReasoningReader(parsed.reasoning)
        self._starts, self._characters = list[int](), 0
        self._places = TextPlaces()

    def first_chunk(self, echo: str | None, prompt: Sequence[TokenUpdate]) -> Json | None:
        """Returns the chunk before any sample's text, with the role or the echo, or None."""
        fields = self._first_fields(echo)
        if fields is None:
            return None
        self._places.echo(echo or "", len(prompt))
        logprobs = self._logprobs(prompt)
        self._places.leave_echo()
        return {"index": self._index, **fields, "logprobs": logprobs, "finish_reason": None}

    def chunk(self, update: RowUpdate) -> Json:
        """Returns the choice of a streamed chunk."""
        return self._choice(update, self._chunk_fields(update.text, update.sample is not None))

    def whole(self, update: RowUpdate, echo: str = "", prompt: Sequence[TokenUpdate] = ()) -> Json:
        """Returns the whole choice, from the update of its end."""
        self._places.echo(echo, len(prompt))
        return self._choice(update, self._text_fields(echo + update.text), prompt)

    def _choice(self, update: RowUpdate, fields: Json, prompt: Sequence[TokenUpdate] = ()) -> Json:
        self._note_starts(update.tokens)
        reason = FINISH_REASONS[update.sample.finish_reason] if update.sample else None
        if reason == "stop" and self._calls is not None and self._calls.found:
            reason = "tool_calls"
        choice = {
            "index": self._index,
            **fields,
            "logprobs": self._logprobs([*prompt, *self._reported(update)]),
            "finish_reason": reason,
        }
        self._places.add([*prompt, *update.tokens])
        if update.error is not None:
            choice["error"] = public(spoken(str(update.error)))
        if self._parsed.token_ids:
            choice["token_ids"] = [token.id for token in update.tokens]
        if self._parsed.details:
            choice["shoal"] = self._details.of(update)
        return choice

    def _without_reasoning(self, text: str, ended: bool) -> tuple[str, str]:
        """Returns the reasoning and the other text that a piece of the sample's text adds."""
        return ("", text) if self._reasoning is None else self._reasoning.feed(text, ended)

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens so far that begin within the reasoning, once its end is known."""
        if self._reasoning is None:
            return 0
        return sum(start < self._reasoning.characters for start in self._starts)

    def _note_starts(self, tokens: Sequence[TokenUpdate]) -> None:
        """Notes the places in the sample's text where its tokens begin."""
        for token in tokens if self._reasoning is not None else ():
            self._starts.append(self._characters)
            self._characters += len(token.text)

    def _reported(self, update: RowUpdate) -> Sequence[TokenUpdate]:
        """Returns the tokens whose log-probabilities the answer tells."""
        return update.tokens

    def _logprobs(self, tokens: Sequence[TokenUpdate]) -> Json | None:
        return None if self._parsed.top_logprobs is None else self._logprob_fields(tokens)

    def _alternatives(self, token: TokenUpdate) -> Sequence[tuple[int, float]]:
        """Returns the most probable tokens; the token itself has the same number as elsewhere."""
        own = {} if token.logprob is None else {token.id: token.logprob}
        likely = token.top.raw[: self._parsed.top_logprobs] if token.top else ()
        return [(other, own.get(other, logprob)) for other, logprob in likely]

    @abstractmethod
    def _first_fields(self, echo: str | None) -> Json | None: ...

    @abstractmethod
    def _chunk_fields(self, text: str, ended: bool) -> Json: ...

    @abstractmethod
    def _text_fields(self, text: str) -> Json: ...

    @abstractmethod
    def _logprob_fields(self, tokens: Sequence[TokenUpdate]) -> Json: ...


class CompletionFormat(ApiFormat):
    """The format of /v1/completions."""

    request_model, prompt_field = CompletionRequest, "prompt"
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    prompt_in_choice = True

    def _first_fields(self, echo: str | None) -> Json | None:
        return None if echo is None else {"text": echo}

    def _chunk_fields(self, text: str, ended: bool) -> Json:
        return {"text": text}

    def _text_fields(self, text: str) -> Json:
        return {"text": text}

    def _logprob_fields(self, tokens: Sequence[TokenUpdate]) -> Json:
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._by_name(token) or None for token in tokens],
            "text_offset": self._places.of(tokens),
        }

    def _by_name(self, token: TokenUpdate) -> dict[str, float | None]:
        """Returns the alternatives of a token, and the token; of others with one name the best."""
        named: dict[str, float | None] = {}
        for other, logprob in self._alternatives(token):
            named.setdefault(self._name(other), finite(logprob))
        own = {} if token.logprob is None else {self._name(token.id): finite(token.logprob)}
        return named | own

    def _name(self, token: int) -> str:
        return name_and_bytes(self._tokenizer, token, self._parsed.named_by_id)[0]


class ChatFormat(ApiFormat):
    """The format of /v1/chat/completions."""

    request_model, prompt_field = ChatRequest, "messages"
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_in_choice = False

    def _first_fields(self, echo: str | None) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def _chunk_fields(self, text: str, ended: bool) -> Json:
        reasoning, text = self._without_reasoning(text, ended)
        before = self._calls.found if self._calls else 0
        shown, calls = self._calls.feed(text, ended) if self._calls else (text, [])
        delta: Json = {"content": shown} if shown else {}
        if reasoning:
            delta |= _named(reasoning)
        if calls:
            delta["tool_calls"] = [
                {"index": i, **_call(call)} for i, call in enumerate(calls, before)
            ]
        return {"delta": delta}

    def _text_fields(self, text: str) -> Json:
        reasoning, text = self._without_reasoning(text, True)
        shown, calls = self._calls.feed(text, True) if self._calls else (text, [])
        message: Json = {"role": "assistant", "content": shown}
        if reasoning:
            message |= {"content": shown or None, **_named(reasoning)}
        if calls:
            message |= {"content": shown or None, "tool_calls": [_call(call) for call in calls]}
        return {"message": message}

    def _reported(self, update: RowUpdate) -> Sequence[TokenUpdate]:
        """Returns the tokens of the text: the end of a turn is none, unless ids are asked for."""
        ended = update.sample is not None and update.sample.finish_reason == "eos"
        bare = ended and update.tokens and not update.tokens[-1].text
        return update.tokens[:-1] if bare and not self._parsed.token_ids else update.tokens

    def _logprob_fields(self, tokens: Sequence[TokenUpdate]) -> Json:
        def entry(token: int, logprob: float | None) -> Json:
            name, text = name_and_bytes(self._tokenizer, token, self._parsed.named_by_id)
            return {
                "token": name,
                "logprob": finite(logprob),
                "bytes": None if text is None else list(text),
            }

        return {
            "content": [
                entry(token.id, token.logprob)
                | {"top_logprobs": [entry(*pair) for pair in self._alternatives(token)]}
                for token in tokens
            ]
        }


def _named(reasoning: str) -> Json:
    """Returns the reasoning under two names: that of DeepSeek's API, and vLLM's."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _call(call: Call) -> Json:
    """Returns the JSON of a tool call with a fresh id, of nine characters as Mistral wants it."""
    return {
        "id": secrets.token_hex(5)[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


FORMATS: dict[str, type[ApiFormat]] = {COMPLETIONS: CompletionFormat, CHAT: ChatFormat}
"""The format of each path of OpenAI's API whose answers have choices."""
