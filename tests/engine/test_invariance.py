"""Keyed noise: a request's tokens do not depend on what else runs, when it joined, or where its rows stand.

Sampled, float32, fixed draft length, a drafter that is right now and then: the same ids, and the same path to them (rounds, drafted
and accepted tokens of each row). Controllers such as bass look at the whole batch, so for them only the law is the same
(test_exact_distribution.py).

Tests of: sampling.uniforms, sampling.distributions, engine.scheduler, engine.memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from native_kernels import needs_compiler
from noisy_heads import noisy
from shoal.config import Limits, Sampling
from shoal.engine.admission import SlotRows
from shoal.engine.engine import Engine
from shoal.engine.memory import grade
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.sampling import native_draws
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Move

K = 3

SAMPLINGS = (
    {},
    {"temperature": 0.7},
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 20},
    {"top_p": 0.8, "repetition_penalty": 1.3},
    {"min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": 0.3},
)


@cache
def pair() -> tuple[Any, Any]:
    """A target, and the same with noise on its head."""
    target = tiny_model("llama", seed=3)
    return target, noisy(target, 0.3)


@cache
def requests() -> tuple[Request, ...]:
    """Ragged prompts, unequal lengths and n, all kinds of sampling."""
    made = []
    for i in range(9):
        prompt = torch.randint(0, VOCABULARY, (1 + 7 * i % 23,), generator=torch.Generator().manual_seed(i))
        sampling = Sampling(**{"seed": 100 + i % 4, **SAMPLINGS[i % len(SAMPLINGS)]})
        made.append(Request(tuple(prompt.tolist()), 1 + i % 3, sampling, Limits(max_new_tokens=6 + 5 * i % 17)))
    return tuple(made)


def engine(max_batch: int, attention: str = "auto") -> Engine:
    target, drafter = (Runner(hf, "tiny", "interface", 128, attention) for hf in pair())
    return engine_of(target, drafter, Fixed(K), max_batch=max_batch)


def drain(running: Engine) -> None:
    while running.step():
        pass


Path = tuple[tuple[int, ...], int, int, int]


def paths(rows: Sequence[Row]) -> list[Path]:
    """What each row said and how it came to it."""
    return [(tuple(row.tokens[row.prompt_length :]), row.rounds, row.drafted, row.accepted) for row in rows]


@cache
def alone(index: int) -> list[Path]:
    running = engine(1)
    rows = running.submit(requests()[index])
    drain(running)
    return paths(rows)


def test_the_drafter_is_right_now_and_then() -> None:
    accepted, drafted = (sum(path[part] for i in range(len(requests())) for path in alone(i)) for part in (3, 2))
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize(
    ("order", "max_batch"),
    [("given", 2), ("reversed", 3), ("shuffled", 7), ("given", 32), ("shuffled", 32), ("reversed", 7)],
)
def test_batched_permuted_and_compacted(max_batch: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in turns, with rows moving into the holes that others leave."""
    moves, compact = [], SlotRows.compact

    def spy(self: SlotRows) -> list[Move]:
        made = compact(self)
        moves.extend(made)
        return made

    monkeypatch.setattr(SlotRows, "compact", spy)
    indices = list(range(len(requests())))
    if order == "reversed":
        indices.reverse()
    elif order == "shuffled":
        random.Random(max_batch).shuffle(indices)
    running = engine(max_batch)
    rows = {i: running.submit(requests()[i]) for i in indices}
    drain(running)
    for i in indices:
        assert paths(rows[i]) == alone(i)
    assert moves or max_batch < 7
    assert running.target.cache.slots == grade(min(max_batch, sum(request.n for request in requests())))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_joined_late(every: int) -> None:
    """A request arrives every few rounds, while others run."""
    running, rows = engine(6), []
    for request in requests():
        rows.append(running.submit(request))
        for _ in range(every):
            running.step()
    drain(running)
    assert [paths(group) for group in rows] == [alone(i) for i in range(len(rows))]


