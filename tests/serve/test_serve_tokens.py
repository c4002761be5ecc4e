"""The tokenizer's routes, the model's names, request ids, and comments that keep a quiet stream open.

Tests of: serve.routes, serve.api_errors,
serve.responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serving import Gate, Served, legible, pair, served
from shoal.serve import responses

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 2048


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pair(), chat_template=TEMPLATE, aliases=("small", "gpt-4o")) as running:
        yield running


def asked(server: Served, path: str, **fields: Any) -> Any:
    response = httpx.post(server.url + path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_texts_become_tokens_and_texts_again(server: Served) -> None:
    text = "naïve 🐟 fish"
    answer = asked(server, "/tokenize", prompt=text, return_token_strs=True)
    ids = server.shoal.tokenizer.encode(text)
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (len(ids), CONTEXT, len(ids))
    assert answer["token_strs"] == server.shoal.tokenizer.convert_ids_to_tokens(ids)
    assert asked(server, "/detokenize", tokens=ids) == {"prompt": text}
    assert asked(server, "/detokenize", tokens=[]) == {"prompt": ""}
    assert server.post(prompt=ids, max_tokens=2, echo=True).json()["usage"]["prompt_tokens"] == answer["count"]


def test_conversations_become_the_tokens_that_the_model_reads(server: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = asked(server, "/tokenize", model="small", messages=messages)
    assert asked(server, "/detokenize", tokens=answer["tokens"])["prompt"] == "<user>hi<assistant>"
    chat = asked(server, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    bare = asked(server, "/tokenize", messages=messages, add_generation_prompt=False)
    assert asked(server, "/detokenize", tokens=bare["tokens"])["prompt"] == "<user>hi"


def test_conversations_are_tokenized_as_a_chat_reads_them(server: Served) -> None:
    """With tools that are told, a last message that goes on, and a developer."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    said = {"role": "assistant", "content": "I am", "prefix": True}
    for fields, more in (
        ({"messages": [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}]}, {}),
        ({"messages": [{"role": "user", "content": "hi"}, said]}, {}),
        ({"messages": [{"role": "user", "content": "hi"}, said | {"prefix": None}], "continue_final_message": True}, {}),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}, {"tool_choice": "none"}),
    ):  # fmt: skip
        chat = asked(server, "/v1/chat/completions", max_tokens=1, return_token_ids=True, **fields, **more)
        told = {name: value for name, value in fields.items() if not (name == "tools" and more)}
        assert asked(server, "/tokenize", **told)["tokens"] == chat["prompt_token_ids"]


@pytest.mark.parametrize("name", ["messages", "conversation", "chat_template", "tokenize"])
def test_variables_of_a_template_are_not_the_prompt_itself(server: Served, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {name: "x"}}
    for path in ("/tokenize", "/v1/chat/completions"):
        error = httpx.post(server.url + path, json=body).json()["error"]
        assert error["param"] == "chat_template_kwargs"
        assert error["message"] == f"chat_template_kwargs cannot have {name!r}, which the request says itself"


def test_what_the_tokenizer_is(server: Served) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info["chat_template"] == TEMPLATE
    assert info["tokenizer_class"] == type(server.shoal.tokenizer).__name__
    assert info["eos_token"] == server.shoal.tokenizer.eos_token


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ("/detokenize", {}, "tokens"),
])  # fmt: skip
def test_what_cannot_be_tokenized_is_refused(server: Served, path: str, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(server.url + path, json=fields)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


def test_every_name_of_the_model_is_served(server: Served) -> None:
    models = server.client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [(name, CONTEXT) for name in ("tiny", "small", "gpt-4o")]
    assert models[0].model_extra["shoal"]["loaded"] == server.shoal.loaded
    assert server.client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError) as error:
        server.client.models.retrieve("huge")
    assert error.value.code == "model_not_found"
    answers = [server.client.completions.create(model=name, prompt="hello", seed=1) for name in ("tiny", "gpt-4o")]
    assert [answer.model for answer in answers] == ["tiny", "gpt-4o"]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    response = server.post(model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_answers_carry_the_id_of_their_request(server: Served) -> None:
    def id_of(given: str | None, path: str = "/v1/models") -> str:
        return httpx.get(server.url + path, headers={} if given is None else {"x-request-id": given}).headers["x-request-id"]

    assert id_of("abc-1") == id_of("abc-1", "/nowhere") == "abc-1"
    made = {id_of(None), id_of(None), id_of("with space"), id_of("x" * 129)}
    assert len(made) == 4
    assert all(len(name) == 32 for name in made)


@pytest.mark.parametrize(("method", "path", "status", "words"), [
    ("POST", "/v1/embeddings", 404, "no embeddings"), ("POST", "/v1/audio/speech", 404, "no speech"),
    ("POST", "/v1/images/generations", 404, "no images"), ("POST", "/v1/moderations", 404, "no moderation"),
    ("POST", "/v1/batches", 404, "`shoal batch INPUT OUTPUT`"),
    ("GET", "/v1/files/file-1/content", 404, "`shoal batch INPUT OUTPUT`"),
    ("GET", "/v1/responses/resp_1", 404, "send the whole conversation"),
    ("POST", "/v1/responses/resp_1/cancel", 404, "no kept answers"),
    ("GET", "/v1/responses", 405, "takes POST, not GET; this server has no kept answers"),
    ("GET", "/v1/chat/completions", 405, "takes POST, not GET; this server has no kept answers"),
    ("GET", "/v1/chat/completions/chatcmpl-1", 404, "no kept answers"), ("DELETE", "/v1/models/tiny", 405, "takes GET, not DELETE"),
    ("POST", "/v1/messages", 404, "Anthropic"), ("POST", "/api/chat", 404, "Ollama"),
    ("POST", "/chat/completions", 404, "/chat/completions is /v1/chat/completions here"),
    ("GET", "/models", 404, "is /v1/models here"),
    ("POST", "/v1/v1/completions", 404, "/v1 twice"), ("POST", "//v1/completions", 404, "two slashes"),
    ("GET", "/nowhere", 404, "no such path"),
    ("GET", "/v1/embeddingsx", 404, "no such path"),
])  # fmt: skip
def test_a_path_that_is_not_there_says_what_there_is(
    server: Served, method: str, path: str, status: int, words: str
) -> None:
    response = httpx.request(method, server.url + path, json={} if method == "POST" else None)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"], error["param"]) == (
        status, "invalid_request_error", "unknown_route", None,
    )  # fmt: skip
    assert words in error["message"]
    assert "/openapi.json" in error["message"]


def test_the_client_says_what_is_not_there(server: Served) -> None:
    for ask in (
        lambda: server.client.embeddings.create(model="tiny", input="x"),
        lambda: server.client.responses.retrieve("resp_1"),
        lambda: server.client.batches.list(),
    ):
        with pytest.raises(
            openai.NotFoundError, match=r"this server has no .*; this server generates text, by /v1/completions"
        ):
            ask()


def test_a_quiet_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_SECONDS", 0.02)
    gate = Gate(legible(0), 8)
    with served(pair(gate)) as server:
        lines: list[str] = []
        body = {"prompt": "hello", "max_tokens": 8, "stream": True, "seed": 1}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                if line == ": keep-alive" and lines.count(line) == 3:
                    gate.opened.set()
        assert lines.count(": keep-alive") >= 3
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert text == server.post(max_tokens=8, seed=1).json()["choices"][0]["text"]


def test_as_many_samples_as_pass_at_200_needs(server: Served) -> None:
    answer = asked(server, "/v1/completions", prompt="hello", n=256, max_tokens=1)
    assert len(answer["choices"]) == 256
