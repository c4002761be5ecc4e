"""The answer to a parsed request, whole or as server-sent events."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal.errors import BadLogits, RequestError, ShoalError
from shoal.serve.api_errors import ApiError, Json, api_error_of, naming, public, spoken, written
from shoal.serve.api_formats import ApiFormat
from shoal.serve.request_builder import ParsedRequest
from shoal.serve.token_details import Scoring, finite, name_and_bytes, scored
from shoal.serve.worker import RowUpdate, Submission, TokenUpdate, Worker
from shoal.types.samples import Sample, ranked
from shoal.types.stats import as_dicts, total_by_drafter

EMPTY = Sample(
    "",
    (),
    (),
    processed_logprobs=(),
    mean_logprob=math.nan,
    finish_reason="length",
    finished_at=0.0,
    rounds=0,
    drafted=0,
    accepted=0,
    target_passes=0,
    drafters=(),
)
"""The sample of a request for no tokens."""

KEEP_ALIVE_SECONDS = 15.0
"""The seconds of silence after which a stream sends a comment, so that proxies do not close its
connection."""
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass
class ApiResponse:
    """The answer to one request, computed by `whole` or `events`.

    Attributes:
        worker: the worker that computes the rows.
        tokenizer: the target's.
        model: the model's name in the answer.
        api: the format of the answer.
        parsed: the request.
        created: the time of the answer, in seconds since 1970.
        key: the random part of the answer's id.
    """

    worker: Worker
    tokenizer: Any
    model: str
    api: type[ApiFormat]
    parsed: ParsedRequest
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    _submitted: Submission | None = None
    _committed: dict[int, int] = field(default_factory=dict)

    async def whole(self) -> Json:
        """Returns the answer, once all rows have ended.

        Raises:
            ApiError: see `Worker.serving`; if every row failed, the error of the first.
            RequestError: see `Worker.serving`; if every row failed, the error of the first.
        """
        parsed, submission = self.parsed, self._submission()
        async with self._serving(submission):
            scorings = await self._scorings()
            ends = [update async for update in self._updates(submission) if update is not None]
        ends.sort(key=lambda update: update.index)
        samples = [update.sample for update in ends if update.sample is not None]
        if all(update.error is not None for update in ends):
            raise failure(ends[0].error)
        returned = [ends[index] for index in _returned(samples, parsed)]
        choices, echoed = [], self._echoed(scorings)
        forms = [self._choice(index) for index in range(len(returned))]
        for form, update in zip(forms, returned, strict=True):
            prompt = update.index // parsed.drawn
            choice = form.whole(update, parsed.echo[prompt] if parsed.echo else "", echoed[prompt])
            choices.append(
                choice | (self._of_prompt(prompt, scorings) if self.api.prompt_in_choice else {})
            )
        usage = self._usage(
            samples, [update.sample for update in returned if update.sample is not None], forms
        )
        of_prompt = {} if self.api.prompt_in_choice else self._of_prompt(0, scorings)
        return self._body(self.api.object_name, choices) | {"usage": usage} | of_prompt

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the answer as server-sent events.

        The first item, which may be empty, comes once the engine has accepted the rows.

        Raises:
            ApiError: before the first item, as `whole` does; later errors are events.
            RequestError: before the first item, as `whole` does; later errors are events.
        """
        parsed, submission = self.parsed, self._submission()
        choices = [self._choice(index) for index in range(parsed.rows)]
        async with self._serving(submission):
            unsent = (
                set(range(parsed.rows if self.api.prompt_in_choice else 1))
                if parsed.token_ids
                else set[int]()
            )
            yield self._first_events(choices, self._echoed(await self._scorings()), unsent)
            samples: dict[int, Sample] = {}
            try:
                async for update in self._updates(submission, KEEP_ALIVE_SECONDS):
                    if update is None:
                        yield KEEP_ALIVE
                        continue
                    choice = choices[update.index].chunk(update)
                    yield self._chunk(choice, unsent, update.committed)
                    if update.sample is not None:
                        samples[update.index] = update.sample
            except Exception as error:  # the status has been sent
                yield event(api_error_of(error).body())
                return
        if parsed.include_usage:
            ended = [samples[index] for index in sorted(samples)]
            yield event(
                self._body(self.api.chunk_name, []) | {"usage": self._usage(ended, ended, choices)}
            )
        yield b"data: [DONE]\n\n"

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────

    def _submission(self) -> Submission:
        parsed = self.parsed
        self._submitted = Submission(
            parsed.requests,
            parsed.rows,
            stream=parsed.stream,
            rounds=parsed.rounds,
            grammar_field=parsed.grammar_field,
            detailed=parsed.details
            or parsed.token_ids
            or parsed.top_logprobs is not None
            or parsed.reasoning is not None,
        )
        return self._submitted

    def computed(self) -> Json:
        """Returns the token counts so far, for the log."""
        rows = [] if self._submitted is None else self._submitted.members
        return {
            "prompt_tokens": sum(map(len, self.parsed.prompts)),
            "completion_tokens": sum(row.new_tokens for row in rows),
            "samples": len(rows),
        }

    @asynccontextmanager
    async def _serving(self, submission: Submission) -> AsyncIterator[None]:
        """Calls `Worker.serving`; its errors name the prompt's field, the only unvalidated one."""
        with naming(self.api.prompt_field):
            async with self.worker.serving(submission):
                yield

    async def _updates(
        self, submission: Submission, silence: float = math.inf
    ) -> AsyncIterator[RowUpdate | None]:
        """Yields the updates of the submission, and None after `silence` seconds without an update.

        If nothing is to be generated, it yields updates of rows without tokens.
        """
        ends, drawn = self.parsed.line_ends, self.parsed.drawn
        async for update in submission.updates(silence):
            yield update.with_line_ends(ends[update.index // drawn]) if update and ends else update
        if not self.parsed.requests:
            for index in range(self.parsed.rows):
                yield RowUpdate(
                    index, "", (), committed=0, drafted=0, accepted=0, rounds=0, sample=EMPTY
                )

    async def _scorings(self) -> list[Scoring]:
        """Returns the prompts with their log-probabilities, if the answer has them; else none."""
        parsed = self.parsed
        if parsed.scored is None:
            return []
        return await scored(self.worker, parsed.prompts, parsed.scored, parsed.deadline)

    def _echoed(self, scorings: Sequence[Scoring]) -> list[tuple[TokenUpdate, ...]]:
        """Returns the tokens of the prompts, if they are echoed with log-probabilities."""
        parsed = self.parsed
        if parsed.echo is None or parsed.top_logprobs is None:
            return [()] * len(parsed.prompts)
        pairs = zip(scorings, parsed.echo, strict=True)
        return [scoring.tokens(self.tokenizer, echo) for scoring, echo in pairs]

    # ── JSON ──────────────────────────────────────────────────────────────────────────────────────

    def _choice(self, index: int) -> ApiFormat:
        return self.api(self.tokenizer, index, self.parsed)

    def _of_prompt(self, prompt: int, scorings: Sequence[Scoring] = ()) -> Json:
        """Returns the answer's fields about a prompt, by number: its ids, its log-probabilities."""
        parsed, fields = self.parsed, Json()
        if parsed.token_ids:  # the ids that the samples follow
            fields["prompt_token_ids"] = [
                *(parsed.requests[prompt].prompt_ids if parsed.requests else parsed.prompts[prompt])
            ]
        if parsed.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                None
                if place is None
                else {str(token): self._ranked(token, *entry) for token, entry in place.items()}
                for place in scorings[prompt].ranked(parsed.prompt_logprobs)
            ]
        return fields

    def _ranked(self, token: int, logprob: float, rank: int) -> Json:
        name, _ = name_and_bytes(self.tokenizer, token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": name}

    def _first_events(
        self,
        choices: Sequence[ApiFormat],
        prompts: Sequence[Sequence[TokenUpdate]],
        unsent: set[int],
    ) -> bytes:
        echo: Sequence[str | None] = self.parsed.echo or [None] * len(prompts)
        chunks = [
            choice.first_chunk(
                echo[index // self.parsed.drawn], prompts[index // self.parsed.drawn]
            )
            for index, choice in enumerate(choices)
        ]
        return b"".join(self._chunk(chunk, unsent) for chunk in chunks if chunk is not None)

    def _chunk(self, choice: Json, unsent: set[int], committed: int = 0) -> bytes:
        """Returns an event with a choice.

        Args:
            unsent: the choices whose next chunk has the fields about the prompt; the choice is
                removed from them.
            committed: the number of tokens of the choice so far.
        """
        self._committed[choice["index"]] = committed
        index, of_prompt = choice["index"], Json()
        if index in unsent:
            unsent.remove(index)
            of_prompt = self._of_prompt(index // self.parsed.drawn)
        body = self._body(
            self.api.chunk_name, [choice | of_prompt if self.api.prompt_in_choice else choice]
        )
        return event(body | ({} if self.api.prompt_in_choice else of_prompt) | self._usage_so_far)

    @property
    def _usage_so_far(self) -> Json:
        if not (self.parsed.include_usage and self.parsed.continuous_usage):
            return {"usage": None} if self.parsed.include_usage else {}
        prompt, completion = sum(map(len, self.parsed.prompts)), sum(self._committed.values())
        totals = {"completion_tokens": completion, "total_tokens": prompt + completion}
        return {"usage": {"prompt_tokens": prompt, **totals}}

    def _body(self, kind: str, choices: Sequence[Json]) -> Json:
        key = self.api.id_prefix + self.key
        return {
            "id": key,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }

    def _usage(
        self, drawn: Sequence[Sample], returned: Sequence[Sample], forms: Sequence[ApiFormat]
    ) -> Json:
        """Returns the tokens of all samples drawn, and the counters of each sample returned."""
        prompt = sum(map(len, self.parsed.prompts))
        completion = sum(len(sample.token_ids) for sample in drawn)
        reasoning = sum(form.reasoning_tokens for form in forms)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": min(prompt, sum(sample.restored for sample in drawn))
            },
            **(
                {"completion_tokens_details": {"reasoning_tokens": reasoning}}
                if self.parsed.reasoning
                else {}
            ),
            "by_drafter": as_dicts(total_by_drafter(sample.by_drafter for sample in drawn)),
            **({"lossy": lossy} if (lossy := self.worker.thread.engine.stats.lossy) else {}),
            "choices": [
                {
                    "index": index,
                    "completion_tokens": len(sample.token_ids),
                    "drafted": sample.drafted,
                    "accepted": sample.accepted,
                    "by_drafter": as_dicts(sample.by_drafter),
                    "rounds": sample.rounds,
                    "mean_logprob": finite(sample.mean_logprob),
                    "ended_by": sample.finish_reason,
                    "finished": sample.finished,
                    **({} if sample.syntax is None else {"syntax": sample.syntax}),
                    **(
                        {}
                        if sample.log_weight is None
                        else {"log_weight": finite(sample.log_weight)}
                    ),
                    "error": sample.error and public(spoken(sample.error)),
                }
                for index, sample in enumerate(returned)
            ],
        }


def failure(error: ShoalError | None) -> Exception:
    """Returns the error of a request whose rows all failed.

    The status is 400 for the request's fault, 500 for the model's, 503 for lack of memory.
    """
    if isinstance(error, RequestError):
        return error
    return ApiError(500 if isinstance(error, BadLogits) else 503, str(error), code="row_failed")


def _returned(samples: Sequence[Sample], parsed: ParsedRequest) -> list[int]:
    """Returns the indices of the returned samples: all in order, or the best of each prompt."""
    if parsed.returned == parsed.drawn:
        return list(range(len(samples)))
    indices = {id(sample): index for index, sample in enumerate(samples)}
    groups = [
        samples[start : start + parsed.drawn] for start in range(0, len(samples), parsed.drawn)
    ]
    return [indices[id(sample)] for group in groups for sample in ranked(group)[: parsed.returned]]


def event(body: Json) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + written(body) + b"\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events.

    It closes their generator when the client disconnects, so that the rows of the request end.

    Args:
        first: the first event, awaited before there is a response: an error until then has a
            status.
        events: the events after it.
        headers: headers of the response.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes], headers: Mapping[str, str]
    ) -> None:
        self._events = events
        super().__init__(
            _chained(first, events),
            headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the last one, or until the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _chained(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in events:
        yield event
