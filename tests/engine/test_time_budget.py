"""Time budgets: what is computed after the deadline, what counts as finished, who starts. Prompts and rounds move the clock.

Tests of: engine.waiting.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from clocks import Timed
from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.serve.worker import Submission, Worker
from shoal.types.requests import Request, Row
from shoal.types.samples import FINISH_REASONS, Sample, ranked

# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@pytest.mark.parametrize("budget", [0.5, 8, 20, 99.5])
def test_after_the_deadline_at_most_a_chunk_of_the_prompt_is_computed(budget: float, prefix_sharing: str) -> None:
    """Alone in the engine: nobody else is waiting for the round."""
    timed = Timed(prefix_sharing=prefix_sharing)
    rows = timed.ask(100, n=2, budget=budget)
    timed.finish()
    assert timed.now < budget + timed.engine.scheduler.chunk
    assert timed.engine.stats.prefill_tokens == timed.engine.stats.seconds_prefill == timed.now
    assert timed.engine.stats.target_passes == 0
    assert {(s.finished, s.text, s.token_ids) for s in timed.samples.values()} == {(False, "", ())}
    assert len(timed.samples) == len(rows)


def test_a_deadline_that_waits_counts_too() -> None:
    """The long prompt has no deadline of its own; the row behind it has."""
    timed = Timed(max_batch=1)
    long, short = timed.ask(100, new=3), timed.ask(2, budget=10)
    for _ in range(3):
        if not set(timed.samples) & set(short):
            timed.step()
    assert timed.now < 10 + 8
    assert timed.samples[short[0]].token_ids == ()
    timed.finish()
    assert timed.told(long) == ["length"]


def test_deadlines_are_read_after_the_prompt_and_before_its_round() -> None:
    """The chunk that completes the prompt ends after the deadline: no pass is made for the row, and others are not held up."""
    timed = Timed()
    running = timed.ask(2, new=40)
    timed.step()
    late, after = timed.ask(7, n=2, budget=4), timed.ask(7, n=1, seed=1)
    rounds = timed.engine.stats.rounds
    commits = timed.step()
    assert {commit.row for commit in commits} == {*late, *running}
    assert timed.engine.stats.rounds == rounds + 1
    assert all(row.target_passes == 0 for row in late)
    assert timed.engine.stats.prefill_tokens == 2 + 8  # theirs, and one token of the next prompt
    timed.finish()
    assert timed.told(running + after) == ["length"] * 2
    alone = Timed().finish_alone(7, 1)
    assert after[0].tokens == alone


def test_slots_are_closed_up_when_a_deadline_passes_in_between() -> None:
    """A row below the others leaves after the prompts and before the round; those above keep their tokens."""
    timed = Timed(max_batch=3, chunk=64)
    first = timed.ask(1, new=40, budget=12, seed=1)
    others = [timed.ask(3, new=20, seed=2)[0], timed.ask(3, new=20, seed=3)[0]]
    timed.step()
    timed.engine.cancel(others[1:])
    new = timed.ask(30, new=20, seed=4)
    timed.step()
    assert timed.told(first) == ["time"]
    assert [row.slot for row in timed.engine.scheduler.running] == [0, 1]
    timed.finish()
    for row, (length, seed) in ((others[0], (3, 2)), (new[0], (30, 4))):
        assert row.tokens == Timed().finish_alone(length, seed, new=20)


def test_without_deadlines_prompts_are_computed_whole() -> None:
    timed = Timed()
    timed.ask(100)
    timed.step()
    assert (timed.engine.stats.prefill_chunks, timed.engine.stats.prefill_tokens) == (1, 100)


# ── what counts as finished ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("budget", "finished"), [(5.0, True), (4.5, False)])
def test_a_row_that_ends_after_its_deadline_is_not_finished(budget: float, finished: bool) -> None:
    """It keeps its reason, as its text is whole; it ranks behind those that were in time, whatever its log-probability."""
    timed = Timed(draft=False)
    rows = timed.ask(3, n=2, new=2, budget=budget)  # rounds end at 4 and at 5
    timed.finish()
    assert timed.told(rows) == ["length"] * 2
    for row in rows:
        sample = timed.samples[row]
        assert (sample.finished_at, len(sample.token_ids)) == (5.0, 2)
        assert sample.finished is sample.in_time is finished


def test_ranking_honours_the_budget() -> None:
    def sample(reason: str, mean: float, in_time: bool = True, **more: Any) -> Sample:
        return Sample(
            "", more.pop("ids", ()), (), more.pop("logprobs", ()), mean, reason, 1.0, 1, 0, 0, 1, (), in_time=in_time, **more
        )

    late, whole, cut = sample("eos", -0.1, in_time=False), sample("stop", -2.0), sample("time", -0.5, in_time=False)
    empty = sample("eos", math.nan)
    assert ranked([late, cut, empty, whole]) == [whole, empty, late, cut]
    weighted = sample("eos", -9.0, ids=(1, 2), logprobs=(-1.0, -2.0), log_allowed=-1.0)
    assert (weighted.ranking_logprob, ranked([whole, weighted])) == (-2.0, [whole, weighted])
    assert ranked([replace(whole, mean_logprob=-2.1), weighted])[0] is weighted


# ── who starts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(timed: Timed, prompts: int, n: int, budget: float | None, length: int = 3) -> list[list[Row]]:
    """Several prompts in one call, two tokens for each sample."""
    limits = Limits(max_new_tokens=2, time_budget=budget, eos=())
    return timed.engine.submit_all(
        Request((1 + i, *range(1, length + 1)), n, Sampling(seed=i), limits, submitted_at=timed.now) for i in range(prompts)
    )


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@pytest.mark.parametrize(("groups", "slots", "computed"), [(4, 2, 8), (3, 4, 3), (3, 1, 7)])
def test_with_a_budget_every_prompt_gets_its_first_sample_first(
    groups: int, slots: int, computed: int, prefix_sharing: str
) -> None:
    """Three samples of each, in the order of their index; the tokens are those of the order without a budget, where every prompt is
    computed once. A prompt that lost its slot between two of its samples is computed again, and counted."""
    timed = Timed(draft=False, max_batch=slots, prefix_sharing=prefix_sharing, chunk=512)
    rows = [row for group in asked(timed, groups, 3, 1e6) for row in group]
    timed.finish()
    began = sorted(rows, key=lambda row: (timed.samples[row].finished_at, row.index))
    assert [row.index for row in began] == sorted(row.index for row in rows)
    free = Timed(draft=False, max_batch=slots, prefix_sharing=prefix_sharing)
    others = [row for group in asked(free, groups, 3, None) for row in group]
    free.finish()
    assert [row.tokens for row in rows] == [row.tokens for row in others]
    assert (timed.engine.stats.prefills, free.engine.stats.prefills) == (computed, groups)


def test_rows_that_time_never_let_start_say_so() -> None:
    """Two slots, three prompts of three samples, time for the first samples and one more: of the prompt that is still in a slot."""
    timed = Timed(draft=False, max_batch=2)
    groups = asked(timed, 3, 3, 13.0)  # prompts take 3 seconds each, rounds 1
    timed.finish()
    assert [timed.told(group) for group in groups] == [
        ["length", "not started", "not started"], ["length", "length", "not started"],
        ["length", "not started", "not started"],
    ]  # fmt: skip
    for row in groups[0][1:] + groups[1][2:] + groups[2][1:]:
        sample = timed.samples[row]
        assert (sample.finished, sample.text, sample.token_ids, sample.rounds) == (False, "", (), 0)
        assert ranked(timed.samples.values()).index(sample) >= 4
    assert "not started" in FINISH_REASONS


def test_a_call_that_cannot_be_served_leaves_nothing_behind() -> None:
    timed = Timed()
    with pytest.raises(RequestError, match="empty"):
        timed.engine.submit_all([Request((1, 2)), Request(())])
    assert timed.engine.scheduler.idle


class Unlisted(dict[Row, Any]):
    """A dict that may be asked, but not gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("gone through")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_a_submission_joins_as_one_call_and_leaves_alone() -> None:
    """Its prompts take turns; cancelling it does not look at the rows of others."""
    engine = Timed(max_batch=1).engine
    worker = Worker(lambda: engine, 100, None)  # type: ignore[arg-type]
    worker._rows = Unlisted()
    submissions = []
    for _ in range(2):
        requests = [Request((1 + i, 2), 2, limits=Limits(time_budget=60.0)) for i in range(2)]
        submissions.append(Submission(requests, 4, stream=False, detailed=False))
        worker._submit(submissions[-1])
    assert [(row.group, row.index) for row in engine.scheduler.waiting] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1),
    ]  # fmt: skip
    worker._cancel(submissions[0])
    assert [(row.group, row.index) for row in engine.scheduler.waiting] == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert len(worker._rows) == 4
