"""Text drafters alone and in the engine: what they propose, and what is decoded with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch

from laws import P
from shoal.config import Limits, Sampling
from shoal.drafting.protocol import Drafter
from shoal.drafting.recycling import RecyclingDrafter
from shoal.drafting.text import TextDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed, by_name
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.distributions import Scores
from shoal.testing.scripted import hashed, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions, Verdict

V = 5


def row(*tokens: int, prompt: int = 1, group: int = 0) -> Row:
    """A row with a prompt of so many tokens, the others committed."""
    return Row(Request(tokens[:prompt], 1), group, 0, 0, list(tokens), frozenset(), 1000)


def proposed(drafter: TextDrafter, *rows: Row, length: int = 4) -> list[list[int]]:
    """What it guesses for rows, through the calls that the engine makes."""
    drafter.read(rows)
    return [list(drafter.guess(one, length).tokens) for one in rows]


def group(request: Request, *texts: Sequence[int]) -> list[Row]:
    """Rows of one request, with these tokens behind the prompt."""
    rows = range(len(texts))
    return [Row(request, 0, i, i, [*request.prompt_ids, *texts[i]], frozenset(), 1000) for i in rows]


def leave(drafter: Drafter, *rows: Row, reason: str | None = "length") -> None:
    for one in rows:
        one.finish_reason = reason
    drafter.end(rows)


def heard(drafter: RecyclingDrafter, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: torch.Tensor) -> None:
    """A round in which the target says these logits of these drafts; none were asked of this drafter."""
    drafter.begin(rows)
    nothing = torch.zeros(len(rows), dtype=torch.long)
    drafter.observe(rows, Scores(logits, Positions(rows, drafts)), Verdict(nothing, nothing, torch.ones(len(rows), 1)))


SAMPLES = 1600


def passes_of(target: Runner) -> Callable[[], float]:
    """A clock by which a pass takes a second, whatever its size, and everything else next to nothing."""
    calls = itertools.count()
    return lambda: target.hf.forwards + 1e-6 * next(calls)


def sampled(
    drafter: Drafter, rule: Rule, lookahead: object = 2, *, target: Runner | None = None, samples: int = SAMPLES
) -> tuple[Engine, list[Row]]:
    """Samples four tokens of a Markov table in many rows of one request."""
    target = target or table_model(P)
    engine = Engine(target, drafter, by_name(lookahead), max_batch=120, rule=rule, clock=passes_of(target))
    rows = engine.submit(Request((0, 0), samples, Sampling(seed=3), Limits(max_new_tokens=4)))
    while engine.step():
        pass
    return engine, rows


def decoded(
    drafter: Drafter | None,
    rule: Rule,
    max_batch: int,
    *,
    k: int = 4,
    temperature: float = 0.7,
    target: Runner | None = None,
    prompts: Sequence[int] = (2, 5, 8, 11),
) -> tuple[Engine, list[list[int]]]:
    """Groups that join one after the other, rows of which are cancelled; the tokens of the others."""
    target = target or scripted(hashed(V, spread=3.0), V)
    engine = Engine(target, drafter, Fixed(k if drafter else 0), max_batch=max_batch, rule=rule)
    rows: list[Row] = []
    for number, length in enumerate(prompts):
        prompt = tuple((i * i) % V for i in range(length))
        limits = Limits(max_new_tokens=12 + 5 * number)
        rows += engine.submit(Request(prompt, 3, Sampling(temperature=temperature, seed=number), limits))
        engine.step()
    engine.cancel(rows[4:5])
    while engine.step():
        pass
    return engine, [row.tokens for row in rows[:4] + rows[5:]]


@cache
def decoded_plainly(rule: type[Rejection | Coupled], max_batch: int, temperature: float) -> tuple[Engine, list[list[int]]]:
    return decoded(None, rule(), max_batch, temperature=temperature)
