"""Greedy decoding of random models by Shoal and by Transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import by_name
from shoal.models.runner import Runner
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import History, adversary, mixed, runner, says, scripted
from shoal.types.requests import Request, Row

NEW = 34
"""New tokens per row: more than the longest draft."""


@cache
def target_model() -> Any:
    return tiny_model("llama", seed=0)


@cache
def random_model() -> Any:
    return tiny_model("llama", seed=1, layers=1)


@cache
def prompt(index: int) -> tuple[int, ...]:
    """Ragged: from one token to 40, neighbours very unequal."""
    generator = torch.Generator().manual_seed(index)
    length = 1 + (17 * index) % 40
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


@cache
def stock_ids(index: int) -> tuple[int, ...]:
    """What Transformers' own `generate` says, this prompt alone."""
    ids = torch.tensor([prompt(index)])
    out = target_model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return tuple(out[0, ids.shape[1] :].tolist())


def continuations(prompts: int) -> History:
    """The greedy target as a script, for the prompts in use."""
    return says([prompt(i) + stock_ids(i) for i in range(prompts)], VOCABULARY)


def drafter(kind: str, prompts: int) -> Runner:
    said = continuations(prompts)
    wrong = adversary(said, VOCABULARY)
    makers = {
        "same": lambda: runner(target_model()),
        "random": lambda: runner(random_model()),
        "oracle": lambda: scripted(said, VOCABULARY, dtype=torch.float32),
        "adversarial": lambda: scripted(wrong, VOCABULARY, dtype=torch.float32),
        "sometimes": lambda: scripted(mixed(said, wrong, every=3), VOCABULARY, dtype=torch.float32),
    }
    return makers[kind]()


def decode(
    draft: Runner | None, k: object, *, prompts: int, n: int, max_batch: int, new: int = NEW
) -> tuple[Engine, list[Row]]:
    """All rows of the first prompts, greedily."""
    engine = engine_of(runner(target_model()), draft, by_name(k), max_batch=max_batch)
    requests = [Request(prompt(i), n, Sampling(temperature=0), Limits(max_new_tokens=new)) for i in range(prompts)]
    rows = [row for request in requests for row in engine.submit(request)]
    while engine.step():
        pass
    return engine, rows
