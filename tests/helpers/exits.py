"""Models whose own first layers draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.drafting.protocol import Drafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import by_name
from shoal.models import weights
from shoal.models.loading import wrap
from shoal.models.passes import choose_passes
from shoal.models.runner import Runner
from shoal.models.weights.matrix import PACKED
from shoal.native.build import missing
from shoal.sampling.acceptance import Rule
from shoal.testing import tiny_model
from shoal.types.requests import Request, Row

V = 29
ALPHA = 1e-6
PASSES = ("modules", *(["one call"] if not missing() else []))


def model_of(vocab_size: int = V, share: float = 0.25, **options: Any) -> Any:
    """Three layers, of which the last adds this share of what it would: exits agree with the whole now and then."""
    hf = tiny_model("llama", layers=3, vocab_size=vocab_size, **options)
    last = hf.model.layers[-1]
    for projection in (last.self_attn.o_proj, last.mlp.down_proj):
        projection.weight.data *= share
    return hf


def runner_of(passes: str, hf: Any = None) -> Runner:
    hf = model_of() if hf is None else hf
    if passes == "modules":
        return wrap(hf, "tiny")
    weights.lay_out(hf, lambda keys: dict.fromkeys(keys, PACKED))
    runner = wrap(hf, "tiny")
    choose_passes(runner, "on", owned=True)
    assert runner.lean is not None
    assert runner.lean.whole is not None
    return runner


def run(
    target: Runner,
    drafter: Drafter | None,
    rule: Rule,
    temperature: float,
    max_batch: int = 3,
    k: int = 3,
    sharing: str = "auto",
    n: int = 3,
) -> tuple[Engine, list[list[int]]]:
    """Groups that join one after the other, a row of which is cancelled; the tokens of the others."""
    lookahead = by_name(k if drafter else 0)
    engine = Engine(target, drafter, lookahead, max_batch=max_batch, rule=rule, prefix_sharing=sharing, chunk=4)
    rows: list[Row] = []
    for number, length in enumerate((1, 5, 11)):
        prompt = tuple((7 * i * i + number) % target.vocab_size for i in range(length))
        sampling = Sampling(temperature=temperature, seed=number)
        rows += engine.submit(Request(prompt, n, sampling, Limits(max_new_tokens=9 + number)))
        engine.step()
    engine.cancel(rows[2:3])
    while engine.step():
        pass
    return engine, [row.tokens for row in rows[:2] + rows[3:]]


def difference_to_anew(engine: Engine, row: Row) -> float:
    """The largest difference of a running row's keys and values to those of its committed tokens computed anew."""
    own, anew, held = engine.target.cache, engine.target.fork(), len(row.tokens) - 1
    anew.memory.reserve(1, 64)
    anew.feed([0], torch.tensor([row.tokens[:-1]]), [held])
    assert own.lengths[row.slot] == held
    offset = 0 if row.prefix is None else row.prefix.length
    pairs = [
        (mine[row.slot, : held - offset], fresh[0, offset:held])
        for stores, theirs in zip(own.stores(), anew.cache.stores(), strict=True)
        for mine, fresh in zip(stores[:2], theirs[:2], strict=True)
    ]
    return max(float((mine - fresh).abs().max()) for mine, fresh in pairs)


@torch.inference_mode()
def states_after(hf: Any, tokens: Sequence[int]) -> Sequence[Tensor]:
    """Hidden states after each layer, [tokens, width] each; those before the first come first."""
    found = hf(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    return [states[0] for states in found]
