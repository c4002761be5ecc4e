"""What a server logs of its requests, as text and as JSON objects.

Tests of: serve.logs, serve.relay.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from logging.config import dictConfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from bare_logger import require_bare_logger
from serving import eventually, pair, served
from shoal.cli import serve
from shoal.serve import logs
from shoal.serve.handler import ApiHandler
from shoal.serve.logs import Exchange, JsonFormatter, TextFormatter
from shoal.serve.settings import Settings

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(JsonFormatter().format(record)) for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, level = Kept(), logs.LOG.level
    logs.LOG.addHandler(handler)
    logs.LOG.setLevel(logging.DEBUG)
    yield handler
    logs.LOG.removeHandler(handler)
    logs.LOG.setLevel(level)


def lines_of_requests(kept: Kept) -> None:
    """A line for each of five requests, with what it took or why it was refused, and nothing secret."""
    with served(pair(), keys=("secret-key",)) as server:
        key = {"authorization": "Bearer secret-key"}
        ask = {"prompt": "hello", "n": 3, "max_tokens": 5, "seed": 1}

        def post(headers: dict[str, str], **body: Any) -> None:
            httpx.post(f"{server.url}/v1/completions?token=hidden", json=ask | body, headers=headers)

        post(key | {"x-request-id": "mine"})
        post(key, stream=True)
        post(key, n=0)
        post({})
        httpx.get(f"{server.url}/health")
        ended = [("/v1/completions", 200, 2), ("/v1/completions", 400, 1), ("/v1/completions", 401, 1), ("/health", 200, 1)]
        counts = {f'shoal_requests_total{{path="{path}",status="{status}"}}': count for path, status, count in ended}
        eventually(
            lambda: all(server.metric(name) == count for name, count in counts.items())
        )  # counted before it is logged
    told = [line for line in kept.told if line["path"] != "/metrics"]
    assert len(told) == 5
    whole, stream, wrong, closed, probe = told
    assert (whole["method"], whole["path"], whole["status"], whole["request_id"]) == ("POST", "/v1/completions", 200, "mine")
    for line in (whole, stream):
        assert (line["prompt_tokens"], line["completion_tokens"], line["samples"]) == (5, 15, 3)
        assert line["seconds"] > 0
        assert re.fullmatch(TIME, line["time"])
    assert stream["request_id"] not in ("", "mine")
    assert wrong["status"] == 400
    assert wrong["reason"] == "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead."
    assert "completion_tokens" not in wrong
    assert (closed["status"], "API key" in closed["reason"]) == (401, True)
    assert (probe["path"], probe["level"], whole["level"]) == ("/health", "debug", "info")
    every = json.dumps(kept.told) + "".join(TextFormatter().format(record) for record in kept.records)
    assert "secret-key" not in every
    assert "hidden" not in every


def loses_refusals(exchange: Exchange) -> None:
    """A refused request has no line."""
    if exchange.status != 401:
        _log(exchange)


def loses_reasons(exchange: Exchange) -> None:
    """A line does not say why a request was refused."""
    exchange.reason = None
    _log(exchange)


def tells_queries(exchange: Exchange) -> None:
    """A line has the query."""
    exchange.scope["path"] += f"?{exchange.scope['query_string'].decode()}"
    _log(exchange)


_log = logs.log


@pytest.mark.parametrize("sabotage", [None, loses_refusals, loses_reasons, tells_queries])
def test_each_request_has_a_line_when_its_answer_has_ended(
    sabotage: Callable[[Exchange], None] | None, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "log", sabotage or _log)
    with pytest.raises((AssertionError, KeyError)) if sabotage else nullcontext():
        lines_of_requests(kept)


def test_a_client_that_leaves_is_told(kept: Kept) -> None:
    with served(pair()) as server:
        body = {"prompt": "hello", "n": 2, "max_tokens": 900, "stream": True, "seed": 1}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        eventually(lambda: bool(kept.records))
    (line,) = kept.told
    assert line["samples"] == 2
    assert 0 < line["completion_tokens"] < 1800
    assert line["status"] == 499


def test_a_fault_that_nobody_foresaw_is_500(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, name: str) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(ApiHandler, "require_model", fails)
    with served(pair()) as server:
        told = httpx.get(f"{server.url}/v1/models/x")
        assert told.status_code == 500
        eventually(lambda: bool(kept.records))
    (line,) = kept.told
    assert (line["status"], line["level"], line["request_id"]) == (500, "warning", told.headers["x-request-id"])
    assert line["reason"] == told.json()["error"]["message"] == "an internal error (RuntimeError); the server's log has more"


def test_paths_cannot_write_lines_of_their_own(kept: Kept) -> None:
    with served(pair()) as server:
        for path in (
            "a%0aINFO%20all%20is%20well",
            "a%20404",
            "a%27%22",
            "a%1b[2J%e2%80%ae",
            "v1/models/%c3%a9",
            "v1/models",
        ):
            httpx.get(f"{server.url}/{path}")
        eventually(lambda: len(kept.records) == 6)
    shown = [
        r"'/a\nINFO all is well' 404", "'/a 404' 404", r"""'/a\'"' 404""", r"'/a\x1b[2J\u202e' 404", "/v1/models/é 404",
        "/v1/models 200",
    ]  # fmt: skip
    for record, said in zip(kept.records, shown, strict=True):
        assert re.match(TIME + " INFO +GET " + re.escape(said) + " ", TextFormatter().format(record))


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_is_on_stderr_and_leaves_nothing_behind(form: logs.LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    dictConfig(logs.config("info", form))
    try:
        logs.LOG.info("asked", extra={"fields": {"status": 200}})
        logs.LOG.debug("a probe")
        logging.getLogger("uvicorn.access").info("no second line of a request")
    finally:
        logs.restore()
    logs.LOG.info("later")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    if form == "json":
        assert (json.loads(line)["status"], json.loads(line)["message"]) == (200, "asked")
    else:
        assert re.fullmatch(TIME + " INFO +asked", line)


class Closing(logging.StreamHandler[Any]):
    """Closes its stream, as absl's handler does unless it is `sys.stderr` just then."""

    def close(self) -> None:
        if self.stream is not sys.stderr:
            self.stream.close()
        super().close()


