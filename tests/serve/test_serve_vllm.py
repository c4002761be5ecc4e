"""vLLM's fields in requests do what the library does alone, drafted or not; what would mean something else is refused.

Tests of: serve.request_fields, serve.prompts, serve.settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import GenerationConfig

from by_pairs import by_pairs
from serving import CONTEXT, TIMEOUT_SECONDS, Served, legible, pair, served
from shoal.api import Shoal
from shoal.config import Grammar
from shoal.testing import BEGIN, END, VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import History, mixed, says, scripted

TOKENIZER = tiny_tokenizer()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
MESSAGES = [{"role": "user", "content": "hi"}]
ABC = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def marked(seed: int) -> History:
    """Legible texts with special tokens among them."""
    script, often = legible(seed), torch.zeros(VOCABULARY)
    often[[BEGIN, END]] = torch.tensor([8.5, 7.5])
    return lambda ids: script(ids) + often


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    target = marked(0)
    models = [scripted(spoken, VOCABULARY, CONTEXT) for spoken in (target, mixed(target, marked(1), every=3))]
    with served(Shoal(*models, TOKENIZER, max_batch=8), chat_template=TEMPLATE, max_logprobs=5) as running:
        yield running


def alone(server: Served, prompt: str = "hello", n: int = 3, **options: Any) -> Any:
    return server.shoal.generate(prompt, n, lookahead=4, rule="coupled", seed=3, **options)[0].samples


# ── ends and texts ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_ignored_ends_leave_the_tokens_of_plain_decoding(server: Served) -> None:
    body = {"n": 3, "seed": 3, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    drafted, plain = server.post(**body).json(), server.post(**body, speculation="off").json()
    expected = alone(server, eos=(), max_new_tokens=60)
    ids = [choice["token_ids"] for choice in drafted["choices"]]
    assert ids == [list(sample.token_ids) for sample in expected] == [choice["token_ids"] for choice in plain["choices"]]
    assert all(END in row and len(row) == 60 for row in ids)
    assert {choice["finish_reason"] for choice in drafted["choices"]} == {"length"}
    counts = [(each["drafted"], each["accepted"], each["rounds"]) for each in drafted["usage"]["choices"]]
    assert counts == [(sample.drafted, sample.accepted, sample.rounds) for sample in expected]
    assert all(accepted > 9 for _, accepted, _ in counts)
    assert {each["drafted"] for each in plain["usage"]["choices"]} == {0}
    some = server.post(**body, stop_token_ids=[BEGIN]).json()["choices"]
    assert [choice["token_ids"] for choice in some] == [row[: row.index(BEGIN) + 1] for row in ids]
    usual = server.post(**body | {"ignore_eos": False}).json()["choices"]
    assert [choice["token_ids"] for choice in usual] == [row[: row.index(END) + 1] for row in ids]


@pytest.mark.parametrize("stream", [False, True])
def test_texts_show_special_tokens_but_for_the_one_that_ends(server: Served, stream: bool) -> None:
    body = {"n": 3, "seed": 3, "max_tokens": 60, "skip_special_tokens": False, "return_token_ids": True, "logprobs": 0}
    for more in ({}, {"ignore_eos": True}, {"speculation": "off"}):
        for ids, text, _ in choices_of(server, "/v1/completions", stream, **body, **more):
            shown = ids[:-1] if ids[-1] == END and not more.get("ignore_eos") else ids
            assert text == TOKENIZER.decode(shown)
            assert "<|begin|>" in text or BEGIN not in shown
    cut = choices_of(server, "/v1/completions", stream, **body, ignore_eos=True, stop="<|end|>")
    assert all(END not in ids and len(ids) < 60 and text == TOKENIZER.decode(ids) for ids, text, _ in cut)


def choices_of(server: Served, path: str, stream: bool, **body: Any) -> list[tuple[list[int], str, Any]]:
    """Token ids, text and prompt ids of each choice."""
    asked = {"prompt": "hello"} if path.endswith("/completions") and "chat" not in path else {"messages": MESSAGES}
    response = httpx.post(server.url + path, json={**asked, **body, "stream": stream}, timeout=TIMEOUT_SECONDS)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines() if stream else [f"data: {response.text}"]
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found: dict[int, Any] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            ids, text, prompt = found.setdefault(choice["index"], ([], [], []))
            message = choice.get("message") or choice.get("delta") or {}
            ids += choice.get("token_ids") or []
            text.append(choice.get("text") or message.get("content") or "")
            told = [each["prompt_token_ids"] for each in (choice, piece) if each.get("prompt_token_ids")]
            prompt += told
    return [(ids, "".join(text), prompt) for _, (ids, text, prompt) in sorted(found.items())]


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_stops_is_not_in_the_text(server: Served, stream: bool) -> None:
    """vllm#55483, under drafts that hold the token, too: its id and its log-probability are told, its text is not."""
    body = {"n": 3, "seed": 3, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    whole = [ids for ids, _, _ in choices_of(server, "/v1/completions", stream, **body)]
    stop = next(token for token in whole[0][3:] if token not in (BEGIN, END) and all(token in ids for ids in whole))
    for more in ({}, {"speculation": "off"}, {"include_stop_str_in_output": False}):
        found = choices_of(server, "/v1/completions", stream, **body, stop_token_ids=[stop], **more)
        for (ids, text, _), alone_ in zip(found, whole, strict=True):
            assert ids == alone_[: alone_.index(stop) + 1]
            assert text == TOKENIZER.decode(ids[:-1], skip_special_tokens=True)
    chat = {"messages": MESSAGES, "max_tokens": 60, "seed": 3, "logprobs": True, "stop_token_ids": [*range(33, 60)]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=TIMEOUT_SECONDS).json()["choices"][0]
    told = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"]["content"]).decode()
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", told)


def as_in_vllm(ids: list[int], stops: list[str], stop_ids: list[int], least: int, special: bool) -> tuple[list[int], str]:
    """The tokens and the text of vLLM, where stop strings and tokens are shown: all tokens up to the end, whatever ends it."""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count], skip_special_tokens=special)
        new = len(text) - len(TOKENIZER.decode(ids[: count - 1], skip_special_tokens=special))
        ends = [
            (at, at + len(stop))
            for stop in stops
            if new and (at := text.find(stop, max(len(text) - new - len(stop) + 1, 0))) >= 0
        ]
        if count > least and ends:
            return ids[:count], text[: min(ends)[1]]
        if count > least and ids[count - 1] in stop_ids:
            return ids[:count], text
    return ids, TOKENIZER.decode(ids, skip_special_tokens=special)


