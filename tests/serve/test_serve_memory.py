"""A server without memory: rows end with an error, a new engine takes the place of the failed one, or the process ends.

Tests of: serve.engine_thread, serve.app, models.device.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

import serving
from serving import TIMEOUT_SECONDS, Gate, eventually, legible, pair
from serving_faults import assert_all_given_back, in_background
from shoal import cli
from shoal.api import Shoal
from shoal.engine.engine import Engine
from shoal.engine.validation import RequestValidator
from shoal.errors import InternalError, OutOfMemory, RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import device
from shoal.models.device import KV_SHARE, explained, free_bytes, is_out_of_memory
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.serve.app import PREFIX_SHARE, ServeConfig
from shoal.serve.engine_thread import SWITCH_SECONDS, EngineThread
from shoal.serve.settings import Settings
from shoal.serve.token_details import Scoring
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import runner, scripted
from shoal.types.requests import Request, Row
from shoal.types.stats import Stats

NO_MEMORY: list[Exception] = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("std::bad_alloc"),
    OSError(12, "Cannot allocate memory"),
]
OTHERS: list[Exception] = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    ValueError("out of memory"),
    OSError(2, "No such file"),
]


@pytest.mark.parametrize("error", [*NO_MEMORY, *OTHERS], ids=str)
def test_what_means_no_memory(error: Exception) -> None:
    assert is_out_of_memory(error) is (error in NO_MEMORY)
    with pytest.raises(OutOfMemory if error in NO_MEMORY else type(error)) as caught, explained("the model"):
        raise error
    assert caught.value is error or "the model: out of memory" in str(caught.value)


# ── servers whose engines fail on demand ────────────────────────────────────────────────────────────────


class Failing:
    """Makes engines of a pair; a stage of their rounds raises `errors`, one after the other.

    Attributes:
        made: engines so far, and their caches. left: how many of those were still there when the next engine was made.
        before: called before an engine is made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str = "shoal.engine.verify.verify") -> None:
        self.errors: list[Exception] = []
        self.made: list[weakref.ref[Any]] = []
        self.left: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.shoal = pair()
        real = resolve(stage)

        def failing(*arguments: Any, **options: Any) -> Any:
            if self.errors:
                raise self.errors.pop(0)
            return real(*arguments, **options)

        monkeypatch.setattr(stage, failing)

    def engine(self) -> Engine:
        """One more."""
        self.before()
        self.left.append(sum(ref() is not None for ref in self.made))
        engine = self.shoal.engine(4, Coupled())
        self.made += [weakref.ref(engine), *(weakref.ref(model.cache) for model in runners_of(engine))]
        return engine


def resolve(path: str) -> Any:
    """What a dotted path names."""
    found: Any = __import__(path.partition(".")[0])
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


STAGES = [
    "shoal.drafting.model.draws",
    "shoal.sampling.distributions.draws",
    "shoal.engine.verify.verify",
    "shoal.sampling.acceptance.Coupled.uniforms",
    "shoal.sampling.acceptance.Coupled.decide",
    "shoal.engine.engine.commit",
    "shoal.models.cache.SlotCache.keep",
]


