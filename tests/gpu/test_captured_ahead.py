"""Captured rounds that are built before a row asks for them, and again when caches have changed their size.

Tests of: drafting.captured_kinds, models.compiled.captured_round, models.compiled.round_functions,
models.compiled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from captured_models import K, hf, ids, pair, runner
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.drafting import captured_kinds
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models.compiled import EXECUTORS, block
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.captures import MOST_KINDS
from shoal.sampling.acceptance import Rejection
from shoal.serve.engine_thread import EngineThread
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request

TOKENS = 40
LOOKAHEADS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Fixed(0),
    "fixed": lambda: Fixed(K),
}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder)


def engine(lookahead: Any, **options: Any) -> Engine:
    models = runner(hf(), "graphed"), runner(hf(seed=1, layers=1), "graphed")
    for model in models:
        assert model.captures is not None
        model.captures.knows_prefixes = True  # as on CUDA: passes span the whole cache
    return engine_of(*models, lookahead, rule=Rejection(), **{"max_batch": 8, **options})


def prepared(lookahead: Any, tokens: int = TOKENS, **options: Any) -> Engine:
    made = engine(lookahead, **options)
    made.prepare(8, tokens)
    while made.build_ahead():
        pass
    return made


def functions(made: Engine) -> list[tuple[int, Any, Any]]:
    """All that is built over the target's cache as it is: rows, style, parts."""
    target = made.target.captures
    assert target is not None
    rounds: dict[Any, CapturedRound] = target.generation(made.target.cache).rounds
    return [(kind.rows, kind.style.greedy, part) for kind, round_ in rounds.items() for part in round_.built]


def run(made: Engine, rows: int = 8, new: int = 20, temperature: float = 0.8) -> tuple[list[list[int]], int]:
    """The tokens, and how many functions were built meanwhile."""
    before = len(functions(made)) if len(made.target.cache) else 0
    every = [
        row
        for i in range(rows)
        for row in made.submit(Request((1, 2, 3 + i), 1, Sampling(temperature, seed=i), Limits(max_new_tokens=new)))
    ]
    while made.step():
        pass
    target = runners_of(made)[0].captures
    assert target is not None
    assert target.failures == []
    assert target.ran.total() > 0
    return [row.tokens for row in every], len(functions(made)) - before


@pytest.mark.parametrize(("lookahead", "temperatures"), [("plain", [0.8]), ("fixed", [0.0, 0.8])])
def test_no_round_waits_for_what_was_built_before(lookahead: str, temperatures: list[float]) -> None:
    made = prepared(LOOKAHEADS[lookahead]())
    for temperature in temperatures:
        found, built = run(made, temperature=temperature)
        expected, built_in_rounds = run(engine(LOOKAHEADS[lookahead]()), temperature=temperature)
        assert found == expected
        assert built == 0 < built_in_rounds
        assert not made.build_ahead()


def test_a_pair_that_was_prepared_captures_nothing_in_its_calls() -> None:
    """In Python: nothing is captured at load, as the caller alone knows sizes and settings."""
    made, options = pair("graphed", draft_seed=1), {"temperature": 0.8, "seed": 1, "lookahead": K, "max_new_tokens": 12}
    assert made.target.seconds_building == 0
    assert made.prepare(6, 24, **options) > 2  # type: ignore[arg-type]
    prompts, captures = [[1, 2, 3], [4, 5]], Recorder.log.count("capture")
    found = made.generate(prompts, 3, **options)  # type: ignore[arg-type]
    assert Recorder.log.count("capture") == captures > 2
    assert ids(found) == ids(pair("graphed", draft_seed=1).generate(prompts, 3, **options))  # type: ignore[arg-type]
    assert pair(None).prepare(6, 24) == 0


@pytest.mark.slow
def test_what_a_cache_outgrew_is_built_again_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AHEAD", "MOST"):
        monkeypatch.setattr(captured_kinds, name, 200)
    monkeypatch.setattr(block, "KEYS_OF_KERNEL", 16)  # so that short runs outgrow a cache
    made = prepared(Fixed(K), tokens=8)
    small = made.target.cache.capacity
    assert run(made, new=80)[1]  # longer than was expected
    size, known = made.target.cache.capacity, functions(made)
    assert size > small
    while made.build_ahead():
        pass
    assert {*known} < {*functions(made)}
    assert [run(made, rows, temperature=t)[1] for rows in (1, 8) for t in (0.0, 0.8)] == [0, 0, 0, 0]
    assert run(made, new=80)[1] == 0
    assert made.target.cache.capacity == size