HANDLER = Closing()
"""Made, as absl's is, before a test has a stderr of its own."""


def test_a_log_that_is_configured_closes_no_stream_of_the_capture(capsys: pytest.CaptureFixture[str]) -> None:
    assert HANDLER.stream is not sys.stderr
    dictConfig(logs.config("info", "text"))
    logs.restore()
    assert not HANDLER.stream.closed


def test_what_a_server_leaves_behind_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    dictConfig(logs.config("info", "text"))
    with pytest.raises(AssertionError, match="stays configured"):
        require_bare_logger()


@pytest.mark.parametrize("form", ["text", "json"])
def test_faults_of_our_own_have_tracebacks(form: logs.LogFormat) -> None:
    made = logs.config("info", form)["formatters"]["shoal"]["()"]()
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("shoal.x", logging.ERROR, "", 1, "it %s", ("failed",), sys.exc_info())
    text = made.format(record)
    if form == "json":
        told = json.loads(text)
        assert (told["message"], told["level"], told["logger"]) == ("it failed", "error", "shoal.x")
        text = told["traceback"]
    assert "ValueError: no" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_log_on_a_full_disk_ends_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - closing it fails
    monkeypatch.setattr("sys.stderr", full)
    serve._print_address("0.0.0.0", Settings("tiny"), True, None, 8000)
    assert json.loads(capsys.readouterr().out) == {"url": "http://0.0.0.0:8000/v1", "model": "tiny"}
    with pytest.raises(OSError, match="No space"):
        print("what is written meets the end of the disk", file=full, flush=True)
    with suppress(OSError):
        full.close()


def test_lines_of_replicas_go_on_after_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    from shoal.serve import relay

    taken, printed = iter([["first"], ["second", "third"], None]), list[str]()

    def put(lines: str) -> None:
        if lines == "first\n":
            raise OSError("No space left on device")
        printed.append(lines)

    monkeypatch.setattr(relay.ray, "get", lambda answer: answer)
    log = SimpleNamespace(write=put, flush=lambda: None)
    monkeypatch.setattr(relay, "sys", SimpleNamespace(stderr=log))
    relay._print(SimpleNamespace(take=SimpleNamespace(remote=lambda: next(taken))))
    assert printed == ["second\nthird\n"]  # in one piece
