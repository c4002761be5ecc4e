"""Requests made to stop a server, or to learn too much: each is refused at a small price, and the others are served meanwhile.

Tests of: serve.access, serve.routes, serve.api_errors, serve.run, serve.request_parser.
"""

from __future__ import annotations

import gzip
import inspect
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
import torch

from serving import TIMEOUT_SECONDS, Gate, Served, application, eventually, legible, pair, served, whole_answer
from shoal import cli
from shoal.cli.serve import serve
from shoal.models.sources import name_of
from shoal.serve import access, routes, run
from shoal.serve.access import hosts_of
from shoal.serve.api_errors import public

JSON = {"content-type": "application/json"}
ANSWER = 16 * 1024
"""Bytes; the most that an error may take."""
MOST_ERRORS = 100
"""The most that the validation of a body may find, which pydantic lists one by one."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pair(), chat_template="{{ messages[0].content }}") as running:
        yield running


def sent(server: Served, body: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, content=body, headers=JSON | headers, timeout=TIMEOUT_SECONDS)


# ── bodies that are expensive to judge ──────────────────────────────────────────────────────────────────────────────

TEXT, MANY = b'{"prompt":"x",', 2 * 2**20 - 100
CHAT = "/v1/chat/completions"


def repeated(before: bytes, item: bytes, after: bytes) -> bytes:
    """As many items as fit a body."""
    return before + b",".join([item] * ((MANY - len(before)) // (len(item) + 1))) + after


ATTACKS: dict[str, tuple[str, bytes]] = {
    "empty lists": ("", repeated(b'{"prompt":[', b"[]", b"]}")),
    "lists of empty lists": ("", repeated(b'{"prompt":[[1],', b"[[]]", b"]}")),
    "bad ids": ("", repeated(b'{"prompt":[1,', b'""', b"]}")),
    "bad texts": ("", repeated(b'{"prompt":["a",', b"1", b"]}")),
    "bad ids in a list": ("", repeated(b'{"prompt":[[1],[1,', b"{}", b"]]}")),
    "negative ids": ("", repeated(b'{"prompt":[', b"-1", b"]}")),
    "halves of characters": ("", repeated(b'{"prompt":[', b'"\\ud800"', b"]}")),
    "stop strings": ("", repeated(TEXT + b'"stop":[', b'"a"', b"]}")),
    "bad stop strings": ("", repeated(TEXT + b'"stop":[', b"1", b"]}")),
    "stop ids": ("", repeated(TEXT + b'"stop_token_ids":[', b'""', b"]}")),
    "biases": ("", TEXT + b'"logit_bias":{' + b",".join(b'"%d":"x"' % i for i in range(150_000)) + b"}}"),
    "biases that are none": ("", TEXT + b'"logit_bias":{' + b",".join(b'"a%d":1' % i for i in range(100_000)) + b"}}"),
    "unknown fields": ("", TEXT + b",".join(b'"a%d":1' % i for i in range(150_000)) + b"}"),
    "unknown fields inside": ("", TEXT + b'"shoal":{' + b",".join(b'"a%d":1' % i for i in range(150_000)) + b"}}"),
    "a long name": ("", TEXT + b'"' + b"a" * (MANY - 100) + b'":1}'),
    "a long name in many bytes": ("", TEXT + b'"' + "😀".encode() * (MANY // 5) + b'":1}'),
    "a long name inside": ("", TEXT + b'"shoal":{"' + b"a" * (MANY - 100) + b'":1}}'),
    "a long bias": ("", TEXT + b'"logit_bias":{"' + b"a" * (MANY - 100) + b'":1}}'),
    "a long value": ("", TEXT + b'"speculation":"' + b"a" * (MANY - 100) + b'"}'),
    "a long model": ("", TEXT + b'"model":"' + b"a" * (MANY - 100) + b'"}'),
    "a large number": ("", b'{"prompt":["x","y","z"],"n":' + b"9" * 4300 + b"}"),
    "a large seed": ("", TEXT + b'"seed":-' + b"9" * 4300 + b"}"),
    "a large float": ("", TEXT + b'"temperature":' + b"9" * 4300 + b"}"),
    "a large bias": ("", TEXT + b'"logit_bias":{"1":' + b"9" * 4300 + b"}}"),
    "one name many times": ("", TEXT + b",".join([b'"n":0'] * 300_000) + b"}"),
    "messages": (CHAT, repeated(b'{"messages":[', b"{}", b"]}")),
    "messages of one field": (CHAT, repeated(b'{"messages":[', b'{"a":1}', b"]}")),
    "parts": (CHAT, repeated(b'{"messages":[{"role":"user","content":[', b"[]", b"]}]}")),
    "tool calls": (CHAT, repeated(b'{"messages":[{"role":"user","content":"x","tool_calls":[', b"[]", b"]}]}")),
    "modalities": (CHAT, repeated(b'{"messages":[{"role":"user","content":"x"}],"modalities":[', b'"x"', b"]}")),
    "deep": ("", b'{"prompt":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "deep in a schema": (
        "",
        TEXT + b'"response_format":{"type":"json_schema","json_schema":{"schema":{"a":' + b"[" * 900 + b"]" * 900 + b"}}}}",
    ),
}


@pytest.mark.slow(but=["bad ids"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_body_that_is_expensive_to_judge(server: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = ATTACKS[name]
    assert len(body) <= 2 * 2**20
    found = []
    real = access.RequestValidationError
    monkeypatch.setattr(
        access, "RequestValidationError", lambda errors, body: found.append(len(errors)) or real(errors, body=body)
    )
    response = sent(server, body, path or "/v1/completions")
    assert response.status_code == (404 if name == "a long model" else 400), response.text[:200]
    assert len(response.content) < ANSWER
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert all(count <= MOST_ERRORS for count in found)
    assert server.worker.thread.alive


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x" * 500])
def test_compressed_bodies_are_told_so(server: Served, coding: str) -> None:
    """They were no valid JSON: a byte 0x8b in position 1."""
    answer = sent(server, gzip.compress(b'{"prompt": "x"}'), **{"content-encoding": coding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert f"the body is compressed ({coding[:40]})" in answer.json()["error"]["message"]
    assert sent(server, b'{"prompt": "x"}', **{"content-encoding": "Identity"}).status_code == 200


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt": {}}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt.1"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
])  # fmt: skip
def test_errors_name_the_field_that_was_sent(server: Served, body: dict[str, Any], param: str) -> None:
    """And no part of how it is read: 'prompt.text' was there for a prompt that is an object."""
    answer = httpx.post(server.url + ("/v1/completions" if "prompt" in body else CHAT), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert f"'{param}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/", "/chat", "/editor", "/health", "/ready", "/v1/models", "/v1/models/tiny", "/v1/models/no"]
)
def test_what_can_be_read_has_a_head(server: Served, path: str) -> None:
    whole, head = httpx.get(server.url + path), httpx.head(server.url + path)
    assert (head.status_code, head.headers["content-length"], head.content) == (
        whole.status_code, whole.headers["content-length"], b"",
    )  # fmt: skip


def test_half_a_surrogate_pair_is_no_fault_of_the_server(server: Served) -> None:
    """Where no text needs it, it comes back as it was sent; else the answer says what is wrong."""
    half = "\ud83d"
    schema = {"type": "json_schema", "name": "a", "description": half, "schema": {"type": "object"}}
    for fields in ({"metadata": {"a": half}}, {"text": {"format": schema}}):
        body = json.dumps({"input": "hi", "max_output_tokens": 1, **fields}).encode()
        response = sent(server, body, "/v1/responses")
        assert (response.status_code, "\\ud83d" in response.text) == (200, True), response.text
    for given in ({"const": half}, {"type": "object", "description": half}):
        body = json.dumps({"prompt": "x", "guided_json": given}).encode()
        error = sent(server, body, "/v1/completions")
        assert (error.status_code, "surrogate" in error.json()["error"]["message"]) == (400, True)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"description": half}}}}
    for path, fields, param in (
        ("/v1/chat/completions", {**chat, half: 1}, "\\ud83d"),
        ("/v1/chat/completions", {**chat, "stream_options": {half: 1}}, "stream_options.\\ud83d"),
        ("/v1/responses", {"input": "hi", "metadata": {half: 1}}, "metadata.\\ud83d"),
        ("/v1/chat/completions", {**chat, "tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
         "tools.0.function.parameters"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **tool}]}, "tools.0.parameters"),
    ):  # fmt: skip
        error = sent(server, json.dumps(fields).encode(), path)
        assert (error.status_code, error.json()["error"]["param"]) == (400, param), error.text


def test_of_many_errors_ten_are_reported() -> None:
    from shoal.serve.api_errors import api_error_of

    errors = [{"type": "x", "loc": ("body", "prompt", i), "msg": f"no {i}."} for i in range(100)]
    fault = api_error_of(
        access.RequestValidationError([{**errors[0], "loc": ("body", "prompt")}, *errors], body={"prompt": [0] * 100})
    )
    assert fault.detail.count("no ") == 10


@pytest.mark.parametrize("step", ["parse", "validated"])
def test_a_body_is_judged_while_others_are_served(server: Served, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judging, go_on = threading.Event(), threading.Event()
    real = getattr(access, step)

    def waiting(*arguments: Any) -> Any:
        judging.set()
        assert go_on.wait(TIMEOUT_SECONDS)
        return real(*arguments)

    monkeypatch.setattr(access, step, waiting)
    got: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: got.append(server.post(max_tokens=2)))
    thread.start()
    assert judging.wait(TIMEOUT_SECONDS)
    assert httpx.get(f"{server.url}/health", timeout=TIMEOUT_SECONDS).status_code == 200
    go_on.set()
    thread.join(TIMEOUT_SECONDS)
    assert got[0].status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "text/json+x"]
)
def test_pages_of_others_cannot_send_what_is_no_json(server: Served, kind: str | None) -> None:
    """A browser asks before it sends JSON to another origin, and before nothing else."""
    response = httpx.post(
        f"{server.url}/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind} if kind else {}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    for good in ("application/json; charset=utf-8", "Application/JSON", "application/x+json"):
        assert sent(server, b'{"prompt": "x"}', **{"content-type": good}).status_code == 200


# ── errors that nobody foresaw ──────────────────────────────────────────────────────────────────────────────────────


def test_ids_that_no_tokenizer_can_decode(server: Served) -> None:
    for prompt in ([4294967296], [[1], [2**62]], [260]):
        for echo in (True, False):
            response = server.post(prompt=prompt, echo=echo)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_an_unhandled_error_counts_as_500_and_names_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.request_parser import RequestParser

    def broken(*_: Any) -> Any:
        raise FileNotFoundError("/home/user/models/secret")

    monkeypatch.setattr(RequestParser, "parse", broken)
    with served(pair()) as server:
        response = server.post()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert server.metric('shoal_requests_total{path="/v1/completions",status="500"}') == 1
        assert server.metric('shoal_requests_total{path="/v1/completions",status="499"}') == 0


def test_what_a_model_at_a_path_says_of_itself_is_reported_without_the_path() -> None:
    shoal = pair(lambda ids: legible(0)(ids) * (torch.nan if len(ids) > 8 else 1.0))
    for model in (shoal.target, shoal.draft_model):
        model.name = "/home/user/models/tiny-1.5b"
    with served(shoal) as server:
        responses = [
            server.post(prompt=prompt, n=2, stream=stream) for prompt in ("hello", "hello hello") for stream in (False, True)
        ]
    assert 500 in {response.status_code for response in responses}
    for response in responses:
        assert "tiny-1.5b" in response.text
        assert "/home" not in response.text
        assert "models/" not in response.text


@pytest.mark.parametrize(
    ("said", "public_text"),
    [
        ("/home/user/a b", "a b"),
        ("cannot read '/a/b.json': [Errno 2]", "cannot read 'b.json': [Errno 2]"),
        ("in ~/x/y, ./x/y and ../x/y", "in y, y and y"),
        (r"at C:\x\y.bin", "at y.bin"),
        ("Qwen/Qwen3-8B at 3/4, see https://a.example/b and/or c", "Qwen/Qwen3-8B at 3/4, see https://a.example/b and/or c"),
    ],
)
def test_paths_are_named_by_their_last_part(said: str, public_text: str) -> None:
    assert public(said) == public_text


def test_a_model_is_called_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    names = [
        name_of(name)
        for name in ("Qwen/Qwen3-8B", "small", "./small/", str(tmp_path / "small"), "/a/b.gguf", "hub/id:c.gguf")
    ]
    assert names == ["Qwen/Qwen3-8B", "small", "small", "small", "b", "c"]
    cached = tmp_path / "models--Qwen--Qwen3-8B/snapshots" / ("0" * 40)
    cached.mkdir(parents=True)
    (tmp_path / "current").symlink_to("small")
    monkeypatch.chdir("current")
    given = (".", "..", str(tmp_path / "current/"), "../current", "../small/.", str(cached), "/a/b-Q4_0-00001-of-00003.gguf")
    assert [name_of(name) for name in given] == [
        "small", tmp_path.name, "current", "current", "small", "Qwen/Qwen3-8B", "b-Q4_0",
    ]  # fmt: skip


# ── keys before bodies ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_key_is_checked_before_the_body_is_read() -> None:
    with served(pair(), keys=("sesame",), max_body=1000) as server:
        for body in (b"{", b"[" * 100_000, b'{"prompt": "' + b"x" * 10_000 + b'"}', b'{"bogus": 1}'):
            assert sent(server, body).status_code == 401
            assert sent(server, body, authorization="Bearer sesame").status_code in (400, 413)
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n"
            )
            connection.sendall(head.encode())  # and no body
            assert whole_answer(connection) == 401


def test_a_client_that_goes_before_its_body_is_there() -> None:
    with served(pair()) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n"
            )
            connection.sendall(head.encode() + b'{"prompt":')
        eventually(lambda: server.metric('shoal_requests_total{path="/v1/completions",status="499"}') == 1)
        assert json.loads(server.post().content)["choices"]


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def connected(server: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(TIMEOUT_SECONDS)
        yield connection


def until_closed(connection: socket.socket, drop: bytes = b"") -> bytes:
    """What comes until the server closes, while a byte at a time is sent."""
    got = b""
    connection.settimeout(0.05)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with suppress(TimeoutError, ConnectionError, BrokenPipeError):
            if drop:
                connection.sendall(drop)
        try:
            part = connection.recv(2**16)
        except TimeoutError:
            continue
        except ConnectionError:
            return got
        if not part:
            return got
        got += part
    raise AssertionError("the connection stays open")


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.slow(but=["nothing"])
@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp", HEAD], ids=["nothing", "a line", "headers"])
def test_headers_that_trickle(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    with served(pair()) as server:
        monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.IDLE, 0.5)
        with connected(server) as connection:
            connection.sendall(begun)
            got = until_closed(connection, drop=b"x" if begun else b"")
        assert got.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in got
        monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.IDLE, TIMEOUT_SECONDS)
        assert server.post().status_code == 200


def test_a_later_request_that_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(pair()) as server, connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert whole_answer(connection) == 200
        monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.IDLE, 0.5)
        connection.sendall(b"GET /health HT")
        assert b"HTTP/1.1 408" in until_closed(connection, drop=b"x")


def test_a_body_that_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_SECONDS", 0.5)
    with served(pair()) as server:
        with connected(server) as connection:
            connection.sendall(HEAD + b"content-length: 100000\r\n\r\n")
            got = until_closed(connection, drop=b"x")
        assert got.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in got
        assert server.metric('shoal_requests_total{path="/v1/completions",status="408"}') == 1


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_a_body_that_trickles_and_that_nobody_reads(monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    with served(pair(), keys=("sesame",)) as server:
        monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.SEND_BODY, 0.5)
        with connected(server) as connection:
            connection.sendall(HEAD.replace(b"/v1/completions", path) + b"content-length: 100000\r\n\r\n")
            got = until_closed(connection, drop=b"x")
        assert got.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404"))


def test_a_request_that_takes_its_time_is_no_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(legible(0), length=10)
    with served(pair(gate)) as server, connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert whole_answer(connection) == 200  # the time for a connection's first bytes is over
        for phase in run.ARRIVAL_TIMEOUT_SECONDS:
            monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, phase, 0.2)
        body = b'{"prompt": "hello", "max_tokens": 20}'
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert gate.reached.wait(TIMEOUT_SECONDS)
        threading.Event().wait(0.5)
        gate.opened.set()
        assert whole_answer(connection) == 200


def test_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PROTOCOL, "limit_concurrency", 3)
    monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.IDLE, TIMEOUT_SECONDS)
    with served(pair()) as server, ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(3)]
        for _ in range(3):
            with connected(server) as more:
                got = until_closed(more)
            assert got.startswith(b"HTTP/1.1 503")
            assert b"too_many_connections" in got
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert whole_answer(held[0]) == 200
        held[1].close()
        eventually(lambda: server.post(max_tokens=1).status_code == 200)


def test_clients_close_their_idle_connections_before_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [httpx.Limits().keepalive_expiry or 0, 15, 60, 90]  # httpx, aiohttp, nginx, Go
    assert run.PROTOCOL["timeout_keep_alive"] > max(clients)
    with served(pair()) as server, connected(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert whole_answer(connection) == 200
            monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.IDLE, 0.2)  # not of the first request: it might be slow
            threading.Event().wait(0.5)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_that_was_pointed_here_is_refused() -> None:
    with served(pair(), hosts=hosts_of("127.0.0.1", ())) as server:
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example.",
        ):
            for path in ("/v1/models", "/", "/metrics", "/v1/completions", "/health"):
                response = httpx.request("GET", server.url + path, headers={"host": host})
                assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
        for host in ("localhost", "LOCALHOST.:99", "127.0.0.1:1", "[::1]", "[::1]:8000", "10.0.0.7"):
            assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200
        for target, wanted in (  # as proxies are asked; such a target counts before the header
            (b"http://127.0.0.1/v1/models?a=1", 200),
            (b"HTTP://localhost:99/v1/models", 200),
            (b"http://localhost", 200),
            (b"http://localhost/v1/none", 404),
            (b"http://evil.example/v1/models", 403),
            (b"http://localhost@evil.example/v1/models", 403),
        ):
            with httpx.Client() as client:
                assert client.get(server.url, extensions={"target": target}).status_code == wanted, target
        assert server.metric('shoal_requests_total{path="other",status="403"}') == 27


def test_names_may_be_allowed() -> None:
    assert hosts_of("0.0.0.0", ()) == ("*",)
    assert hosts_of("0.0.0.0", ["a.example"]) == ("a.example",)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        assert hosts_of(host, ()) == (host,)
    assert hosts_of("localhost", ["a.example", "*"]) == ("a.example", "*")
    with served(pair(), hosts=("A.example",)) as server:
        statuses = [
            httpx.get(f"{server.url}/health", headers={"host": host}).status_code for host in ("a.Example:80", "b.example")
        ]
        assert statuses == [200, 403]


def test_the_command_checks_names_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[str, ...]] = []
    monkeypatch.setattr(run, "run", lambda app, *_, **__: allowed.append(app))
    monkeypatch.setattr("shoal.serve.app.ServeConfig.app", lambda recipe: recipe.settings.hosts)
    for options in ([], ["--allowed-host", "a.example", "--allowed-host", "b"], ["--host", "0.0.0.0"]):
        assert cli.run(["serve", "--port", "0", *options]) == 0
    assert allowed == [("127.0.0.1",), ("a.example", "b"), ("*",)]


# ── ready or not ────────────────────────────────────────────────────────────────────────────────────────────────────


def status(server: Served, path: str) -> int:
    return httpx.get(server.url + path, timeout=TIMEOUT_SECONDS).status_code


def test_a_pass_that_hangs_makes_ready_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "HUNG_PASS_SECONDS", 0.2)
    gate = Gate(legible(0), length=10)
    with served(pair(gate)) as server:
        assert status(server, "/ready") == 200
        thread = threading.Thread(target=server.post)
        thread.start()
        assert gate.reached.wait(TIMEOUT_SECONDS)
        eventually(lambda: status(server, "/ready") == 503)
        assert "at one pass for" in httpx.get(f"{server.url}/ready").json()["status"]
        assert status(server, "/health") == 200
        gate.opened.set()
        thread.join(TIMEOUT_SECONDS)
        eventually(lambda: status(server, "/ready") == 200)
        threading.Event().wait(0.5)  # an engine without work is not stuck
        assert status(server, "/ready") == 200


def test_ready_is_red_before_a_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Balancers look at it: whoever is sent here meanwhile is still served."""
    monkeypatch.setattr(run, "NOTICE_SECONDS", TIMEOUT_SECONDS)
    application_ = application(pair())
    seen: list[int] = []

    def client() -> None:
        seen.append(httpx.get(f"{url}/ready").status_code)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 503)
        seen.append(httpx.get(f"{url}/health").status_code)
        seen.append(httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=TIMEOUT_SECONDS).status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    with run.bind("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=client)
        run.run(application_, listening, 5, "critical", ready=thread.start)
        thread.join(TIMEOUT_SECONDS)
    assert seen == [200, 200, 200]


def test_a_server_stops_before_it_is_killed() -> None:
    """Orchestrators kill 30 seconds after SIGTERM."""
    drain = inspect.signature(serve).parameters["drain"].default
    assert run.NOTICE_SECONDS > 0
    assert drain + run.NOTICE_SECONDS + run.GRACE_SECONDS < 30
