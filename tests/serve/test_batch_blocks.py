"""Blocks of lines whose workers die: every line is answered or given up once, and only those that kill are given up.

Tests of: serve.batch_lines.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.batch_lines import MAX_BLOCK_LINES, MAX_DEATHS, BatchLine, Blocks, LineBlock


def lines(count: int) -> list[BatchLine]:
    return [BatchLine(number, "{}", number) for number in range(count)]


@given(st.integers(0, 300), st.integers(1, 5), st.sets(st.integers(0, 299), max_size=4))
def test_only_lines_that_kill_are_given_up(count: int, workers: int, killers: set[int]) -> None:
    blocks, answered, lost, deaths = Blocks(lines(count), workers), [], [], 0
    while (block := blocks.take()) is not None:
        assert 1 <= len(block.lines) <= MAX_BLOCK_LINES
        if killers.isdisjoint(line.number for line in block.lines):
            answered += [line.number for line in block.lines]
        else:
            deaths += 1
            given_up = blocks.died(block)
            lost += [] if given_up is None else [given_up.number]
    present = sorted(killers & set(range(count)))
    assert sorted(lost) == present
    assert sorted(answered) == sorted(set(range(count)) - killers)
    assert deaths <= len(present) * (MAX_DEATHS + MAX_BLOCK_LINES.bit_length() - 1), (
        "halving finds a line in logarithmically many deaths"
    )


def test_a_line_survives_machines_that_go_for_reasons_of_their_own() -> None:
    blocks = Blocks(lines(2), 1)
    first, second = blocks.take(), blocks.take()
    assert first is not None
    for _ in range(MAX_DEATHS - 1):
        assert blocks.died(first) is None
        first = blocks.take()
        assert first is not None
    assert first.lines[0].number == 0
    assert second == LineBlock((BatchLine(1, "{}", 1),))
    assert blocks.died(first) == BatchLine(0, "{}", 0)
    assert len(blocks) == 0


def test_blocks_are_as_many_as_keep_workers_busy() -> None:
    assert [len(Blocks(lines(count), 2)) for count in (0, 1, 8, 9, 48, 4096)] == [0, 1, 8, 5, 8, 64]
