"""What drafters propose, kept while an engine runs, and the law of what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from laws import joint
from shoal.cli import run
from shoal.config import Limits, Sampling
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed, by_name
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rejection, Rule
from shoal.testing import tiny_model
from shoal.testing.enumeration import chi_square
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree

Proposal = tuple[list[int], list[int], list[Tensor]]
"""A row's tokens, its draft, and the q of each drafted token."""


def recorded(drafter: Drafter) -> list[Proposal]:
    """What the drafter proposes from now on."""
    found: list[Proposal] = []
    real = drafter.propose

    def propose(inputs: DraftInputs) -> DraftTree:
        before = [list(row.tokens) for row in inputs.rows]
        tree = real(inputs)
        for b, (tokens, draft) in enumerate(zip(before, tree.drafts, strict=True)):
            if draft and tree.q is not None:
                found.append((tokens, list(draft), [q[b] for q in tree.q[: len(draft)]]))
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    return found


@torch.inference_mode()
def p_of_two_tokens(hf: Any, drafter: Drafter, prompt: Sequence[int], samples: int) -> float:
    """The p-value of two tokens of four, by rejection sampling at temperature 2, under the target's own logits."""
    first = hf(torch.tensor([prompt])).logits[0, -1].double().div(2).softmax(-1)
    second = hf(torch.tensor([[*prompt, token] for token in range(4)])).logits[:, -1].double().div(2).softmax(-1)
    engine = Engine(wrap(hf, "tiny", checked=False), drafter, by_name(1), max_batch=200, rule=Rejection())
    limits = Limits(max_new_tokens=2)
    rows = engine.submit(Request(tuple(prompt), samples, Sampling(temperature=2.0, seed=11), limits))
    while engine.step():
        pass
    assert 0 < engine.stats.accepted < engine.stats.drafted
    return chi_square(joint(rows, 4), first[:, None] * second)


def require_every_way_in(place: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The library, the command and the Transformers entry draft by a spec, and give the tokens of plain decoding.

    Returns what the pair says that it has loaded.
    """
    with shoal.load(place, spec, dtype="float32") as pair:
        loaded, name = pair.loaded, pair.drafter_name
        for options in ({"seed": 1}, {"temperature": 0.0}):
            plain = pair.generate("def f(x):", 3, max_new_tokens=12, lookahead="off", **options)  # type: ignore[arg-type]
            for lookahead in (3, "auto"):
                found = pair.generate("def f(x):", 3, max_new_tokens=12, lookahead=lookahead, **options)  # type: ignore[arg-type]
                assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
                assert plain.stats.drafted == 0 < found.stats.drafted or lookahead == "auto"
    assert run(["generate", "-m", str(place), "--draft", spec, "-p", "x", "-n", "2", "--max-new-tokens", "4", "--json"]) == 0
    assert f'"{name}"' in capsys.readouterr().out
    model, ids = tiny_model("llama").float(), torch.tensor([[1, 2, 3]])
    given = {"custom_generate": shoal.custom_generate, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **given, draft_model=spec, lookahead=2), model.generate(ids, **given))
    return loaded


def decoded(
    target: Runner, drafter: Any, rule: Rule, temperature: float, prompts: Sequence[Sequence[int]]
) -> tuple[Engine, list[Row]]:
    """Groups that join one after the other and fill a batch of four rows, a row of which is cancelled; the others."""
    engine = Engine(target, drafter, Fixed(3 if drafter else 0), max_batch=4, rule=rule, chunk=4)
    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        limits = Limits(max_new_tokens=9 + number)
        rows += engine.submit(Request(tuple(prompt), 3, Sampling(temperature=temperature, seed=number), limits))
        engine.step()
    engine.cancel(rows[2:3])
    while engine.step():
        pass
    return engine, rows[:2] + rows[3:]
