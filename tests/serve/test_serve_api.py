"""`shoal serve` answers with exactly what `generate` gives, field by field, through the official client.

Tests of: serve.app, serve.api_formats, serve.token_details, serve.request_models, serve.request_builder, serve.response_models,
serve.responses, serve.prometheus_metrics, serve.api_errors.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from serving import CONTEXT, Served, legible, pair, served
from shoal import __version__
from shoal.api import Shoal
from shoal.config import Grammar
from shoal.engine.commit import finish as finished_sample
from shoal.serve.token_details import ChoiceDetails, name_and_bytes
from shoal.testing import VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import says, scripted
from shoal.types.requests import Row
from shoal.types.samples import Output, Sample

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pair(), chat_template=TEMPLATE) as running:
        yield running


def offline(server: Served, prompt: Any = "hello", n: int = 1, **options: Any) -> Output:
    """What the library gives for the same, one prompt."""
    return server.shoal.generate(prompt, n, **{"lookahead": 4, "rule": "coupled", "max_new_tokens": 16, **options})[0]


def events(server: Served, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The objects of a stream, whose last line must be [DONE]."""
    response = server.post(path, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def without_clock(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


# ── the same as generate ────────────────────────────────────────────────────────────────────────────────────────────


def test_samples_and_what_they_took_are_those_of_generate(server: Served) -> None:
    answer = server.client.completions.create(model="tiny", prompt="hello", n=3, seed=7, max_tokens=40).model_dump()
    ended_rows = offline(server, n=3, seed=7, max_new_tokens=40).samples
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in ended_rows]
    took = answer["usage"]["choices"]
    for name, mine in {
        "drafted": "drafted",
        "accepted": "accepted",
        "rounds": "rounds",
        "ended_by": "finish_reason",
    }.items():
        assert [choice[name] for choice in took] == [getattr(sample, mine) for sample in ended_rows]
    assert sum(choice["accepted"] for choice in took) > 0
    assert [choice["mean_logprob"] for choice in took] == [sample.mean_logprob for sample in ended_rows]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == sum(len(sample.token_ids) for sample in ended_rows) == 120


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 0.3}, {"temperature": 0.3}),
    "greedy": ({"temperature": 0}, {"temperature": 0}),
    "top_p": ({"top_p": 0.2}, {"top_p": 0.2}),
    "top_k": ({"top_k": 2}, {"top_k": 2}),
    "min_p": ({"min_p": 0.5}, {"min_p": 0.5}),
    "typical_p": ({"typical_p": 0.2}, {"typical_p": 0.2}),
    "presence_penalty": ({"presence_penalty": 9.5}, {"presence_penalty": 9.5}),
    "frequency_penalty": ({"frequency_penalty": 9.5}, {"frequency_penalty": 9.5}),
    "repetition_penalty": ({"repetition_penalty": 9.0}, {"repetition_penalty": 9.0}),
    "logit_bias": ({"logit_bias": {"65": 5, "66": 5.5}}, {"logit_bias": {65: 5, 66: 5.5}}),
    "stop": ({"stop": ["a", "e", "1"], "max_tokens": 99}, {"stop": ["a", "e", "1"], "max_new_tokens": 99}),
    "stop_token_ids": (
        {"stop_token_ids": list(range(65, 91)), "max_tokens": 99},
        {"eos": tuple(range(65, 91)), "max_new_tokens": 99},
    ),
    "min_tokens": (
        {"stop_token_ids": list(range(128)), "min_tokens": 8},
        {"eos": tuple(range(128)), "min_new_tokens": 8},
    ),
    "max_tokens": ({"max_tokens": 3}, {"max_new_tokens": 3}),
    "seed": ({"seed": 8}, {"seed": 8}),
}


def shown_texts(ended_rows: Any, ours: dict[str, Any]) -> list[str]:
    """The texts that the server shows: as in vLLM, without the token that a request stops at."""
    hides = "eos" in ours
    return [row.text[: -1 if hides and row.finish_reason == "eos" else None] for row in ended_rows]


