"""Behaviour kept: the runs of tests/helpers/frozen.py give the tokens and counts in tests/data.

Tests of: engine.engine, api, sampling.acceptance, lookahead.controller.
"""

from __future__ import annotations

import pytest

import frozen

KEPT = frozen.kept()


def test_every_run_is_kept() -> None:
    assert list(KEPT) == list(frozen.runs())


@pytest.mark.parametrize("name", KEPT)
def test_tokens_and_counts_are_those_kept(name: str) -> None:
    record = frozen.runs()[name]()
    assert [record[part] for part in frozen.TOKENS] == [KEPT[name][part] for part in frozen.TOKENS]
    assert record == KEPT[name]


def test_the_kept_runs_took_every_way() -> None:
    """Drafts were accepted and rejected, rows ended in every manner, and a plain run drafted nothing."""
    drafted = [run for name, run in KEPT.items() if "plain" not in name]
    assert all(0 < run["accepted"] < run["drafted"] for run in drafted)
    assert KEPT["controls: plain"]["drafted"] == KEPT["controls: plain"]["draft_passes"] == 0
    assert {end for run in KEPT.values() for end in run["ends"]} >= {"eos", "length", "stop", "cancelled"}
