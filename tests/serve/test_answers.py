"""Answers written from rows that are made by hand, without a model: every figure of `usage`, of choices and of their streams.

Of `shoal.serve.responses`, `api_formats`, `worker` and `scoring`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.engine.detokenizer import Detokenizer
from shoal.errors import BadLogits, OutOfMemory, RequestError
from shoal.serve.api_errors import ApiError, api_error_of
from shoal.serve.api_formats import ApiFormat, ChatFormat, CompletionFormat, TextPlaces
from shoal.serve.infill import InfillResponse
from shoal.serve.item_format import ItemFormat, ItemWriter
from shoal.serve.item_models import ResponsesRequest
from shoal.serve.item_response import ItemResponse
from shoal.serve.message_models import InfillRequest
from shoal.serve.prometheus_metrics import Metrics
from shoal.serve.reasoning import ReasoningRules
from shoal.serve.request_builder import ParsedRequest
from shoal.serve.responses import ApiResponse, event
from shoal.serve.token_details import CHUNK_TOKENS, Scoring
from shoal.serve.tool_calls import HERMES, Call, CallRules
from shoal.serve.worker import RowUpdate, Submission, TokenUpdate
from shoal.testing import VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.samples import Sample, TopLogprobs
from shoal.types.stats import DraftCounts

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def tokens(text: str, mean: float = -1.0, tops: int = 0) -> tuple[TokenUpdate, ...]:
    """Tokens of ASCII characters, the first of each pair a draft; their log-probabilities have the mean."""
    best = [TopLogprobs(tuple((own + i, mean - i) for i in range(tops)), ((own, 0.0),) * tops) for own in ids(text)]
    return tuple(
        TokenUpdate(own, character, mean, None if place % 2 else "suffix", best[place] if tops else None)
        for place, (own, character) in enumerate(zip(ids(text), text, strict=True))
    )


def sample(text: str, mean: float = -1.0, reason: str = "length", **fields: Any) -> Sample:
    own = ids(text)
    counts: dict[str, Any] = {"drafted": 4, "accepted": 1, "by_drafter": {"suffix": DraftCounts(4, 1)}} | fields
    names = ("rounds", "drafted", "accepted", "target_passes")
    numbers = [counts.pop(name, 3) for name in names]
    logs = (mean,) * len(own)
    average = mean if own else math.nan
    return Sample(text, own, logs, logs, average, reason, 1.0, *numbers, (None,) * len(own), **counts)


def ended(index: int, text: str, mean: float = -1.0, reason: str = "length", tops: int = 0, **fields: Any) -> RowUpdate:
    made = sample(text, mean, reason, **fields)
    error = fields.get("error") and BadLogits(fields["error"])
    return RowUpdate(index, text, tokens(text, mean, tops), len(text), made.drafted, made.accepted, made.rounds, made, error)


def parsed(prompts: Sequence[str], drawn: int = 1, **fields: Any) -> ParsedRequest:
    encoded = [ids(text) for text in prompts]
    known: dict[str, Any] = {
        "requests": [Request(own, drawn) for own in encoded], "returned": drawn, "top_logprobs": None, "echo": None,
        "stream": False, "include_usage": False, "details": False, "rounds": False, "headers": {},
        "deadline": time.perf_counter() + 100,
    }  # fmt: skip
    return ParsedRequest(prompts=encoded, drawn=drawn, **{**known, **fields})


class Worker:
    """Takes submissions and says what it was given; scores prompts by a script."""

    def __init__(self, updates: Sequence[Any]) -> None:
        self.updates, self.scoring = updates, asyncio.Lock()
        self.reserved: list[int] = []
        engine = SimpleNamespace(
            stats=SimpleNamespace(lossy=None), target=scripted(hashed(VOCABULARY), VOCABULARY, 512),
            reserve_tokens=lambda count: self.reserved.append(count) or True,
        )  # fmt: skip
        self.thread = SimpleNamespace(engine=engine, call=self._call, post=lambda job: job())

    async def _call(self, job: Any) -> Any:
        return job()

    @asynccontextmanager
    async def serving(self, submission: Submission) -> AsyncIterator[None]:
        for update in self.updates:
            submission.inbox.put_nowait(update if isinstance(update, Exception) else [update])
        yield


def response(api: type[ApiFormat], request: ParsedRequest, updates: Sequence[Any]) -> ApiResponse:
    return ApiResponse(Worker(updates), TOKENIZER, "m", api, request, created=7, key="k")  # type: ignore[arg-type]


def whole(api: type[ApiFormat], request: ParsedRequest, updates: Sequence[Any]) -> Any:
    """The answer as clients get it."""
    return json.loads(json.dumps(asyncio.run(response(api, request, updates).whole()), allow_nan=False))


def streamed(api: type[ApiFormat], request: ParsedRequest, updates: Sequence[Any]) -> list[Any]:
    async def read() -> bytes:
        return b"".join([piece async for piece in response(api, replace(request, stream=True), updates).events()])

    lines = asyncio.run(read()).decode().split("\n\n")
    assert lines.pop() == ""
    found = [line.removeprefix("data: ") for line in lines]
    return [json.loads(line) for line in found if line != "[DONE]"]


# ── whole answers ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_best_of_each_prompt_are_returned_and_all_are_counted() -> None:
    means = [-3.0, -1.0, -2.0, -1.5, -0.5, -2.5]
    rows = [ended(i, "abcdef"[i] * (i + 1), mean, restored=i + 1) for i, mean in enumerate(means)]
    request = parsed(["hello", "you"], 3, returned=2, echo=["hello", "you"])
    answer = whole(CompletionFormat, request, [rows[i] for i in (4, 0, 5, 3, 1, 2)])
    assert [choice["text"] for choice in answer["choices"]] == ["hellobb", "helloccc", "youeeeee", "youdddd"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 21, 29)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}  # 21 of the rows, at most what there is
    assert usage["by_drafter"] == {"suffix": {"drafted": 24, "accepted": 6}}
    assert [took["index"] for took in usage["choices"]] == [0, 1, 2, 3]
    assert [took["completion_tokens"] for took in usage["choices"]] == [2, 3, 5, 4]
    assert [took["mean_logprob"] for took in usage["choices"]] == [-1.0, -2.0, -0.5, -1.5]
    assert answer | {"choices": 0, "usage": 0} == {
        "id": "cmpl-k", "object": "text_completion", "created": 7, "model": "m", "choices": 0, "usage": 0,
    }  # fmt: skip


def test_what_was_restored_is_the_sum_over_prompts() -> None:
    rows = [ended(0, "a", restored=3), ended(1, "b", restored=2)]
    assert whole(CompletionFormat, parsed(["hello", "you"]), rows)["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


def test_what_usage_says_of_a_choice() -> None:
    one = ended(0, "abc", -math.inf, "stop", syntax="cut", log_weight=-math.inf, rounds=2)
    late = ended(1, "de", -2.0, "eos", in_time=False)
    none = ended(2, "", reason="not started")
    bad = ended(3, "f", reason="error", error="no weights in /root/models/x.bin")
    answer = whole(CompletionFormat, parsed(["hello"], 4), [one, late, none, bad])
    assert answer["usage"]["choices"] == [
        {"index": 0, "completion_tokens": 3, "drafted": 4, "accepted": 1, "by_drafter": {"suffix": {"drafted": 4, "accepted": 1}},
         "rounds": 2, "mean_logprob": -9999.0, "ended_by": "stop", "finished": True, "syntax": "cut", "log_weight": -9999.0,
         "error": None},
        {"index": 1, "completion_tokens": 2, "drafted": 4, "accepted": 1, "by_drafter": {"suffix": {"drafted": 4, "accepted": 1}},
         "rounds": 3, "mean_logprob": -2.0, "ended_by": "eos", "finished": False, "error": None},
        {"index": 2, "completion_tokens": 0, "drafted": 4, "accepted": 1, "by_drafter": {"suffix": {"drafted": 4, "accepted": 1}},
         "rounds": 3, "mean_logprob": None, "ended_by": "not started", "finished": False, "error": None},
        {"index": 3, "completion_tokens": 1, "drafted": 4, "accepted": 1, "by_drafter": {"suffix": {"drafted": 4, "accepted": 1}},
         "rounds": 3, "mean_logprob": -1.0, "ended_by": "error", "finished": False, "error": "no weights in x.bin"},
    ]  # fmt: skip
    assert [choice.get("error") for choice in answer["choices"]] == [None, None, None, "no weights in x.bin"]


@pytest.mark.parametrize(("reason", "said"), [
    ("eos", "stop"), ("stop", "stop"), ("length", "length"), ("time", "length"), ("not started", "length"),
    ("cancelled", "length"),
])  # fmt: skip
def test_the_reasons_of_the_api(reason: str, said: str) -> None:
    assert whole(CompletionFormat, parsed(["a"]), [ended(0, "b", reason=reason)])["choices"][0]["finish_reason"] == said
    cut = ended(0, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', reason=reason)
    rules = CallRules(HERMES, {"f"}, forced=False, parallel=True)
    (choice,) = whole(ChatFormat, parsed(["a"], rules=rules), [cut])["choices"]
    assert choice["finish_reason"] == ("tool_calls" if said == "stop" else said)


@pytest.mark.parametrize(
    ("error", "status"), [(BadLogits("nan"), 500), (OutOfMemory("full"), 503), (RequestError("no"), 400)]
)
def test_rows_fail_together_or_alone(error: Any, status: int) -> None:
    bad = replace(ended(0, "", reason="error", error="x"), error=error)
    good = ended(1, "b")
    answer = whole(CompletionFormat, parsed(["a"], 2), [bad, good])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["error", "length"]
    with pytest.raises((ApiError, RequestError), match=str(error)) as raised:
        whole(CompletionFormat, parsed(["a"], 2), [bad, replace(bad, index=1)])
    assert getattr(raised.value, "status_code", 400) == status


# ── log-probabilities ───────────────────────────────────────────────────────────────────────────────────────────────


def test_log_probabilities_of_a_completion_have_their_offsets() -> None:
    request = parsed(["hello"], echo=["hello"], top_logprobs=2)
    answer = whole(CompletionFormat, request, [ended(0, "abc", tops=5)])
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*"hello", *"abc"]
    assert logprobs["text_offset"] == [*range(8)]
    assert logprobs["token_logprobs"][5:] == [-1.0] * 3
    assert logprobs["top_logprobs"][5:] == [{"a": -1.0, "b": -2.0}, {"b": -1.0, "c": -2.0}, {"c": -1.0, "d": -2.0}]
    assert [len(top or ()) for top in logprobs["top_logprobs"][:5]] == [0, 3, 3, 3, 3]  # and the token itself
    plain = whole(CompletionFormat, parsed(["hello"], top_logprobs=0), [ended(0, "abc", tops=5)])
    assert [len(top or ()) for top in plain["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1, 1]
    assert plain["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]


def test_tokens_of_an_echo_begin_within_it() -> None:
    """Its text may be shorter than theirs: it leaves special tokens out."""
    places = TextPlaces()
    places.echo("hi", 3)
    assert places.of([TokenUpdate(0, text, None, None) for text in ("<s>", "h", "i", "!", "?")]) == [0, 2, 2, 2, 3]


def test_offsets_count_characters() -> None:
    """A character of three bytes takes three tokens, of which the last one writes it."""
    own = ids("€")
    pieces = [TokenUpdate(token, text, -1.0, None) for token, text in zip(own, ("", "", "€"), strict=True)]
    pieces += tokens("ab")
    update = replace(ended(0, ""), text="€ab", tokens=tuple(pieces))
    logprobs = whole(CompletionFormat, parsed(["x"], top_logprobs=0), [update])["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2]
    assert logprobs["tokens"][:3] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    halves = [replace(update, text=text, tokens=tuple(some), sample=last) for text, some, last in
              (("€a", pieces[:4], None), ("b", pieces[4:], update.sample))]  # fmt: skip
    chunks = streamed(CompletionFormat, parsed(["x"], top_logprobs=0), halves)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 0, 0, 1], [2]]
    chat = whole(ChatFormat, parsed(["x"], top_logprobs=0), [update])["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in chat] == [[0xE2], [0x82], [0xAC], [97], [98]]


def test_a_token_has_its_own_number_once_and_others_of_one_name_that_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is the second of four alternatives, whose number there differs in its last digits; its name is the fourth's too."""
    names = dict(zip(ids("abcd"), ("other", "own", "other", "own"), strict=True))
    monkeypatch.setattr("shoal.serve.api_formats.name_and_bytes", lambda tokenizer, token, by_id: (names[token], None))
    pairs = tuple(zip(ids("abcd"), (-0.5, -1.0001, -2.0, -3.0), strict=True))
    row = replace(ended(0, "b"), tokens=(TokenUpdate(ids("b")[0], "b", -1.0, None, TopLogprobs(pairs, pairs)),))
    answer = whole(CompletionFormat, parsed(["x"], top_logprobs=4), [row])
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"other": -0.5, "own": -1.0}]
    (entry,) = whole(ChatFormat, parsed(["x"], top_logprobs=4), [row])["choices"][0]["logprobs"]["content"]
    told = [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]
    assert told == [("other", -0.5), ("own", -1.0), ("other", -2.0), ("own", -3.0)]
    last = replace(row, tokens=(TokenUpdate(ids("d")[0], "d", -3.0, None, TopLogprobs(pairs, pairs)),))
    answer = whole(CompletionFormat, parsed(["x"], top_logprobs=4), [last])
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"other": -0.5, "own": -3.0}]


