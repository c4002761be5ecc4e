"""A drafter that returns NaN, +inf or -inf everywhere, at whatever step: the draft ends before it, and nobody else notices.

Tests of: drafting.model, drafting.protocol.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from by_pairs import by_pairs
from captured_models import runner as static_runner
from enumeration import chain_rule, chi_square
from laws import ALPHA, P, Q, joint
from policies import auto
from shoal.config import Limits, Sampling
from shoal.drafting.protocol import DraftInputs
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed, by_name
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import ScriptedModel, hashed, mixed, runner, scripted
from shoal.types.requests import Request, Row

VOCAB, BAD = 12, 11
HEALTHY = hashed(VOCAB, 0)
DRAFTER = mixed(HEALTHY, hashed(VOCAB, 1), every=3)
PROMPTS = ((1, 2), (BAD, 5), (3, 4, 5))
LOOKAHEADS = {
    "1": lambda: Fixed(1), "5": lambda: Fixed(5), "bass": lambda: by_name("bass"), "heuristic": lambda: by_name("heuristic"),
    "auto": lambda: auto({1: 1.0, 64: 1.0}, 0.01, 0.9),
}  # fmt: skip


def decode(
    target: Runner, drafter: Runner | None, lookahead: Any, texts: Sequence[tuple[int, ...]], *, n: int = 1, new: int = 12,
    rule: Any = None, most: Sequence[int | None] = (), sampling: dict[str, Any] | None = None, **options: Any,
) -> tuple[Engine, list[Row], list[dict[int, tuple[int, int]]]]:  # fmt: skip
    """The engine, its rows, and of each proposal, by the row's first token, its length and its drafts. After every round no cell of
    the drafter may hold NaN."""
    engine = engine_of(target, drafter, lookahead, rule=rule or Coupled(), **options)
    seen: list[dict[int, tuple[int, int]]] = []
    if engine.drafter is not None:
        propose = engine.drafter.propose

        def watched(inputs: DraftInputs) -> Any:
            proposal = propose(inputs)
            counts = zip(inputs.rows, proposal.drafts, strict=True)
            seen.append({row.tokens[0]: (len(row.tokens), len(drafts)) for row, drafts in counts})
            assert all(bool(q.isfinite().all()) for q in proposal.q or ())
            return proposal

        engine.drafter.propose = watched  # type: ignore[method-assign]
    rows = []
    for i, ids in enumerate(texts):
        request = Request(
            ids, n, Sampling(**{"seed": 3, **(sampling or {})}), Limits(new), max_draft=most[i] if most else None
        )
        rows += engine.submit(request)
    while engine.step():
        for model in runners_of(engine)[1:]:
            scratch = model.cache.slots - (model.captures is not None)
            for tensors in model.cache.stores():
                assert all(bool(tensor[:scratch].isfinite().all()) for tensor in tensors[:2])
                assert all(bool(tensor.isfinite().all()) for tensor in tensors[2:])
    return engine, rows, seen


def said(rows: Sequence[Row]) -> list[tuple[list[int], str | None, object]]:
    return [(row.tokens, row.finish_reason, row.error) for row in rows]


def spoilt(value: float, at: int, everywhere: bool) -> Any:
    """`DRAFTER`, but for histories that begin with `BAD` and are that long."""

    def script(ids: tuple[int, ...]) -> Tensor:
        logits = DRAFTER(ids).clone()
        if ids[0] == BAD and len(ids) == at:
            logits[slice(None) if everywhere else 4] = value
        return logits

    return script


@by_pairs(
    {
        "sampling": [{}, {"temperature": 0.0}, {"top_k": 4, "frequency_penalty": 0.5}],
        "value, everywhere": [(float("nan"), False), (float("inf"), False), (-float("inf"), True)],
        "at": [2, 3, 6],
        "lookahead": LOOKAHEADS,
    }
)
def test_the_draft_ends_before_it(lookahead: str, at: int, value: float, everywhere: bool, sampling: dict[str, Any]) -> None:
    """One row's drafter fails after histories of one length; nothing is drawn there, and all that is near it is drafted."""
    broken = scripted(spoilt(value, at, everywhere), VOCAB)
    _, rows, seen = decode(scripted(HEALTHY, VOCAB), broken, LOOKAHEADS[lookahead](), PROMPTS, sampling=sampling)
    assert said(rows) == said(decode(scripted(HEALTHY, VOCAB), None, Fixed(0), PROMPTS, sampling=sampling)[1])
    assert {reason for _, reason, _ in said(rows)} == {"length"}
    own = [proposal[BAD] for proposal in seen if BAD in proposal]
    assert all(not length <= at < length + drafts for length, drafts in own)
    assert sum(drafts for length, drafts in own if length > at) > 0
    if at > 3:
        assert sum(drafts for length, drafts in own if length < at) > 0
    assert all(row.drafted > 0 for row in rows)


def test_a_user_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    broken = scripted(lambda ids: DRAFTER(ids) * (torch.nan if len(ids) > 3 else 1.0), VOCAB)
    with caplog.at_level(logging.WARNING, "shoal"):
        decode(scripted(HEALTHY, VOCAB), broken, Fixed(3), PROMPTS)
    assert [record.message for record in caplog.records] == [
        "the drafter scripted returned NaN or infinite logits; rows go on without those drafts"
    ]


