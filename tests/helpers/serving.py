"""Servers for tests: the real application on a loopback port, with scripted models that wait where a test wants them to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPResponse
from typing import Any

import httpx
import openai
import torch
import uvicorn
from fastapi import FastAPI

from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.sampling.acceptance import RULES
from shoal.serve import item_response, responses, run
from shoal.serve.access import Tls
from shoal.serve.app import make_app
from shoal.serve.run import PROTOCOL, bind
from shoal.serve.settings import Settings
from shoal.serve.worker import Worker
from shoal.testing import VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import History, hashed, mixed, scripted

CONTEXT = 2048
TIMEOUT_SECONDS = 280  # seconds until a wait is a hang
# Comments in streams are no subject of most tests, and a held or slow model would provoke them.
responses.KEEP_ALIVE_SECONDS = item_response.KEEP_ALIVE_SECONDS = TIMEOUT_SECONDS


def eventually(what: Callable[[], bool]) -> None:
    """Waits until it holds; a hang is a failure."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status(connection: socket.socket) -> int:
    """Reads as much of an answer as says how it went, and leaves the rest."""
    line = b""
    while len(line) < len("HTTP/1.1 200"):
        part = connection.recv(len("HTTP/1.1 200") - len(line))
        assert part, line
        line += part
    return int(line[-3:])


def whole_answer(connection: socket.socket) -> int:
    """Reads one answer until its end, in however many parts it comes; returns its status."""
    answer = HTTPResponse(connection)
    try:
        answer.begin()
        answer.read()
        return answer.status
    finally:
        answer.close()


@dataclass
class Gate:
    """Holds a script back on histories of more than `length` tokens until it is opened."""

    script: History
    length: int
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, ids: tuple[int, ...]) -> torch.Tensor:
        if len(ids) > self.length:
            self.reached.set()
            assert self.opened.wait(TIMEOUT_SECONDS)
        return self.script(ids)


def legible(seed: int) -> History:
    """Mostly the characters ! to ~, which are the byte tokenizer's first ids, and now and then a piece of another."""
    script = hashed(VOCABULARY, seed)
    odd = 6.0 * (torch.arange(VOCABULARY) > ord("~") - ord("!"))
    return lambda ids: script(ids) - odd


def pair(script: History | None = None, tokenizer: Any = None, max_batch: int = 8, context: int = CONTEXT) -> Shoal:
    """A scripted pair that mostly agrees, with the byte tokenizer; `script`: the target's, and the drafter's too."""
    target = script or legible(0)
    drafter = script or mixed(target, legible(1), every=3)
    models = [scripted(spoken, VOCABULARY, context) for spoken in (target, drafter)]
    return Shoal(*models, tokenizer or tiny_tokenizer(), max_batch=max_batch)


@dataclass
class Served:
    """A running server. `url`: without /v1."""

    url: str
    worker: Worker
    shoal: Shoal

    @cached_property
    def client(self) -> openai.OpenAI:
        """The official client, whose connections end with the server."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """A request of a prompt, if it says nothing else."""
        return httpx.post(self.url + path, json={"prompt": "hello", **body}, timeout=TIMEOUT_SECONDS)

    def connect(self) -> socket.socket:
        """A bare connection, which waits as long as tests do."""
        return socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), TIMEOUT_SECONDS)

    def metric(self, name: str) -> float:
        """One figure of /metrics, by its name with labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == name), 0.0)


def application(
    shoal: Shoal,
    lookahead: Any = 4,
    rule: str = "coupled",
    kv_bytes: int | None = None,
    prefix_bytes: int = 0,
    make_engine: Callable[[], Engine] | None = None,
    model: str = "tiny",
    **settings: Any,
) -> FastAPI:
    """The application around a pair."""
    allowed = Settings(model, seeds=rule == "coupled", **settings)
    memory = {"kv_bytes": kv_bytes, "prefix_bytes": prefix_bytes}
    return make_app(shoal, make_engine or (lambda: shoal.engine(lookahead, RULES[rule](), **memory)), allowed)


@contextmanager
def served(shoal: Shoal, tls: Tls | None = None, **options: Any) -> Iterator[Served]:
    """The application on a thread, for as long as the block lasts."""
    app = application(shoal, **options)
    with bind("127.0.0.1", 0) as listening:
        options = {**PROTOCOL, **(tls.uvicorn_options() if tls else {})}
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, **options))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        port = listening.getsockname()[1]
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        try:
            made = Served(f"http{'s' if tls else ''}://127.0.0.1:{port}", app.state.worker, shoal)
            yield made
        finally:
            if "client" in vars(made):
                made.client.close()
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()
            assert not app.state.worker.thread.alive


def run_until_it_ends(app: FastAPI, client: Callable[[str], None], drain: float = TIMEOUT_SECONDS) -> None:
    """Runs an application as the command does, with its signals, and a client on another thread once it listens."""
    with bind("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=client, args=(url,))
        try:
            run.run(app, listening, drain, "critical", ready=thread.start)
        finally:
            thread.join(TIMEOUT_SECONDS)