@pytest.mark.parametrize("path", [1, 3])
def test_log_probabilities_of_a_prompt_are_those_of_the_model(path: int) -> None:
    """Over three chunks, and with ties: the rank of a token counts the more probable ones."""
    length = 2 * CHUNK_TOKENS + path
    given = [int(token) for token in torch.randint(0, 200, (length,), generator=torch.Generator().manual_seed(0))]
    script = hashed(VOCABULARY)

    def tied(history: tuple[int, ...]) -> torch.Tensor:
        return (script(history) * 2).round() / 2

    scoring = Scoring(scripted(tied, VOCABULARY, length), given, 8)
    advances = 0
    while not scoring.done:
        scoring.advance()
        advances += 1
    assert advances == (2 if path == 1 else 3)
    scoring.release()
    expected = [tied(tuple(given[:i])).log_softmax(-1) for i in range(1, length)]
    own = [float(each[given[i]]) for i, each in enumerate(expected, 1)]
    found = scoring.tokens(TOKENIZER, TOKENIZER.decode(given))
    assert [one.id for one in found] == given
    assert found[0].logprob is None
    assert [one.logprob for one in found[1:]] == pytest.approx(own)
    first, *places = scoring.ranked(2)
    assert first is None
    for i, place in enumerate(places, 1):
        logs = expected[i - 1]
        logprob, rank = place[given[i]]
        assert (logprob, rank) == (pytest.approx(own[i - 1]), 1 + int((logs > logs[given[i]]).sum()))
        top = found[i].top
        assert top is not None
        assert [value for _, value in top.raw] == pytest.approx(logs.topk(8).values.tolist())
        others = {token: (value, at) for at, (token, value) in enumerate(top.raw[:2], 1) if token != given[i]}
        assert {token: entry for token, entry in place.items() if token != given[i]} == others


