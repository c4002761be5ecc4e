"""The histograms of waiting and of tokens' times, on a clock that only the target moves; two sabotages show in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.serve.metrics import Metrics
from shoal.serve.timeline import Timeline
from shoal.types.requests import Row
from shoal.types.rounds import Commit
from test_time_budget import Timed

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
    families = text_string_to_metric_families(metrics.text().decode())
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


def test_waiting_and_paces_are_measured() -> None:
    compared()


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


@pytest.mark.parametrize("sabotage", [late, from_the_first])
def test_what_is_measured_wrong_is_found(sabotage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeline, "record", sabotage)
    with pytest.raises(AssertionError, match="request_queue" if sabotage is late else "inter_token"):
        compared()