def test_rows_of_unlike_requests_share_rounds_and_nothing_else(server: Served) -> None:
    answers: dict[str, Any] = {}

    def ask(name: str) -> None:
        answers[name] = server.post(n=2, **{"seed": 7, **FIELDS[name][0]}).json()

    threads = [threading.Thread(target=ask, args=(name,)) for name in FIELDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (_, ours) in FIELDS.items():
        ended_rows = offline(server, n=2, **{"seed": 7, **ours}).samples
        assert [choice["text"] for choice in answers[name]["choices"]] == shown_texts(ended_rows, ours), name


def test_several_prompts_of_text_and_ids(server: Served) -> None:
    prompts = ["hello", "world"]
    answer = server.post(prompt=prompts, n=2, seed=3, max_tokens=9).json()
    result = server.shoal.generate(prompts, 2, seed=3, max_new_tokens=9, lookahead=4)
    texts = [sample.text for output in result for sample in output.samples]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    ids = [list(output.prompt_ids) for output in result]
    for prompt in (ids, prompts):
        assert [c["text"] for c in server.post(prompt=prompt, n=2, seed=3, max_tokens=9).json()["choices"]] == texts
    assert server.post(prompt=ids[0], n=2, seed=3, max_tokens=9).json()["choices"][1]["text"] == texts[1]


# ── speculation, per request ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("speculation", "length"), [("auto", 4), (2, 2), (9, 4), (1, 1), ("off", 0), (0, 0)])
def test_speculation_is_told_by_the_counts(speculation: Any, length: int) -> None:
    with served(pair(legible(0))) as server:  # a drafter that is always right
        answer = server.post(n=2, seed=1, max_tokens=30, speculation=speculation).json()
    rounds = 30 // (length + 1)
    for took in answer["usage"]["choices"]:
        assert (took["rounds"], took["drafted"], took["accepted"]) == (rounds, rounds * length, rounds * length)


def test_the_tokens_are_the_same_however_they_are_drafted(server: Served) -> None:
    texts = [
        [choice["text"] for choice in server.post(n=2, seed=5, max_tokens=30, speculation=how).json()["choices"]]
        for how in ("auto", "off", 1, 3)
    ]
    assert texts == [texts[0]] * 4


# ── grammars ────────────────────────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
GRAMMARS: dict[str, tuple[dict[str, Any], Grammar, Callable[[str], object]]] = {
    "regex": (
        {"grammar": {"type": "regex", "text": "[a-e]{20,30}"}},
        Grammar("regex", "[a-e]{20,30}"),
        lambda text: re.fullmatch("[a-e]{20,30}", text),
    ),
    "lark": (
        {"grammar": {"type": "lark", "text": 'start: ("no" | "yes") "!"+'}},
        Grammar("lark", 'start: ("no" | "yes") "!"+'),
        lambda text: re.fullmatch("(no|yes)!+", text),
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": SCHEMA}}},
        Grammar("json_schema", json.dumps(SCHEMA)),
        lambda text: isinstance(json.loads(text)["ok"], bool),
    ),
    "json_schema, compact": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "whitespace": "compact"}},
        Grammar("json_schema", json.dumps(SCHEMA), "compact"),
        lambda text: text in ('{"ok":true}', '{"ok":false}'),
    ),
    "json_object": (
        {"response_format": {"type": "json_object"}, "logit_bias": {"92": 9.0}},
        Grammar("json_object"),
        lambda text: isinstance(json.loads(text), dict),
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_holds_for_its_own_request(server: Served, name: str) -> None:
    theirs, grammar, fits = GRAMMARS[name]
    other, got = threading.Thread(target=lambda: got.append(server.post(seed=7, n=2, max_tokens=60).json())), []
    other.start()
    answer = server.post(**{"n": 4, "seed": 7, "max_tokens": 60, "logit_bias": {"256": 3.0}, **theirs}).json()
    other.join()
    bias = {int(token): value for token, value in theirs.get("logit_bias", {"256": 3.0}).items()}
    ended_rows = offline(server, n=4, seed=7, max_new_tokens=60, grammar=grammar, logit_bias=bias).samples
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in ended_rows]
    complete = [choice["text"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert complete
    assert all(fits(text) for text in complete)
    assert sum(took["drafted"] for took in answer["usage"]["choices"]) > 0
    free = offline(server, n=2, seed=7, max_new_tokens=60).samples
    assert [choice["text"] for choice in got[0]["choices"]] == [sample.text for sample in free]


def test_a_schema_that_is_cut_ends_by_length(server: Served) -> None:
    whole = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": whole}}, "logit_bias": {"256": 3.0}}
    for most, reason in ((9, "length"), (400, "stop")):
        (choice,) = server.post(seed=7, max_tokens=most, **fields).json()["choices"]
        assert choice["finish_reason"] == reason
        assert choice["text"].startswith("[")
    assert len(json.loads(choice["text"])) == 20


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_adds_up_to_the_whole_answer(server: Served) -> None:
    stop = offline(server, seed=7, max_new_tokens=30).samples[0].text[20:22]
    body = {"n": 3, "seed": 7, "max_tokens": 30, "stop": stop, "logprobs": 2, "shoal": {"details": True}}
    whole = server.post(**body).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length", "length"]
    pieces = events(server, stream_options={"include_usage": True}, **body)
    assert without_clock(pieces[-1]) == {
        "object": "text_completion", "model": "tiny", "choices": [], "usage": whole["usage"],
    }  # fmt: skip
    assert all(piece["usage"] is None for piece in pieces[:-1])
    for choice in whole["choices"]:
        mine = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert len(mine) > 3
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert joined(c["logprobs"][name] for c in mine) == choice["logprobs"][name]
        assert joined(c["shoal"]["tokens"] for c in mine) == choice["shoal"]["tokens"]
        assert mine[-1]["shoal"]["mean_logprob"] == pytest.approx(choice["shoal"]["mean_logprob"])


def test_details_tell_the_tokens_and_where_they_came_from(server: Served) -> None:
    pieces = events(server, n=2, seed=7, max_tokens=30, shoal={"details": True})
    for index, sample in enumerate(offline(server, n=2, seed=7, max_new_tokens=30).samples):
        mine = [c["shoal"] for piece in pieces for c in piece["choices"] if c["index"] == index]
        tokens = [token for details in mine for token in details["tokens"]]
        assert [token["id"] for token in tokens] == list(sample.token_ids)
        assert [token["from_draft"] for token in tokens] == list(sample.from_draft)
        assert [token["logprob"] for token in tokens] == list(sample.logprobs)
        assert "".join(token["text"] for token in tokens) == sample.text
        last = mine[-1]
        assert last["mean_logprob"] == pytest.approx(sample.mean_logprob)
        assert (last["committed"], last["drafted"], last["accepted"]) == (30, sample.drafted, sample.accepted)
        assert [details["rounds"] for details in mine] == list(range(1, sample.rounds + 1))
        assert all("by_round" not in details for details in mine)
    assert all("shoal" not in c for piece in events(server, max_tokens=5) for c in piece["choices"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_rounds_tell_what_was_drafted_and_rejected(path: str, stream: bool) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 7, "max_tokens": 30, "stop": ["zq"], "shoal": {"rounds": True}}
    asking = {"messages": [{"role": "user", "content": "hello"}], "prompt": None} if "chat" in path else {}
    with served(pair(), chat_template="{{ messages[0].content }}") as server:
        if stream:
            lines = server.post(path, **options, **asking, stream=True).text.splitlines()
            pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            for piece in pieces:  # each round as it ends
                assert all(len(c["shoal"]["by_round"]) == 1 for c in piece["choices"] if "shoal" in c)
        else:
            pieces = [server.post(path, **options, **asking).json()]
        (sampled,) = server.shoal.generate("hello", 2, seed=7, max_new_tokens=30, stop=["zq"])
    drafted = 0
    for index, sample in enumerate(sampled.samples):
        mine = [c["shoal"] for piece in pieces for c in piece["choices"] if c["index"] == index and "shoal" in c]
        rounds = [done for details in mine for done in details["by_round"]]
        tokens = [token for details in mine for token in details["tokens"]]
        origins = [i < done["accepted"] for done in rounds for i in range(done["committed"])]
        assert [token["id"] for token in tokens] == list(sample.token_ids)
        assert [token["from_draft"] for token in tokens] == origins[: len(tokens)]
        assert [done["start"] for done in rounds] == [sum(d["committed"] for d in rounds[:r]) for r in range(len(rounds))]
        rejected = [draft for done in rounds for draft in done["rejected"]]
        assert len(rounds) == mine[-1]["rounds"]
        assert len(rejected) == mine[-1]["drafted"] - mine[-1]["accepted"]
        assert all(draft["text"] and draft["drafter"] == "model" for draft in rejected)
        for done in rounds:  # chains: what the target chose instead differs from the first draft it rejected
            if done["rejected"] and done["start"] + done["accepted"] < len(tokens):
                assert tokens[done["start"] + done["accepted"]]["id"] != done["rejected"][0]["id"]
        drafted += mine[-1]["drafted"]
    assert drafted


# ── log-probabilities, echo, best_of, suffix ────────────────────────────────────────────────────────────────────────


def test_log_probabilities(server: Served) -> None:
    (choice,) = server.post(seed=7, logprobs=3, max_tokens=12).json()["choices"]
    (sample,) = offline(server, seed=7, top_logprobs=3, max_new_tokens=12).samples
    name = partial(name_and_bytes, server.shoal.tokenizer)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == list(sample.logprobs)
    assert logprobs["tokens"] == [name(token)[0] for token in sample.token_ids]
    tops = [{name(token)[0]: value for token, value in top.raw} for top in sample.top_logprobs]
    own = [{name(token)[0]: value} for token, value in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert logprobs["top_logprobs"] == [top | one for top, one in zip(tops, own, strict=True)]
    assert {3, 4} == {*map(len, logprobs["top_logprobs"])}
    (alone,) = server.post(seed=7, logprobs=0, max_tokens=12).json()["choices"]
    assert alone["logprobs"]["top_logprobs"] == own  # the sampled token is always there


def test_pieces_of_characters_have_their_bytes() -> None:
    """Emoji take four tokens of a byte-level tokenizer, each of which is no text."""
    text = "é: 😀日本\n"
    ids = (*pair().tokenizer.encode("hello"), *pair().tokenizer.encode(text))
    with served(pair(says([ids], VOCABULARY)), chat_template="hello") as server:
        body = {"temperature": 0, "max_tokens": len(ids) - 5}
        answer = server.post("/v1/chat/completions", prompt="x", messages=MESSAGES, logprobs=True, top_logprobs=3, **body)
        assert answer.status_code == 400  # prompt is no field of a chat
        chat = server.client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, temperature=0, max_tokens=len(ids) - 5
        )
        content = chat.choices[0].logprobs.content
        assert chat.choices[0].message.content == text
        assert [bytes(entry.bytes) for entry in content] == [bytes([byte]) for byte in text.encode()]
        assert [entry.token for entry in content[:3]] == ["bytes:\\xc3", "bytes:\\xa9", ":"]
        assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].bytes == entry.bytes for entry in content)
        (choice,) = server.post(logprobs=20, **body).json()["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", ":"]
        assert [len(tops) for tops in logprobs["top_logprobs"]] == [20] * len(content)  # no two of one name
        assert [top[name] for top, name in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)] == logprobs[
            "token_logprobs"
        ]
        assert [choice["text"][at : at + 1] for at in logprobs["text_offset"][-4:]] == ["本", "本", "本", "\n"]


