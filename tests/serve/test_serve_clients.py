"""What clients of OpenAI's API send besides what matters here: harmless fields are passed over and named, limits are reported.

Tests of: serve.request_fields, serve.request_models, serve.request_builder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serving import Served, pair, served

CONTEXT = 150
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
HARMLESS: dict[str, Any] = {
    "user": "me", "safety_identifier": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low", "verbosity": "low", "bad_words": [], "use_beam_search": False, "early_stopping": True,
    "length_penalty": 1.5, "include_reasoning": True, "priority": 3, "request_id": "r", "cache_salt": "s", "cache_prompt": True,
    "id_slot": -1,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pair(context=CONTEXT), max_tokens=40, chat_template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_field_is_ignored_and_named(server: Served, name: str) -> None:
    for path, asked, stream in (
        ("/v1/completions", {"prompt": "hello"}, name < "r"), ("/v1/chat/completions", {"messages": MESSAGES}, name >= "r")
    ):  # fmt: skip
        body = {**asked, "seed": 7, "max_tokens": 4, "stream": stream}
        plain, with_it = (httpx.post(server.url + path, json=body | more) for more in ({}, {name: HARMLESS[name]}))
        assert with_it.status_code == 200, with_it.text
        assert with_it.headers["x-shoal-ignored"] == name
        assert "x-shoal-ignored" not in plain.headers
        assert "x-shoal-clamped" not in with_it.headers
        assert stream or with_it.json()["choices"] == plain.json()["choices"]


def test_all_that_was_ignored_is_named(server: Served) -> None:
    more = {"stream_options": {"include_usage": True, "include_obfuscation": True}, "stream": True}
    headers = server.post(max_tokens=2, **HARMLESS, **more).headers
    assert set(headers["x-shoal-ignored"].split(", ")) == {*HARMLESS, "stream_options.include_obfuscation"}


def test_null_is_no_field(server: Served) -> None:
    response = server.post(max_tokens=2, tools=None, functions=None, whatever=None, shoal={"what": None}, user=None)
    assert response.status_code == 200
    assert "x-shoal-ignored" not in response.headers
    nulls = dict.fromkeys(("temperature", "stop", "logit_bias", "stream", "n", "echo", "suffix", "speculation", "shoal"))
    assert server.post(seed=1, **nulls).json()["choices"] == server.post(seed=1).json()["choices"]
    refused = server.post(whatever=None, best_of_beams=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of_beams")
    assert refused.json()["error"]["code"] == "unknown_field"


def test_the_official_client_sends_back_what_it_got(server: Served) -> None:
    """`message.model_dump()` has null fields, and answers of OpenAI's have empty lists."""
    client = server.client.chat.completions
    first = client.create(model="tiny", messages=MESSAGES, seed=1, max_tokens=8, user="me", store=False, modalities=["text"])
    said = first.choices[0].message.model_dump()
    assert said["refusal"] is said["tool_calls"] is said["function_call"] is said["audio"] is None
    again = [client.create(model="tiny", messages=[*MESSAGES, message, *MESSAGES], seed=1, max_tokens=8) for message in (
        said, {**said, "tool_calls": [], "annotations": []}, {"role": "assistant", "content": said["content"]},
    )]  # fmt: skip
    assert len({answer.choices[0].message.content for answer in again}) == 1
    assert again[0].usage.prompt_tokens == len("<user>hi<assistant><user>hi<assistant>") + len(said["content"])
    with pytest.raises(openai.BadRequestError) as error:
        client.create(model="tiny", messages=[{**said, "tool_calls": [{"id": "x"}]}])
    assert ".tool_calls" in error.value.param
    for field in ({"refusal": "no"}, {"audio": {"id": "x"}}):  # of other answers, which a template does not show
        passed = client.with_raw_response.create(model="tiny", messages=[{**said, **field}], max_tokens=1)
        assert passed.headers["x-shoal-ignored"] == f"messages.{next(iter(field))}"
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.create(model="tiny", messages=MESSAGES, modalities=["text", "audio"])


def test_top_k_may_be_switched_off_as_elsewhere(server: Served) -> None:
    choices = [server.post(seed=7, top_k=k).json()["choices"] for k in (-1, 0, 1)]
    assert choices[0] == choices[1] != choices[2]


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_server_allows_are_clamped_and_said(server: Served, stream: bool) -> None:
    for name, path, asked in (
        ("max_tokens", "/v1/completions", {"prompt": "hello"}),
        ("max_tokens", "/v1/chat/completions", {"messages": MESSAGES}),
        ("max_completion_tokens", "/v1/chat/completions", {"messages": MESSAGES}),
    ):
        asked |= {"temperature": 0}  # sampled, a text may end before
        response = httpx.post(server.url + path, json={**asked, name: 10**6, "stream": stream})
        assert response.headers["x-shoal-clamped"] == "max_tokens=40"
        if not stream:
            assert response.json()["usage"]["completion_tokens"] == 40
        exact = httpx.post(server.url + path, json={**asked, name: 40, "stream": stream})
        assert "x-shoal-clamped" not in exact.headers


def test_more_tokens_than_the_server_allows_are_what_the_context_leaves(server: Served) -> None:
    """Who asks for a million means as many as there can be: no reason to refuse."""
    asked = {"prompt": "x" * (CONTEXT - 18), "max_tokens": 10**6, "temperature": 0}  # sampled, a text may end before
    response = httpx.post(f"{server.url}/v1/completions", json=asked)
    assert response.headers["x-shoal-clamped"] == "max_tokens=18"
    assert response.json()["usage"]["completion_tokens"] == 18


def test_beyond_the_context_is_told_in_the_words_that_clients_look_for(server: Served) -> None:
    long = "x" * (CONTEXT - 18)
    with pytest.raises(openai.BadRequestError) as error:
        server.client.completions.create(model="tiny", prompt=long, max_tokens=19)
    assert (error.value.code, error.value.type, error.value.param) == (
        "context_length_exceeded", "invalid_request_error", "prompt",
    )  # fmt: skip
    assert f"maximum context length is {CONTEXT} tokens. However, you requested {CONTEXT + 1} tokens" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 2 * CONTEXT}])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    fits = server.client.completions.create(model="tiny", prompt=long, max_tokens=18, temperature=0)
    assert fits.usage.completion_tokens == 18
    (choice,) = server.post(prompt="x" * (CONTEXT - 8), temperature=0).json()["choices"]
    assert choice["finish_reason"] == "length"  # who says nothing gets what fits
    assert server.post(prompt=["x", "x" * (CONTEXT - 8)], max_tokens=9).json()["error"]["code"] == "context_length_exceeded"
    assert server.post(prompt="x" * CONTEXT, max_tokens=0, echo=True, logprobs=0).status_code == 200


def test_pages_may_read_the_notes() -> None:
    origin = "https://page.example"
    with served(pair(), origins=(origin,)) as server:
        exposed = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"origin": origin}).headers
        names = set(exposed["access-control-expose-headers"].split(", "))
        assert names == {"x-request-id", "x-shoal-ignored", "x-shoal-clamped", "x-shoal-told"}
