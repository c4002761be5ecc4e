"""Memory that a server freed goes back to the system.

Tests of: serve.routes.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
from pathlib import Path

import pytest

from serving import pair, served
from shoal.serve import app, routes

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
    left = [2, 1]
    monkeypatch.setattr(routes, "trimmer", lambda: left.pop)
    with pytest.raises(IndexError):  # by the third call
        asyncio.run(routes.give_back_freed_memory(0))
    assert not left


def test_nothing_is_done_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "trimmer", lambda: None)
    asyncio.run(asyncio.wait_for(routes.give_back_freed_memory(0), 10))


def test_a_server_does_it_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def noted() -> None:
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