def test_what_cannot_be_scored() -> None:
    target = scripted(hashed(VOCABULARY), VOCABULARY, 4)
    for wrong in ([], [1] * 5, [VOCABULARY], [-1]):
        with pytest.raises(RequestError, match="prompt"):
            Scoring(target, wrong, 0)
    Scoring(target, [0, VOCABULARY - 1, 0, 0], 0)


def test_the_first_token_of_a_prompt_has_nothing_before_it() -> None:
    """SentencePiece drops the blank at the beginning of a text, and only there."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE({"<unk>": 0, "▁the": 1}, [], unk_token="<unk>"))
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    scoring = Scoring(scripted(hashed(2), 2, 8), [1, 1, 1], 0)
    scoring.advance()
    found = scoring.tokens(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>"), "the the the")
    assert [one.text for one in found] == ["the", " the", " the"]


def test_low_precision_is_scored_in_float32() -> None:
    script = hashed(VOCABULARY)
    target = scripted(lambda history: script(history).bfloat16(), VOCABULARY, 8, dtype=torch.bfloat16)
    scoring = Scoring(target, [1, 2, 3], 1)
    scoring.advance()
    logs = script((1,)).bfloat16().float().log_softmax(-1)
    assert scoring.tokens(TOKENIZER, TOKENIZER.decode([1, 2, 3]))[1].logprob == pytest.approx(float(logs[2]), abs=1e-6)


def test_prompts_are_told_by_their_choices() -> None:
    """Ids and log-probabilities of its own prompt with each choice of a completion; of a chat's one prompt beside its choices."""
    given = parsed(["hello", "you"], 2, token_ids=True, prompt_logprobs=1)
    rows = [ended(i, "abcd"[i]) for i in range(4)]
    choices = whole(CompletionFormat, given, rows)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[*ids(text)] for text in ("hello", "hello", "you", "you")]
    assert [choice["token_ids"] for choice in choices] == [[*ids(text)] for text in "abcd"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [5, 5, 3, 3]
    place = choices[2]["prompt_logprobs"][1]
    logs = hashed(VOCABULARY)(ids("you")[:1]).log_softmax(-1)
    best = int(logs.argmax())
    own = ids("you")[1]
    assert place[str(own)] == {
        "logprob": pytest.approx(float(logs[own])), "rank": 1 + int((logs > logs[own]).sum()), "decoded_token": "o",
    }  # fmt: skip
    assert place[str(best)]["rank"] == 1
    chat = whole(ChatFormat, parsed(["hello"], 2, token_ids=True, prompt_logprobs=1), rows[:2])
    assert chat["prompt_token_ids"] == [*ids("hello")]
    assert len(chat["prompt_logprobs"]) == 5
    assert all("prompt_token_ids" not in choice for choice in chat["choices"])


def test_echoed_prompts_without_new_tokens() -> None:
    given = parsed(["hello", "you"], 2, requests=[], echo=["hello", "you"], top_logprobs=0, token_ids=True)
    answer = whole(CompletionFormat, given, [])
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "hello", "you", "you"]
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [[*"hello"]] * 2 + [[*"you"]] * 2
    assert [choice["token_ids"] for choice in answer["choices"]] == [[]] * 4
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[*ids("hello")]] * 2 + [[*ids("you")]] * 2
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def halves(update: RowUpdate) -> list[RowUpdate]:
    """A row in two updates."""
    at = len(update.text) // 2
    begun = replace(update, text=update.text[:at], tokens=update.tokens[:at], sample=None, committed=at, rounds=1)
    return [begun, replace(update, text=update.text[at:], tokens=update.tokens[at:])]


