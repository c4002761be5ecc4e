"""The histograms of waiting and of tokens' times, on a clock that only the target moves; two sabotages show in them.

Tests of: serve.prometheus_metrics.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clocks import Timed
from shoal.serve.prometheus_metrics import Metrics, Timeline, text_of
from shoal.types.requests import Row
from shoal.types.rounds import Commit

NAMES = ("request_queue", "time_to_first_token", "inter_token", "time_per_output_token")


@dataclass
class Seen:
    """What a reader of the rounds notes of a request."""

    rows: list[Row]
    timeline: Timeline
    started: float | None = None
    ends: dict[Row, list[tuple[float, int]]] = field(default_factory=dict)  # of each row's rounds, with their tokens

    def note(self, commit: Commit, now: float) -> None:
        self.ends.setdefault(commit.row, []).append((now, len(commit.tokens)))


def found(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Count and sum of each histogram."""
    families = text_string_to_metric_families(text_of({"": metrics.families()}).decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return {name: (values[f"shoal_{name}_seconds_count"], values[f"shoal_{name}_seconds_sum"]) for name in NAMES}


def expected(requests: list[Seen]) -> dict[str, tuple[float, float]]:
    rows = [(row, ends) for seen in requests for row, ends in seen.ends.items()]
    paces = [(ends[-1][0] - ends[0][0]) / sum(count for _, count in ends[1:]) for _, ends in rows if len(ends) > 1]
    told = {
        "request_queue": [seen.started - seen.rows[0].request.submitted_at for seen in requests if seen.started is not None],
        "time_to_first_token": [ends[0][0] - row.request.submitted_at for row, ends in rows],
        "inter_token": [later[0] - before[0] for _, ends in rows for before, later in pairwise(ends)],
        "time_per_output_token": paces,
    }
    return {name: (len(values), pytest.approx(sum(values))) for name, values in told.items()}


def compared() -> None:
    """A slot is taken, and there is one for three requests: two rows with a long prompt, one row, one that never gets a slot."""
    timed, metrics = Timed(max_batch=2), Metrics()
    timed.ask(6, new=14)
    assert timed.step()  # it runs while the long prompt of the next is computed in chunks
    asked = [timed.ask(20, n=2, seed=1), timed.ask(3, seed=2), timed.ask(3, budget=10.0, seed=3)]
    requests = [Seen(rows, Timeline(len(rows))) for rows in asked]
    while True:
        before = timed.now
        commits = timed.step()
        for seen in requests:
            if seen.started is None and any(row.slot >= 0 for row in seen.rows):
                seen.started = before
        for commit in commits:
            for seen in requests:
                if commit.row in seen.rows:
                    if commit.tokens:
                        seen.note(commit, timed.now)
                    seen.timeline.record(metrics, seen.rows.index(commit.row), commit, timed.now)
        if not commits:
            break
    assert [seen.started is None for seen in requests] == [False, False, True]
    assert requests[0].started is not None
    assert min(ends[0][0] for ends in requests[0].ends.values()) > requests[0].started + 20  # behind all of its prompt
    assert max(len(ends) for seen in requests for ends in seen.ends.values()) > 2
    assert found(metrics) == expected(requests)


def late(self: Timeline, metrics: Metrics, index: int, commit: Commit, now: float) -> None:
    """A row starts at the end of its first round."""
    commit.row.started_at = now if commit.tokens else None
    _record(self, metrics, index, commit, now)


def from_the_first(self: Timeline, metrics: Metrics, index: int, commit: Commit, now: float) -> None:
    """The time of later tokens is counted from the first ones on."""
    first = self._first[index]
    if first is not None:
        self._last[index] = first
    _record(self, metrics, index, commit, now)


_record = Timeline.record


@pytest.mark.parametrize(("sabotage", "shows"), [(None, ""), (late, "request_queue"), (from_the_first, "inter_token")])
def test_waiting_and_paces_are_measured(sabotage: Any, shows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sabotage:
        monkeypatch.setattr(Timeline, "record", sabotage)
    with pytest.raises(AssertionError, match=shows) if shows else nullcontext():
        compared()


# ── several processes ───────────────────────────────────────────────────────────────────────────────────────────────


def merged(name: Callable[[int], str] = str) -> None:
    """The metrics of two processes in one text: what Prometheus adds up is what both counted."""
    two = [Metrics(), Metrics()]
    for metrics, seconds in zip(two, (0.2, 3.0), strict=True):
        metrics.request_started(seconds)
    families = {name(i): pickle.loads(pickle.dumps(metrics.families())) for i, metrics in enumerate(two)}
    text = text_of(families).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    queue = [sample for sample in samples if sample.name.startswith("shoal_request_queue_seconds")]
    assert {sample.labels["replica"] for sample in samples} == {"0", "1"}
    assert sum(sample.value for sample in queue if sample.name.endswith("_sum")) == pytest.approx(3.2)
    assert sum(sample.value for sample in queue if sample.labels.get("le") == "1.0") == 1
    assert sum(sample.value for sample in queue if sample.labels.get("le") == "+Inf") == 2
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_metrics_of_several_processes_are_together() -> None:
    merged()
    with pytest.raises(AssertionError):
        merged(lambda _: "0")  # the control: those of one in place of all