@pytest.mark.slow(but=["/v1/completions-False"])
@by_pairs(
    {
        "path": ["/v1/completions", "/v1/chat/completions"],
        "stream": [False, True],
        "more": [{}, {"min_tokens": 18, "ignore_eos": True}, {"skip_special_tokens": False}, {"speculation": "off"}],
    }
)
def test_what_stops_a_text_is_in_it_where_asked(server: Served, path: str, stream: bool, more: dict[str, Any]) -> None:
    """Stop strings of one token and of several, special tokens that stop, and the model's own end."""
    body = {"n": 3, "seed": 3, "max_tokens": 60, "return_token_ids": True, **more}
    free = [ids for ids, _, _ in choices_of(server, path, False, **body | {"ignore_eos": True})]
    own = [] if "ignore_eos" in more else [END]
    text = TOKENIZER.decode(free[0], skip_special_tokens=True)
    special = more.get("skip_special_tokens", True)
    least = more.get("min_tokens", 0)
    letter = next(token for token in free[0][12:] if token < 90)
    for stops, stop_ids in (
        ([text[14:16]], []), ([text[14:16], text[20], text[9:13]], []), ([text[30], text[8:20]], [letter]), ([], [letter]),
        ([], [BEGIN]), (["zzzz"], []), ([text[14:17], text[15:17]], []),
    ):  # fmt: skip
        if least and stop_ids:
            continue  # they are not drawn before, and other tokens are
        fields: dict[str, Any] = {"stop": stops, "stop_token_ids": stop_ids, "include_stop_str_in_output": True}
        logprobs = {"logprobs": 0} if path == "/v1/completions" else {"logprobs": True}
        found = choices_of(server, path, stream, **body, **fields, **logprobs)
        expected = [as_in_vllm(ids, stops, [*stop_ids, *own], least, special) for ids in free]
        assert [(ids, shown) for ids, shown, _ in found] == expected, (stops, stop_ids)
        without = choices_of(server, path, stream, **body, **{**fields, "include_stop_str_in_output": False})
        for (ids, shown, _), (cut, before, _) in zip(found, without, strict=True):
            assert shown.startswith(before)
            assert ids[: len(cut)] == cut


def test_the_tokens_of_a_stop_string_that_is_shown_are_told(server: Served) -> None:
    body = {"seed": 3, "max_tokens": 60, "logprobs": 0, "ignore_eos": True}
    whole = server.post(**body).json()["choices"][0]
    stop = whole["text"][20:23]
    for stream in (False, True):
        answer = server.post(**body, stop=stop, include_stop_str_in_output=True, stream=stream).text
        lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")] or [answer]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        text = "".join(choice["text"] for choice in choices)
        told = [name for choice in choices if choice["logprobs"] for name in choice["logprobs"]["tokens"]]
        assert text == whole["text"][: whole["text"].index(stop) + 3]
        assert told == whole["logprobs"]["tokens"][: len(told)]
        assert "".join(name for name in told if not name.startswith("<|")) == text
        assert choices[-1]["finish_reason"] == "stop"


