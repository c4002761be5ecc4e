"""Scoring of prompts takes its memory from the same budget as rows do, and its time from its own request.

Tests of: serve.token_details, engine.memory, engine.scheduler.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from serving import TIMEOUT_SECONDS, Gate, Served, eventually, legible, pair, served
from serving_faults import asking
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.engine.memory import Memory
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import RULES, Coupled
from shoal.serve.token_details import Scoring
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import runner
from shoal.types.requests import Request

SCORE: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 0}


def budget(tokens: int) -> int:
    """Bytes of a row of so many tokens in both caches of a pair."""
    engine = pair().engine(4, RULES["coupled"](), kv_bytes=2**40)
    return sum(model.memory.cache_bytes(1, tokens) for model in runners_of(engine))


def at_rest(server: Served) -> bool:
    worker = server.worker
    return (
        worker.rows == 0
        and worker.thread.engine.scheduler.idle
        and not worker.thread.engine.memory._reserved
        and not worker.scoring.locked()
    )


@pytest.mark.slow
def test_scoring_and_rows_stay_within_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2 * budget(300)
    taken: list[int] = []
    advance, allocate = Scoring.advance, Memory.allocate
    scoring: list[Scoring] = []

    def beside(memory: Memory) -> None:
        caches = sum(one._runner.cache.nbytes() for one in set(scoring) if one._runner is not None)
        taken.append(memory.used + caches)

    def advanced(self: Scoring) -> None:
        scoring.append(self)
        beside(server.worker.thread.engine.memory)
        advance(self)
        beside(server.worker.thread.engine.memory)

    def made(self: Memory, round_: Any) -> None:
        allocate(self, round_)
        beside(self)

    monkeypatch.setattr(Scoring, "advance", advanced)
    monkeypatch.setattr(Memory, "allocate", made)
    with served(pair(), kv_bytes=most) as server:
        got: list[httpx.Response] = []
        asked: list[dict[str, Any]] = [{"n": 3, "max_tokens": 200}, {"prompt": ["x" * 500, "y" * 40], **SCORE}] * 2
        threads = [threading.Thread(target=lambda body=body: got.append(server.post(**body))) for body in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        assert [response.status_code for response in got] == [200] * 4
        assert max(taken) <= most
        assert max(taken) > most / 2, "nothing was tight"
        never = server.post(prompt="x" * 1300, **SCORE)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        assert "KV cache" in never.json()["error"]["message"]
        eventually(lambda: at_rest(server))


@pytest.mark.slow
def test_caches_that_rows_have_left_make_room() -> None:
    """They keep the size they had where there is no want of memory."""
    most = 2 * budget(300)
    engine = pair().engine(4, RULES["coupled"](), kv_bytes=most)

    def run(n: int, new: int, beside: int) -> None:
        engine.submit(Request((1, 2, 3, 4, 5), n, Sampling(seed=1), Limits(max_new_tokens=new)))
        while not engine.scheduler.idle:
            engine.step()
            assert engine.memory.used + beside <= most

    run(2, 200, 0)
    scored = engine.target.memory.cache_bytes(1, 500)
    assert engine.memory.used + scored > most
    assert engine.reserve_tokens(500)
    assert engine.memory.used + scored <= most
    run(1, 145, scored)
    run(3, 100, scored)
    engine.reserve_tokens(0)
    run(2, 280, 0)


def real(memory: int | None, prefix_sharing: str, max_batch: int = 2, k: int = 3) -> Engine:
    models = [runner(tiny_model("llama"), 128), runner(tiny_model("llama", seed=1, layers=1), 128)]
    return engine_of(
        *models, Fixed(k), max_batch=max_batch, rule=Coupled(), prefix_sharing=prefix_sharing, chunk=4, kv_bytes=memory
    )


@pytest.mark.parametrize(("time_budget", "new", "room"), [(None, 8, 100), (1000.0, 4, 150)], ids=["in order", "in turns"])
@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_rows_keep_their_tokens_whenever_memory_is_reserved(
    prefix_sharing: str, time_budget: float | None, new: int, room: int
) -> None:
    """A free slot may hold the prompt that the next row copies, and is cut with the rest of the cache. Where requests take turns,
    a prompt is computed in chunks above such a slot."""
    limits = Limits(max_new_tokens=new, time_budget=time_budget)
    asked = [Request((*range(1, length),), n, Sampling(seed=length), limits) for length, n in ((60, 3), (40, 1))]

    def run(memory: int | None, every: int) -> list[list[int]]:
        engine = real(memory, prefix_sharing)
        rows = [row for request in asked for row in engine.submit(request)]
        while not engine.scheduler.idle:
            engine.step()
            if every:
                for _ in range(every):  # until there is room, or the rows have gone on without
                    if engine.reserve_tokens(60):
                        scored = engine.target.memory.cache_bytes(1, 60)
                        assert engine.memory.used + scored <= most
                        trimmed.append(engine.memory.used)
                engine.reserve_tokens(0)
        return [row.tokens for row in rows]

    trimmed: list[int] = []
    most = sum(model.memory.cache_bytes(1, room) for model in runners_of(real(2**40, prefix_sharing)))
    expected = run(None, 0)
    for every in (1, 2):
        assert run(most, every) == expected
    assert trimmed, "there was never room"


def test_slots_that_rows_have_left_take_no_memory() -> None:
    most = 8 * sum(model.memory.cache_bytes(1, 16) for model in runners_of(real(2**40, "copied")))
    engine = real(most, "copied", max_batch=8, k=8)
    rows = [
        row for i in range(8) for row in engine.submit(Request((1, 2, i), 1, Sampling(seed=1), Limits(max_new_tokens=4)))
    ]
    engine.step()
    assert len(engine.scheduler.slots.rows_in_slots) == 8
    engine.cancel(rows)
    assert engine.reserve_tokens(128)


def test_a_row_that_would_be_alone_waits_for_a_prompt_that_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(legible(0), length=150)
    advance = Scoring.advance
    beside: list[tuple[int, int]] = []

    def advanced(self: Scoring) -> None:
        scheduler = server.worker.thread.engine.scheduler
        beside.append((len(scheduler.slots.rows_in_slots), len(scheduler.waiting)))
        advance(self)

    monkeypatch.setattr(Scoring, "advance", advanced)
    with served(pair(gate), kv_bytes=budget(250)) as server:
        got: list[httpx.Response] = []
        scoring = threading.Thread(target=lambda: got.append(server.post(prompt="x" * 400, **SCORE)))
        scoring.start()
        assert gate.reached.wait(TIMEOUT_SECONDS)
        row = threading.Thread(target=lambda: got.append(server.post(max_tokens=100)))
        row.start()
        eventually(lambda: server.worker.rows == 2)
        gate.opened.set()
        for thread in (scoring, row):
            thread.join(TIMEOUT_SECONDS)
        assert [response.status_code for response in got] == [200, 200]
        assert beside[-1] == (0, 1)
        eventually(lambda: at_rest(server))


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_ends_with_its_requests_time(stream: bool) -> None:
    gate = Gate(legible(0), length=10)
    with served(pair(gate)) as server:
        response = server.post(prompt=["x" * 300] * 3, stream=stream, time_budget=0.3, **SCORE)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "time_limit")
        gate.opened.set()
        eventually(lambda: at_rest(server))
        assert server.post(prompt="x" * 300, **SCORE).status_code == 200


def test_a_client_that_goes_leaves_no_prompt_being_scored() -> None:
    gate = Gate(legible(0), length=10)
    with served(pair(gate), kv_bytes=budget(500)) as server:
        with server.connect() as connection:
            connection.sendall(asking(prompt="x" * 400, **SCORE))
            assert gate.reached.wait(TIMEOUT_SECONDS)
        eventually(lambda: server.worker.rows == 0)
        gate.opened.set()
        eventually(lambda: at_rest(server))
        assert server.post(max_tokens=3).status_code == 200
