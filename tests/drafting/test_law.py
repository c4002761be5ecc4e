"""The law of the samples, whoever drafts: tokens of a Markov table counted through the engine, and sabotages that bend it.

Tests of: drafting.suffix, drafting.sums, drafting.model, drafting.medusa, drafting.eagle3, drafting.ppd, engine.verify.
Each case would fail with probability 1e-6 if its seeds were drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from drafts import sampled
from eagle_heads import CONFIG, random_heads
from enumeration import chain_rule, chi_square, independence
from laws import ALPHA, P, Q, codes, contingency, joint
from medusa_heads import HEADS, knowing
from prompt_tokens import scripted_tokens
from shoal.drafting import sums
from shoal.drafting.eagle3 import Eagle3Drafter
from shoal.drafting.medusa import MedusaDrafter
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ppd import PpdDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.lookahead.controller import Auto
from shoal.lookahead.costs import PairCosts
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing.scripted import ahead, table_model
from shoal.types.requests import Row
from shoal.types.trees import DraftTree


def plain_target() -> Runner:
    return table_model(P)


def target_that_looks_ahead() -> Runner:
    """Its hidden states are what it says next."""
    table = P.log()
    return table_model(P, features=ahead(lambda ids: table[(0, 0, *ids)[-2:]], HEADS + 1))


def target_with_prompt_tokens(count: int = 3) -> Runner:
    table = torch.zeros(4 + count, 4 + count, 4, dtype=torch.float64)
    table[:4, :4] = P
    table[:, 4:] = P.mean((0, 1))  # the answers of prompt tokens
    return table_model(table)


def eagle(target: Runner, kind: type[Eagle3Drafter] = Eagle3Drafter) -> Eagle3Drafter:
    """Heads that draft three of the four tokens."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4}
    heads = random_heads(CONFIG | shape | {"draft_vocab_size": 3}, 3 * 4, 4, own=True)
    heads.target_ids.copy_(torch.tensor([0, 2, 3]))
    return kind(heads, (0, 1, 2), target)


def drawn_from_q() -> ModelDrafter:
    return ModelDrafter(table_model(Q), 4)


def suffix_or_model(kind: type[SumDrafter] = SumDrafter) -> SumDrafter:
    return kind([SuffixDrafter("group")], drawn_from_q())


class Alternating(Auto):
    """Drafts up to 3 tokens by each choice of a sum in turn."""

    limit = 3

    def __init__(self, drafter: SumDrafter) -> None:
        super().__init__(PairCosts(packed=True))
        self.drafter, self.round = drafter, 0

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        self.round += 1
        self.drafter.use(self.round % len(self.drafter.choices))
        self._longest = [min(row.max_draft_length, 3) for row in rows]
        return self._longest

    def learn(self, outcome: Any) -> None:
        pass


def alternating(drafter: Drafter) -> Alternating:
    assert isinstance(drafter, SumDrafter)
    return Alternating(drafter)


@dataclass(frozen=True)
class Case:
    """A drafter, made for a target; the rule; the draft length, or a controller made for the drafter."""

    make: Callable[[Runner], Drafter]
    rule: Rule
    lookahead: Any = 2
    target: Callable[[], Runner] = plain_target
    samples: int = 1200


REJECTION, COUPLED = Rejection(), Coupled()
CASES = {
    "model, coupled": Case(lambda _: drawn_from_q(), COUPLED, 3, samples=1600),
    "model, auto": Case(lambda _: drawn_from_q(), REJECTION, "auto"),
    "siblings": Case(lambda _: SuffixDrafter("group"), REJECTION, samples=1600),
    "siblings, coupled, auto": Case(lambda _: SuffixDrafter("group"), COUPLED, "auto"),
    "siblings, trees, coupled": Case(lambda _: SuffixDrafter("group", nodes=5), COUPLED),
    "siblings, trees, auto": Case(lambda _: SuffixDrafter("group", nodes=5), REJECTION, "auto"),
    "sums": Case(lambda _: suffix_or_model(), REJECTION, samples=1600),
    "sums, coupled, auto": Case(lambda _: suffix_or_model(), COUPLED, "auto"),
    "choices": Case(lambda _: suffix_or_model(), REJECTION, alternating, samples=1600),
    "choices, coupled": Case(lambda _: suffix_or_model(), COUPLED, alternating, samples=1600),
    "medusa": Case(lambda _: MedusaDrafter(knowing(4), 1), REJECTION, target=target_that_looks_ahead, samples=1600),
    "medusa, trees, coupled": Case(lambda _: MedusaDrafter(knowing(4), 1, 5), COUPLED, target=target_that_looks_ahead),
    "medusa, auto": Case(lambda _: MedusaDrafter(knowing(4), 1), REJECTION, "auto", target_that_looks_ahead),
    "eagle": Case(eagle, REJECTION, samples=1600),
    "eagle, coupled": Case(eagle, COUPLED),
    "eagle, auto": Case(eagle, REJECTION, "auto"),
    "prompt tokens, coupled": Case(lambda _: PpdDrafter(scripted_tokens(4), 8), COUPLED, 3, target_with_prompt_tokens, 700),
    "prompt tokens, auto": Case(
        lambda _: PpdDrafter(scripted_tokens(4), 8), REJECTION, "auto", target_with_prompt_tokens, 700
    ),
}
FIRST = (
    "model, coupled",
    "siblings",
    "siblings, trees, coupled",
    "sums",
    "choices",
    "medusa",
    "eagle",
    "prompt tokens, coupled",
)
"""Every drafter, by one rule: what `make test` counts."""
MODELS = ("model", "sums", "choices", "medusa", "eagle")
"""Whose drafts take passes; prompt tokens ride in those of the target."""


