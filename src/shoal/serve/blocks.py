"""Lines of a batch in blocks for workers. Pure Python.

A block whose worker died is halved until the line that kills workers stands alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.serve.batch_lines import BatchLine

MAX_BLOCK_LINES = 64
"""Lines of a block: so many are asked again when a worker dies, and at a block's end its batch runs empty."""
BLOCKS_PER_WORKER = 4
"""Blocks for each worker, if there are lines enough: who is quick has more of them."""
MAX_DEATHS = 3
"""Workers that a line may kill when it is alone with them; machines also go for reasons of their own."""


@dataclass(frozen=True)
class Block:
    """Lines that one worker answers, all or none. `deaths`: of workers that had this block, if it is of one line."""

    lines: tuple[BatchLine, ...]
    deaths: int = 0


class Blocks:
    """What is still to be answered and at no worker."""

    def __init__(self, lines: Sequence[BatchLine], workers: int) -> None:
        size = min(max(math.ceil(len(lines) / (BLOCKS_PER_WORKER * workers)), 1), MAX_BLOCK_LINES)
        starts = range(0, len(lines), size)
        self._waiting = deque(Block(tuple(lines[start : start + size])) for start in starts)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> Block | None:
        """The next one, if there is any."""
        return self._waiting.popleft() if self._waiting else None

    def died(self, block: Block) -> BatchLine | None:
        """To be told of a block whose worker died: it comes again, in halves and after the others.

        Returns:
            The line that is given up, if it was alone with `MAX_DEATHS` workers that died.
        """
        if len(block.lines) > 1:
            half = len(block.lines) // 2
            self._waiting += [Block(block.lines[:half]), Block(block.lines[half:])]
            return None
        if block.deaths + 1 == MAX_DEATHS:
            return block.lines[0]
        self._waiting.append(Block(block.lines, block.deaths + 1))
        return None