PADDED = 6
"""Ids behind those of the tokenizer, as heads are padded to a multiple of 64 or 128: they have no text."""
HUGE: list[tuple[dict[str, float], set[int]]] = [
    ({"262": 1e39}, {262}), ({"262": 1e308, "264": 1e308}, {262, 264}), ({"262": 1e39, "70": -1e39}, {262}),
    ({"70": 3e38}, {70}), ({str(i): -1e39 for i in range(VOCABULARY + PADDED) if i != 265}, {265}),
]  # fmt: skip


@pytest.fixture(scope="module")
def padded() -> Iterator[Served]:
    script, behind = legible(0), torch.full((PADDED,), 3.0)
    model = scripted(
        lambda ids: torch.cat([script(tuple(i for i in ids if i < VOCABULARY)), behind]), VOCABULARY + PADDED, CONTEXT
    )
    with served(Shoal(model, model, tiny_tokenizer(), max_batch=8), chat_template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize(("bias", "left"), HUGE, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0}, {"temperature": 5, "repetition_penalty": 1.5}, {"stream": True}], ids=str
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_biases_beyond_any_number_name_ids_without_a_text(
    padded: Served, path: str, more: dict[str, Any], bias: dict[str, float], left: set[int]
) -> None:
    """No bias leaves nothing possible; each id without a text has a name of its own, in the log-probabilities too."""
    asked: dict[str, Any] = {"prompt": "hello", "logprobs": 5}
    if "chat" in path:
        asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}
    body = {**asked, **more, "n": 2, "max_tokens": 6, "seed": 5, "logit_bias": bias, "return_token_ids": True}
    response = httpx.post(padded.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")] or [response.text]
    choices = joined([json.loads(line)["choices"] for line in lines])
    ids = joined([choice.get("token_ids") or [] for choice in choices])
    assert len(ids) == 12
    assert {*ids} <= left
    names = {name_and_bytes(padded.shoal.tokenizer, token)[0] for token in ids}
    assert "" not in names
    for told in (choice["logprobs"] for choice in choices if choice["logprobs"]):
        entries = told.get("content") or []
        tops = [[one["token"] for one in entry["top_logprobs"]] for entry in entries] + [
            [*top] for top in told.get("top_logprobs") or []
        ]
        assert {*told.get("tokens", ()), *(entry["token"] for entry in entries)} <= names
        assert all(len({*top}) == len(top) >= 5 and "" not in top for top in tops)
        assert all(entry["bytes"] == [] for entry in entries if entry["token"].startswith("token_id:"))


def test_ids_without_a_text_are_taken_wherever_ids_are(padded: Served) -> None:
    """In prompts, echoed and scored, as stop tokens, and decoded; ids of no model are refused by the field's name."""
    prompt = [70, 261, 71, 264]
    body = {"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": 3, "seed": 1}
    (choice,) = padded.post(**body, logit_bias={"263": 1e39}, stop_token_ids=[263]).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["g", "token_id:261", "h", "token_id:264", "token_id:263"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["text_offset"]) == ("gh", "stop", [0, 1, 1, 2, 2])
    scored = padded.post(prompt=prompt, max_tokens=1, prompt_logprobs=5).json()["choices"][0]["prompt_logprobs"]
    assert [place[str(token)]["decoded_token"] for place, token in zip(scored[1:], prompt[1:], strict=True)] == [
        "token_id:261", "h", "token_id:264",
    ]  # fmt: skip
    assert httpx.post(f"{padded.url}/detokenize", json={"tokens": prompt}).json() == {"prompt": "gh"}
    for field, value in (("logit_bias", {"266": 1}), ("stop_token_ids", [266]), ("prompt", [266]), ("logit_bias", {"": 1})):
        refused = padded.post(**{field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


def test_tokens_are_spelled_as_their_tokenizer_writes_them() -> None:
    """Byte fallback and a dropped first space, as Llama 2 and Gemma have them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁the": 1, "the": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "▁": 6, "€": 7}
    model = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    assert tokenizer.decode([1]) == "the"
    names = [name_and_bytes(tokenizer, token) for token in range(1, 8)]
    assert names[:2] == [(" the", b" the"), ("the", b"the")]
    assert names[2:5] == [("bytes:\\xe2", b"\xe2"), ("bytes:\\x82", b"\x82"), ("bytes:\\xac", b"\xac")]
    assert names[5:] == [(" ", b" "), ("€", "€".encode())]
    rejected = SimpleNamespace(start=0, committed=1, accepted=0, rejected=[(3, "model")])
    update: Any = SimpleNamespace(tokens=(), committed=1, drafted=1, accepted=0, rounds=1, by_round=(rejected,))
    (told,) = ChoiceDetails(tokenizer, rounds=True).of(update)["by_round"]
    assert told["rejected"] == [{"id": 3, "text": names[2][0], "drafter": "model"}]


def test_echo_tells_the_prompt_and_what_the_model_thinks_of_it(server: Served) -> None:
    body = {"seed": 7, "logprobs": 2, "max_tokens": 6}
    (choice,) = server.post(echo=True, **body).json()["choices"]
    (plain,) = server.post(**body).json()["choices"]
    assert choice["text"] == "hello" + plain["text"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"hello", *plain["logprobs"]["tokens"]]
    assert logprobs["text_offset"] == [*range(5), *(5 + offset for offset in plain["logprobs"]["text_offset"])]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][5:] == plain["logprobs"]["token_logprobs"]
    ids = server.shoal.tokenizer.encode("hello")
    script = server.shoal.target.hf.script
    expected = [float(script(tuple(ids[:i])).log_softmax(-1)[ids[i]]) for i in range(1, 5)]
    assert logprobs["token_logprobs"][1:5] == pytest.approx(expected)
    for name, own, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert (top[name], len(top) in (2, 3)) == (own, True)
    pieces = events(server, echo=True, **body)
    assert "".join(c["text"] for piece in pieces for c in piece["choices"]) == choice["text"]
    assert joined(c["logprobs"]["token_logprobs"] for p in pieces for c in p["choices"]) == logprobs["token_logprobs"]


def test_a_prompt_may_be_scored_alone(server: Served) -> None:
    rounds = server.worker.thread.engine.stats.rounds
    answer = server.post(prompt=["hello", "you"], echo=True, logprobs=1, max_tokens=0, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "hello", "you", "you"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [5, 5, 3, 3]
    assert answer["usage"]["completion_tokens"] == 0
    assert server.worker.thread.engine.stats.rounds == rounds


@pytest.mark.parametrize("prompt", ["", [999], "x" * 3000], ids=["empty", "not a token", "too long"])
def test_a_prompt_that_cannot_be_scored_is_refused(server: Served, prompt: Any) -> None:
    response = server.post(prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert response.status_code == 400
    assert "prompt" in response.json()["error"]["message"]


def test_best_of_returns_the_best_first(server: Served) -> None:
    answer = server.post(n=2, best_of=5, seed=7).json()
    ranked = offline(server, n=5, seed=7).ranked
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in ranked[:2]]
    assert [took["mean_logprob"] for took in answer["usage"]["choices"]] == [sample.mean_logprob for sample in ranked[:2]]
    assert answer["usage"]["completion_tokens"] == 5 * 16


def test_best_of_prefers_samples_that_were_in_time(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples end by themselves, those with the best mean log-probabilities too late."""
    ranked = offline(server, n=5, seed=7).ranked
    late = {sample.token_ids for sample in ranked[:3]}

    def finish(row: Row, now: float) -> Sample:
        sample = finished_sample(row, now)
        return replace(sample, in_time=sample.token_ids not in late)

    monkeypatch.setattr("shoal.engine.commit.finish", finish)
    answer = server.post(n=3, best_of=5, seed=7).json()
    best = [*ranked[3:], ranked[0]]
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in best]
    assert [took["finished"] for took in answer["usage"]["choices"]] == [True, True, False]
    assert [took["ended_by"] for took in answer["usage"]["choices"]] == [sample.finish_reason for sample in best]


def test_suffix_fills_in(filling: Served) -> None:
    body = {"prompt": "def add(a, b):\n    ", "suffix": "\n    return c\n", "temperature": 0, "max_tokens": 12}
    (choice,) = filling.post(**body, align=False).json()["choices"]
    from shoal.constraints.fim import fill_in_middle

    ids = fill_in_middle(filling.shoal.tokenizer, body["prompt"], body["suffix"])
    (sample,) = filling.shoal.generate([ids], temperature=0, max_new_tokens=12)[0].samples
    assert choice["text"] == sample.text


@pytest.mark.parametrize("more", [{"align": True}, {"suffix": " x"}, {"suffix": " x", "align": False}])
def test_prompts_are_aligned_as_by_generate(server: Served, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr("shoal.constraints.fim.TOKENS", (("Q", "W", "Z"),))
    answer = server.post(n=3, seed=7, max_tokens=8, stop=["a"], **more).json()
    options = {"rule": "coupled", "lookahead": 4, **more}
    ended_rows = server.shoal.generate(["hello"], 3, seed=7, max_new_tokens=8, stop=["a"], **options)[0].samples
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in ended_rows]
    assert answer["usage"]["completion_tokens"] == sum(len(sample.token_ids) for sample in ended_rows)


@pytest.fixture(scope="module")
def filling(bundled: Shoal) -> Iterator[Served]:
    """The bundled pair, which fills in middles."""
    with served(bundled) as running:
        yield running


@pytest.mark.parametrize("exact", ["weights", "smc", "distinct"])
def test_samples_are_weighed(filling: Served, exact: str) -> None:
    grammar = {"type": "regex", "text": "[a-z]{2}[0-9]{3} x*;"}
    before = filling.worker.thread.engine.stats.resampled
    body: dict[str, Any] = {
        "prompt": "value = ",
        "temperature": 1.0,
        "seed": 7,
        "n": 6,
        "max_tokens": 10,
        "grammar": grammar,
    }
    weights = [took["log_weight"] for took in filling.post(**body, exact=exact).json()["usage"]["choices"]]
    assert len(set(weights)) > 1 or exact == "smc"
    assert all(weight < 0 for weight in weights)  # of distinct texts as well: p allows little
    assert (filling.worker.thread.engine.stats.resampled > before) is (exact == "smc")
    assert "log_weight" not in filling.post(**body).json()["usage"]["choices"][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"exact": "weights", "temperature": 1.0}, "weighs samples by what limits them"),
        ({"exact": "weights", "align": True, "temperature": 0}, "temperature=0"),
        ({"exact": "smc", "align": True, "n": 2, "stream": True}, "leave out stream"),
        ({"exact": "distinct", "n": 2, "stream": True}, "leave out stream"),
        ({"exact": "smc", "align": True}, "n >= 2"),
        ({"exact": "all", "align": True}, "exact"),
    ],
)
def test_what_cannot_be_weighed_is_refused(server: Served, body: dict[str, Any], words: str) -> None:
    refused = server.post(**body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"] + str(refused.json()["error"]["param"])


def test_syntax_cuts_middles_where_they_parse(filling: Served) -> None:
    left, right = "def add(a, b):\n    c = a +", "\n    return c\n"
    body = {"prompt": left, "suffix": right, "syntax": "python", "n": 4, "max_tokens": 12, "seed": 3}
    answer = filling.post(**body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    for text in texts:
        compile(left + text + right, "whole", "exec")
    states = {took["syntax"] for took in answer["usage"]["choices"]}
    assert states <= {"complete", "cut"}
    assert "cut" in states
    ended_rows = filling.shoal.generate(left, suffix=right, syntax="python", n=4, max_new_tokens=12, seed=3)[0].samples
    assert texts == [sample.text for sample in ended_rows]
    answer = filling.post(prompt='["a', suffix='b", 1]', syntax="json", n=2, max_tokens=6, seed=3).json()
    assert all(len(json.loads(f'["a{choice["text"]}b", 1]')) >= 2 for choice in answer["choices"])
    refused = filling.post(prompt="x = = ", syntax="python", max_tokens=4)
    assert refused.status_code == 400
    assert "not the beginning of a Python program" in refused.json()["error"]["message"]


def test_the_bundled_pair_greedily(filling: Served) -> None:
    prompts = ["def add(a, b):\n", "def is_even(n):\n"]
    answer = filling.post(prompt=prompts, temperature=0, n=2, max_tokens=40).json()
    result = filling.shoal.generate(prompts, 2, temperature=0, max_new_tokens=40, lookahead="off")
    assert [choice["text"] for choice in answer["choices"]] == [s.text for output in result for s in output.samples]
    assert sum(took["accepted"] for took in answer["usage"]["choices"]) > 0


# ── chat ────────────────────────────────────────────────────────────────────────────────────────────────────────────

MESSAGES: list[Any] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


def test_chat_is_a_completion_of_what_the_template_makes(server: Served) -> None:
    answer = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, seed=7, max_completion_tokens=12, logprobs=True, top_logprobs=2
    )
    output = offline(server, "<system>be kind<user>hi<assistant>", n=2, seed=7, max_new_tokens=12, top_logprobs=2)
    assert [choice.message.content for choice in answer.choices] == [sample.text for sample in output.samples]
    for choice, sample in zip(answer.choices, output.samples, strict=True):
        assert choice.message.role == "assistant"
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert [entry.logprob for entry in content] == list(sample.logprobs)
        assert [len(entry.top_logprobs) for entry in content] == [2] * 12
        tops = [top.logprob for entry in content for top in entry.top_logprobs]
        assert tops == pytest.approx([value for top in sample.top_logprobs for _, value in top.raw], abs=1e-6)
        assert b"".join(bytes(entry.bytes or ()) for entry in content).decode(errors="replace") == choice.message.content


def test_chat_streams_begin_with_the_role(server: Served) -> None:
    body = {"messages": MESSAGES, "n": 2, "seed": 7, "max_tokens": 12}
    stream = server.client.chat.completions.create(model="tiny", stream=True, **body)
    deltas = [choice for piece in stream for choice in piece.choices]
    assert [choice.delta.role for choice in deltas[:2]] == ["assistant", "assistant"]
    whole = server.client.chat.completions.create(model="tiny", **body)
    for index in range(2):
        text = "".join(choice.delta.content or "" for choice in deltas if choice.index == index)
        assert text == whole.choices[index].message.content


def test_a_chat_answer_may_be_as_long_as_the_server_allows() -> None:
    with served(pair(), max_tokens=50, chat_template=TEMPLATE) as server:
        answer = server.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 50


# ── limits of time and of what is asked ─────────────────────────────────────────────────────────────────────────────


def test_a_time_budget_returns_what_there_is(server: Served) -> None:
    answer = server.post(max_tokens=1000, time_budget=0.001, n=2).json()
    assert {took["ended_by"] for took in answer["usage"]["choices"]} <= {"time", "not started"}
    assert not any(took["finished"] for took in answer["usage"]["choices"])
    assert all(took["completion_tokens"] < 1000 for took in answer["usage"]["choices"])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


def test_metrics_tell_what_requests_took() -> None:
    with served(pair()) as server:
        took = server.post(n=3, seed=7, max_tokens=30).json()["usage"]
        server.post(n=0)
        text = httpx.get(f"{server.url}/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(text.text)}
    found = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert families["process_resident_memory_bytes"].samples[0].value > 0
    (build,), (model,) = families.pop("shoal_build_info").samples, families.pop("shoal_model_info").samples
    assert build.labels["version"] == __version__
    assert model.labels == {"model": "tiny", "drafter": "model", "device": "cpu", "dtype": "float32"}
    families = {name: family for name, family in families.items() if not name.startswith("process_")}
    for name, family in families.items():  # Prometheus' conventions: a prefix, base units, _total where it counts
        assert name.startswith("shoal_")
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert not re.search("_(ms|milliseconds|minutes|kb|mib|count|total)$", name)
        assert family.type != "counter" or all(s.name.endswith(("_total", "_created")) for s in family.samples)
    for name in ("drafted", "accepted"):
        assert found[f"shoal_{name}_total",] == sum(choice[name] for choice in took["choices"]) > 0
    assert found["shoal_committed_total",] == took["completion_tokens"] == 90
    rounds = sum(choice["rounds"] for choice in took["choices"])
    assert found["shoal_row_rounds_total",] == rounds
    assert found["shoal_acceptance_length",] == pytest.approx(90 / rounds)
    assert found["shoal_prefill_tokens_total",] == took["prompt_tokens"] - 1  # the last one is of the first round
    assert found["shoal_passes_total", "modules", "target"] > found["shoal_target_passes_total",] > 0  # with the prompt
    assert found["shoal_passes_total", "modules", "draft"] > 0
    assert found["shoal_rows_total", "length"] == 3
    assert found["shoal_requests_total", "/v1/completions", "200"] == 1
    assert found["shoal_requests_total", "/v1/completions", "400"] == 1
    assert found["shoal_request_seconds_count", "/v1/completions", "200"] == 1
    assert found["shoal_request_seconds_count", "/v1/completions", "400"] == 1
    assert found["shoal_request_queue_seconds_count",] == 1
    assert found["shoal_inter_token_seconds_count",] == rounds - 3
    assert found["shoal_request_queue_seconds_sum",] <= found["shoal_time_to_first_token_seconds_sum",]
    per_row = (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "row_seconds",
        "row_tokens",
        "row_acceptance_length",
    )
    for name in per_row:
        assert found[f"shoal_{name}_count",] == 3
    assert found["shoal_row_tokens_sum",] == 90
    stages = {labels[0]: value for (name, *labels), value in found.items() if name == "shoal_stage_seconds_total"}
    assert set(stages) == {"prefill", "propose", "verify", "accept", "commit"}
    assert all(seconds > 0 for seconds in stages.values())
    assert found["shoal_kv_bytes",] > 0
    names = ("shoal_up", "shoal_rows_running", "shoal_rows_waiting", "shoal_rows_capacity")
    assert [found[name,] for name in names] == [1, 0, 0, 8 + 256]


REFUSED: list[tuple[Any, ...]] = [
    ({"tools": []}, "tools"),
    ({"n": "2"}, "n"),
    ({"best_of": 257}, "best_of"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "logit_bias names token id 260"),
    ({"suffix": "x"}, "suffix", "no fill-in-the-middle tokens"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": [260]}, "prompt", "prompt ids must be in 0..259"),
    ({"prompt": "x" * 3000}, "prompt", "you requested 3001 tokens (3000 in the prompt, 1 in"),
    ({"grammar": {"type": "regex", "text": "("}}, "grammar"),
    ({"grammar": {"type": "lark", "text": "start: nowhere"}}, "grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"model": "huge"}, "model"),
]
"""One of each kind, and those that the engine refuses: test_parsed_requests.py has the others, which need no model."""


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case)[:40])
def test_what_cannot_be_done_is_refused_by_name(server: Served, case: tuple[Any, ...]) -> None:
    """What the engine refuses is told in its words, before a stream begins, too."""
    fields, param, *words = case
    for stream in (False, True) if words else (False,):
        body = json.dumps({"prompt": "hello", **({"stream": True} if stream else {}), **fields})
        response = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == (404 if param == "model" else 400)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].split(".")[0] == param.split(".")[0]
        assert "".join(words) in error["message"] != ""
