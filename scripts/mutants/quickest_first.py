"""A plugin of pytest for runs of mutants: the quickest tests come first, up to a budget of seconds.

mutmut notes how long each test took without mutants. Most mutants are then seen by a test of milliseconds, and one that no test
sees costs no more than the budget.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

NOTES = Path("mutmut-stats.json")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests of a mutant, and leaves out those past the budget."""
    phase = os.environ.get("MUTANT_UNDER_TEST")
    if not NOTES.exists() or phase in ("stats", "list_all_tests"):
        return
    seconds = json.loads(NOTES.read_text(encoding="utf-8"))["duration_by_test"]
    items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))
    left, chosen = float(os.environ["MUTANTS_SECONDS"]), []
    for item in items:
        left -= seconds.get(item.nodeid, 0.0)
        if left < 0 and chosen:
            break
        chosen.append(item)
    config.hook.pytest_deselected(items=items[len(chosen) :])
    items[:] = chosen
