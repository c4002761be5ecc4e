"""Captured rounds that are launched before the host knows the verdict of the round before, on a pretended device.

Tests of: drafting.captured_inputs, drafting.captured, models.compiled.captured_round,
models.compiled.round_functions, models.compiled.block.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from captured_device import device, engine, tokens
from captured_models import hf
from captured_models import runner as captured_runner
from pretend import Pretend
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.drafting.captured import CapturedRounds
from shoal.drafting.captured_inputs import fill_drafting, fill_target
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models.cache import Plan
from shoal.models.compiled import EXECUTORS, captured_round
from shoal.models.compiled.block import Block, Bucket
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.captures import CAPTURED
from shoal.models.compiled.round_functions import NextRound
from shoal.sampling.acceptance import RULES
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request

__all__ = ["device"]
K, NEW = 4, 24
SAMPLED = [Sampling(0.8, seed=i) for i in range(3)]
CASES = [
    (0, "rejection", SAMPLED),
    (K, "rejection", SAMPLED),
    (K, "coupled", SAMPLED),
    (K, "rejection", [Sampling(temperature=0.0)] * 3),
    (1, "rejection", SAMPLED),
    (K, "rejection", [Sampling(top_p=0.9, top_k=20, seed=i) for i in range(3)]),
]


def counts(made: Engine) -> dict[str, int]:
    names = ("rounds", "drafted", "accepted", "target_passes", "draft_passes", "committed")
    return {name: getattr(made.stats, name) for name in names}


def ahead(made: Engine) -> dict[str, int]:
    return dict(made._stages.captured.launched_ahead)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its call on, no round is launched ahead."""
    monkeypatch.setattr(CapturedRounds, "_launch_next", lambda *_: None)


def failures(made: Engine) -> list[str]:
    return [one for runner in runners_of(made) if runner.captures is not None for one in runner.captures.failures]


