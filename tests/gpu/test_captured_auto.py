"""Captured rounds whose drafts end by the drafter's confidence: the questions, tokens and counts of the stages, few crossings.

Tests of: models.compiled.transfer, drafting.captured_kinds, models.compiled.captured_round,
drafting.captured, models.compiled.round_functions, models.compiled.executors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from by_pairs import by_pairs
from captured_device import runner as runner_on
from captured_device import waits
from captured_models import hf, runner
from policies import LIMIT, Confident, with_known_costs
from pretend import Pretend
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.drafting import captured_kinds
from shoal.drafting.captured import RECENT, CapturedRounds
from shoal.drafting.captured_kinds import MOST, PIECE
from shoal.engine.engine import Engine
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.executors import EXECUTORS
from shoal.models.compiled.round_functions import Kind
from shoal.models.compiled.transfer import Upload
from shoal.sampling.acceptance import RULES, decides_chains
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request

CAPTURED = [name for name, rule in RULES.items() if decides_chains(rule())]


SETTINGS: dict[str, tuple[list[Sampling], float]] = {
    "greedy": ([Sampling(temperature=0.0)] * 3, 0.12),
    "sampled": ([Sampling(temperature=0.8, seed=i) for i in range(5)], 0.15),
    "several": ([Sampling(temperature=t, seed=2) for t in (0.0, 0.7, 1.2)], 0.12),
    "top_p": ([Sampling(top_p=0.9, top_k=20, seed=i) for i in range(3)], 0.2),
}
"""By name: the rows' sampling, and how sure the drafter must be."""


def run(made: Engine, samplings: Sequence[Sampling], new: int = 40) -> list[list[int]]:
    rows = [
        row
        for i, sampling in enumerate(samplings)
        for row in made.submit(Request((1, 2, 3 + i), 1, sampling, Limits(max_new_tokens=new - 5 * i)))
    ]
    while made.step():
        pass
    return [row.tokens for row in rows]


def near(architecture: str = "llama") -> Any:
    """A drafter that mostly agrees with the target."""
    made = tiny_model(architecture)
    head = made.get_output_embeddings().weight
    head.data += 0.3 * head.std() * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    return made