def counted(case: Case) -> tuple[Any, list[Row]]:
    target = case.target()
    drafter = case.make(target)
    lookahead = case.lookahead(drafter) if callable(case.lookahead) else case.lookahead
    return sampled(drafter, case.rule, lookahead, target=target, samples=case.samples)


@pytest.mark.slow(but=["model, coupled"])
@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_four_tokens_have_the_joint_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request may draft for each other, and are independent all the same."""
    monkeypatch.setattr("shoal.drafting.grafting.SURE", 0.3)  # sums: both of their drafters take part
    engine, rows = counted(CASES[name])
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA
    assert independence(contingency(codes(rows[::2], 4, slice(2)), codes(rows[1::2], 4, slice(2)))) > ALPHA
    stats = engine.stats
    assert name == "prompt tokens, auto" or 0 < stats.accepted < stats.drafted
    assert (stats.draft_passes > 0) == name.startswith(MODELS)
    if name.startswith(("sums", "choices")):
        # with auto the machine's speed decides between the two
        assert name.endswith("auto") or all(counts.accepted > 100 for counts in stats.by_drafter.values())
        assert set(stats.by_drafter) == {"suffix", "model"}


# ── sabotage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def claimed(propose: Callable[[Any, DraftInputs], DraftTree]) -> Callable[[Any, DraftInputs], DraftTree]:
    """The most probable token is proposed, and said to be drawn from a distribution."""

    def wrong(self: Any, inputs: DraftInputs) -> DraftTree:
        tree = propose(self, inputs)
        q = torch.full((len(inputs.rows), 4), 0.1, dtype=torch.float64)
        return replace(tree, q=[q.scatter(1, column[:, None], 0.7) for column in tree.tokens.unbind(1)]) if tree.m else tree

    return wrong


def by_ids_of_the_draft(propose: Callable[[Any, DraftInputs], DraftTree]) -> Callable[[Any, DraftInputs], DraftTree]:
    """q by ids of the draft vocabulary, where those of the target are meant."""

    def wrong(self: Any, inputs: DraftInputs) -> DraftTree:
        tree = propose(self, inputs)
        return tree if tree.q is None else replace(tree, q=[q[:, [0, 2, 3, 1]] for q in tree.q])

    return wrong


def peeking(propose: Callable[[Any, DraftInputs], DraftTree]) -> Callable[[Any, DraftInputs], DraftTree]:
    """A row is left to the other drafter for what the model has drawn for it."""

    def wrong(self: Any, inputs: DraftInputs) -> DraftTree:
        tree = propose(self, inputs)
        if tree.q is None:
            return tree
        left = [tokens[:0] if tokens[:1] == [1] else tokens for tokens in tree.drafts]
        made = DraftTree.of(left, device=inputs.uniforms.device, steps=tree.steps)
        return DraftTree(made.tokens, made.lengths, tree.q[: made.m], made.drafts, made.parents, made.steps)

    return wrong


SABOTAGES: dict[str, tuple[str, type[Drafter], Any]] = {
    "a claimed q of siblings": ("siblings", SuffixDrafter, claimed),
    "a claimed q of heads": ("medusa", MedusaDrafter, claimed),
    "a q of other ids": ("eagle", Eagle3Drafter, by_ids_of_the_draft),
    "a choice by the drawn token": ("sums", SumDrafter, peeking),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SABOTAGES)
def test_a_wrong_q_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kind, wrong = SABOTAGES[name]
    monkeypatch.setattr("shoal.drafting.grafting.SURE", 0.9 if wrong is peeking else 0.3)
    monkeypatch.setattr(kind, "propose", wrong(kind.propose))
    engine, rows = counted(CASES[case])
    assert engine.stats.accepted > 0
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) < ALPHA


@pytest.mark.slow
def test_a_row_without_its_point_mass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's q stands for the other drafter's proposal."""
    monkeypatch.setattr("shoal.drafting.grafting.SURE", 0.3)
    real = sums.with_point_masses
    monkeypatch.setattr(sums, "with_point_masses", lambda q, drafts: real(q, [[] for _ in drafts]))
    _, rows = counted(CASES["sums"])
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) < ALPHA