@pytest.mark.slow(but=["0-rejection-samplings0", "4-rejection-samplings1"])
@pytest.mark.parametrize(("k", "rule", "samplings"), CASES)
def test_samples_and_counts_are_those_of_rounds_one_by_one(
    k: int, rule: str, samplings: Sequence[Sampling], device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device:
        made = engine(k, rule, device, samplings, new=NEW)
        found = tokens(made)
        without(monkeypatch)
        plain = engine(k, rule, device, samplings, new=NEW)
        assert found == tokens(plain)
    assert counts(made) == counts(plain)
    assert failures(made) == []
    assert ahead(plain) == {}
    used = ahead(made)
    assert set(used) <= {"used", "dropped"}
    # The first round is compared with its stages, and the last ones are near the ends of rows.
    assert used["used"] >= made.stats.rounds // 2


def ending(device: Pretend, k: int, waiting: int) -> Engine:
    """Five rows of which two end early, and `waiting` more than there are slots for."""
    made = engine(k, "rejection", device, [], new=NEW)
    for i in range(8 + waiting):
        limits = Limits(max_new_tokens=NEW if i % 2 else 16 + i, eos=(5, 9, 11))
        made.submit(Request((1, 2, 3 + i), 1, Sampling(0.8, seed=i), limits))
    return made


@pytest.mark.slow(but=["0-0", "4-0"])
@pytest.mark.parametrize("waiting", [0, 5])
@pytest.mark.parametrize("k", [0, K])
def test_rows_that_end_leave_the_others_as_they_are(
    k: int, waiting: int, device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device:
        made = ending(device, k, waiting)
        found = tokens(made)
        without(monkeypatch)
        plain = ending(device, k, waiting)
        assert found == tokens(plain)
    assert len(found) == 8 + waiting
    assert failures(made) == []
    assert ahead(made)["used"] > 3


@pytest.mark.slow
def test_a_row_joins_after_the_round_that_was_launched(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    def joined() -> tuple[Engine, list[tuple[int, ...]]]:
        made, found = engine(K, "rejection", device, SAMPLED[:2], new=NEW), []
        for _ in range(4):
            found += made.step()
        late = made.submit(Request((7, 8, 9), 1, SAMPLED[2], Limits(max_new_tokens=8)))
        for _ in range(2):
            made.step()
        assert late[0].rounds >= 1
        return made, tokens(made)

    with device:
        made, found = joined()
        without(monkeypatch)
        assert joined()[1] == found
    assert ahead(made)["used"] > 3


@pytest.mark.slow
def test_a_cancelled_row_does_not_end_the_round_of_the_others(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut() -> tuple[Engine, list[tuple[int, ...]]]:
        made = engine(K, "rejection", device, SAMPLED, new=NEW)
        for _ in range(4):
            made.step()
        made.cancel(made.scheduler.running[:1])
        return made, tokens(made)

    with device:
        made, found = cut()
        without(monkeypatch)
        assert cut()[1] == found
    assert ahead(made)["used"] > 3
    assert "dropped" not in ahead(made)


def test_a_cache_that_changes_its_size_drops_the_round(device: Pretend) -> None:
    with device:
        made = engine(0, "rejection", device, SAMPLED, new=NEW)
        expected = tokens(engine(0, "rejection", device, SAMPLED, new=NEW))
        for _ in range(4):
            made.step()
        with torch.inference_mode():
            made.target.cache.reserve(made.target.cache.slots + 4, made.target.cache.capacity + 64)
        assert tokens(made) == expected
    assert ahead(made)["dropped"] == 1


@pytest.mark.slow(but=["0"])
@pytest.mark.parametrize("k", [0, K])
def test_a_round_without_a_verdict_is_left_to_its_stages_also_where_a_row_has_left(
    k: int, device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are left do not lie side by side then."""

    def cut(unsound: bool) -> tuple[Engine, list[tuple[int, ...]]]:
        made = engine(k, "rejection", device, SAMPLED, new=NEW)
        for _ in range(4):
            made.step()
        made.cancel(made.scheduler.running[:1])
        assert made._stages.captured.is_ahead
        if unsound:
            real = captured_round.unpacked

            def found(numbers: Any, logits: torch.Tensor, *seconds: float) -> Any:
                monkeypatch.setattr(captured_round, "unpacked", real)
                return real(numbers, logits, *seconds)._replace(sound=np.zeros(len(numbers), bool))

            monkeypatch.setattr(captured_round, "unpacked", found)
        made.step()
        assert [row.slot for row in made.scheduler.running] == ([0, 1] if unsound else [1, 2])
        return made, tokens(made)

    with device:
        plain, expected = cut(unsound=False)
        made, found = cut(unsound=True)
    assert found == expected
    assert failures(made) == []
    stages = [one.stats.rounds - one.stats.executors["target"][CAPTURED] for one in (plain, made)]
    assert stages[1] == stages[0] + 1


def test_weights_that_are_replaced_while_a_round_is_under_way_count_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, as pretended tensors have no addresses."""
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)

    def replaced() -> tuple[Engine, list[tuple[int, ...]]]:
        made = engine_of(captured_runner(copy.deepcopy(hf()), "graphed"), None, Fixed(0), max_batch=4)
        for i in range(2):
            made.submit(Request((1, 2, 3 + i), 1, Sampling(temperature=0.0), Limits(max_new_tokens=NEW)))
        for _ in range(5):
            made.step()
        weight = made.target.hf.lm_head.weight
        weight.data = -weight.data
        with pytest.warns(RuntimeWarning, match="weights or layers of the model were replaced"):
            return made, tokens(made)

    made, found = replaced()
    assert ahead(made) == {"used": 4, "dropped": 1}
    without(monkeypatch)
    assert replaced()[1] == found


def test_rows_whose_logits_are_read_are_not_followed(device: Pretend) -> None:
    with device:
        made = engine(K, "rejection", device, [], new=NEW)
        made.submit(Request((1, 2, 3), 1, SAMPLED[0], Limits(max_new_tokens=NEW), top_logprobs=2))
        tokens(made)
    assert ahead(made) == {}


def test_bits_of_first_inputs_are_compared(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that fills other inputs than its function ends the kind, with a warning, and rows go on by stages."""
    fill, calls = NextRound.fill, []

    def wrong(self: Any, results: torch.Tensor) -> Any:
        calls.append(results)
        found = fill(self, results)
        if len(calls) > 2:  # the comparison, after a warm-up and the capture
            self._functions.inputs["last"].add_(1)
        return found

    with device:
        expected = tokens(engine(0, "rejection", device, SAMPLED, new=NEW))
        monkeypatch.setattr(NextRound, "fill", wrong)
        made = engine(0, "rejection", device, SAMPLED, new=NEW)
        with pytest.warns(RuntimeWarning, match="does not write the inputs"):
            assert tokens(made) == expected


@pytest.mark.slow
def test_inputs_are_those_that_the_host_would_fill_in(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, padding included; with rows at different lengths, some of which accept all drafts."""
    begun = CapturedRounds._launch
    for_host: list[np.ndarray[Any, Any]] = []

    def filled(self: CapturedRounds, work: Any, uniforms: Any) -> Any:
        round_ = self._kinds.prepared(work, uniforms(work.k + 1).flatten(2).shape[2])
        assert round_ is not None
        fill_drafting(round_, work, uniforms(work.k + 1).flatten(2), 0 if self._runner is None else self._runner.vocab_size)
        fill_target(round_, work, self._target.vocab_size)
        for_host.append(round_.functions.inputs._host.numpy().copy())
        return begun(self, work, uniforms)

    def tokens_of_a_run() -> list[tuple[int, ...]]:
        return tokens(engine(K, "rejection", device, SAMPLED, new=NEW))

    with device:
        follow, launched = CapturedRound.follow, []

        def followed(self: CapturedRound, uniforms: torch.Tensor) -> Any:
            advance = self._advance

            def noted() -> None:
                advance()
                device.synchronize()
                launched.append(self.functions.inputs.buffer.cpu().numpy().copy())

            monkeypatch.setattr(self, "_advance", noted, raising=False)
            found = follow(self, uniforms)
            monkeypatch.delattr(self, "_advance")
            return found

        monkeypatch.setattr(CapturedRound, "follow", followed)
        expected = tokens_of_a_run()
        without(monkeypatch)
        monkeypatch.setattr(CapturedRounds, "_launch", filled)
        assert tokens_of_a_run() == expected
    assert len(launched) > 4
    starts = {own.tobytes() for own in for_host}
    assert all(own.tobytes() in starts for own in launched)


@pytest.mark.parametrize("q", [1, 2, 5])
def test_a_block_moves_on_the_device_as_on_the_host(q: int) -> None:
    rows, capacity, generator = 4, 50, np.random.default_rng(q)
    block = Block(Bucket(rows, q, capacity), 7 * capacity, torch.device("cpu"))
    for used in range(rows + 1):
        starts = generator.integers(0, capacity - q, used).tolist()
        counts = generator.integers(1, q + 1, used).tolist()
        zeros = [0] * (rows - used)
        if used:
            plan = Plan(list(range(used)), starts, counts, torch.device("cpu"))
            expected = block.placed(plan, capacity)
        else:
            expected = block.empty()
        block.bounds[2:].zero_()
        block.move(torch.tensor([*starts, *zeros]), torch.tensor([*counts, *zeros]), capacity)
        assert block._numbers.tolist() == expected.tolist()


def test_uniforms_of_a_position_do_not_depend_on_where_a_round_begins() -> None:
    """`NextRound.fill` takes those of the next round from a table that begins at this round's first position."""
    for rule in (RULES["rejection"](), RULES["coupled"]()):
        for rounds in (None, [3, 4]):
            whole = rule.uniforms([1, 2], [10, 20], 10, rounds)
            part = rule.uniforms([1, 2], [13, 23], 4, rounds)
            assert torch.equal(whole[:, 3:7], part)


def test_a_row_is_followed_only_far_from_its_end(device: Pretend) -> None:
    with device:
        made = engine(K, "rejection", device, SAMPLED, new=2 * (K + 1) - 1)
        tokens(made)
    assert ahead(made) == {}