def test_the_end_of_a_turn_is_not_shown_as_a_stop_string() -> None:
    """It is the template's, not the request's."""
    ids = (*TOKENIZER.encode("<user>hi<assistant>"), *TOKENIZER.encode("yes<turn>no"))
    with served(pair(says([ids], VOCABULARY)), chat_template=TEMPLATE, turn_ends=("<turn>",)) as server:
        asked = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "include_stop_str_in_output": True}
        for stop, text in (([], "yes"), (["es"], "yes"), (["<t"], "yes<t")):
            for stream in (False, True):
                found = choices_of(server, "/v1/chat/completions", stream, **{**asked, "stop": stop})
                assert [shown for _, shown, _ in found] == [text]


def test_log_probabilities_name_tokens_by_ids_where_asked(server: Served) -> None:
    body = {"seed": 3, "max_tokens": 4, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = server.post(**body, prompt="hi", echo=True, logprobs=2).json()["choices"]
    ids, told = [*choice["prompt_token_ids"], *choice["token_ids"]], choice["logprobs"]
    assert told["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for top in told["top_logprobs"] if top for name in top)
    chat = {**body, "messages": MESSAGES, "logprobs": True}
    (choice,) = httpx.post(f"{server.url}/v1/chat/completions", json={**chat, "top_logprobs": 2}).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert bytes(byte for entry in entries[:3] for byte in entry["bytes"]).decode() in choice["message"]["content"]
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={**chat, "top_logprobs": 99}).json()["error"]
    assert (refused["param"], "'top_logprobs'" in refused["message"]) == ("top_logprobs", True)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_that_were_read_and_written(server: Served, stream: bool) -> None:
    body = {"n": 2, "seed": 3, "max_tokens": 20, "return_token_ids": True}
    expected = [list(sample.token_ids) for sample in alone(server, n=2, max_new_tokens=20)]
    hello = TOKENIZER.encode("hello")
    found = choices_of(server, "/v1/completions", stream, **body)
    assert [(ids, prompt) for ids, _, prompt in found] == [(ids, [hello]) for ids in expected]
    chat = choices_of(server, "/v1/chat/completions", stream, **body)
    written = TOKENIZER.encode("<user>hi<assistant>")
    assert [ids for ids, _, _ in chat] == [
        list(each.token_ids) for each in alone(server, "<user>hi<assistant>", n=2, max_new_tokens=20)
    ]
    assert chat[0][2] == [written]  # told once, of the whole answer


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_logprobs_of_prompts_are_those_of_echo(server: Served) -> None:
    body = {"prompt": ["hello you", "ab"], "max_tokens": 1, "n": 2}
    answer = server.post(**body, prompt_logprobs=3, echo=True, logprobs=3).json()
    for choice in answer["choices"]:
        first, *places = choice["prompt_logprobs"]
        assert first is None
        ids = TOKENIZER.encode(body["prompt"][choice["index"] // 2])
        said, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(places) == len(ids) - 1
        for i, place in enumerate(places, start=1):
            assert place[str(ids[i])]["logprob"] == said[i]
            assert {entry["decoded_token"]: entry["logprob"] for entry in place.values()} == {
                **tops[i], TOKENIZER.decode([ids[i]]): said[i],
            }  # fmt: skip
            logits = marked(0)(tuple(ids[:i])).double()
            ranks = {int(token): 1 + int((logits > logits[int(token)]).sum()) for token in place}
            assert {int(token): entry["rank"] for token, entry in place.items()} == ranks
    chat = server.post("/v1/chat/completions", prompt=None, messages=MESSAGES, max_tokens=1, prompt_logprobs=0).json()
    assert [len(place or ()) for place in chat["prompt_logprobs"]] == [0] + [1] * (chat["usage"]["prompt_tokens"] - 1)
    assert "prompt_logprobs" not in chat["choices"][0]


def test_a_truncated_prompt_is_its_end(server: Served) -> None:
    body = {"seed": 3, "max_tokens": 12, "return_token_ids": True}
    short = server.post(**body, prompt="llo").json()
    cut = server.post(**body, truncate_prompt_tokens=3, echo=True).json()
    assert cut["choices"][0]["token_ids"] == short["choices"][0]["token_ids"]
    assert cut["choices"][0]["text"] == "llo" + short["choices"][0]["text"]
    assert cut["choices"][0]["prompt_token_ids"] == TOKENIZER.encode("llo")
    assert cut["usage"]["prompt_tokens"] == 3
    whole = server.post(**body, truncate_prompt_tokens=50, echo=True).json()["choices"][0]
    assert whole["text"].startswith("hello")
    long = {"prompt": "x" * 3000, "max_tokens": 12}
    assert server.post(**long).status_code == 400
    assert server.post(**long, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == CONTEXT - 12
    chat = {"messages": [{"role": "user", "content": "x" * 3000}], "prompt": None, "max_tokens": 12}
    answer = server.post("/v1/chat/completions", **chat, truncate_prompt_tokens=-1, return_token_ids=True).json()
    assert TOKENIZER.decode(answer["prompt_token_ids"]).endswith("xx<assistant>")
    assert len(answer["prompt_token_ids"]) == CONTEXT - 12


# ── grammars ────────────────────────────────────────────────────────────────────────────────────────────────────────

GBNF = 'root ::= "a" number\nnumber ::= [0-9]+ "."'
SAME: list[tuple[dict[str, Any], Grammar]] = [
    ({"structured_outputs": {"json": ABC}}, Grammar("json_schema", ABC)),
    ({"guided_json": json.dumps(ABC)}, Grammar("json_schema", ABC)),
    ({"structured_outputs": {"json": ABC, "disable_any_whitespace": True}}, Grammar("json_schema", ABC, "compact")),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, Grammar("regex", "[ab]{3}")),
    ({"guided_regex": "[ab]{3}"}, Grammar("regex", "[ab]{3}")),
    ({"structured_outputs": {"choice": ["yes", "no (\"no\")", "yes!"]}}, Grammar("regex", 'yes!?|no \\("no"\\)')),
    ({"guided_choice": ["a/b", "a\nb", "é"]}, Grammar("regex", "a/b|a\\nb|é")),
    ({"structured_outputs": {"grammar": 'start: ("a" | "b") "."'}}, Grammar("regex", "[ab][.]")),
    ({"guided_grammar": GBNF}, Grammar("regex", "a[0-9]+[.]")),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, Grammar("json_object")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "grammar"), SAME, ids=lambda value: str(value)[:40])
def test_a_grammar_of_vllm_is_one_of_shoal(server: Served, fields: dict[str, Any], grammar: Grammar) -> None:
    pytest.importorskip("llguidance")
    expected = alone(server, grammar=grammar, max_new_tokens=30)
    for path in ("/v1/completions", "/v1/chat/completions"):
        if path.startswith("/v1/chat"):
            expected = alone(server, "<user>hi<assistant>", grammar=grammar, max_new_tokens=30)
        found = choices_of(server, path, False, **fields, n=3, seed=3, max_tokens=30, return_token_ids=True)
        assert [(ids, text) for ids, text, _ in found] == [(list(each.token_ids), each.text) for each in expected]
    if "disable_fallback" in str(fields):
        assert server.post(**fields).headers["x-shoal-ignored"] == "structured_outputs.disable_fallback"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"guided_json": {"type": "no such type"}}, "guided_json"),
    ({"truncate_prompt_tokens": 3, "suffix": "x", "align": False}, "truncate_prompt_tokens"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
]  # fmt: skip
"""What needs an engine: test_parsed_requests.py has the others."""


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_mean_something_else_is_refused_by_name(
    server: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    pytest.importorskip("llguidance")
    if "suffix" in fields:
        monkeypatch.setattr("shoal.serve.prompts.fill_in_middle", lambda *_: [1, 2])
    refused = server.post(**fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_spaces_between_special_tokens_are_as_asked_or_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert server.post(**apart).status_code == 200
    monkeypatch.setattr(type(TOKENIZER), "decode", lambda _, ids, **__: " ".join(map(str, ids)))
    refused = server.post(**apart, prompt=[1, 2])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "spaces_between_special_tokens")


def test_the_models_own_sampling_holds_where_a_chat_says_nothing() -> None:
    """As in vLLM; with --generation-config none, in completions, and where the request says it, it does not."""
    shoal = pair()
    shoal.target.hf.generation_config = GenerationConfig(top_k=1, temperature=0.7, repetition_penalty=1.1, max_new_tokens=3)
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}
    template = "{{ messages[0].content }}"

    def text(server: Served, **fields: Any) -> str:
        return httpx.post(f"{server.url}/v1/chat/completions", json={**asked, **fields}).json()["choices"][0]["message"][
            "content"
        ]

    with served(shoal, chat_template=template) as server:
        default, greedy = text(server), text(server, temperature=0)
        assert default == greedy != text(server, top_k=0)
        assert text(server, top_k=0) == text(server, top_k=0, repetition_penalty=1.1, temperature=0.7)
        assert text(server, top_k=0) != text(server, top_k=0, temperature=5)
        item = {"input": "hi", "max_output_tokens": 2}
        assert httpx.post(f"{server.url}/v1/responses", json=item).json()["temperature"] == 0.7
        own = server.post(prompt="hi", max_tokens=12, seed=3).json()["choices"][0]["text"]
        assert text(server, exact="distinct", n=2, guided_regex="a[bc]")[0] == "a"
    with served(shoal, chat_template=template, generation_config=False) as server:
        assert text(server) == own != default
