"""What a server does when clients, models, memory or its own thread fail: it says so, gives everything back, and lives on.

Tests of: serve.worker, serve.engine_thread, serve.worker, serve.access, serve.run,
serve.token_details, cli.serve.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import h11
import httpx
import openai
import pytest
import torch
from fastapi.testclient import TestClient

from serving import TIMEOUT_SECONDS, Gate, Served, application, eventually, legible, pair, run_until_it_ends, served, status
from serving_faults import asking, assert_all_given_back, connect_narrowly, in_background, narrow, server
from shoal import cli
from shoal.engine import running_rows
from shoal.errors import RequestError
from shoal.models.cache import SlotCache
from shoal.serve import run
from shoal.serve.access import is_valid_key, owner_of, read_keys, weights_of
from shoal.serve.settings import Settings
from shoal.serve.token_details import Scoring

__all__ = ["narrow", "server"]  # fixtures

JSON = {"content-type": "application/json"}


# ── clients that go ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_takes_its_rows_along(stream: bool) -> None:
    gate = Gate(legible(0), length=40)
    with served(pair(gate)) as server:
        with server.connect() as connection:
            connection.sendall(asking(prompt="hello", n=3, max_tokens=900, stream=stream))
            assert gate.reached.wait(TIMEOUT_SECONDS)
            assert server.worker.rows == 3
            if stream:
                assert status(connection) == 200
        eventually(lambda: server.worker.rows == 0)  # the event loop knows, while the engine is held at the gate
        gate.opened.set()
        assert_all_given_back(server)
        assert server.metric('shoal_rows_total{reason="length"}') == 1  # that of the last request: the three were cut
        assert server.worker.thread.engine.stats.committed < 3 * 900


@pytest.mark.slow(but=["None"])
@pytest.mark.parametrize("exact", [None, "weights", "smc", "asap", "asap+smc", "distinct"])
def test_rows_that_are_drawn_together_end_at_the_next_round(exact: str | None) -> None:
    """Twelve for eight slots: those that run, that wait, and that are held for the ones before them."""
    gate = Gate(legible(0), length=14)
    body = {"prompt": "hello", "n": 12, "max_tokens": 90, "guided_regex": "([!-~]{2}|[!-~]{40})*", "temperature": 1.0}
    with served(pair(gate), queue=16) as server:
        stats = server.worker.thread.engine.stats
        with server.connect() as connection:
            connection.sendall(asking(**body, **({"exact": exact} if exact else {})))
            assert gate.reached.wait(TIMEOUT_SECONDS)
            before = stats.rounds
        eventually(lambda: server.worker.rows == 0)
        gate.opened.set()
        eventually(lambda: server.worker.thread.engine.scheduler.idle)
        assert 0 < before <= stats.rounds <= before + 1
        assert_all_given_back(server)


def test_a_client_that_goes_leaves_the_rest_of_its_prompt_uncomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in pieces of 512 tokens, of which the second is held here until the client has gone."""
    reached, opened, compute = threading.Event(), threading.Event(), running_rows.prefill

    def held(target: Any, round_: Any, *more: Any) -> int:
        if any(chunk.start for chunk in round_.chunks):
            reached.set()
            assert opened.wait(TIMEOUT_SECONDS)
        return compute(target, round_, *more)

    monkeypatch.setattr(running_rows, "prefill", held)
    with served(pair(context=8192)) as server:
        with server.connect() as connection:
            connection.sendall(asking(prompt="hello " * 700, max_tokens=900))
            assert reached.wait(TIMEOUT_SECONDS)
        eventually(lambda: server.worker.rows == 0)
        opened.set()
        assert_all_given_back(server)
        assert server.worker.thread.engine.stats.prefill_tokens < 3 * 512


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux cuts off those who do not read")
def test_a_client_that_does_not_read_is_cut_off(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "UNREAD_TIMEOUT_SECONDS", 1.0)
    with served(pair()) as server, connect_narrowly(server) as connection:
        connection.sendall(asking(prompt="hello", n=4, max_tokens=80, logprobs=20, stream=True))
        assert status(connection) == 200
        assert_all_given_back(server)  # though the connection is open, and there is more to read
        rest = b""
        with suppress(ConnectionError):
            while part := connection.recv(2**16):
                rest += part
        assert b"[DONE]" not in rest


