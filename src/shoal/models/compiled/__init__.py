"""Captured rounds: functions of buffers of fixed address and shape, recorded into CUDA graphs.

Ordinary passes (`Runner.feed`) are as long as their rows are, and launch their kernels one by one.
On a GPU, launching the kernels of a small pass takes longer than running them. A captured round is
the same computation, drafter and verdict included, padded up to few sizes and replayed; the values
that change from round to round lie in buffers.

    block            the sizes, the buffers of one pass, the cache that a model meets inside
    captures         the captured rounds of a model, by cache, and the failures that end them
    draft_functions  a drafter's step with its draw
    round_functions  the functions of a round, and of the inputs of the next one
    transfer         the uploads of a round, and its results
    captured_round   builds and runs the functions, and compares their first replays

Here are two ways to run a function of static buffers: as it is, or captured into a CUDA graph; and
the models that cannot be captured. The function has no arguments. It reads and writes buffers whose
address and shape never change, and returns tensors. The tensors are good until the function is run
again.

An executor serves one *generation* of captures: those over one cache of one size. Its graphs share
a pool of memory, as they never run at the same time. A pool whose last graph has ended is never
used again: its memory is there until the allocator frees it, and until then the allocator refuses a
capture into a pool without users.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from shoal.models.structure import ROPES_BY_LENGTH, rope_parameters

Run = Callable[[], Any]
Executor = Callable[[Run], Run]
"""A function that builds the runner of a function.

It may call the function, so the function's buffers must hold nothing that matters.
"""

WARM_UPS = 2
"""The number of runs before a capture.

In these runs libraries allocate handles and choose algorithms, and kernels are compiled and loaded.
"""


def eager(run: Run) -> Run:
    """Returns the function itself: shows that the static formulation is right, on any machine."""
    return run


class Graphs:
    """The executor, on one device, that captures the CUDA graphs of one generation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, run: Run) -> Run:
        """Runs the function a few times outside the graph, records one run, and returns its replay.

        One thread at a time: captures share a stream, and the warm-up of one capture would be
        recorded by the other.
        """
        with _capturing, torch.cuda.device(self._device):
            graph, result = self._captured(run)

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def _captured(self, run: Run) -> tuple[Any, Any]:
        """Returns the graph, and the tensors that each replay writes its result to.

        Warm-up and capture are on one stream, as libraries keep handles and workspaces by stream.
        Workspaces are cleared around the capture: a workspace from before the capture might be
        given to somebody else while the graph still writes to it, and a workspace from within the
        capture belongs to the graphs' pool.
        """
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the stream is left also if it fails
            for _ in range(WARM_UPS):
                run()
            torch.cuda.synchronize()
            users = list(self._graphs)  # held, so that the pool has users until the capture ends
            if not users:
                gc.collect()  # graphs that have ended, and their memory
                torch.cuda.empty_cache()
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with _without_workspaces(), _without_collections():
                result = self._recorded(graph, run)
            self._graphs.add(graph)
        torch.cuda.current_stream().wait_stream(stream)
        return graph, result

    def _recorded(self, graph: Any, run: Run) -> Any:
        """Returns the function's result while its kernels are recorded.

        In any case the capture ends, and the allocator no longer serves the pool: some versions of
        torch do neither after a failure. Only calls of this thread may break the capture, as other
        engines go on meanwhile.
        """
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = run()
            graph.capture_end()
        except BaseException:
            for tidy in (graph.capture_end, self._leave_pool):
                with suppress(Exception):  # the first error matters
                    tidy()
            raise
        return result

    def _leave_pool(self) -> None:
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


_streams: dict[torch.device, Any] = {}
_capturing = threading.Lock()
"""The lock that is held during a capture, on any device."""


def _stream(device: torch.device) -> Any:
    """Returns the stream that everything on a device is captured on."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


@contextmanager
def _without_workspaces() -> Iterator[None]:
    clear: Callable[[], None] = torch._C._cuda_clearCublasWorkspaces
    clear()
    try:
        yield
    finally:
        clear()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collects no garbage within: to free a graph or an event breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


EXECUTORS: dict[str, Callable[[torch.device], Executor]] = {
    "eager": lambda device: eager,
    "graphed": Graphs,
}
"""The makers of a generation's executor on a device, by name."""


def executor_for(mode: str, device: torch.device) -> str | None:
    """Returns the executor that a setting of `compile` means on a device; None = ordinary passes.

    Graphs save the launches of kernels, at the cost of a moment per shape; on a CPU there is
    nothing to launch.
    """
    return "graphed" if mode != "off" and device.type == "cuda" else None


ATTENTION = ("auto", "pad", "fused")
"""The attention methods that ask for masks and bounds only, never for a plan."""
GROUPED_FROM = (9, 0)
"""The compute capability from which PyTorch multiplies groups of bfloat16 rows in one kernel.

Elsewhere the host reads the sizes of the groups.
"""


def attention_obstacle(path: str, method: str) -> str | None:
    """Returns the reason why no pass with this attention can be captured; None if there is none.

    Args:
        path: "interface" or "mask" (`shoal.models.bridge`).
        method: the name of the attention method.
    """
    if path != "interface":
        return "the model attends by its own code"
    return None if method in ATTENTION else f"attention={method!r}"


def obstacle(hf: Any) -> str | None:
    """Returns the reason why no pass of a model can be captured in a CUDA graph, or None."""
    config = hf.config.get_text_config()
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ROPES_BY_LENGTH:
            return f"its rotary embedding ({kind}) reads positions on the host"
    if any(
        getattr(config, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        return _of_experts(getattr(config, "_experts_implementation", None), hf.device, hf.dtype)
    return None


def _of_experts(implementation: str | None, device: torch.device, dtype: torch.dtype) -> str | None:
    if implementation in (None, "eager"):
        return "its experts are looked up on the host (experts_implementation 'eager')"
    if implementation == "grouped_mm" and (
        dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < GROUPED_FROM
    ):
        return (
            "its experts' sizes are read on the host: grouped products are one kernel for "
            "bfloat16 on Hopper or later only"
        )
    return None