@pytest.mark.slow(but=["error0-shoal.drafting.model.draws"])
@pytest.mark.parametrize(
    ("error", "stage"),
    [
        (NO_MEMORY[4], STAGES[0]), (NO_MEMORY[2], STAGES[-1]),
        *(pytest.param(NO_MEMORY[2], stage, marks=pytest.mark.slow) for stage in STAGES[:-1]),
    ],
)  # fmt: skip
def test_memory_runs_out_in_a_round(stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows end with an error, whatever had no memory; what the failed engine took is free before there is a new one."""
    failing = Failing(monkeypatch, stage)
    with serving.served(failing.shoal, make_engine=failing.engine) as server:
        assert server.post(seed=1).status_code == 200
        right = server.post(seed=1).json()["choices"][0]["text"]
        failing.errors = [error]
        failed = server.post(n=3)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "pass_failed")
        assert "out of memory" in failed.json()["error"]["message"]
        rounds = server.worker.thread.stats.rounds
        assert server.post(seed=1).json()["choices"][0]["text"] == right
        assert server.worker.thread.stats.rounds > rounds > 0
        assert failing.left == [0, 0]
        assert_all_given_back(server)


def test_rows_that_wait_are_told_and_streams_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    gate = Gate(legible(0), length=20)
    failing.shoal = pair(gate, max_batch=1)
    with serving.served(failing.shoal, make_engine=failing.engine) as server:
        stream, got = in_background(lambda: server.post(n=3, max_tokens=100, stream=True))
        assert gate.reached.wait(TIMEOUT_SECONDS)
        failing.errors = [NO_MEMORY[0]]
        gate.opened.set()
        stream.join(TIMEOUT_SECONDS)
        assert got[0].text.count("pass_failed") == 1
        assert "[DONE]" not in got[0].text
        eventually(lambda: len(failing.left) == 2)
        assert_all_given_back(server)


@pytest.mark.slow
def test_caches_that_captured_rounds_keep_are_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They outlive an engine, for the next one: not when memory has run out."""
    failing = Failing(monkeypatch, "shoal.engine.engine.commit")  # a round that is captured has no stage before it
    failing.shoal = Shoal(*(runner(tiny_model("llama", seed=seed), 512) for seed in (0, 1)), tiny_tokenizer())
    for model in (failing.shoal.target, failing.shoal.draft_model):
        assert model is not None
        model.capture_rounds("eager")
    assert failing.shoal.target.captures is not None
    with serving.served(failing.shoal, make_engine=failing.engine) as server:
        assert server.post().status_code == 200
        assert failing.shoal.target.captures.ran
        failing.errors = [NO_MEMORY[0]]
        assert server.post().status_code == 503
        assert server.post().status_code == 200
        assert failing.left == [0, 0]


def test_figures_while_a_new_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    with serving.served(failing.shoal, make_engine=failing.engine) as server:
        made, go = threading.Event(), threading.Event()

        def hold() -> None:
            made.set()
            assert go.wait(TIMEOUT_SECONDS)

        failing.before = hold
        failing.errors = [NO_MEMORY[0]]
        assert server.post().status_code == 503  # answered before there is a new engine
        assert made.wait(TIMEOUT_SECONDS)
        assert server.metric("shoal_up") == 1
        assert server.metric("shoal_rows_capacity") > 0
        assert httpx.get(f"{server.url}/health").status_code == 200
        later, got = in_background(server.post)
        go.set()
        later.join(TIMEOUT_SECONDS)
        assert got[0].status_code == 200


@pytest.mark.slow
def test_a_finished_round_between_two_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    with serving.served(failing.shoal, make_engine=failing.engine) as server:
        for _ in range(3):
            failing.errors = [NO_MEMORY[1]]
            assert server.post().status_code == 503
            assert server.post().status_code == 200
        assert failing.left == [0, 0, 0, 0]


def ends_with(failing: Failing, client: Callable[[str], None]) -> InternalError:
    """What the server's process ends with, while a client has its way."""
    with pytest.raises(InternalError, match="the engine's thread has ended") as caught:
        serving.run_until_it_ends(serving.application(failing.shoal, make_engine=failing.engine), client)
    return caught.value


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "n": 2}, timeout=TIMEOUT_SECONDS)


def test_two_failures_in_a_row_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    failing.errors = [NO_MEMORY[2], NO_MEMORY[3]]
    got: list[httpx.Response] = []
    error = ends_with(failing, lambda url: got.extend([ask(url), ask(url)]))
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in got] == [(503, "pass_failed")] * 2
    assert "2 passes in a row" in str(error)


def test_an_engine_that_cannot_be_made_anew_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    got: list[httpx.Response] = []

    def client(url: str) -> None:
        def refuse() -> None:
            raise RuntimeError("CUDA error: out of memory")

        failing.before, failing.errors = refuse, [NO_MEMORY[2]]
        got.append(ask(url))

    ends_with(failing, client)
    assert got[0].json()["error"]["code"] == "pass_failed"


def test_an_error_that_nobody_foresaw_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA context that is broken stays so: only a new process helps."""
    failing = Failing(monkeypatch)
    failing.errors = [OTHERS[0]]
    got: list[httpx.Response] = []
    ends_with(failing, lambda url: got.append(ask(url)))
    assert (got[0].status_code, got[0].json()["error"]["code"]) == (503, "engine_stopped")


def test_the_commands_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise InternalError("the engine's thread has ended")

    monkeypatch.setattr("shoal.serve.run.run", gone)
    monkeypatch.setattr(ServeConfig, "app", lambda _: None)
    assert cli.run(["serve", "--port", "0"]) == 1


def test_memory_runs_out_while_rows_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts the second has no memory: the rows of the first leave as well, and nobody decodes for no one."""
    failing = Failing(monkeypatch)
    with serving.served(failing.shoal, make_engine=failing.engine) as server:
        real, calls = RequestValidator.rows, []

        def rows(self: RequestValidator, request: Request, needs_text: bool) -> list[Row]:
            calls.append(request)
            if len(calls) == 2:
                raise MemoryError
            return real(self, request, needs_text)

        monkeypatch.setattr(RequestValidator, "rows", rows)
        failed = server.post(prompt=["one", "two"])
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "out_of_memory")
        assert_all_given_back(server)


def test_memory_runs_out_while_a_prompt_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving.served(pair()) as server:

        def advance(_: Scoring) -> None:
            raise RuntimeError("CUDA error: out of memory")

        with monkeypatch.context() as patched:
            patched.setattr(Scoring, "advance", advance)
            failed = server.post(echo=True, logprobs=1)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "out_of_memory")
        assert_all_given_back(server)


