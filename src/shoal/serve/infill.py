"""The answer of /infill, in the form of llama.cpp's server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.constraints.protocol import Cutting
from shoal.serve.access import validated
from shoal.serve.api_errors import Json, api_error_of, naming
from shoal.serve.message_models import InfillRequest
from shoal.serve.request_builder import ParsedRequest, RequestBuilder, require_members
from shoal.serve.request_models import CompletionRequest
from shoal.serve.responses import event, failure
from shoal.serve.token_details import finite, name_and_bytes
from shoal.serve.worker import RowUpdate, Submission, TokenUpdate, Worker
from shoal.types.arguments import line_end, with_line_ends, with_line_feeds

STOP_TYPES = {"eos": "eos", "stop": "word"}
"""The `stop_type` by `Sample.finish_reason`; all others are "limit"."""


PARSES = ("complete", "cut")
"""The values of `Sample.syntax` of texts with which the file parses."""


class IndentLimit:
    """A filter that ends a text before the first line with less than `least` blanks of indent.

    It does not look at the line of the cursor.
    """

    def __init__(self, least: int) -> None:
        self._least, self._held, self._blanks = least, "", -1

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns the text that may be shown, and True if the text ends there.

        Line feeds and blanks wait for the character that follows them.
        """
        if not self._least:
            return text, False
        shown = ""
        for character in text:
            if character == "\n":
                self._held, self._blanks = self._held + character, 0
            elif character == "\r":
                continue  # of an end of a line, which gets the file's own
            elif self._blanks < 0:
                shown += character
            elif character in " \t":
                self._held, self._blanks = self._held + character, self._blanks + 1
            elif self._blanks < self._least:
                return shown, True
            else:
                shown, self._held, self._blanks = shown + self._held + character, "", -1
        return shown, False

    def rest(self) -> str:
        """Returns the waiting characters, once the text has ended by itself."""
        return self._held


