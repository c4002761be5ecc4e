"""Which tests run: those marked as slow in parts, and of some parametrized tests one case among the quick ones.

`--slow-part 2` runs the tests that are not slow, and a seventh of the others; `--slow-part turn`, as in CI, the part of the day.
The name of a test alone decides its part: a new test moves no other.

`@pytest.mark.slow(but=["llama"])`: the cases are slow but for `llama` and `llama-...`, by their ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pytest

import lanes

PARTS = 7
"""Each slow test once a week."""
SHARED = ("test_ray.py", "test_tensor_parallel.py")
"""Files whose tests share processes which take long to start; all of a file are in one part."""


def part_of(nodeid: str) -> int:
    """The part of a slow test, 1 to PARTS."""
    file = nodeid.partition("::")[0]
    return 1 + crc32((file if file.endswith(SHARED) else nodeid).encode()) % PARTS


STALE: set[tuple[str, str]] = set()
"""Tests of this session and the words of their `but` that no case has."""


def quick_cases(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Mark, str | None]]:
    """The tests marked as slow but for some cases, each with its mark, and the word that takes it out."""
    for item in items:
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        for mark in item.iter_markers("slow"):
            words = mark.kwargs.get("but", ())
            if words:
                yield item, mark, next((word for word in words if f"{case}-".startswith(f"{word}-")), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    numbers = [str(number) for number in range(1, PARTS + 1)]
    text = "the tests not marked as slow, and this part of the others; turn: that of the day"
    parser.addoption("--slow-part", choices=["turn", *numbers], help=text)


def pytest_configure(config: pytest.Config) -> None:
    """The process that starts the others reads the calendar: they go on past midnight."""
    if config.option.slow_part == "turn":
        config.option.slow_part = str(1 + lanes.turn(PARTS))


@pytest.hookimpl(tryfirst=True)  # before those of `-m` are chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the slow tests of the other parts. Tests that share processes come first: what is last in one process of tests
    is left to others, which would start theirs."""
    items.sort(key=lambda item: item.path.name not in SHARED)
    named, met = set(), set()
    for item, mark, word in list(quick_cases(items)):
        test = item.nodeid.partition("[")[0]
        named.update((test, each) for each in mark.kwargs["but"])
        if word is not None:
            met.add((test, word))
            item.own_markers.remove(mark)
    if not any("::" in place for place in config.args):  # cases that were asked for by name are not all
        STALE.update(named - met)
    if part := config.option.slow_part:
        others = {item for item in items if item.get_closest_marker("slow") and part_of(item.nodeid) != int(part)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which part this was."""
    if part := terminalreporter.config.option.slow_part:
        terminalreporter.write_line(f"slow tests: part {part} of {PARTS}")