def test_a_stream_of_several_prompts() -> None:
    rows = [ended(i, "abcdefgh"[i] * 4, restored=1, tops=2) for i in range(4)]
    parts = [halves(row) for row in rows]
    updates = [parts[3][0], parts[0][0], parts[0][1], parts[2][0], parts[3][1], parts[1][0], parts[2][1], parts[1][1]]
    given = parsed(["hello", "you"], 2, echo=["hello", "you"], top_logprobs=1, token_ids=True, include_usage=True)
    events = streamed(CompletionFormat, given, updates)
    *chunks, last = events
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 2, 3, 3, 0, 0, 2, 3, 1, 2, 1]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:4]] == ["hello", "hello", "you", "you"]
    for index, text in enumerate(("hello", "hello", "you", "you")):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text + rows[index].text
        assert [choice.get("prompt_token_ids") for choice in own] == [[*ids(text)], None, None]
        assert [choice["finish_reason"] for choice in own] == [None, None, "length"]
        joined = {name: [value for choice in own for value in choice["logprobs"][name]] for name in own[0]["logprobs"]}
        assert joined["tokens"] == [*text, *rows[index].text]
        assert joined["text_offset"] == [*range(len(text) + 4)]
        assert len(joined["token_logprobs"]) == len(joined["top_logprobs"]) == len(text) + 4
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    assert [took["index"] for took in last["usage"]["choices"]] == [0, 1, 2, 3]
    whole_usage = whole(CompletionFormat, replace(given, include_usage=False), rows)["usage"]
    assert last["usage"] == whole_usage


