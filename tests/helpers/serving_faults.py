"""Requests to a server whose engine fails, and what it must give back."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import serving
from serving import TIMEOUT_SECONDS, Served, eventually, pair, served
from shoal.serve import run
from shoal.serve.run import bind


def in_background(ask: Callable[[], httpx.Response]) -> tuple[threading.Thread, list[httpx.Response]]:
    """Asks on another thread; what comes is put into the list."""
    got: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: got.append(ask()))
    thread.start()
    return thread, got


def assert_all_given_back(server: Served) -> None:
    """No row runs or waits, on either side of the engine's thread, and the next request is served."""
    eventually(lambda: server.worker.rows == 0 and server.worker.thread.engine.scheduler.idle)
    assert not server.worker._rows
    eventually(lambda: not server.worker._submissions)
    assert server.post(seed=1).status_code == 200


def asking(path: str = "/v1/completions", /, **body: Any) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is on its way between a server and a client that reads nothing, and no such client is cut off: a test that wants that
    sets the seconds itself, as a busy machine may need more than those of the server for any step."""
    monkeypatch.setattr(run, "READ_TIMEOUT_SECONDS", 10.0 * TIMEOUT_SECONDS)
    monkeypatch.setattr(run, "UNREAD_TIMEOUT_SECONDS", 10.0 * TIMEOUT_SECONDS)

    def bound(host: str, port: int) -> socket.socket:
        listening = bind(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(serving, "bind", bound)


def connect_narrowly(server: Served) -> socket.socket:
    """A connection whose client has little space for what it does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(TIMEOUT_SECONDS)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return connection


@pytest.fixture(scope="module")
def server() -> Any:
    with served(pair(), max_body=2**20) as running:
        yield running