@dataclass
class InfillResponse:
    """The answer to one request, computed by `whole` or `events`.

    Attributes:
        worker: the worker that computes the row.
        tokenizer: the target's.
        model: the model's name in the answer.
        request: the request as it was sent.
        parsed: the request as the server serves it.
        truncated: True if the prompt lacks a part of the text that was sent.
    """

    worker: Worker
    tokenizer: Any
    model: str
    request: InfillRequest
    parsed: ParsedRequest
    truncated: bool
    started_at: float = field(default_factory=time.perf_counter)
    _first_at: float | None = None
    _tokens: list[TokenUpdate] = field(default_factory=list)
    _last: RowUpdate | None = None
    _syntax: str | None = None

    def computed(self) -> Json:
        """Returns the token counts so far, for the log."""
        new = 0 if self._last is None else self._last.committed
        return {
            "prompt_tokens": sum(map(len, self.parsed.prompts)),
            "completion_tokens": new,
            "samples": 1,
        }

    async def whole(self) -> Json:
        """Returns the answer, once the row has ended.

        Raises:
            ApiError: see `Worker.serving`, or the error of the row.
            RequestError: see `Worker.serving`, or the error of the row.
        """
        text = "".join([piece async for piece in self._pieces()])
        if self._reason == "time" and self._syntax not in PARSES and "\n" in text:
            # llama.cpp ends at a line feed too
            text = text[: text.rindex("\n")]
        return self._selected(self._final(self._as_in_file(text)))

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the answer as server-sent events; the first item is empty.

        Raises:
            ApiError: before the first item.
            RequestError: before the first item.
        """
        pieces = self._pieces()
        try:
            async for piece in pieces:
                if not piece:
                    yield b""
                    continue
                counts = {
                    "tokens_predicted": self._last.committed if self._last else 0,
                    "tokens_evaluated": self._prompt_tokens,
                }
                yield event(
                    {
                        "index": 0,
                        "content": self._as_in_file(piece),
                        "tokens": [],
                        "stop": False,
                        "id_slot": 0,
                        **counts,
                    }
                )
        except Exception as error:
            if self._first_at is None:
                raise
            yield event(api_error_of(error).body())
            return
        finally:
            await pieces.aclose()
        yield event(self._selected(self._final("")))

    # ── the row ───────────────────────────────────────────────────────────────────────────────────

    async def _pieces(self) -> AsyncGenerator[str]:
        """Yields the text as it comes, after an empty piece once the engine accepted the row."""
        limit, submission = IndentLimit(self.request.n_indent or 0), self._submission()
        with naming("input_prefix"):
            async with self.worker.serving(submission):
                yield ""
                async for update in submission.updates():
                    assert update is not None  # there is no bound on the silence
                    if update.error is not None:
                        raise failure(update.error)
                    self._note(update)
                    shown, over = limit.feed(update.text)
                    if over:
                        shown = self._cut_again(shown)
                    if shown:
                        yield shown
                    if over:
                        return
        if limit.rest():
            yield limit.rest()

    def _cut_again(self, text: str) -> str:
        """Returns the beginning of a checked text that an indent has shortened, cut anew.

        The text of a checked row comes at once, when it has ended: its last place counts with which
        the file parses.
        """
        sample = self._last.sample if self._last else None
        checks = [one for one in self.parsed.requests[0].constraints if isinstance(one, Cutting)]
        if sample is None or not checks:
            return text
        scores = [0.0] * (len(sample.token_ids) + 1)
        best_end = checks[0].best_end(sample.token_ids, scores, len(text))
        self._syntax = "incomplete" if best_end is None else "cut"
        return text if best_end is None else text[: best_end[0]]

    def _as_in_file(self, text: str) -> str:
        """Returns a text with the file's ends of lines; a carriage return belongs to one."""
        own = line_end(self.request.before_cursor, self.request.input_suffix)
        return with_line_ends(text, own)

    def _submission(self) -> Submission:
        detailed = self.parsed.top_logprobs is not None
        return Submission(self.parsed.requests, self.parsed.rows, stream=True, detailed=detailed)

    def _note(self, update: RowUpdate) -> None:
        if self._first_at is None:
            self._first_at = time.perf_counter()
        self._last = update
        self._syntax = update.sample.syntax if update.sample else None
        self._tokens += update.tokens

    # ── JSON ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def _reason(self) -> str | None:
        sample = self._last.sample if self._last else None
        return sample.finish_reason if sample else None

    @property
    def _prompt_tokens(self) -> int:
        return len(self.parsed.prompts[0])

    def _final(self, content: str) -> Json:
        predicted = self._last.committed if self._last else 0
        body: Json = {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": predicted,
            "tokens_evaluated": self._prompt_tokens,
            "has_new_line": "\n" in content,
            "truncated": self.truncated,
            "stop_type": STOP_TYPES.get(self._reason or "", "limit"),
            "stopping_word": "",
            "tokens_cached": 0,
            "timings": self._timings(predicted),
        }
        if self._syntax is not None:
            body["syntax"] = self._syntax
        if self.parsed.top_logprobs is not None:
            body["completion_probabilities"] = [self._probability(token) for token in self._tokens]
        return body

    def _timings(self, predicted: int) -> Json:
        """Returns the timings; the prompt's time ends with the first tokens, waiting included."""
        now = time.perf_counter()
        first = self._first_at or now
        parts = {
            "prompt": (self._prompt_tokens, first - self.started_at),
            "predicted": (predicted, now - first),
        }
        timings: Json = {}
        for name, (count, seconds) in parts.items():
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": 1000 * seconds,
                f"{name}_per_token_ms": 1000 * seconds / max(count, 1),
                f"{name}_per_second": count / max(seconds, 1e-9),
            }
        drafts = (
            {"draft_n": self._last.drafted, "draft_n_accepted": self._last.accepted}
            if self._last
            else {}
        )
        return timings | drafts

    def _probability(self, token: TokenUpdate) -> Json:
        alternatives = token.top.raw[: self.parsed.top_logprobs] if token.top else ()
        return self._named(token.id, token.logprob) | {
            "top_logprobs": [self._named(*pair) for pair in alternatives]
        }

    def _named(self, token: int, logprob: float | None) -> Json:
        name, spelled = name_and_bytes(self.tokenizer, token)
        return {
            "id": token,
            "token": name,
            "bytes": list(spelled or b""),
            "logprob": finite(logprob),
        }

    def _selected(self, body: Json) -> Json:
        """Returns the fields that were asked for, each by its path."""
        wanted = self.request.response_fields
        if wanted is None:
            return body
        return {path: value for path in wanted if (value := _at(body, path.split("/"))) is not None}


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _as_read(request: InfillRequest) -> InfillRequest:
    """Returns the request with line feeds for ends of lines in all of its texts."""
    texts = {name: getattr(request, name) for name in ("input_prefix", "prompt", "input_suffix")}
    fed: dict[str, Any] = {name: text and with_line_feeds(text) for name, text in texts.items()}
    fed["stop"] = request.stop and [with_line_feeds(one) for one in request.stop]
    fed["input_extra"] = request.input_extra and [
        one.model_copy(update={"text": with_line_feeds(one.text)}) for one in request.input_extra
    ]
    return request.model_copy(update=fed)


def parsed_infill(builder: RequestBuilder, request: InfillRequest) -> tuple[ParsedRequest, bool]:
    """Returns the request, and True if text was left out that the context does not hold.

    Raises:
        ApiError: the request cannot be served.
        RequestError: the request cannot be served.
    """
    require_members(request, builder.settings)
    request = _as_read(request)
    wanted = (
        request.n_predict
        if request.n_predict is not None and request.n_predict >= 0
        else builder.settings.max_tokens
    )
    max_tokens = min(wanted, builder.settings.max_tokens, builder.context // 2)
    prompt, truncated = builder.encoder.middle(request, builder.context - max_tokens)
    fields = {"prompt": "", "max_tokens": max_tokens, **request.completion()}
    headers = (
        {"x-shoal-clamped": f"n_predict={max_tokens}"}
        if max_tokens < wanted and request.n_predict is not None
        else {}
    )
    if ignored := ", ".join(request.ignored):
        headers["x-shoal-ignored"] = ignored
    top_logprobs = min(request.n_probs, builder.settings.max_logprobs) if request.n_probs else None
    completion = validated(CompletionRequest, fields)
    parsed = builder.build(
        completion,
        [prompt.ids],
        max_tokens,
        drawn=1,
        returned=1,
        top_logprobs=top_logprobs,
        echo=() if max_tokens == 0 else None,
        headers=headers,
    )
    before, behind = request.before_cursor, request.input_suffix
    requests = [
        builder.encoder.dressed(one, request, before, behind, prompt.end) for one in parsed.requests
    ]
    return replace(parsed, requests=requests), truncated
