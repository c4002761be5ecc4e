"""The number of threads of a parallel region: fewer for a while where a thread was without a processor, and the same bits.

Tests of: native/team.h.
"""

from __future__ import annotations

import torch

from native_kernels import needs_compiler
from shoal.models.weights.panels import PanelMatrix
from shoal.native.build import library

pytestmark = needs_compiler
LONG, SHORT = 4_000_000, 10_000
"""Nanoseconds without a processor: a slice of another process, and an interrupt."""


def threads_after(lost: list[int], judged: int = 8) -> int:
    """The threads of the next region that wants 8, behind others that lost so much."""
    for one in lost:
        library().judge_team(judged, one)
    return int(library().team(8))


def test_a_long_loss_halves_the_threads_for_a_while() -> None:
    """One test: pauses are those of the process, and the last ones here take a second each."""
    while threads_after([SHORT] * 200) < 8:
        pass  # a pause of a test before, a second at most
    assert threads_after([LONG, *[SHORT] * 200, LONG, *[SHORT] * 200]) == 8  # now and then
    assert threads_after([LONG] * 20, judged=1) == 8  # one thread waits for nobody
    matrix, x, threads = PanelMatrix(torch.randn(700, 320)), torch.randn(9, 320), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = matrix.linear(x)
        assert threads_after([LONG] * 12) == 4
        assert [library().team(wanted) for wanted in (1, 2, 3)] == [1, 1, 1]
        assert torch.equal(matrix.linear(x), whole)
    finally:
        torch.set_num_threads(threads)