def test_usage_of_a_stream_is_in_the_order_of_rows() -> None:
    rows = [ended(0, "aaa"), ended(1, "b")]
    *_, last = streamed(CompletionFormat, parsed(["x"], 2, include_usage=True), [rows[1], rows[0]])
    assert [took["completion_tokens"] for took in last["usage"]["choices"]] == [3, 1]


def test_a_chat_stream_tells_its_prompt_once_and_its_role_first() -> None:
    rows = [ended(0, "ab"), ended(1, "cd")]
    chunks = streamed(ChatFormat, parsed(["hello"], 2, token_ids=True), [rows[1], *halves(rows[0])])
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[*ids("hello")], None, None, None, None]
    assert [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks[2:]] == [
        (1, {"content": "cd"}), (0, {"content": "a"}), (0, {"content": "b"}),
    ]  # fmt: skip
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_an_error_in_a_stream_is_its_last_event() -> None:
    updates = [*halves(ended(0, "ab"))[:1], ApiError(503, "gone", code="pass_failed")]
    chunks = streamed(CompletionFormat, parsed(["x"], include_usage=True), updates)
    assert chunks[-1] == {
        "error": {"message": "gone", "type": "service_unavailable_error", "param": None, "code": "pass_failed"}
    }
    assert len(chunks) == 2


def test_the_usage_so_far_is_that_of_all_rows() -> None:
    request = parsed(["hello"], 2, include_usage=True, continuous_usage=True)
    usages = [chunk["usage"] for chunk in streamed(CompletionFormat, request, [ended(0, "abc"), ended(1, "de")])]
    assert [(usage["completion_tokens"], usage["total_tokens"]) for usage in usages] == [(3, 8), (5, 10), (5, 10)]


def test_details_add_up_over_a_stream() -> None:
    row = ended(0, "abcd", -1.0)
    own = tuple(token._replace(logprob=-float(place)) for place, token in enumerate(row.tokens))
    chunks = streamed(CompletionFormat, parsed(["x"], details=True), halves(replace(row, tokens=own)))
    details = [chunk["choices"][0]["shoal"] for chunk in chunks]
    assert [one["mean_logprob"] for one in details] == [-0.5, -1.5]
    assert [one["committed"] for one in details] == [2, 4]
    assert [[token["from_draft"] for token in one["tokens"]] for one in details] == [[True, False], [True, False]]
    assert [[token["drafter"] for token in one["tokens"]] for one in details] == [["suffix", None], ["suffix", None]]
    assert all("by_round" not in one for one in details)


# ── reasoning and calls ─────────────────────────────────────────────────────────────────────────────────────────────

CALLS = 'Two.<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call><tool_call>{"name": "g"}</tool_call>'


def test_calls_of_a_chat() -> None:
    rules = CallRules(HERMES, {"f", "g"}, forced=False, parallel=True)
    row = replace(ended(0, "", reason="eos"), text=CALLS)
    (choice,) = whole(ChatFormat, parsed(["x"], rules=rules), [row])["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Two.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": "é"}'}, {"name": "g", "arguments": "{}"},
    ]  # fmt: skip
    assert [len(call["id"]) for call in message["tool_calls"]] == [9, 9]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    only = replace(row, text=CALLS.removeprefix("Two."))
    assert whole(ChatFormat, parsed(["x"], rules=rules), [only])["choices"][0]["message"]["content"] is None
    cut = CALLS.index('<tool_call>{"name": "g')
    chunks = streamed(ChatFormat, parsed(["x"], rules=rules), [
        replace(row, text=CALLS[:cut], sample=None), replace(row, text=CALLS[cut:]),
    ])  # fmt: skip
    told = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in told] == [(0, "f"), (1, "g")]
    first = whole(ChatFormat, parsed(["x"], rules=replace(rules, parallel=False)), [row])["choices"][0]["message"]
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["f"]
    unknown = replace(rules, names={"f"})
    kept = whole(ChatFormat, parsed(["x"], rules=unknown), [row])["choices"][0]["message"]
    assert [call["function"]["name"] for call in kept["tool_calls"]] == ["f"]
    assert '{"name": "g"}' in kept["content"]


