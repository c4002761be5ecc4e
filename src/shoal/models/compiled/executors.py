"""Two ways to run a function of static buffers: as it is, or captured into a CUDA graph and replayed.

The function takes nothing, reads and writes buffers whose address and shape never change, and returns tensors. What it returns is
good until it is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], Any]
Executor = Callable[[Run], Run]
"""Builds the runner of a function. It may call the function, so its buffers must hold nothing that matters."""

WARM_UPS = 2
"""Runs before a capture: libraries allocate workspaces and choose algorithms in them."""


def eager(run: Run) -> Run:
    """The function itself: shows that the static formulation is right, on any machine."""
    return run


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
    "graphed": Graphs,
}


def executor_for(mode: str, device: torch.device) -> str | None:
    """The executor that a setting of `compile` means on a device; None = ordinary passes. Graphs save the launches of kernels, at
    the cost of a moment per shape; on a CPU there is nothing to launch."""
    return "graphed" if mode != "off" and device.type == "cuda" else None