def test_headers_without_end_are_not_held(server: Served) -> None:
    with server.connect() as connection:
        sent = 0
        with suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            for sent in range(1000):  # noqa: B007
                connection.sendall(b"x: y\r\n" * 10_000)
        assert sent < 999
    assert server.post().status_code == 200


def test_one_connection_serves_many_requests(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(3 * asking(prompt="hello", max_tokens=2, seed=1))
        got = b""
        while got.count(b'"choices"') < 6:  # one in each answer, and one in its usage
            got += connection.recv(2**16)
    assert got.count(b"HTTP/1.1 200") == 3


@pytest.mark.slow
def test_a_hundred_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.ARRIVAL_TIMEOUT_SECONDS, h11.IDLE, TIMEOUT_SECONDS)  # so many threads take long to send
    limits = httpx.Limits(max_connections=100)
    with (
        served(pair(), queue=60) as server,
        httpx.Client(limits=limits, timeout=TIMEOUT_SECONDS, base_url=server.url) as client,
    ):
        body = {"prompt": "hello", "max_tokens": 2}
        threads = [in_background(lambda: client.post("/v1/completions", json=body)) for _ in range(100)]
        for thread, _ in threads:
            thread.join()
        statuses = [got[0].status_code for _, got in threads]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 68
        assert_all_given_back(server)