def engine(controller: Any, rule: str, executor: str) -> Engine:
    return engine_of(runner(hf(), executor), runner(near(), executor), controller, rule=RULES[rule](), max_batch=8)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, rounds are left to their stages."""
    return lambda: monkeypatch.setattr(CapturedRounds, "decide", lambda *_, **__: None)


def same_questions(ours: Confident, theirs: Confident) -> None:
    """In the same order, about the same confidences; and the same of every round was told, but for steps computed in vain."""
    assert [[position for position, _ in one] for one in ours.asked] == [
        [position for position, _ in one] for one in theirs.asked
    ]
    for one, other in zip(ours.asked, theirs.asked, strict=True):
        for (_, confidence), (_, right) in zip(one, other, strict=True):
            assert confidence == pytest.approx(right, abs=1e-5, nan_ok=True)
    for one, other in zip(ours.told, theirs.told, strict=True):
        assert (one.drafted, one.accepted) == (other.drafted, other.accepted)
        assert other.steps <= one.steps <= max(ours.limit, other.steps) + PIECE - 1


def compared(
    rule: str, settings: str, executor: str, stages: Callable[[], None], make: Callable[[], Any] | None = None
) -> tuple[Engine, Engine, list[Any]]:
    """The same work by captured rounds and by stages, and their controllers."""
    samplings, least = SETTINGS[settings]
    controllers = [Confident(least) if make is None else make() for _ in range(2)]
    ours = engine(controllers[0], rule, executor)
    found = run(ours, samplings)
    stages()
    theirs = engine(controllers[1], rule, "eager")
    assert run(theirs, samplings) == found
    for count in ("rounds", "drafted", "accepted", "target_passes", "committed"):
        assert getattr(ours.stats, count) == getattr(theirs.stats, count), count
    return ours, theirs, controllers


def rounds_run(made: Engine) -> int:
    target = runners_of(made)[0].captures
    assert target is not None
    assert target.failures == []
    return target.ran.total()


@by_pairs({"ragged": [False, True], "few": [1, 2], "settings": SETTINGS, "rule": CAPTURED})
def test_tokens_counts_and_questions_are_those_of_the_stages(
    rule: str, settings: str, few: int, ragged: bool, monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]
) -> None:  # fmt: skip
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    monkeypatch.setattr(captured_kinds, "AT_ONCE", 0 if ragged else captured_kinds.AT_ONCE)  # 0: built within rounds
    least = SETTINGS[settings][1]
    ours, theirs, controllers = compared(rule, settings, "graphed", stages, lambda: Confident(least, ragged, few))
    same_questions(*controllers)
    assert rounds_run(ours) == ours.stats.rounds
    assert ours.stats.accepted > 10
    assert theirs.stats.draft_passes <= ours.stats.draft_passes <= theirs.stats.draft_passes + PIECE * ours.stats.rounds


@pytest.mark.parametrize("executor", ["eager", "graphed"])
@pytest.mark.parametrize("rule", CAPTURED)
def test_auto_decides_what_it_decides_by_stages(
    rule: str, executor: str, monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]
) -> None:
    """With costs that stay what they are: trials, plans, drafts that end by confidence."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    ours, _, controllers = compared(rule, "sampled", executor, stages, with_known_costs)
    assert rounds_run(ours) == ours.stats.rounds
    assert ours.stats.accepted > 10
    ours_costs, theirs_costs = (controller.costs for controller in controllers)
    assert ours_costs.acceptance.mean == pytest.approx(theirs_costs.acceptance.mean, abs=1e-6)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_logits_that_are_not_finite_are_left_to_the_stages(role: str, stages: Callable[[], None]) -> None:
    """One token's embedding is NaN: rounds in which it is fed, and those after, must be what they are by stages."""

    def result() -> Any:
        models = [tiny_model("llama", seed=0), near()]
        models[role == "drafter"].model.embed_tokens.weight.data[7] = torch.nan
        made = engine_of(*(runner(model) for model in models), Confident(0.1), rule=RULES["rejection"](), max_batch=8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tokens = run(made, SETTINGS["sampled"][0])
        return rounds_run(made), tokens, made.stats.accepted

    some, *found = result()
    assert some
    stages()
    _, *expected = result()
    assert found == expected


# ── what is wrong is found ──────────────────────────────────────────────────────────────────────────────────────────


def asked_on(self: CapturedRounds, round_: Any, work: Any, stop: Any, clock: Any) -> Any:
    """The controller is asked about all that was computed."""
    ended = _drafted(self, round_, work, stop, clock)
    stop(len(round_.confidences(len(work.rows))) - 1, round_.confidences(len(work.rows))[-1])
    return ended


def late(self: CapturedRound, rows: int) -> Any:
    """Confidences of the position before."""
    found = _confidences(self, rows)
    return [found[0], *found[:-1]]


def stale(self: Upload, first: str | None = None, last: str | None = None) -> None:
    """The lengths that were asked for, not those that are left."""
    if first == "target":
        length = self._host_parts["lengths"]
        length[:] = np.maximum(length, 1)
    _send(self, first, last)


def forgetful(self: CapturedRound, name: str, number: int) -> Any:
    """What was in the buffers before a function was built is lost."""
    known = (name, number) in self.built
    made = _part(self, name, number)
    if not known:
        self.functions.fill_padding(0)
    return made


_drafted, _confidences, _send, _part = CapturedRounds._drafted, CapturedRound.confidences, Upload.send, CapturedRound._part
SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    "asked on": (CapturedRounds, "_drafted", asked_on),
    "late": (CapturedRound, "confidences", late),
    "stale": (Upload, "send", stale),
    "forgetful": (CapturedRound, "_part", forgetful),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_what_is_wrong_is_found(sabotage: str, monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]) -> None:
    owner, name, wrong = SABOTAGES[sabotage]
    monkeypatch.setattr(captured_kinds, "AT_ONCE", 0)  # functions are built within rounds
    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    with warnings.catch_warnings(), pytest.raises((AssertionError, IndexError)):  # noqa: PT012
        warnings.simplefilter("ignore")
        ours, _, controllers = compared("rejection", "sampled", "graphed", stages)
        same_questions(*controllers)
        assert rounds_run(ours)