def test_reasoning_of_a_chat_and_its_tokens() -> None:
    text = "<think>ab</think>cd"
    given = parsed(["x"], reasoning=ReasoningRules(False))
    answer = whole(ChatFormat, given, [ended(0, text)])
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "cd", "reasoning_content": "ab", "reasoning": "ab",
    }  # fmt: skip
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 17}
    alone = whole(ChatFormat, given, [ended(0, "<think>ab")])
    assert alone["choices"][0]["message"]["content"] is None
    assert alone["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
    none = whole(ChatFormat, given, [ended(0, "ab")])
    assert none["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert none["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    *_, last = streamed(ChatFormat, replace(given, include_usage=True), halves(ended(0, text)))
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 17}


# ── submissions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def row_of(text: str) -> Row:
    """A row that has written a text."""
    row = Row(Request(ids("x")), 0, 0, 0, [*ids("x"), *ids(text)], frozenset(), 99)
    row.detokenizer = Detokenizer(TOKENIZER, row.request.prompt_ids)
    for token in ids(text):
        row.detokenizer.push(token)
        row.logprobs.append(-1.0)
        row.drafters.append(None)
    return row


def submission(**options: Any) -> Submission:
    return Submission([Request(ids("x"), 2)], 2, **{"stream": True, "detailed": True, **options})


def test_tokens_are_sent_once_and_not_before_their_text() -> None:
    sub, row = submission(), row_of("ab€"[:2])
    row.detokenizer.take(final=False)
    first = sub.update(1, Commit(row, [*ids("ab")], 1, "ab"))
    assert first is not None
    assert (first.index, [token.text for token in first.tokens], first.committed) == (1, ["a", "b"], 2)
    for token in ids("€")[:2]:
        row.tokens.append(token)
        row.detokenizer.push(token)
        row.logprobs.append(-2.0)
        row.drafters.append("suffix")
    row.detokenizer.take(final=False)
    second = sub.update(1, Commit(row, [*ids("€")[:2]], 2, ""))
    assert second is not None
    assert second.tokens == ()
    assert second.committed == 4
    other = sub.update(0, Commit(row_of("c"), [*ids("c")], 0, "c"))
    assert other is not None
    assert other.tokens == ()  # nothing of it has been shown yet


def test_rounds_say_where_they_began() -> None:
    for stream in (True, False):
        sub, row = submission(stream=stream, rounds=True, detailed=False), row_of("abc")
        found = [sub.update(0, Commit(row, [*ids("abc")], 2, "abc", None, (7, 8, 9), ("m", "m", "s"), (0, 1)))]
        row.tokens += ids("d")
        last = sub.update(0, Commit(row, [*ids("d")], 0, "d", sample("abcd"), (5,), ("m",)))
        cut = sub.update(1, Commit(row, [], 0, "", sample("abcd")))
        rounds = [(3, 2, [(9, "s")], 0), (1, 0, [(5, "m")], 3)]
        updates = [update for update in (*found, last) if update is not None]
        told = [(one.committed, one.accepted, one.rejected, one.start) for update in updates for one in update.by_round]
        assert told == rounds
        assert [len(update.by_round) for update in updates] == ([1, 1] if stream else [2])
        assert cut is not None
        assert cut.by_round == ()
    run = submission(rounds=True, detailed=False).update(0, Commit(row, [*ids("cd")], 0))
    assert run is not None
    assert [(one.committed, one.start) for one in run.by_round] == [(1, 2), (1, 3)]
    sub = submission(stream=False, rounds=True, detailed=False)
    sub.update(0, Commit(row_of("ab"), [*ids("ab")], 1, "", None, (7,), ("m",)))
    begun_again = sub.update(0, Commit(row_of("c"), [*ids("c")], 0, "c", sample("c")))
    assert begun_again is not None
    assert [(one.committed, one.start) for one in begun_again.by_round] == [(1, 0)]
    refused = submission(rounds=True, detailed=False).update(0, Commit(row, [], 0, "", None, (5,), ("m",)))
    assert refused is not None
    assert [(one.committed, one.start) for one in refused.by_round] == [(0, 4)]


def test_a_stop_string_takes_its_tokens_away() -> None:
    sub, row = submission(), row_of("abcd")
    update = sub.update(0, Commit(row, [*ids("abcd")], 0, "ab", sample("ab", reason="stop")))
    assert update is not None
    assert [token.id for token in update.tokens] == [*ids("ab")]


def test_unread_updates_of_a_stream_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ended(0, "abc", tops=2)
    assert one.size == 500 + 4 * 3 + 250 * 3 + 100 * 6
    monkeypatch.setattr("shoal.serve.worker.MAX_UNREAD_BYTES", 2 * one.size)

    async def run(stream: bool) -> list[bool]:
        sub = submission(stream=stream)
        taken = [sub.put([one]), sub.put([one])]
        reader = sub.updates()
        await anext(reader)
        taken += [sub.put([one]), sub.put([one])]
        assert sub.inbox.empty() is stream
        return taken

    assert asyncio.run(run(True)) == [True, True, True, False]
    assert asyncio.run(run(False)) == [True] * 4


# ── for the log, and as JSON ────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_computed_counts_all_rows() -> None:
    one = response(CompletionFormat, parsed(["hello", "you"], 2), [])
    assert one.computed() == {"prompt_tokens": 8, "completion_tokens": 0, "samples": 0}
    one._submission().members = [row_of(text) for text in ("ab", "", "abc", "d")]
    assert one.computed() == {"prompt_tokens": 8, "completion_tokens": 6, "samples": 4}


def test_the_end_of_a_turn_is_no_token_of_a_chats_text() -> None:
    """Unless ids are asked for, which have it too; a completion tells all that it was charged for."""
    update = ended(0, "ab", reason="eos")
    update = replace(update, tokens=(*update.tokens, TokenUpdate(0, "", -2.0, None)))
    fields: dict[str, Any] = {"top_logprobs": 0}
    chat = whole(ChatFormat, parsed(["x"], **fields), [update])["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == ["a", "b"]
    chunks = streamed(ChatFormat, parsed(["x"], **fields), [update])
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert len(entries) == 2
    with_ids = whole(ChatFormat, parsed(["x"], token_ids=True, **fields), [update])["choices"][0]
    assert len(with_ids["logprobs"]["content"]) == len(with_ids["token_ids"]) == 3
    cut = replace(update, sample=sample("ab", reason="length"))
    assert len(whole(ChatFormat, parsed(["x"], **fields), [cut])["choices"][0]["logprobs"]["content"]) == 3
    assert len(whole(CompletionFormat, parsed(["x"], **fields), [update])["choices"][0]["logprobs"]["tokens"]) == 3


def test_an_event_is_json_whatever_is_in_it() -> None:
    """Readers of lines take U+2028 and its like for ends of lines."""
    ends = "\u2028\u2029\x85\x0b\x1c"
    written = event({"a": "é" + ends, "b": None})
    assert written == b'data: {"a":"\xc3\xa9\\u2028\\u2029\\u0085\\u000b\\u001c","b":null}\n\n'
    with pytest.raises(ValueError, match="JSON"):
        event({"a": math.nan})


def test_bytes_that_are_not_known_are_null_in_chats_and_empty_in_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serve.api_formats.name_and_bytes", lambda tokenizer, token, by_id: ("?", None))
    row = ended(0, "a", tops=1)
    (entry,) = whole(ChatFormat, parsed(["x"], top_logprobs=1), [row])["choices"][0]["logprobs"]["content"]
    assert (entry["bytes"], entry["top_logprobs"][0]["bytes"]) == (None, None)
    (item,) = ItemFormat(TOKENIZER, 0, parsed(["x"], top_logprobs=1)).logprobs(row)
    assert (item["bytes"], item["top_logprobs"][0]["bytes"]) == ([], [])


def items(rows: Sequence[Any], request: ParsedRequest | None = None, **asked: Any) -> Any:
    body = ResponsesRequest(input="hi", **asked)
    one = ItemResponse(
        Worker(rows), TOKENIZER, "m", ItemFormat, request or parsed(["hello"]), created=7, key="k", request=body
    )  # type: ignore[arg-type]
    return json.loads(json.dumps(asyncio.run(one.whole()), allow_nan=False))


@pytest.mark.parametrize(("reason", "status"), [("eos", "completed"), ("stop", "completed"), ("length", "incomplete"),
                                                ("time", "incomplete"), ("cancelled", "incomplete")])  # fmt: skip
def test_how_an_answer_of_items_ends(reason: str, status: str) -> None:
    answer = items([ended(0, "abc", reason=reason, restored=4)])
    assert (answer["status"], answer["output"][0]["status"]) == (status, status)
    assert (answer["completed_at"] is None, answer["incomplete_details"]) == (
        (False, None) if status == "completed" else (True, {"reason": "max_output_tokens"})
    )
    assert answer["output"][0]["content"][0]["text"] == "abc"
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert (answer["id"], answer["object"], answer["created_at"], answer["model"]) == ("resp_k", "response", 7, "m")


def test_an_answer_of_items_repeats_what_was_asked() -> None:
    answer = items(
        [ended(0, "a")], temperature=0, top_p=0.5, instructions="be", metadata={"a": "b"}, parallel_tool_calls=False
    )
    assert (answer["temperature"], answer["top_p"], answer["instructions"]) == (0, 0.5, "be")
    assert (answer["metadata"], answer["parallel_tool_calls"], answer["tool_choice"]) == ({"a": "b"}, False, "auto")
    plain = items([ended(0, "a")])
    assert (plain["temperature"], plain["top_p"], plain["metadata"], plain["parallel_tool_calls"]) == (1.0, 1.0, {}, True)
    assert (plain["text"], plain["top_logprobs"]) == ({"format": {"type": "text"}}, 0)


def test_log_probabilities_are_those_of_the_first_text() -> None:
    writer = ItemWriter("k")
    events = writer.add(["a", Call("f", "{}"), "b"], [{"token": "a"}])
    told = [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"]
    assert told == [[{"token": "a"}], []]
    assert [item["id"] for item in writer.items] == ["msg_k0", "fc_k1", "msg_k2"]
    assert [one["output_index"] for one in events] == [0] * 6 + [1] * 4 + [2] * 3


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("status", "kind"), [
    (400, "invalid_request_error"), (401, "authentication_error"), (404, "invalid_request_error"), (429, "rate_limit_error"),
    (500, "server_error"), (503, "service_unavailable_error"),
])  # fmt: skip
def test_errors_have_the_types_of_the_api(status: int, kind: str) -> None:
    error = ApiError(status, "no /root/models/x.bin", param="p" * 200, code="c")
    said = "no /root/models/x.bin" if status < 500 else "no x.bin"
    assert error.body() == {"error": {"message": said, "type": kind, "param": "p" * 97 + "...", "code": "c"}}


@pytest.mark.parametrize(("error", "status", "code"), [
    (RequestError("x"), 400, "invalid_value"), (OutOfMemory("x"), 503, "out_of_memory"), (BadLogits("x"), 500, "internal_error"),
    (KeyError("x"), 500, "internal_error"),
])  # fmt: skip
def test_errors_of_the_library_become_answers(error: Exception, status: int, code: str) -> None:
    found = api_error_of(error)
    assert (found.status_code, found.code) == (status, code)


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_metrics_note_of_a_row() -> None:
    metrics = Metrics()
    metrics.row_ended(replace(sample("abcd", reason="eos"), finished_at=2.5, target_passes=2, rounds=4), 0.25)
    metrics.row_ended(replace(sample("", reason="time"), target_passes=0), None)
    found = {one.name: one.value for family in metrics.families() for one in family.samples if not one.labels}
    for name, count, total in (("row_seconds", 2, 3.5), ("row_tokens", 2, 4), ("row_acceptance_length", 1, 2),
                               ("time_per_output_token_seconds", 1, 0.25)):  # fmt: skip
        assert (found[f"shoal_{name}_count"], found[f"shoal_{name}_sum"]) == (count, total), name
    ends = {
        one.labels["reason"]: one.value
        for family in metrics.families()
        for one in family.samples
        if one.name == "shoal_rows_total"
    }
    assert ends == {"eos": 1, "time": 1}


# ── /infill ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def infilled(rows: Sequence[Any], request: ParsedRequest | None = None, **asked: Any) -> Any:
    body = InfillRequest(input_prefix="a", input_suffix="b", **asked)
    one = InfillResponse(Worker(rows), TOKENIZER, "m", body, request or parsed(["hello"]), truncated=False)  # type: ignore[arg-type]
    return json.loads(json.dumps(asyncio.run(one.whole()), allow_nan=False))


@pytest.mark.parametrize(("reason", "kind", "text"), [("eos", "eos", "ab\ncd\nef"), ("stop", "word", "ab\ncd\nef"),
                                                      ("length", "limit", "ab\ncd\nef"), ("time", "limit", "ab\ncd")])  # fmt: skip
def test_how_an_infill_ends(reason: str, kind: str, text: str) -> None:
    answer = infilled([ended(0, "ab\ncd\nef", reason=reason)])
    assert (answer["content"], answer["stop_type"], answer["has_new_line"]) == (text, kind, True)
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["stop"]) == (8, 5, True)
    assert (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (4, 1)
    assert (answer["timings"]["prompt_n"], answer["timings"]["predicted_n"]) == (5, 8)


def test_fields_of_an_infill_that_were_asked_for() -> None:
    row = ended(0, "ab", tops=3)
    answer = infilled([row], parsed(["hello"], top_logprobs=2), response_fields=["content", "timings/prompt_n", "none/such"])
    assert answer == {"content": "ab", "timings/prompt_n": 5}
    (first, _) = infilled([row], parsed(["hello"], top_logprobs=2))["completion_probabilities"]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (*ids("a"), "a", [97], -1.0)
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [("a", -1.0), ("b", -2.0)]
    assert "completion_probabilities" not in infilled([row])
