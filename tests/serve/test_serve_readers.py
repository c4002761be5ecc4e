"""Clients that do not read their streams: they take no place of others, no memory without bound, and are cut off in the end.

Tests of: serve.run, serve.worker.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

import serving
from serving import TIMEOUT_SECONDS, Gate, Served, eventually, legible, pair, status
from serving_faults import asking, assert_all_given_back, connect_narrowly, narrow
from shoal.serve import run, worker
from shoal.serve.run import MIN_READ_BYTES, LimitedProtocol
from shoal.serve.worker import RowUpdate, Submission, TokenUpdate

__all__ = ["narrow"]  # a fixture
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 80, "logprobs": 20, "stream": True}
"""A fifth of a megabyte per sample: more than lies on the way."""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]


@contextmanager
def reader(server: Served, **body: Any) -> Iterator[socket.socket]:
    """A client that has asked, and reads what its test reads."""
    with connect_narrowly(server) as connection:
        connection.sendall(asking(**{**LONG, **body}))
        assert status(connection) == 200
        yield connection


def test_a_row_gives_its_place_back_when_it_ends() -> None:
    """Whether or not anybody has read it, and also where others of its request run on."""
    gate = Gate(legible(0), length=10**6)
    with serving.served(pair(gate, max_batch=4), queue=0) as server, reader(server, n=4):
        eventually(lambda: server.worker.rows == 0)
        assert len(server.worker._submissions) == 1  # its stream goes on
        assert [server.post(n=4, seed=1, max_tokens=4).status_code for _ in range(3)] == [200] * 3
        assert server.worker.rows == 0


def test_some_rows_of_a_request_end_before_others() -> None:
    """Each gives its own place back."""
    go, script, workers = threading.Event(), legible(0), []

    def held(ids: tuple[int, ...]) -> torch.Tensor:
        assert not (workers and workers[0]._finished) or go.wait(TIMEOUT_SECONDS)
        return script(ids)

    with serving.served(pair(held, max_batch=1), queue=3) as server:
        workers.append(server.worker)
        with reader(server, n=4, max_tokens=8):
            eventually(lambda: server.worker.rows == 3)
            assert server.post(n=2).status_code == 429
            go.set()
        assert_all_given_back(server)


@pytest.mark.parametrize("trickling", [False, True])
def test_many_who_do_not_read_and_one_who_does(trickling: bool) -> None:
    with serving.served(pair(), queue=8) as server, ExitStack() as stack:
        over = threading.Event()
        for _ in range(6):
            connection = stack.enter_context(reader(server))
            eventually(lambda: server.worker.rows == 0)
            if trickling:
                threading.Thread(target=trickle, args=(connection, over), daemon=True).start()
        assert len(server.worker._submissions) == 6
        assert [server.post(n=4, max_tokens=8).status_code for _ in range(4)] == [200] * 4
        over.set()
    assert server.worker.rows == 0


def trickle(connection: socket.socket, over: threading.Event) -> None:
    """Reads a byte a second."""
    with suppress(OSError):
        while not over.wait(1.0) and connection.recv(1):
            pass


def test_what_waits_for_a_reader_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond, its rows are cancelled, though they could run on."""
    monkeypatch.setattr(worker, "MAX_UNREAD_BYTES", 50_000)
    gate = Gate(legible(0), length=10**6)
    with serving.served(pair(gate)) as server, reader(server, n=2, max_tokens=900):
        (submission,) = server.worker._submissions
        eventually(lambda: server.worker.rows == 0 and server.worker.thread.engine.scheduler.idle)
        assert submission.inbox.qsize() <= 1
        assert server.worker.thread.stats.committed < 2 * 900
        assert server.metric('shoal_rows_total{reason="length"}') == 0
        assert_all_given_back_but_one(server)


def assert_all_given_back_but_one(server: Served) -> None:
    assert not server.worker._rows
    assert len(server.worker._submissions) == 1
    assert server.post(max_tokens=4).status_code == 200


def test_only_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself reads for an answer in one piece, and all rows may end in one round."""
    monkeypatch.setattr(worker, "MAX_UNREAD_BYTES", 5000)
    with serving.served(pair()) as server:
        assert server.post(n=8, max_tokens=64, logprobs=5).status_code == 200


def test_a_reader_that_keeps_up_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has read does not count."""
    monkeypatch.setattr(worker, "MAX_UNREAD_BYTES", 100_000)

    async def read() -> None:
        submission = Submission([], 1, stream=True, detailed=True)
        submission.open = 1
        token = TokenUpdate(1, "x", 0.0, None)
        update = RowUpdate(0, "x" * 100, (token,) * 100, 1, 1, 1, 1, None)
        assert update.size > 20_000
        updates = submission.updates()
        for _ in range(50):
            assert submission.put([update])
            assert await anext(updates) == update
        assert all(submission.put([update]) for _ in range(3))
        assert not all(submission.put([update]) for _ in range(3))

    asyncio.run(read())


# ── the deadline ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("trickling", [False, True])
def test_who_does_not_read_is_cut_off(trickling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who reads a byte a second; its rows end, though they have just begun."""
    monkeypatch.setattr(run, "READ_TIMEOUT_SECONDS", 1.0)
    over = threading.Event()
    with serving.served(pair()) as server, reader(server, n=4) as connection:
        if trickling:
            threading.Thread(target=trickle, args=(connection, over), daemon=True).start()
        eventually(lambda: not server.worker._submissions)
        over.set()
        assert_all_given_back(server)


def test_an_answer_in_one_piece_has_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "READ_TIMEOUT_SECONDS", 1.0)
    cut, lost = threading.Event(), LimitedProtocol.connection_lost
    monkeypatch.setattr(LimitedProtocol, "connection_lost", lambda self, exc: (lost(self, exc), cut.set()))
    with serving.served(pair()) as server, reader(server, n=4, stream=False) as connection:
        assert cut.wait(TIMEOUT_SECONDS)
        got = b""
        with suppress(ConnectionError):
            while part := connection.recv(2**16):
                got += part
        assert b'"usage"' not in got[-2000:]
        assert_all_given_back(server)


class Clock:
    """An event loop and a transport whose time passes when a test says so."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Any, tuple[Any, ...]]] = []
        self.unsent, self.aborted = 0, False

    def call_later(self, seconds: float, what: Any, *arguments: Any) -> Any:
        entry = (seconds, what, arguments)
        self.due.append(entry)
        clock = self

        class Handle:
            def cancel(self) -> None:
                if entry in clock.due:
                    clock.due.remove(entry)

        return Handle()

    def pass_deadline(self) -> None:
        ((seconds, what, arguments),) = self.due
        assert seconds == run.READ_TIMEOUT_SECONDS
        self.due.clear()
        what(*arguments)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


class Flow:
    """Of uvicorn: records calls, and does nothing else."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


@pytest.mark.parametrize(("read", "cut"), [(0, True), (MIN_READ_BYTES - 1, True), (MIN_READ_BYTES, False)])
def test_a_slow_reader_that_reads_is_left_alone(read: int, cut: bool) -> None:
    """A large answer over a slow line takes longer than the deadline, and each of its parts does not."""
    connection: Any = object.__new__(LimitedProtocol)
    clock = Clock()
    connection.loop = connection.transport = clock
    connection.flow, connection._unread = Flow(), None
    clock.unsent = 10 * MIN_READ_BYTES
    connection.pause_writing()
    for _ in range(5):
        clock.unsent -= read
        clock.pass_deadline()
        if cut:
            break
    assert clock.aborted == cut
    if not cut:
        connection.resume_writing()
        assert not clock.due
