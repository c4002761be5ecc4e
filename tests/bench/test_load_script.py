"""The load test itself, for a second: it finds nothing where nothing is wrong, and what is wrong it finds.

Tests of: benchmarks/load.py, benchmarks/held_memory.py.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import held_memory
import load
from held_memory import Reading, growth


@pytest.mark.slow  # a server of its own, with the bundled pair
def test_a_second_of_it_and_then_a_few_requests_of_a_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one server, which the first run leaves to the second: nothing else is wrong.

    A MiB that each request leaves behind is seen in so few, whatever they leave beside it.
    """
    file = tmp_path / "found.json"
    options = ["load.py", "--minutes", "0.02", "--clients", "2", "--json", str(file)]
    monkeypatch.setattr(load, "known_asks", cache(load.known_asks))
    monkeypatch.setattr(load, "ENOUGH", 0)
    monkeypatch.setattr(load, "LEFT_KIB", 300.0)
    with ExitStack() as running:
        started = running.enter_context(load.server(["--max-batch", "8", "--chat-template", "chatml"], 2**20))
        monkeypatch.setattr(load, "server", lambda *_: nullcontext(started))
        monkeypatch.setattr(sys, "argv", options)
        assert load.main() == 1
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["failures"] == ["SIGTERM ended the server with exit code None"]
        assert found["rows_left"] == 0
        for phase in found["phases"].values():
            assert sum(phase["requests"].values()) >= 2
            assert phase["tokens"] > 0

        @contextmanager
        def last(*_: Any) -> Iterator[Any]:
            with running:
                yield started

        monkeypatch.setattr(load, "server", last)
        monkeypatch.setattr(sys, "argv", [*options, "--soak", "64"])
        code = load.main()
    found = json.loads(file.read_text(encoding="utf-8"))
    assert code == 1
    (failure,) = found["failures"]
    assert failure.startswith("a request left ")
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


@pytest.mark.parametrize(
    ("at_least", "soak", "said"), [(1.1, 20_000, True), (0.9, 20_000, False), (-3.0, 20_000, False), (1.1, 3_000, False)]
)
def test_a_soak_is_judged_by_what_a_request_leaves_at_the_least(at_least: float, soak: int, said: bool) -> None:
    found = {**GOOD, "memory": GROWN, "growth": {"left_kib": 1.4, "at_least_kib": at_least}}
    assert load.failures(found, 0, 0, soak) == ([f"a request left 1.4 KiB behind, {at_least} at the least"] if said else [])


@pytest.mark.parametrize(("leak", "sure"), [(4096, (2.5, 5.5)), (0, (-1.5, 1.5))])
def test_growth_is_told_with_its_bounds(leak: int, sure: tuple[float, float]) -> None:
    """Beside half a MiB of noise, one reading that is far off, and a warm-up that took more."""
    chance = random.Random(0)
    sizes = [2**28 + i * 250 * leak + chance.randrange(2**19) - max(20 - i, 0) * 2**20 for i in range(40)]
    sizes[30] += 2**27
    told = growth([Reading(250 * i, size, {"a": i, "b": 7}) for i, size in enumerate(sizes)])
    assert told is not None
    assert sure[0] < told["at_least_kib"] <= told["left_kib"] <= told["at_most_kib"] < sure[1]
    assert (told["readings"], told["objects_per_1000"]) == (20, {"a": 4.0})
    assert growth([Reading(1, 1, {})] * 10) is None


PROCESS = """
import json, os, random, sys
from held_memory import held
chance, kept, leak = random.Random(0), [], int(sys.argv[1])
for _ in range(24):
    passing = [os.urandom(chance.randrange(2**18)) for _ in range(50)]
    kept += [[os.urandom(leak)] for _ in range(50) if leak]
    del passing
    print(json.dumps(held()))
"""


@pytest.mark.slow(but=["4096"])
@pytest.mark.parametrize("leak", [4096, 0])
def test_what_a_process_keeps_is_seen(leak: int) -> None:
    """4 KiB a request, as a list would keep them, beside megabytes that come and go."""
    place = str(Path(held_memory.__file__).parent)
    environment = os.environ | {"PYTHONMALLOC": "malloc", "PYTHONPATH": os.pathsep.join([place, *filter(None, sys.path)])}
    command = [sys.executable, "-c", PROCESS, str(leak)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    held = [json.loads(line) for line in lines]
    told = growth([Reading(50 * (i + 1), one["bytes"], one["types"]) for i, one in enumerate(held)])
    assert told is not None
    if leak:
        assert 4 <= told["at_least_kib"] <= told["at_most_kib"] < 5
        assert told["objects_per_1000"]["builtins.list"] >= 1000
    else:
        assert told["at_least_kib"] <= 0.1
        assert told["at_most_kib"] < 1


def test_times_are_told_in_percentiles() -> None:
    assert load.percentiles([i / 1000 for i in range(101)]) == {"p50": pytest.approx(50), "p95": pytest.approx(95)}
    assert load.percentiles([1.0]) is None