def test_neighbours_cancelled_midway() -> None:
    running = engine(8)
    rows = [running.submit(request) for request in requests()]
    running.step()
    running.step()
    running.cancel([row for group in rows[1::2] for row in group])
    drain(running)
    for i, group in enumerate(rows):
        if i % 2 == 0:
            assert paths(group) == alone(i)
        else:
            for row, (full, *_) in zip(group, alone(i), strict=True):
                said = tuple(row.tokens[row.prompt_length :])
                assert said == full[: len(said)]


@pytest.mark.parametrize("attention", ["reference", "pad", "split"])
def test_whatever_the_attention_method(attention: str) -> None:
    running = engine(6, attention)
    rows = [running.submit(request) for request in requests()]
    drain(running)
    assert [paths(group) for group in rows] == [alone(i) for i in range(len(rows))]


def test_more_samples_leave_the_first_ones_as_they_are() -> None:
    few, many = replace(requests()[0], n=2), replace(requests()[0], n=7)
    running = engine(16)
    rows = running.submit(many)
    drain(running)
    assert len({path[0] for path in paths(rows)}) == 7
    other = engine(16)
    fewer = other.submit(few)
    drain(other)
    assert paths(fewer) == paths(rows)[:2]


def test_without_a_seed_runs_differ() -> None:
    request = replace(requests()[0], sampling=Sampling(), limits=Limits(max_new_tokens=20))
    running = engine(4)
    rows = [running.submit(request)[0] for _ in range(2)]
    drain(running)
    assert rows[0].tokens != rows[1].tokens


@pytest.mark.parametrize(
    ("k", "dtype"), [(0, torch.float64), (1, torch.float64), (5, torch.float64), (3, torch.float32)], ids=str
)
def test_exactly_so_whatever_the_draft_length(k: int, dtype: torch.dtype) -> None:
    """Scripts whose logits change with every token of the history: no rounding to lean on, no cell to get wrong."""
    target = hashed(10, 0)
    models = [scripted(script, 10, dtype=dtype) for script in (target, mixed(target, hashed(10, 1)))]
    asked = [replace(request, prompt_ids=tuple(t % 10 for t in request.prompt_ids)) for request in requests()]

    def together(chosen: Sequence[Request], max_batch: int) -> list[list[Path]]:
        running = engine_of(*models, Fixed(k), max_batch=max_batch)
        rows = [running.submit(request) for request in chosen]
        drain(running)
        return [paths(group) for group in rows]

    single = [together([request], 3)[0] for request in asked]
    assert together(asked, 4) == single
    assert together(asked, 64) == single
    assert together(asked[::-1], 5) == single[::-1]


# ── by whom chains are decided ──────────────────────────────────────────────────────────────────────────────────────


@needs_compiler
@pytest.mark.parametrize("rule", [Coupled(), Rejection()], ids=["coupled", "rejection"])
def test_chains_are_decided_alike_in_c_and_by_torch(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels decide every round over logits in float32, torch over those in float64."""
    decide, decided = native_draws.verify, []

    def counted(scores: Tensor, *rest: Any, **more: Any) -> native_draws.Verified:
        decided.append(scores.shape)
        return decide(scores, *rest, **more)

    monkeypatch.setattr(native_draws, "verify", counted)
    scripts = hashed(10, 0), mixed(hashed(10, 0), hashed(10, 1))
    seen = []
    for dtype in (torch.float32, torch.float64):
        decided.clear()
        running = engine_of(*(scripted(script, 10, dtype=dtype) for script in scripts), Fixed(K), max_batch=5, rule=rule)
        asked = [replace(request, prompt_ids=tuple(t % 10 for t in request.prompt_ids)) for request in requests()]
        rows = [row for request in asked for row in running.submit(request)]
        drain(running)
        assert 0 < running.stats.accepted < running.stats.drafted
        assert len(decided) == (running.stats.rounds if dtype == torch.float32 else 0)
        seen.append((paths(rows), [value for row in rows for value in (*row.logprobs, *row.processed_logprobs)]))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == pytest.approx(seen[1][1], abs=1e-5)
