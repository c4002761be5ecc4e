"""`auto` on captured rounds: one length for all rows, known before a round begins, so that rounds are launched ahead.

Tests of: lookahead.controller, drafting.captured_kinds, drafting.captured, engine.pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from captured_device import device
from captured_device import runner as runner_on
from captured_models import hf, runner
from policies import Confident, even_with_known_costs, with_known_costs
from pretend import Pretend, moved
from recorder import Recorder
from shoal import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting.captured import CapturedRounds
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Auto, EvenAuto, Fixed
from shoal.models import loading
from shoal.models.compiled import EXECUTORS
from shoal.models.compiled.captures import CAPTURED
from shoal.models.runner import Runner
from shoal.sampling.acceptance import RULES, decides_chains
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request, Row

__all__ = ["device"]
RULES_OF_CHAINS = [name for name, rule in RULES.items() if decides_chains(rule())]
SAMPLED = [Sampling(temperature=0.8, seed=i) for i in range(5)]


def near(architecture: str = "llama") -> Any:
    """A drafter that mostly agrees with the target."""
    made = tiny_model(architecture)
    head = made.get_output_embeddings().weight
    head.data += 0.1 * head.std() * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    return made


def near_on(device: Pretend) -> Runner:
    made = loading.wrap(moved(near()), "near", "pad", checked=False)
    made.capture_rounds("graphed")
    return made


def engine(controller: Any, rule: str, executor: str | None) -> Engine:
    return engine_of(runner(hf(), executor), runner(near(), executor), controller, rule=RULES[rule](), max_batch=8)


def run(made: Engine, samplings: Sequence[Sampling] = SAMPLED, new: int = 60) -> list[list[int]]:
    """The tokens of rows that end one after the other."""
    rows = [
        row
        for i, sampling in enumerate(samplings)
        for row in made.submit(Request((1, 2, 3 + i), 1, sampling, Limits(max_new_tokens=new - 5 * i)))
    ]
    while made.step():
        pass
    return [row.tokens for row in rows]


def ran(made: Engine) -> int:
    target = runners_of(made)[0].captures
    assert target is not None
    assert target.failures == []
    return target.ran.total()


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, rounds are left to their stages."""
    return lambda: monkeypatch.setattr(CapturedRounds, "decide", lambda *_, **__: None)


@pytest.mark.parametrize("executor", ["eager", "graphed"])
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_it_decides_what_it_decides_by_stages(
    rule: str, executor: str, monkeypatch: pytest.MonkeyPatch, stages: Callable[[], None]
) -> None:
    """With costs that stay what they are, and no round launched ahead: trials and plans."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)
    monkeypatch.setattr(CapturedRounds, "_launch_next", lambda *_: None)
    ours = engine(even_with_known_costs(), rule, executor)
    found = run(ours)
    stages()
    theirs = engine(even_with_known_costs(), rule, "eager")
    assert run(theirs) == found
    for count in ("rounds", "drafted", "accepted", "target_passes", "committed"):
        assert getattr(ours.stats, count) == getattr(theirs.stats, count), count
    assert ran(ours) == ours.stats.rounds
    assert ours.stats.accepted > 40


def launched(made: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], list[int]]]:
    """Runs; of each round: rows' serial numbers, lengths that the controller said, drafts that were verified."""
    controller, seen = made.lookahead, []
    for name in ("lengths", "repeat"):
        right = getattr(controller, name)

        def noted(rows: Sequence[Row], *more: int, right: Any = right, name: str = name) -> list[int]:
            found: list[int] = right(rows, *more)
            seen.append((name, [row.serial for row in rows], list(found)))
            return found

        monkeypatch.setattr(controller, name, noted)
    learn, rounds = controller.learn, []
    monkeypatch.setattr(controller, "learn", lambda outcome: (rounds.append((*seen[-1], outcome.drafted)), learn(outcome)))
    run(made)
    return rounds


@pytest.mark.slow
def test_rounds_of_a_plan_are_launched_ahead(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lengths are those of the round before, for the rows that are left; every other one asks the controller."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(device))
    with device:
        models = runner_on("target", device), near_on(device)
        made = engine_of(*models, even_with_known_costs(), rule=RULES["rejection"](), max_batch=8)
        rounds = launched(made, monkeypatch)
    assert all(said == list(drafted) for _, _, said, drafted in rounds)
    repeated = [now for now in rounds if now[0] == "repeat"]
    assert len(repeated) == made._stages.captured.launched_ahead["used"] > len(rounds) // 3
    for before, now in pairwise(rounds):
        if now[0] == "repeat":
            kept = dict(zip(before[1], before[2], strict=True))
            assert [kept[row] for row in now[1]] == now[2]
    assert any(max(now[2]) > 1 for now in repeated)
    assert ran(made) == made.stats.rounds + made._stages.captured.launched_ahead["dropped"]


@pytest.mark.slow
def test_tokens_follow_the_target_whatever_is_launched_ahead(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows: the ids of plain decoding."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(device))
    greedy = [Sampling(temperature=0.0)] * 5
    with device:
        models = runner_on("target", device), near_on(device)
        made = engine_of(*models, even_with_known_costs(), rule=RULES["rejection"](), max_batch=8)
        found = run(made, greedy)
        assert found == run(engine_of(runner_on("target", device), None, Fixed(0), max_batch=8), greedy)
    assert made._stages.captured.launched_ahead["used"] > 3
    assert made.stats.accepted > 20


@pytest.mark.parametrize("make", [lambda: Confident(0.1), with_known_costs])
def test_drafts_that_end_by_confidence_are_left_to_the_stages(make: Callable[[], Any]) -> None:
    """Plain rounds of such a controller are captured."""
    ours, theirs = engine(make(), "rejection", "eager"), engine(make(), "rejection", None)
    assert run(ours) == run(theirs)
    for count in ("rounds", "drafted", "accepted", "committed"):
        assert getattr(ours.stats, count) == getattr(theirs.stats, count), count
    assert ours.stats.accepted > 10
    plain = ours.stats.executors["target"][CAPTURED]
    assert 0 < plain < ours.stats.rounds


@pytest.mark.parametrize("executor", ["eager", None])
def test_auto_is_even_where_rounds_are_captured(executor: str | None) -> None:
    made = Shoal(runner(hf(), executor), runner(near(), executor), max_batch=4)
    kind = type(made.engine("auto", RULES["rejection"]()).lookahead)
    assert kind is (EvenAuto if executor else Auto)
