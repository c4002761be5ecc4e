"""What drafters propose, kept while an engine runs, and the law of what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from enumeration import chi_square
from laws import joint
from shoal.cli import run
from shoal.config import Limits, Sampling
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed, by_name
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import tiny_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree

Proposal = tuple[list[int], list[int], list[Tensor]]
"""A row's tokens, its draft, and the q of each drafted token, if there are any."""


def recorded(drafter: Drafter) -> list[Proposal]:
    """What the drafter proposes from now on."""
    found: list[Proposal] = []
    real = drafter.propose

    def propose(inputs: DraftInputs) -> DraftTree:
        before = [list(row.tokens) for row in inputs.rows]
        tree = real(inputs)
        for b, (tokens, draft) in enumerate(zip(before, tree.drafts, strict=True)):
            if draft:
                found.append((tokens, list(draft), [q[b] for q in (tree.q or ())[: len(draft)]]))
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    return found


def largest_difference(
    proposals: Sequence[Proposal],
    definition: Callable[[list[int], list[int]], Iterable[Tensor]],
    enough: float = math.inf,
) -> float:
    """Between the q that were proposed and those of a definition's logits, at T = 2; one above `enough` is the last looked at."""
    worst = 0.0
    for tokens, draft, q in proposals:
        right = [(logits / 2.0).softmax(-1) for logits in definition(tokens, draft)]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(q, right, strict=True)))
        if worst > enough:
            break
    return worst


@torch.inference_mode()
def p_of_two_tokens(target: Any, drafter: Drafter, prompt: Sequence[int], samples: int, rule: Rule | None = None) -> float:
    """The p-value of two tokens at temperature 2 under the target's own logits, by rejection sampling or another rule.

    Args:
        target: a runner, or a model of Transformers.
        drafter: the drafter.
        prompt: the prompt's ids.
        samples: the number of rows.
        rule: the rule.
    """
    made = target if isinstance(target, Runner) else wrap(target, "tiny", checked=False)
    after = [[*prompt, token] for token in range(made.vocab_size)]
    law = made.hf(torch.tensor(after), use_cache=False).logits[:, -2:].double().div(2).softmax(-1)
    engine = Engine(made, drafter, by_name(1), max_batch=200, rule=rule or Rejection())
    limits = Limits(max_new_tokens=2)
    rows = engine.submit(Request(tuple(prompt), samples, Sampling(temperature=2.0, seed=11), limits))
    while engine.step():
        pass
    assert 0 < engine.stats.accepted < engine.stats.drafted
    return chi_square(joint(rows, made.vocab_size), law[0, 0][:, None] * law[:, 1])


def require_tokens_of_plain_decoding(target: Runner, make: Callable[[], Drafter], prompts: Sequence[Sequence[int]]) -> None:
    """Greedy by both rules, those of Transformers' `generate`; under the coupled rule at T > 0 as well."""
    for rule, temperature in ((Rejection(), 0.0), (Coupled(), 0.0), (Coupled(), 2.0)):
        plain, expected = decoded(target, None, rule, temperature, prompts)
        engine, found = decoded(target, make(), rule, temperature, prompts)
        assert [row.tokens for row in found] == [row.tokens for row in expected]
        stats = engine.stats
        assert stats.committed == stats.row_rounds + stats.accepted
        assert plain.stats.row_rounds == plain.stats.committed
        assert stats.drafted > stats.row_rounds
        assert 0 < stats.draft_passes <= 3 * stats.rounds
        for row in [] if temperature else found:
            ids = torch.tensor([row.request.prompt_ids])
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": row.new_tokens, "do_sample": False}
            assert row.tokens == target.hf.generate(ids, **options)[0].tolist()


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
