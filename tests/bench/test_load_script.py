"""The load test itself, for a second: it finds nothing where nothing is wrong, and what is wrong it finds.

Tests of: benchmarks/load.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import load


@pytest.mark.slow  # a server of its own, with the bundled pair
def test_a_second_of_it_and_then_a_few_requests_of_a_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one server, which the first run leaves to the second: nothing else is wrong."""
    file = tmp_path / "found.json"
    options = ["load.py", "--minutes", "0.02", "--clients", "2", "--json", str(file)]
    monkeypatch.setattr(load, "known_asks", cache(load.known_asks))
    with ExitStack() as running:
        started = running.enter_context(load.server(["--max-batch", "8", "--chat-template", "chatml"]))
        monkeypatch.setattr(load, "server", lambda _: nullcontext(started))
        monkeypatch.setattr(sys, "argv", options)
        assert load.main() == 1
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["failures"] == ["SIGTERM ended the server with exit code None"]
        assert found["rows_left"] == 0
        for phase in found["phases"].values():
            assert sum(phase["requests"].values()) >= 2
            assert phase["tokens"] > 0

        @contextmanager
        def last(_: list[str]) -> Iterator[Any]:
            with running:
                yield started

        monkeypatch.setattr(load, "server", last)
        monkeypatch.setattr(sys, "argv", [*options, "--soak", "64"])
        code = load.main()
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["failures"], code) == ([], 0)
    kinds = {kind for phase in found["phases"].values() for kind in phase["requests"]}
    assert sum(sum(phase["requests"].values()) for phase in found["phases"].values()) == 64
    assert kinds & {"new schema", "chat", "echo", "no time", "bad"}


GOOD: dict[str, Any] = {
    "phases": {"auto": {"failures": []}}, "rows_left": 0,
    "memory": {"quarters_mib": [300, 400, 405, 410], "without_caches_mib": [200, 250, 255, 260]},
}  # fmt: skip
GROWN = {"quarters_mib": [300, 400, 440, 480], "without_caches_mib": [200, 250, 260, 275]}


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({}, 0, []),
        ({"phases": {"auto": {"failures": ["stop: x"]}}}, 0, ["auto: stop: x"]),
        ({"rows_left": 2.0}, 0, ["2 rows are left in the server"]),
        ({"memory": GROWN}, 0, ["memory without caches grew from 250 to 275 MiB"]),
        ({"memory": {**GROWN, "without_caches_mib": [200, 250, 250, 250]}}, 0, []),
        ({}, None, ["SIGTERM ended the server with exit code None"]),
    ],
)
def test_what_is_wrong_is_told(changed: Any, code: int | None, said: list[str]) -> None:
    assert load.failures({**GOOD, **changed}, 300, code) == said


@pytest.mark.parametrize(("left", "soak", "said"), [(1.4, 20_000, True), (0.9, 20_000, False), (1.4, 3_000, False)])
def test_a_soak_is_judged_by_what_a_request_leaves(left: float, soak: int, said: bool) -> None:
    found = {**GOOD, "memory": {**GROWN, "left_kib": left}}
    assert load.failures(found, 0, 0, soak) == (["a request left 1.4 KiB behind"] if said else [])


def test_what_a_request_leaves_is_told_behind_the_caches() -> None:
    """From the middle of the second quarter to that of the last: 2 KiB a request here, and a cache that grows beside."""
    sizes = [(2**30 + i * (2048 * 10 + 2**20), i * 2**20, 10 * i) for i in range(80)]
    found = load.memory(sizes)
    assert found is not None
    assert (found["left_kib"], found["requests"]) == (2.0, [95, 295, 495, 695])


def test_times_are_told_in_percentiles() -> None:
    assert load.percentiles([i / 1000 for i in range(101)]) == {"p50": pytest.approx(50), "p95": pytest.approx(95)}
    assert load.percentiles([1.0]) is None
