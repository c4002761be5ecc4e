"""Memory that a server freed goes back to the system, and what requests took is freed.

Tests of: serve.routes, serve.logs, serve.engine_thread.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import TIMEOUT_SECONDS, eventually, pair, served
from shoal.serve import app, routes
from shoal.serve.worker import Submission
from shoal.types.requests import Row

needs_glibc = pytest.mark.skipif(routes.trimmer() is None or sys.platform != "linux", reason="glibc gives memory back")


@needs_glibc
def test_freed_pieces_between_used_ones_go_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE

    trim = routes.trimmer()
    assert trim is not None
    trim()
    pieces = [b"x" * 65000 for _ in range(4000)]  # 248 MiB of the heap
    pieces = pieces[::40]  # all of it lies between pieces in use
    held = resident()
    trim()
    assert held - resident() > 150 * 2**20
    assert len(pieces) == 100


def test_it_is_done_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left, caches = [2, 1], list[int]()
    monkeypatch.setattr(routes, "trimmer", lambda: left.pop)
    with pytest.raises(IndexError):  # by the third call
        asyncio.run(routes.give_back_freed_memory(lambda: caches.append(1), 0))
    assert not left
    assert len(caches) == 3
    monkeypatch.setattr(routes, "trimmer", lambda: None)
    with pytest.raises(IndexError):
        asyncio.run(routes.give_back_freed_memory(lambda: caches.pop() and None, 0))


def test_caches_go_back_once_no_row_is_left() -> None:
    """Those of many clients that left, of whom one had a long prompt: slots times its length were held."""
    with served(pair(max_batch=32), max_n=32) as server:
        engine = server.worker.thread.engine

        def give_back() -> None:
            server.worker.thread.give_back()
            asyncio.run_coroutine_threadsafe(server.worker.thread.call(lambda: None), server.worker.thread._loop).result()

        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "a", "n": 32, "stream": True, "max_tokens": 99}
        ) as many:
            assert many.status_code == 200
            next(many.iter_lines())  # passes have made the caches
        eventually(lambda: engine.scheduler.idle)
        wide = engine.memory.used
        assert wide == server.metric("shoal_kv_bytes") > 0
        text = server.post(prompt="b" * 1500, max_tokens=8, seed=1, temperature=1).json()["choices"][0]["text"]
        assert 0 < engine.memory.used < 2 * 1.25 * wide  # 32 slots of this length are ten times as much
        give_back()
        assert engine.memory.used == 0
        assert server.post(prompt="b" * 1500, max_tokens=8, seed=1, temperature=1).json()["choices"][0]["text"] == text


def test_a_server_does_it_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def noted(_: Any) -> None:
        events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    monkeypatch.setattr(app, "give_back_freed_memory", noted)
    with served(pair()) as server:
        assert server.post(max_tokens=2).status_code == 200
        assert events == ["began"]
    assert events == ["began", "ended"]


# ── what a request leaves behind ────────────────────────────────────────────────────────────────────────────────────

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
CONNECTIONS = 4
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SAID = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def asks(number: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests by their kinds, each with texts of its own."""
    text, length = f"hello {number}", {"max_tokens": 6}
    schema = {"type": "object", "properties": {f"key_{number}": {"type": "integer"}}, "required": [f"key_{number}"]}
    return {
        "plain": (COMPLETIONS, {"prompt": text, "n": 3, **length}),
        "stream": (COMPLETIONS, {"prompt": text, "n": 2, "stream": True, **length}),
        "new schema": (COMPLETIONS, {"prompt": text, "guided_json": schema, **length}),
        "chat": (CHATS, {"messages": SAID, "user": text, "prompt_cache_key": text, **length}),
        "tools": (CHATS, {"messages": SAID, "tools": [TOOL], "tool_choice": "required", **length}),
        "responses": (RESPONSES, {"input": text, "max_output_tokens": 6}),
        "echo": (COMPLETIONS, {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}),
        "no time": (COMPLETIONS, {"prompt": text, "time_budget": 1e-3}),
        "bad": (COMPLETIONS, {"prompt": text, "guided_json": {"type": text}}),
        "another model": (COMPLETIONS, {"prompt": text, "model": text}),
    }


@pytest.fixture
def earlier() -> list[object]:
    """What other tests of this process hold, which no count here is about."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (Submission, Row)]


def counted(most: int, kind: type, earlier: list[object]) -> int:
    """How many new objects of a type anything still holds, a moment after the last answer: until they are `most`."""
    old = {id(one) for one in earlier}
    for _ in range(50):
        gc.collect()
        held = sum(type(one) is kind and id(one) not in old for one in gc.get_objects())
        if held <= most:
            break
        time.sleep(0.1)
    return held


@pytest.mark.slow(but=["plain"])
@pytest.mark.parametrize("kind", asks(0))
def test_an_answer_leaves_no_rows_behind(kind: str, earlier: list[object]) -> None:
    """Not on connections that stay open, each of which keeps the scope of its last request; the loop may keep the very last."""
    with served(pair(), lookahead=0, prefix_bytes=1 << 20, chat_template=TEMPLATE) as server, ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS)) for _ in range(CONNECTIONS)
        ]
        for number in range(2 * CONNECTIONS):
            path, body = asks(number)[kind]
            status = {"bad": 400, "another model": 404}.get(kind, 200)
            assert clients[number % CONNECTIONS].post(path, json=body).status_code == status
        assert counted(1, Submission, earlier) <= 1
        assert counted(3, Row, earlier) <= 3


@pytest.mark.slow(but=["/v1/completions"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES])
def test_a_stream_that_is_left_leaves_no_rows_behind(path: str, earlier: list[object]) -> None:
    with served(pair(), lookahead=0, chat_template=TEMPLATE) as server:
        for number in range(CONNECTIONS):
            body = {"prompt": f"hello {number}", "messages": SAID, "input": "hello", "stream": True, "max_tokens": 200}
            fields = {COMPLETIONS: ("prompt",), CHATS: ("messages",), RESPONSES: ("input",)}[path]
            asked = {name: body[name] for name in (*fields, "stream")}
            asked |= {"max_output_tokens" if path == RESPONSES else "max_tokens": 200}
            with httpx.stream("POST", server.url + path, json=asked, timeout=TIMEOUT_SECONDS) as answer:
                assert answer.status_code == 200
                next(answer.iter_lines())
        assert counted(1, Submission, earlier) <= 1
        assert counted(3, Row, earlier) <= 3


def test_the_engines_thread_keeps_no_job() -> None:
    done = threading.Event()

    class Job:
        def __call__(self) -> None:
            done.set()

    with served(pair()) as server:
        job = Job()
        server.worker.thread.post(job)
        assert done.wait(TIMEOUT_SECONDS)
        del job
        assert not counted(0, Job, [])