def test_settings_that_were_used_are_built_again_first() -> None:
    made = prepared(Fixed(K), tokens=8)
    for row in (Sampling(top_k=5, seed=1), Sampling(top_k=5, seed=2)):
        made.submit(Request((1, 2, 3), 1, row, Limits(max_new_tokens=8)))
    while made.step():
        pass
    made.target.memory.reserve(12, 90)
    assert not functions(made)
    assert made.build_ahead()
    target = made.target.captures
    assert target is not None
    assert {kind.style.cut[0] for kind in target.generation(made.target.cache).rounds} == {5}  # type: ignore[attr-defined]


@pytest.mark.slow(but=["AHEAD-3"])
@pytest.mark.parametrize(("name", "limit"), [("AHEAD", 3), ("AHEAD_BYTES", 40_000)])
def test_few_functions_and_few_bytes(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = functions(prepared(Fixed(K)))
    monkeypatch.setattr(captured_kinds, name, limit)
    made = prepared(Fixed(K))
    assert 0 < len(functions(made)) < len(everything)
    assert name != "AHEAD" or len(functions(made)) == limit
    assert run(made)[0] == run(prepared(Fixed(K)))[0]


def test_caches_take_half_of_the_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "KEYS_OF_KERNEL", 16)
    one = engine(Fixed(K)).target.memory.token_bytes
    made = engine(Fixed(K), kv_bytes=2000 * one)
    made.prepare(8, 4096)
    assert 200 * one < made.memory.used <= 1000 * one
    assert made.target.cache.slots > 8
    none = engine(Fixed(K), kv_bytes=10 * one)
    none.prepare(8, 4096)
    assert not none.build_ahead()


def test_room_is_given_back_and_passes_over_it_end() -> None:
    made = prepared(Fixed(K))
    used, slots = made.memory.used, made.target.cache.slots
    target = made.target
    target.memory.trim(2, TOKENS)
    assert (target.cache.slots, made.memory.used < used) == (3, True)
    assert slots > 3
    assert target.captures is not None
    assert target.cache not in target.captures._of
    assert not functions(made)
    assert run(made)[0] == run(engine(Fixed(K)))[0]


def test_a_capture_that_fails_ahead_costs_speed_and_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind is tried once, until so many have failed that none is."""
    made = engine(Fixed(K))
    made.prepare(8, TOKENS)
    monkeypatch.setattr(CapturedRound, "build_one", lambda *_: 1 / 0)
    for _ in range(MOST_KINDS):
        with pytest.warns(RuntimeWarning, match="no more captured rounds"):
            assert not made.build_ahead()
    assert not made.build_ahead()
    made.submit(Request((1, 2, 3), 1, Sampling(seed=0), Limits(max_new_tokens=5)))
    assert sum(len(commit.tokens) for commits in iter(made.step, []) for commit in commits) == 5


def test_models_without_captured_rounds_are_left_alone() -> None:
    made = engine_of(runner(hf(), None), None, Fixed(0), max_batch=8)
    made.prepare(8, TOKENS)
    assert (made.target.cache.slots, made.build_ahead()) == (0, False)


def test_a_server_builds_while_nothing_waits() -> None:
    """Jobs come first, between two functions; when all is built the thread waits for jobs again."""
    order, made = [], engine(Fixed(K))
    made.prepare(8, TOKENS)
    build = made.build_ahead

    def noted() -> bool:
        order.append("function")
        return build()

    made.build_ahead = noted  # type: ignore[method-assign]

    async def main() -> None:
        thread = EngineThread(lambda: made, lambda _: None, lambda _: None, lambda: None)
        for job in ("a", "b"):
            thread.post(lambda job=job: order.append(job))  # type: ignore[misc]
        thread.start(asyncio.get_running_loop())
        deadline = time.monotonic() + 280
        while thread.busy_since is not None or len(order) < 4:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await thread.call(lambda: order.append("c"))
        thread.stop()

    torch.set_num_threads(1)
    asyncio.run(main())
    assert order[:3] == ["a", "b", "function"]
    built = order.index("c")
    target = made.target.captures
    assert target is not None
    rounds = target.generation(made.target.cache).rounds.values()
    parts = [part for one in rounds for part in one.built if part != "advance"]  # those are built with a pass
    assert order[2:built] == ["function"] * (len(parts) + 1)  # the last finds nothing to build
