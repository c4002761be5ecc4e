"""The comparison of first replays with the functions that were captured, bit for bit.

A function launched kernel by kernel runs the same kernels on the same shapes as its replay, so not
a bit may differ: a key that a replay leaves out, a cell that it writes late, a value that was a
number of Python when it was captured, memory that another graph has written over. Rounding hides
most of these where a replay is compared with passes of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.models.compiled.executors import Run
from shoal.models.compiled.round_functions import RoundFunctions, WrittenCells

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes as a number."""


class FirstReplays:
    """The buffers of a round before a function is replayed for the first time.

    Args:
        functions: the functions of the round and their buffers.
        written: the cells that the replay will write.
    """

    def __init__(self, functions: RoundFunctions, written: Sequence[WrittenCells]) -> None:
        self._functions, self._written = functions, written
        self._before = [tensor.clone() for tensor in functions.state]

    def compare(self, run: Run, results: Sequence[Tensor]) -> None:
        """Launches the function kernel by kernel, and compares all that it writes.

        Args:
            run: the function.
            results: the results of the replay.

        Raises:
            ArithmeticError: the replay computes other bits than its function.
        """
        functions, steps = self._functions, self._functions.steps.copy()
        kept = functions.results
        after, cells = functions.inputs.buffer.clone(), self._cells()
        for tensor, value in zip(functions.state, self._before, strict=True):
            tensor.copy_(value)
        real = self._written[0].block.bounds[1] > 0
        for ours, right in zip(results, run(), strict=True):
            _require(~(_differ(ours, right) & real), "values")
        functions.steps[:], functions.results = steps, kept  # their addresses are known to graphs
        _require(_bits(after) == _bits(functions.inputs.buffer), "buffers")
        for written, ours, right in zip(self._written, cells, self._cells(), strict=True):
            padding = written.cells == written.block.scratch
            _require(~_differ(ours, right) | padding, "keys and values")

    def _cells(self) -> list[Tensor]:
        """Returns the numbers in the written cells, of all layers [cells, numbers]."""
        return [
            torch.cat([store.flatten(0, 1)[one.cells].flatten(1) for store in one.stores], dim=1)
            for one in self._written
        ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def _differ(ours: Tensor, right: Tensor) -> Tensor:
    """Returns True for the rows [rows, ...] in which a bit differs, [rows]."""
    return (_bits(ours) != _bits(right)).view(len(ours), -1).any(dim=1)


def _require(same: Tensor, subject: str) -> None:
    """Raises ArithmeticError unless all are True."""
    if not bool(same.all()):
        raise ArithmeticError(f"a replay does not write the {subject} that its function writes")