# ── what a round asks of the host ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    pretend = Pretend()
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(pretend))
    return pretend


def compared_parts(made: Engine) -> int:
    """Functions whose first results have been compared with ordinary passes."""
    assert made.target.captures is not None
    return sum(len(one._checked) for built in made.target.captures._of.values() for one in built.rounds.values())


def of_rounds(controller: Any, rule: str, device: Pretend, most: int = 12) -> dict[int, Counter[str]]:
    """What was counted in each of the first rounds, by its number, where nothing was built and compared, and no prompt computed."""
    found = {}
    with device:
        made = engine_of(
            runner_on("target", device), runner_on("drafter", device), controller, rule=RULES[rule](), max_batch=8
        )
        for i in range(3):
            made.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=200)))
        assert made.drafter is not None
        for i in range(most):
            before, apart = (
                device.counts.copy(),
                (made.target.seconds_building, made.drafter.seconds_preparing, compared_parts(made)),
            )
            made.step()
            if (made.target.seconds_building, made.drafter.seconds_preparing, compared_parts(made)) == apart:
                found[i] = device.counts - before
    assert len(found) > most // 3
    return found


def test_no_round_waits_for_a_capture_after_the_first_of_its_kind(device: Pretend) -> None:
    """Drafts of any length up to 8, ends included."""
    with device:
        made = engine_of(
            runner_on("target", device), runner_on("drafter", device), Confident(0.15), rule=RULES["coupled"](), max_batch=8
        )
        for i in range(3):
            made.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=30)))
        built, kinds, target = [], set[Kind](), made.target.captures
        assert target is not None
        while True:
            before = Recorder.log.count("capture")
            if not made.step():
                break
            if Recorder.log.count("capture") > before:
                new = {key for key in target.ran if isinstance(key, Kind)} - kinds
                built.append(len(new))
                kinds |= new
    assert made.stats.rounds > 12
    assert all(built)  # captures go with a kind that is new
    rounds = [one for of in target._of.values() for one in of.rounds.values()]
    assert sum(len(one.built) for one in rounds) <= MOST
    assert {len(one.built) for one in rounds if one.kind.looks} <= {
        4 + 5,
        1 + 2,
    }  # pieces and widths of 8 drafts, or of 2 at the end


@pytest.mark.parametrize(("least", "steps"), [(0.0, LIMIT), (2.0, 1)])
@pytest.mark.parametrize("rule", CAPTURED)
def test_a_round_waits_twice_where_drafts_end_as_they_did(rule: str, least: float, steps: int, device: Pretend) -> None:
    """One upload before the drafts, one of the lengths that the host decides on; one launch per piece, and one of the target."""
    for i, counts in of_rounds(Confident(least), rule, device).items():
        if i < RECENT:
            continue
        counts.pop("captured")
        assert counts == {"upload": 2, "replay": -(-steps // PIECE) + 1, "download": 2}, device.where


def test_each_look_more_is_a_wait_more(device: Pretend) -> None:
    controller = Confident(0.15)
    for i, counts in of_rounds(controller, "rejection", device).items():
        steps = -(-len(controller.asked[i]) // PIECE) * PIECE
        assert counts["upload"] == 2
        assert 2 <= waits(counts) <= steps // PIECE + 1
        assert steps // PIECE + 1 <= counts["replay"] <= LIMIT // PIECE + 2
        assert counts["launch"] == 0


def test_auto_crosses_as_often(device: Pretend) -> None:
    for counts in of_rounds(with_known_costs(), "coupled", device).values():
        assert counts["launch"] == 0
        assert counts["upload"] in (1, 2)  # plain rounds, and others
        assert waits(counts) <= counts["replay"]
