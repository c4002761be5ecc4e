"""Lines of a batch in blocks for workers.

A block whose worker died is halved, until the line that kills workers is alone in its block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.serve.batch_lines import BatchLine

MAX_BLOCK_LINES = 64
"""The most lines of a block. Larger blocks repeat more work when a worker dies; in smaller ones
more slots of the worker's batch are empty at the end."""
BLOCKS_PER_WORKER = 4
"""The number of blocks per worker, if there are enough lines; faster workers take more of them."""
MAX_DEATHS = 3
"""The number of workers that may die while they answer one line alone: machines also fail for other
reasons."""


@dataclass(frozen=True)
class Block:
    """The lines that one worker answers, all or none.

    Attributes:
        deaths: the number of workers that died with this block, if it has one line.
    """

    lines: tuple[BatchLine, ...]
    deaths: int = 0


class Blocks:
    """The blocks that no worker has yet."""

    def __init__(self, lines: Sequence[BatchLine], workers: int) -> None:
        size = min(max(math.ceil(len(lines) / (BLOCKS_PER_WORKER * workers)), 1), MAX_BLOCK_LINES)
        starts = range(0, len(lines), size)
        self._waiting = deque(Block(tuple(lines[start : start + size])) for start in starts)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> Block | None:
        """Returns the next block; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def died(self, block: Block) -> BatchLine | None:
        """Returns a block whose worker died to the queue, in halves and after the others.

        Returns:
            The line that is given up, if `MAX_DEATHS` workers died with it alone; else None.
        """
        if len(block.lines) > 1:
            half = len(block.lines) // 2
            self._waiting += [Block(block.lines[:half]), Block(block.lines[half:])]
            return None
        if block.deaths + 1 == MAX_DEATHS:
            return block.lines[0]
        self._waiting.append(Block(block.lines, block.deaths + 1))
        return None
