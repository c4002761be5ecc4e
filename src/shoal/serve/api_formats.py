"""How a sample is written down: as a choice of /v1/completions or of /v1/chat/completions, whole or piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.serve.api_errors import public
from shoal.serve.submissions import RowUpdate, TokenUpdate
from shoal.types.samples import Sample

FINISH_REASONS = {
    "eos": "stop", "stop": "stop", "length": "length", "time": "length", "not started": "length",
    "cancelled": "length", "error": "error",
}  # fmt: skip
"""Our reasons in the API's words, which know fewer; `usage.choices` tells them as they are."""
MIN_LOGPROB = -9999.0
"""Stands for the log-probability of the impossible: JSON has no infinities."""

Json = dict[str, Any]
Name = Callable[[int], tuple[str, bytes | None]]
"""A token id -> the token's name and bytes, see `shoal.serve.token_names`."""


class ApiFormat(Protocol):
    """One of the two APIs.

    Attributes:
        prefix: of ids of answers. whole, chunk: what `object` says of an answer, and of a piece of one. asked: the prompt's field.
    """

    prefix: str
    whole: str
    chunk: str
    asked: str

    def content(self, text: str, *, streamed: bool) -> Json:
        """The fields that hold the text."""
        ...

    def opening(self, echo: str | None) -> Json | None:
        """The fields of a stream's first piece of each choice; None where there is none."""
        ...

    def logprobs(self, tokens: Sequence[TokenUpdate], offset: int, tops: int, name: Name) -> Json:
        """The log-probabilities of tokens, the first of which begins `offset` characters into the text."""
        ...


class Completions:
    """/v1/completions."""

    prefix, whole, chunk, asked = "cmpl-", "text_completion", "text_completion", "prompt"

    def content(self, text: str, *, streamed: bool) -> Json:
        return {"text": text}

    def opening(self, echo: str | None) -> Json | None:
        return None if echo is None else {"text": echo}

    def logprobs(self, tokens: Sequence[TokenUpdate], offset: int, tops: int, name: Name) -> Json:
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token.text))
        return {
            "tokens": [name(token.id)[0] for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_by_name(_tops(token, tops), name) or None for token in tokens] if tops else None,
            "text_offset": offsets[:-1],
        }


class Chat:
    """/v1/chat/completions."""

    prefix, whole, chunk, asked = "chatcmpl-", "chat.completion", "chat.completion.chunk", "messages"

    def content(self, text: str, *, streamed: bool) -> Json:
        return (
            {"delta": {"content": text} if text else {}} if streamed else {"message": {"role": "assistant", "content": text}}
        )

    def opening(self, echo: str | None) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, tokens: Sequence[TokenUpdate], offset: int, tops: int, name: Name) -> Json:
        def entry(token: int, logprob: float | None) -> Json:
            text, name_and_bytes = name(token)
            return {
                "token": text,
                "logprob": finite(logprob),
                "bytes": None if name_and_bytes is None else list(name_and_bytes),
            }

        return {
            "content": [
                entry(token.id, token.logprob) | {"top_logprobs": [entry(*pair) for pair in _tops(token, tops)]}
                for token in tokens
            ]
        }


def _by_name(tops: Sequence[tuple[int, float]], name: Name) -> dict[str, float | None]:
    """Of several tokens of one name the most probable is told."""
    told: dict[str, float | None] = {}
    for token, value in tops:
        told.setdefault(name(token)[0], finite(value))
    return told


def _tops(token: TokenUpdate, tops: int) -> Sequence[tuple[int, float]]:
    return token.top.raw[:tops] if token.top else ()


def finite(value: float | None) -> float | None:
    """As JSON can say it: NaN, the mean of nothing, is null."""
    return None if value is None or math.isnan(value) else max(value, MIN_LOGPROB)


@dataclass
class Choice:
    """A choice as it comes into being.

    Attributes:
        index: among the choices. tops: most probable tokens to tell; None = no log-probabilities. details: tell everything.
        offset: characters so far. total, counted: sum of log-probabilities so far, and over how many tokens.
    """

    form: ApiFormat
    name: Name
    index: int
    tops: int | None
    details: bool
    offset: int = 0
    total: float = 0.0
    counted: int = 0

    def opening(self, echo: str | None, tokens: Sequence[TokenUpdate]) -> Json | None:
        """The first piece of a stream: a role, or the prompt."""
        fields = self.form.opening(echo)
        if fields is None:
            return None
        logprobs = self._logprobs(tokens)
        self.offset += len(echo or "")
        return {"index": self.index, **fields, "logprobs": logprobs, "finish_reason": None}

    def piece(self, news: RowUpdate) -> Json:
        """What news add to a stream."""
        return self._written(news, self.form.content(news.text, streamed=True), news.tokens)

    def whole(self, news: RowUpdate, echo: str = "", prompt: Sequence[TokenUpdate] = ()) -> Json:
        """All of it, from the news of its end."""
        return self._written(news, self.form.content(echo + news.text, streamed=False), [*prompt, *news.tokens])

    def _written(self, news: RowUpdate, content: Json, tokens: Sequence[TokenUpdate]) -> Json:
        reason = FINISH_REASONS[news.sample.finish_reason] if news.sample else None
        choice = {"index": self.index, **content, "logprobs": self._logprobs(tokens), "finish_reason": reason}
        self.offset += sum(len(token.text) for token in tokens)
        if news.error is not None:
            choice["error"] = public(str(news.error))
        if self.details:
            choice["shoal"] = self._details(news)
        return choice

    def _logprobs(self, tokens: Sequence[TokenUpdate]) -> Json | None:
        return None if self.tops is None else self.form.logprobs(tokens, self.offset, self.tops, self.name)

    def _details(self, news: RowUpdate) -> Json:
        self.total += sum(token.logprob or 0.0 for token in news.tokens)
        self.counted += len(news.tokens)
        tokens = [
            {"id": token.id, "text": token.text, "logprob": finite(token.logprob), "from_draft": token.from_draft}
            for token in news.tokens
        ]
        return {
            "tokens": tokens, "mean_logprob": finite(self.total / self.counted) if self.counted else None,
            "committed": news.committed, "drafted": news.drafted, "accepted": news.accepted, "rounds": news.rounds,
        }  # fmt: skip


def usage(prompt_tokens: int, drawn: Sequence[Sample], returned: Sequence[Sample]) -> Json:
    """What a request took: tokens of all samples drawn, and by choice what it took to draw those returned."""
    completion = sum(len(sample.token_ids) for sample in drawn)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "choices": [
            {
                "index": index, "completion_tokens": len(sample.token_ids), "drafted": sample.drafted,
                "accepted": sample.accepted, "rounds": sample.rounds, "mean_logprob": finite(sample.mean_logprob),
                "ended_by": sample.finish_reason, "finished": sample.finished,
                "error": sample.error and public(sample.error),
            }
            for index, sample in enumerate(returned)
        ],
    }  # fmt: skip
