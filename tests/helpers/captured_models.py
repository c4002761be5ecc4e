"""Captured rounds of small Transformers models, on a device or on one that is pretended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import pretend
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.models import loading
from shoal.models.runner import Runner
from shoal.testing import tiny_model
from shoal.types.requests import Request
from shoal.types.samples import Result

CPU = torch.device("cpu")
PRETENDED = os.environ.get("SHOAL_TEST_DEVICE") == "pretend"
DEVICE = pretend.DEVICE if PRETENDED else torch.device(os.environ.get("SHOAL_TEST_DEVICE", "cpu"))
"""Where everything is computed: the CPU, a GPU ("cuda"), or a device that pretends to be one ("pretend",
tests/helpers/pretend.py)."""
STATIC = "eager" if DEVICE == CPU else "graphed"
ARCHITECTURES = ("llama", "qwen2-sliding", "gemma2", "gemma3", "gpt2", "mixtral", "gpt-oss", "deepseek-v3", "phi3", "opt")


@cache
def hf(architecture: str = "llama", seed: int = 0, layers: int = 2) -> Any:
    return on_device(tiny_model(architecture, seed=seed, layers=layers))


def on_device(model: Any) -> Any:
    return pretend.moved(model) if PRETENDED else model.to(DEVICE)


def runner(model: Any, executor: str | None = STATIC) -> Runner:
    made = loading.wrap(model, "tiny", checked=False)
    made.capture_rounds(executor)
    return made


PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 9, 9, 3, 4, 5, 6, 2]]
NEW = 16
K = 4


def pair(executor: str | None, draft_seed: int = 0) -> Shoal:
    """A target, and its like (seed 0) or a stranger as its drafter."""
    draft = hf() if draft_seed == 0 else hf(seed=draft_seed, layers=1)
    return Shoal(runner(hf(), executor), runner(draft, executor), max_batch=6)


def ids(result: Result) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in result for sample in output.samples]


def decode(model: Shoal, **options: Any) -> Result:
    return model.generate(PROMPTS, 3, **{"lookahead": K, "max_new_tokens": NEW, "seed": 3, **options})


def rows_of(engine: Engine, samplings: Sequence[Sampling]) -> list[list[int]]:
    rows = [row for s in samplings for row in engine.submit(Request((1, 2, 3), 1, s, Limits(max_new_tokens=NEW)))]
    while engine.step():
        pass
    return [row.tokens for row in rows]