def test_auto_gives_up_a_drafter_that_never_has_a_distribution() -> None:
    """A position without a distribution counts as one that would hardly be accepted."""
    controller = auto({1: 1.0, 64: 1.0}, 0.3, 0.9)
    broken = scripted(lambda _: torch.full((VOCAB,), torch.nan, dtype=torch.float64), VOCAB)
    engine, rows, _ = decode(scripted(HEALTHY, VOCAB), broken, controller, PROMPTS, new=400)
    assert {row.finish_reason for row in rows} == {"length"}
    assert engine.stats.drafted == 0
    assert 0 < engine.stats.draft_passes < 200


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_the_law_stays(lookahead: str) -> None:
    """By rejection sampling: where a draft ends depends on what was drafted before, and must not bend what is committed."""

    def script(ids: tuple[int, ...]) -> Tensor:
        history = (0, 0, *ids)
        return Q[history[-2], history[-1]].log() * (torch.nan if ids[-1] == 2 else 1.0)

    def truth(ids: tuple[int, ...]) -> Tensor:
        history = (0, 0, *ids)
        return P[history[-2], history[-1]].log()

    target, drafter = (runner(ScriptedModel(spoken, 4)) for spoken in (truth, script))
    engine, rows, _ = decode(
        target, drafter, LOOKAHEADS[lookahead](), [(0, 0)], n=2000, new=4, rule=Rejection(), max_batch=250
    )
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA
    assert 0 < engine.stats.accepted < engine.stats.drafted


# ── what it leaves in a cache ───────────────────────────────────────────────────────────────────────────────────────

SIZE = 24
POISON = SIZE - 1


@cache
def target_model() -> Any:
    return tiny_model("llama", vocab_size=SIZE)


def pair(executor: str | None) -> tuple[Runner, Runner]:
    """A target, and its copy whose states are NaN wherever it reads the last token of its vocabulary."""
    drafter = copy.deepcopy(target_model())
    drafter.get_input_embeddings().weight.data[POISON] = torch.nan
    made = static_runner(target_model(), executor), static_runner(drafter, executor)
    for model in made:
        model.packs = model.packs and executor is not None
    return made


LONG = tuple(range(1, 13))
POISONED = (5, 6, POISON, 7)
BIASES = {"as it comes": {}, "often": {"logit_bias": {POISON: 6.0}}, "cut": {"top_k": 8}}


@by_pairs(
    {
        "options": [{}, {"max_batch": 2}, {"prefix_sharing": "shared"}, {"chunk": 3}],
        "sampling": BIASES,
        "executor": [None, "eager"],
    }
)
def test_no_poison_stays_and_drafting_goes_on(executor: str | None, sampling: str, options: dict[str, Any]) -> None:
    """Poison in prompts, in committed tokens and in drafts, of rows side by side and one after the other in a slot."""
    prompts = [LONG, POISONED, (1, 2, 3), (4, 4, 4, 4, 4)]
    asked: dict[str, Any] = {"n": 2, "new": 24, "sampling": BIASES[sampling]}
    engine, rows, seen = decode(*pair(executor), Fixed(4), prompts, **asked, **options)
    plain = decode(pair(None)[0], None, Fixed(0), prompts, **asked)[1]
    assert said(rows) == said(plain)
    drafts = [row.drafted for row in rows]
    assert min(drafts) > 0, "a hole in the drafter's keys ends no row's drafts for good"
    poisons = [POISON in row.tokens[row.prompt_length :] for row in rows]
    assert any(poisons)
    assert engine.stats.accepted > 0
    assert seen


@pytest.mark.parametrize("executor", [None, "eager"], ids=["ordinary", "static"])
def test_what_a_row_drafts_beyond_its_own_length_leaves_nothing(executor: str | None) -> None:
    """Its surplus is ignored, but the cells are its own: poison there would be met in the next round, or by the next row."""
    target, drafter = pair(executor)
    asked: dict[str, Any] = {"sampling": {"logit_bias": {POISON: 6.0}}, "new": 20, "max_batch": 2}
    prompts = [LONG, (1, 2, 3), (4, 5), (6, 7)]
    most = (None, 1, 1, None)
    _, rows, seen = decode(target, drafter, Fixed(6), prompts, most=most, **asked)
    assert said(rows) == said(decode(target, None, Fixed(0), prompts, **asked)[1])
    assert any(drafts > 1 for proposal in seen for _, drafts in proposal.values())
    assert all(row.drafted > 0 for row in rows)


@pytest.mark.parametrize("k", [1, 5])
def test_poison_in_the_targets_padding_ends_no_row(k: int) -> None:
    """The target reads what rows drafted beyond their own lengths, as padding. Its own poison there is no fault of the row."""
    model = copy.deepcopy(target_model())
    model.get_input_embeddings().weight.data[POISON] = torch.nan
    model.lm_head.weight.data[POISON] = 0.0
    target = runner(model, 128, "tiny")
    often = scripted(lambda ids: torch.nn.functional.one_hot(torch.tensor(POISON), SIZE) * 9.0, SIZE)
    prompts = [LONG, (1, 2, 3), (4, 5)]

    def only(drafts: tuple[int | None, ...]) -> list[Any]:
        return said(decode(target, often, Fixed(k), prompts, most=drafts, sampling={"temperature": 0.0})[1])

    ragged = only((None, 0, 0))
    assert ragged[1:] == only((0, 0, 0))[1:]
    assert [reason for _, reason, _ in ragged[1:]] == ["length"] * 2
