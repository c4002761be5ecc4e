"""How passes are captured, shown on a model of CUDA's streams, graphs and memory: what real ones do when they are used wrongly.

Tests of: models.compiled.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shoal.models import compiled
from shoal.models.compiled import Graphs

DEVICE = torch.device("cpu")  # nothing is computed: the model below stands in for torch.cuda


class Cuda:
    """Streams by name, pools of memory by number, and one library that keeps a workspace per stream."""

    def __init__(self) -> None:
        self.streams, self.capturing, self.serving = ["default"], None, None
        self.users: dict[int, int] = {}  # graphs of each pool
        self.workspaces: dict[str, int | None] = {}  # by stream: the pool it lies in, None = ordinary memory
        self.pools, self.modes, self.freed = 0, set(), 0

    # what `compiled` calls, as torch.cuda has it

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def current_stream(self) -> Any:
        return _Waits()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        assert self.capturing is None

    def empty_cache(self) -> None:
        assert self.capturing is None

    def end_pool(self, device: int, pool: int) -> None:
        assert self.serving == pool
        self.serving = None

    def clear_workspaces(self) -> None:
        self.freed += sum(pool is None for pool in self.workspaces.values())
        self.workspaces.clear()

    # what a captured function calls

    def matmul(self) -> tuple[str, int | None]:
        """A kernel of the library: makes a workspace for the stream if it has none, where memory is served from now."""
        stream = self.streams[-1]
        return stream, self.workspaces.setdefault(stream, self.serving)


class _Waits(str):
    def wait_stream(self, other: str) -> None:
        return None


class Graph:
    """A CUDA graph: it counts among the users of its pool from its capture to its end."""

    cuda: Cuda
    breaks = False

    def __init__(self) -> None:
        self.pool = 0

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        cuda = self.cuda
        assert cuda.streams[-1] != "default", "operation not permitted: the default stream cannot capture"
        if cuda.users.get(pool) == 0:  # seen on an H200 with torch 2.11
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pool, cuda.users[pool] = pool, cuda.users.get(pool, 0) + 1
        cuda.capturing, cuda.serving = self, pool
        cuda.modes.add(capture_error_mode)

    def capture_end(self) -> None:
        assert self.cuda.capturing is self, "no capture under way"
        self.cuda.capturing = None
        if self.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.serving = None

    def __del__(self) -> None:
        if self.pool:
            self.cuda.users[self.pool] -= 1

    def replay(self) -> None:
        return None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    graph = type("CUDAGraph", (Graph,), {"cuda": made})
    for name in ("device", "stream", "current_stream", "graph_pool_handle", "current_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Waits("own"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", made.clear_workspaces, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_pool, raising=False)
    monkeypatch.setattr(compiled, "_streams", {})
    return made


def seen_by(cuda: Cuda) -> tuple[list[tuple[str, int | None]], Callable[[], None]]:
    """A function to capture, and where it ran: stream and pool of the workspace."""
    log: list[tuple[str, int | None]] = []
    return log, lambda: log.append(cuda.matmul())


@pytest.mark.slow
def test_the_graphs_of_a_generation_share_a_pool_and_the_next_has_its_own(cuda: Cuda) -> None:
    log, run = seen_by(cuda)
    first = Graphs(DEVICE)
    graphs = [first(run), first(run)]
    assert cuda.users == {1: 2}
    del graphs
    gc.collect()
    assert cuda.users == {1: 0}  # the cache has grown, and all graphs over it have ended
    assert Graphs(DEVICE)(run) is not None
    assert (cuda.pools, log[-1]) == (2, ("own", 2))


@pytest.mark.slow
def test_graphs_after_the_last_one_of_a_pool_get_another(cuda: Cuda) -> None:
    """A drafter's cache that comes or goes ends all rounds over the target's cache, which stays as it is."""
    log, run = seen_by(cuda)
    shared = Graphs(DEVICE)
    graph = shared(run)
    del graph
    gc.collect()
    graphs = [shared(run), shared(run)]
    assert (cuda.users, log[-1]) == ({1: 0, 2: 2}, ("own", 2))
    del graphs


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("call", range(compiled.WARM_UPS + 1))
def test_a_last_graph_that_ends_during_a_capture_leaves_no_pool_without_users(cuda: Cuda, call: int) -> None:
    """It may become garbage in the warm-up of the next, which then has a pool of its own, or within its capture."""
    _, run = seen_by(cuda)
    shared = Graphs(DEVICE)
    graphs, calls = [shared(run)], iter(range(100))

    def ends() -> None:
        if next(calls) == call:
            graphs.clear()
        run()

    graphs.append(shared(ends))
    assert cuda.pools == (1 if call == compiled.WARM_UPS else 2)
    graphs.append(shared(run))
    assert sum(cuda.users.values()) == 2


def test_warm_up_and_capture_are_on_one_stream_of_our_own(cuda: Cuda) -> None:
    log, run = seen_by(cuda)
    Graphs(DEVICE)(run)
    assert [stream for stream, _ in log] == ["own"] * (compiled.WARM_UPS + 1)
    assert cuda.modes == {"thread_local"}
    assert cuda.streams == ["default"]


def test_the_workspace_of_a_graph_is_in_its_pool_and_nobody_keeps_it(cuda: Cuda) -> None:
    """One from the warm-up could be freed, and given to somebody else, while the graph still writes to it."""
    log, run = seen_by(cuda)
    Graphs(DEVICE)(run)
    assert log[-1] == ("own", 1)
    assert cuda.workspaces == {}
    assert cuda.freed == 1  # that of the warm-up


@pytest.mark.parametrize("breaks", [False, True], ids=["capture ends", "capture cannot end"])
def test_a_failed_capture_leaves_no_trace(cuda: Cuda, breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "breaks", breaks)
    calls = iter(range(100))

    def run() -> None:
        cuda.matmul()
        if next(calls) == compiled.WARM_UPS:
            raise ValueError("a host read")

    with pytest.raises(ValueError, match="a host read"):  # the first error, not what followed from it
        Graphs(DEVICE)(run)
    assert cuda.streams == ["default"]
    assert (cuda.capturing, cuda.serving) == (None, None)
    assert gc.isenabled()


def test_one_thread_captures_at_a_time(cuda: Cuda) -> None:
    """On the stream that they share, what another thread warms up would be recorded into this one's graph."""
    order: list[str] = []
    other = threading.Thread(target=lambda: Graphs(DEVICE)(lambda: order.append("other")))

    def run() -> None:
        order.append("one")
        if len(order) == compiled.WARM_UPS + 1:
            other.start()
            other.join(0.2)  # it waits for this one

    Graphs(DEVICE)(run)
    other.join()
    assert order == ["one"] * (compiled.WARM_UPS + 1) + ["other"] * (compiled.WARM_UPS + 1)


def test_nothing_is_collected_during_a_capture(cuda: Cuda) -> None:
    enabled = []
    Graphs(DEVICE)(lambda: enabled.append(gc.isenabled()))
    assert enabled == [True] * compiled.WARM_UPS + [False]
    assert gc.isenabled()
