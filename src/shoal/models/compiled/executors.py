"""Three ways to run a function of static buffers: as it is, compiled, or captured into a CUDA graph and replayed.

The function takes nothing, reads and writes buffers whose address and shape never change, and returns tensors. What it returns is
good until it is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from shoal.errors import RequestError

Run = Callable[[], Any]
Executor = Callable[[Run], Run]
"""Builds the runner of a function. It may call the function, so its buffers must hold nothing that matters."""

WARM_UPS = 2
"""Runs before a capture: libraries allocate workspaces and choose algorithms in them."""


def eager(run: Run) -> Run:
    """The function itself: shows that the static formulation is right, on any machine."""
    return run


def compiled(run: Run) -> Run:
    """torch.compile for exactly these shapes, in one piece.

    The compiler keeps a list of variants per code object and gives up on one with many, so each function gets its own.
    """
    assert isinstance(run, FunctionType)
    code = run.__code__.replace(co_name=f"{run.__code__.co_name}_{id(run):x}")
    own = FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
    fast: Run = torch.compile(own, fullgraph=True, dynamic=False)
    fast()
    return fast


class Graphs:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Runs the function a few times aside, records one run, and returns its replay."""
        self._warm_up(run)
        graph, result = self._captured(run)

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def _warm_up(self, run: Run) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(aside)

    def _captured(self, run: Run) -> tuple[Any, Any]:
        """The graph, and the tensors that each replay writes its result to."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph, result


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "eager": lambda: eager,
    "compiled": lambda: compiled,
    "graphed": Graphs,
}


def executor_for(mode: str, device: torch.device) -> str | None:
    """The executor that a setting of `compile` means on a device; None = the dynamic path.

    "auto" is graphs on CUDA, whose launches they save at the cost of a moment per shape, and nothing elsewhere: on a CPU
    a shape takes many seconds to compile, more than most runs last.

    Raises:
        RequestError: for another word.
    """
    if mode == "off":
        return None
    if mode == "auto":
        return "graphed" if device.type == "cuda" else None
    if mode == "on":
        return "graphed" if device.type == "cuda" else "compiled"
    raise RequestError(f"compile must be 'auto', 'on' or 'off', got {mode!r}")