def test_scoring_lets_rounds_pass() -> None:
    """Chunks of long prompts come between rounds, and as much is let in as of what is to be drawn."""
    gate = Gate(legible(0), length=10)
    with served(pair(gate), queue=4) as server:
        drawing, _ = in_background(lambda: server.post(max_tokens=40, seed=1))
        assert gate.reached.wait(TIMEOUT_SECONDS)
        long = {"prompt": ["x" * 300] * 11, "max_tokens": 0, "echo": True, "logprobs": 0}
        scoring, got = in_background(lambda: server.post(**long))
        eventually(lambda: server.worker.rows == 12)
        refused = server.post(max_tokens=0, echo=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        chunks = 0
        real = Scoring.advance

        def advance(self: Scoring) -> None:
            nonlocal chunks
            chunks += not server.worker.thread.engine.scheduler.idle
            real(self)

        Scoring.advance = advance
        try:
            gate.opened.set()
            drawing.join()
        finally:
            Scoring.advance = real
        scoring.join()
        assert 0 < chunks <= server.worker.thread.engine.stats.rounds  # one at most between two rounds
        assert [len(choice["logprobs"]["tokens"]) for choice in got[0].json()["choices"]] == [300] * 11
        assert_all_given_back(server)


def test_one_client_goes_and_another_gets_all_of_its_own() -> None:
    gate = Gate(legible(0), length=40)
    with served(pair(gate)) as server:
        thread, got = in_background(lambda: server.post(seed=3, n=2, max_tokens=60))
        with server.client.completions.create(model="tiny", prompt="other", n=2, max_tokens=900, stream=True):
            assert gate.reached.wait(TIMEOUT_SECONDS)
        gate.opened.set()
        thread.join()
        samples = server.shoal.generate("hello", 2, seed=3, max_new_tokens=60, lookahead=4)[0].samples
        assert [choice["text"] for choice in got[0].json()["choices"]] == [sample.text for sample in samples]
        assert_all_given_back(server)


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nul",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "x",}',
        b"[" * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "x", "user": [-Infinity]}',
        b'{"prompt": "x", "user": 1e999}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"n": ' + 5000 * b"9" + b"}",
    ],
    ids=repr,
)
def test_malformed_json(server: Served, body: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_ten_megabytes(server: Served, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * 10 * 2**20 + b'"}'
    content: Any = iter([body[i : i + 2**16] for i in range(0, len(body), 2**16)]) if chunked else body
    response = httpx.post(f"{server.url}/v1/completions", content=content, headers=JSON, timeout=TIMEOUT_SECONDS)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert server.post().status_code == 200


# ── keys and origins ────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_open_the_api_and_nothing_else_does() -> None:
    with served(pair(), keys=("first", "second")) as server:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer firs"}, {"authorization": "first"}):
            for path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/tokenizer_info"):
                method = "GET" if path in ("/v1/models", "/tokenizer_info") else "POST"
                response = httpx.request(method, server.url + path, headers=given, json={})
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
            assert client.completions.create(model="tiny", prompt="x").choices
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3


def test_the_command_asks_for_the_keys_of_its_file(
    saved_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("first\n")
    target, drafter = saved_pair
    apps: list[Any] = []
    monkeypatch.setattr("shoal.serve.run.run", lambda app, *_, **__: apps.append(app))
    ask = ["serve", "--model", str(target), "--draft", str(drafter), "--port", "0", "--api-key-file", str(tmp_path / "keys")]
    assert cli.run(ask) == 0
    statuses = []
    with TestClient(apps[0], base_url="http://localhost") as client:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "Bearer first"}):
            statuses.append(client.get("/v1/models", headers=headers).status_code)
    assert statuses == [401, 401, 200]


def test_keys_are_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert read_keys(None) == {}
    monkeypatch.setenv("SHOAL_API_KEY", " one ")
    assert read_keys(None) == {"one": 1.0}
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n second  4\nthird 0.25\n")
    assert read_keys(file) == {"first": 1.0, "second": 4.0, "third": 0.25}
    assert weights_of(read_keys(file)) == {owner_of("second"): 4.0, owner_of("third"): 0.25}
    for line in ("secret four", "secret 0", "secret nan", "secret -1", "secret inf", "secret 1 2", "secret 1001"):
        file.write_text(f"first\n{line}\n")
        with pytest.raises(RequestError, match=r"keys:2: .* its weight, a number from 0.001 to 1000") as error:
            read_keys(file)
        assert "secret" not in str(error.value)
    file.write_text("# none\n")
    with pytest.raises(RequestError, match="holds no API key"):
        read_keys(file)
    with pytest.raises(RequestError, match="cannot read the API keys"):
        read_keys(tmp_path / "nowhere")


def test_requests_have_the_weight_of_their_key() -> None:
    asked: list[float] = []
    with served(pair(), keys=("a", "b"), weights=weights_of({"a": 4.0, "b": 1.0})) as server:
        engine = server.worker.thread.engine
        submit = engine.submit_all
        engine.submit_all = lambda requests, **options: (  # type: ignore[method-assign]
            asked.extend(request.weight for request in requests) or submit(requests, **options)  # type: ignore[func-returns-value]
        )
        for key in ("a", "b"):
            body, headers = {"prompt": ["x", "y"], "max_tokens": 1}, {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    assert asked == [4.0, 4.0, 1.0, 1.0]


def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    assert is_valid_key(("a", "b", "c"), "a")
    assert len(compared) == 3
    assert {len(side) for pair in compared for side in pair} == {32}
    assert not is_valid_key(("a", "b"), "é\ud800")


def test_browsers_are_let_in_only_where_the_server_says_so() -> None:
    origin = {"origin": "https://page.example"}
    with served(pair()) as server:
        assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=origin).headers
    with served(pair(), origins=("https://page.example",)) as server:
        allowed = httpx.get(f"{server.url}/v1/models", headers=origin).headers["access-control-allow-origin"]
        assert allowed == "https://page.example"
        other = httpx.get(f"{server.url}/v1/models", headers={"origin": "https://other.example"}).headers
        assert "access-control-allow-origin" not in other


# ── too much ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_tells_when_to_come_again() -> None:
    gate = Gate(legible(0), length=10)
    with served(pair(gate, max_batch=2), queue=2) as server:
        thread, got = in_background(lambda: server.post(n=3, seed=1))
        assert gate.reached.wait(TIMEOUT_SECONDS)
        refused = server.post(n=2)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert server.post(n=5).status_code == 400, "a request that never fits is not asked to retry"
        assert server.post(n=5).json()["error"]["param"] == "n"
        one, more = in_background(lambda: server.post(seed=2))
        eventually(lambda: server.worker.rows == 4)
        assert server.post().status_code == 429
        gate.opened.set()
        thread.join()
        one.join()
        assert [response.status_code for response in (*got, *more)] == [200, 200]
        assert server.metric('shoal_requests_total{path="/v1/completions",status="429"}') == 2
        assert_all_given_back(server)


def test_a_servers_time_limit_holds_for_those_who_wait() -> None:
    gate = Gate(legible(0), length=10)
    with served(pair(gate, max_batch=1), timeout=0.5) as server:
        first, _ = in_background(lambda: server.post(seed=1))
        assert gate.reached.wait(TIMEOUT_SECONDS)
        second, got = in_background(lambda: server.post(seed=1, time_budget=100))
        eventually(lambda: server.worker.rows == 2)
        time.sleep(0.6)
        gate.opened.set()
        first.join()
        second.join()
        (took,) = got[0].json()["usage"]["choices"]
        assert (took["ended_by"], took["completion_tokens"]) == ("not started", 0)
        gate.length = 10**6
        assert_all_given_back(server)


def test_memory_runs_out_on_admission(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotCache.reserve

    def reserve(self: SlotCache, slots: int, capacity: int, cells: int = 0) -> None:
        if capacity > 500:
            raise MemoryError("no room")
        real(self, slots, capacity, cells)

    monkeypatch.setattr(SlotCache, "reserve", reserve)
    rounds = server.worker.thread.engine.stats.rounds
    refused = server.post(max_tokens=900, n=2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "row_failed")
    assert "out of memory" in refused.json()["error"]["message"]
    (piece,) = server.post(max_tokens=900, stream=True).text.split("\n\n")[:-2]
    (choice,) = json.loads(piece.removeprefix("data: "))["choices"]
    assert choice["finish_reason"] == "error"
    assert "out of memory" in choice["error"]
    assert server.worker.thread.engine.stats.rounds == rounds
    assert_all_given_back(server)
    assert server.worker.thread.engine.stats.rounds > rounds


# ── models that fail ────────────────────────────────────────────────────────────────────────────────────────────────


def nan_after(mark: int) -> Any:
    """Says nothing finite once a row's prompt begins with `mark` and it is 12 tokens long."""
    script = legible(0)
    return lambda ids: script(ids) * (torch.nan if ids[0] == mark and len(ids) > 12 else 1.0)


def test_a_row_whose_model_fails_fails_alone() -> None:
    with served(pair(nan_after(65))) as server:
        answer = server.post(prompt=[[65, 2, 3], [66, 2, 3]], n=2, seed=1, max_tokens=30).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["error", "error", "length", "length"]
        for took in answer["usage"]["choices"][:2]:
            assert took["ended_by"] == "error"
            assert took["completion_tokens"] == 10
            assert "NaN" in took["error"]
        good = server.shoal.generate([[65, 2], [66, 2, 3]], 2, seed=1, max_new_tokens=8, lookahead=4)[1].samples
        texts = [choice["text"] for choice in answer["choices"][2:]]
        assert [text.startswith(sample.text) for text, sample in zip(texts, good, strict=True)] == [True, True]
        alone = server.post(prompt=[65, 2, 3], max_tokens=30)
        assert alone.status_code == 500
        assert alone.json()["error"]["code"] == "row_failed"
        assert_all_given_back(server)
        assert server.metric('shoal_rows_total{reason="error"}') == 3


# ── the engine's thread ─────────────────────────────────────────────────────────────────────────────────────────────


def kill(thread: threading.Thread) -> None:
    """Raises SystemExit in a thread, as whoever ends threads from outside does."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)) == 1


def assert_red(server: Served) -> None:
    for path in ("/health", "/ready"):
        response = httpx.get(server.url + path)
        assert (response.status_code, response.json()["status"]) == (503, "the engine has stopped")
    for stream in (False, True):
        response = server.post(stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stopped")
    assert server.metric("shoal_up") == 0
    assert server.worker.rows == 0


def test_a_killed_thread_turns_health_red_and_hangs_nobody() -> None:
    gate = Gate(legible(0), length=20)
    with served(pair(gate)) as server:
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready")] == [200, 200]
        asked = [httpx.head(server.url + path) for path in ("/health", "/ready")]
        assert [(answer.status_code, answer.content) for answer in asked] == [(200, b"")] * 2
        whole, got = in_background(lambda: server.post(max_tokens=100))
        stream, pieces = in_background(lambda: server.post(max_tokens=100, stream=True))
        eventually(lambda: server.worker.rows == 2)
        assert gate.reached.wait(TIMEOUT_SECONDS)
        kill(server.worker.thread._thread)
        gate.opened.set()
        whole.join(TIMEOUT_SECONDS)
        stream.join(TIMEOUT_SECONDS)
        assert (got[0].status_code, got[0].json()["error"]["code"]) == (503, "engine_stopped")
        assert "engine_stopped" in pieces[0].text
        assert "[DONE]" not in pieces[0].text
        assert_red(server)
        assert isinstance(server.worker.thread.failure, SystemExit)


@pytest.mark.parametrize("killed", [True, False])
def test_a_thread_that_ends_by_itself_turns_health_red(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it is idle, or by an error that nobody foresaw."""

    def step() -> None:
        raise ZeroDivisionError("a bug")

    with served(pair()) as server:
        monkeypatch.setattr(server.worker.thread.engine, "step", step)
        if killed:
            kill(server.worker.thread._thread)
        assert server.post().status_code == 503
        assert_red(server)


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish(sent: signal.Signals) -> None:
    gate = Gate(legible(0), length=20)
    app = application(pair(gate))
    lines: list[str] = []

    def client(url: str) -> None:
        body = {"prompt": "hello", "n": 2, "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS) as response:
            assert gate.reached.wait(TIMEOUT_SECONDS)
            os.kill(os.getpid(), sent)
            eventually(lambda: refused(url))
            gate.opened.set()
            lines.extend(line for line in response.iter_lines() if line)

    with pytest.raises(KeyboardInterrupt) if sent == signal.SIGINT else nullcontext():
        run_until_it_ends(app, client)
    assert lines[-1] == "data: [DONE]"
    ends = [choice["finish_reason"] for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
    assert ends.count("length") == 2
    assert not app.state.worker.thread.alive


@pytest.mark.slow(but=["too long"])
@pytest.mark.parametrize(("drain", "signals"), [(0.1, 1), (TIMEOUT_SECONDS, 2)], ids=["too long", "twice"])
def test_what_does_not_finish_in_time_is_cut(drain: float, signals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", TIMEOUT_SECONDS)
    gate = Gate(legible(0), length=20)
    app = application(pair(gate))
    worker = app.state.worker
    got: list[httpx.Response] = []

    def client(url: str) -> None:
        thread, answers = in_background(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS))
        assert gate.reached.wait(TIMEOUT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: refused(url))
        if signals == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: not worker.thread._jobs.empty())
        gate.opened.set()
        thread.join()
        got.extend(answers)

    body = {"prompt": "hello", "n": 2, "max_tokens": 900}
    run_until_it_ends(app, client, drain)
    took = got[0].json()["usage"]["choices"]
    assert [choice["ended_by"] for choice in took] == ["cancelled", "cancelled"]
    assert all(15 < choice["completion_tokens"] < 900 for choice in took)
    assert not worker.thread.alive


def refused(url: str) -> bool:
    """Nobody listens there."""
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.limit(900)  # a process of its own loads the pair
def test_the_command_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "shoal", "serve", "--port", "0", "--json", "--log-level", "warning", "--name", "small"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        started = json.loads(process.stdout.readline())
        assert started["model"] == "small"
        answer = httpx.post(f"{started['url']}/completions", json={"prompt": "def add(a, b):\n"}, timeout=TIMEOUT_SECONDS)
        assert answer.json()["choices"][0]["text"]
        process.terminate()
        assert process.wait(TIMEOUT_SECONDS) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        process.kill()
        rest, errors = process.communicate()
    assert not rest
    assert "shoal serves small at http://127.0.0.1:" in errors
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.run(["serve", "--port", str(taken.getsockname()[1]), "--model", "/nowhere"]) == 2


def test_without_its_packages_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shoal.serve

    monkeypatch.delattr(shoal.serve, "run")
    monkeypatch.setitem(sys.modules, "shoal.serve.run", None)
    assert cli.run(["serve"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_settings_do_not_show_their_keys() -> None:
    assert "sk-secret" not in repr(Settings("m", keys=("sk-secret",)))