def test_an_error_does_not_hold_what_the_pass_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was refused keeps its error as long as anybody keeps the row; a traceback would keep all tensors of the pass."""
    held: list[weakref.ref[torch.Tensor]] = []

    def dynamic(*_: Any, **__: Any) -> torch.Tensor:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = engine_of(scripted(legible(0), VOCABULARY), None, Fixed(0))
    (row,) = engine.submit(Request((1, 2, 3)))
    monkeypatch.setattr(Runner, "_ordinary", dynamic)
    engine.step()
    assert isinstance(row.error, OutOfMemory)
    gc.collect()
    assert held[0]() is None


# ── what is free ────────────────────────────────────────────────────────────────────────────────────────────────────

GIB = 2**30


def machine(root: Path, **files: object) -> Path:
    """A system's files, "/" written as "__"."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MEMINFO = {"proc__meminfo": f"MemTotal: {99 * 2**20} kB\nMemAvailable: {8 * 2**20} kB"}


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert device._of_machine(machine(tmp_path, **MEMINFO)) == 8 * GIB


@pytest.mark.parametrize("tightest", ["own", "parent", "none"])
def test_a_control_group_leaves_less(tightest: str, tmp_path: Path) -> None:
    """The files it has cached can be dropped, so they count as free."""
    limits = {"own": (3 * GIB, 90 * GIB), "parent": (90 * GIB, 3 * GIB), "none": ("max", "max")}[tightest]
    for name, limit in zip(("a/b", "a"), limits, strict=True):
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{2 * GIB}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    root = machine(tmp_path, **MEMINFO, proc__self__cgroup="0::/a/b")
    assert device._of_machine(root) == (8 if tightest == "none" else 2) * GIB


def test_a_container_sees_its_group_as_the_top(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{3 * GIB}")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}")
    root = machine(tmp_path, **MEMINFO, proc__self__cgroup="7:cpu,cpuacct:/x\n4:memory:/docker/abc")
    assert device._of_machine(root) == 2 * GIB


def test_what_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch holds and does not use is free as well."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * GIB)
    assert free_bytes(torch.device("cuda")) == 13 * GIB


def test_of_this_machine() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def budget_of(recipe: ServeConfig) -> int | None:
    return recipe.app().state.worker.thread.engine.memory._most


def test_the_budget_comes_from_what_is_free_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine asks again."""
    free = [3 * GIB]
    monkeypatch.setattr(device, "free_bytes", lambda _: free[0])
    rows = 1 - PREFIX_SHARE
    assert budget_of(ServeConfig(pair, Settings("tiny"), 4)) == rows * KV_SHARE * 3 * GIB
    assert budget_of(ServeConfig(pair, Settings("tiny"), 4, kv_bytes=5000)) == rows * 5000
    assert budget_of(ServeConfig(pair, Settings("tiny"), 4, kv_bytes=5000, prefix_bytes=0)) == 5000
    with pytest.raises(RequestError, match="may not take all 5,000 bytes"):
        ServeConfig(pair, Settings("tiny"), 4, kv_bytes=5000, prefix_bytes=5000).app()
    make = ServeConfig(pair, Settings("tiny"), 4)._engines(pair())
    free[0] = GIB
    assert make().memory._most == rows * KV_SHARE * GIB


def test_a_request_beyond_the_budget_is_refused_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: 12_000)
    shoal = pair()
    make = ServeConfig(pair, Settings("tiny"), 4)._engines(shoal)
    with serving.served(shoal, make_engine=make) as server:
        refused = server.post(max_tokens=1000)
        assert refused.status_code == 400
        assert "bytes of KV cache" in refused.json()["error"]["message"]
        assert server.post(n=8, max_tokens=100).status_code == 200
        assert server.worker.thread.engine.memory.used <= 6_000


@pytest.mark.parametrize(("device", "seconds"), [("cuda:1", SWITCH_SECONDS), ("cpu", 0.005)])
def test_the_event_loop_gives_way_soon_where_a_device_computes(device: str, seconds: float) -> None:
    """A device that waits for the engine's thread stands still; the interval is that of the process, and is put back."""
    engine: Any = SimpleNamespace(target=SimpleNamespace(device=torch.device(device)), stats=Stats())
    engine.scheduler, engine.build_ahead = SimpleNamespace(idle=True, waiting=SimpleNamespace()), lambda: False

    async def within() -> float:
        thread = EngineThread(lambda: engine, lambda _: None, lambda _: None, lambda: None)
        thread.start(asyncio.get_running_loop())
        try:
            return await thread.call(sys.getswitchinterval)
        finally:
            thread.stop()

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        assert asyncio.run(within()) == pytest.approx(seconds)
        assert sys.getswitchinterval() == pytest.approx(0.005)
    finally:
        sys.setswitchinterval(before)
