"""Targets led by the posterior of a class (GeDi): Bayes' rule over the whole new text, along every branch, whatever becomes of it.

The classes are two models, or one model after two control codes.

Tests of: sampling.guidance, engine.verify, engine.running_rows, types.requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import chi_square
from guides import EXPERT, MADE, Made, V, as_decoded, by_bayes, engine_of, played, request
from laws import ALPHA, P, Q, declared_law, joint, table
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.shapes import shape_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine.engine import Engine
from shoal.engine.verify import verify
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling import guidance
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.guidance import ClassOdds
from shoal.testing.scripted import scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree

G, E = table(4, 7, order=2), table(4, 11, order=2)
SETTINGS = {"guidance": 2.0, "posterior": 3.0, "plausibility": 0.02}
PROMPTS = ((0, 0), (0, 0))
CODES = ((1, 2, 0), (2, 1))
"""What the guide reads and what the expert reads before the new tokens: the prompt, or a control code of each class."""


def law(
    vocab: int,
    horizon: int,
    p: Tensor,
    g: Tensor,
    e: Tensor,
    read: tuple[tuple[int, ...], tuple[int, ...]] = PROMPTS,
    **settings: float,
) -> Tensor:
    """The law of the first new tokens after a prompt of two zeros, from tables of order 2."""

    def step(tokens: tuple[int, ...]) -> Tensor:
        away, wanted = ((*prompt, *tokens) for prompt in read)
        odds = sum(
            math.log(float(e[one[i : i + 3]] / g[other[j : j + 3]]))
            for (one, i), (other, j) in zip(steps(wanted, len(tokens)), steps(away, len(tokens)), strict=True)
        )
        now = (*PROMPTS[0], *tokens)[-2:]
        return by_bayes(p[now], g[away[-2:]], e[wanted[-2:]], odds, len(tokens) + 1, SimpleNamespace(**settings))

    return declared_law(step, vocab, horizon)


def steps(read: tuple[int, ...], count: int) -> list[tuple[tuple[int, ...], int]]:
    """A text with the place of the two tokens before each of the last ones."""
    return [(read, i) for i in range(len(read) - count - 2, len(read) - 2)]


# ── the law ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def columns_of_all_texts(
    vocab: int, depth: int, made: Sequence[Tensor], **prompts: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Every text up to that many tokens as one tree, and what the pass says of the token after each."""
    texts = [text for length in range(depth + 1) for text in itertools.product(range(vocab), repeat=length)]
    tree = DraftTree.of([[text[-1] for text in texts[1:]]], [[texts.index(text[:-1]) - 1 for text in texts[1:]]])
    target, guide, expert = (table_model(one) for one in made)
    sampling = Sampling(**SETTINGS, **prompts)  # type: ignore[arg-type]
    engine = Engine(target, None, Fixed(0), guide=guide, expert=expert)
    (row,) = engine.submit(Request((0, 0), 1, sampling, Limits(max_new_tokens=99)))
    engine._batch.gather([], drafting=False)
    engine.memory.allocate(engine.scheduler.close_up())
    scores = verify(engine.target, [row], tree, engine.guides)
    return texts, scores.p()[0]


def test_the_law_of_four_tokens_by_enumeration_of_all_branches() -> None:
    """Exactly, by what one pass says of the next token after each of the 40 texts up to three tokens."""
    made = [table(3, seed, order=2) for seed in (1, 2, 3)]
    texts, said = columns_of_all_texts(3, 3, made)
    found = torch.zeros([3] * 4, dtype=torch.float64)
    for text in itertools.product(range(3), repeat=4):
        found[text] = torch.stack([said[texts.index(text[:i]), text[i]] for i in range(4)]).prod()
    torch.testing.assert_close(found, law(3, 4, *made, **SETTINGS), rtol=0, atol=1e-6)
    assert (found - law(3, 4, *made, **SETTINGS | {"posterior": 1.0})).abs().max() > 1e-3


def test_two_control_codes_of_one_model_by_enumeration_of_all_branches() -> None:
    """GeDi: P(c+ | text) from one class-conditional model after each code."""
    p, m = table(3, 1, order=2), table(3, 2, order=2)
    texts, said = columns_of_all_texts(3, 3, [p, m, m], negative_prompt=CODES[0], positive_prompt=CODES[1])
    found = torch.zeros([3] * 4, dtype=torch.float64)
    for text in itertools.product(range(3), repeat=4):
        found[text] = torch.stack([said[texts.index(text[:i]), text[i]] for i in range(4)]).prod()
    torch.testing.assert_close(found, law(3, 4, p, m, m, CODES, **SETTINGS), rtol=0, atol=1e-6)
    for other in (PROMPTS, CODES[::-1], (CODES[0], PROMPTS[1]), (PROMPTS[0], CODES[1])):
        assert (found - law(3, 4, p, m, m, other, **SETTINGS)).abs().max() > 1e-3


def test_the_posterior_of_two_codes_is_bayes_rule_over_the_text() -> None:
    """p(x|c+) / (p(x|c+) + p(x|c-)), with log-odds that are not divided by the length, of a target that says nothing itself."""
    p, m = torch.full((3, 3, 3), 1 / 3, dtype=torch.float64), table(3, 2, order=2)
    settings = {"guidance": 1.0, "posterior": 1.0, "plausibility": 0.0}
    for token in range(3):
        wanted, away = (float(m[(*code[-2:], token)]) for code in (CODES[1], CODES[0]))
        others = [float(m[(*CODES[1][-2:], one)]) / float(m[(*CODES[0][-2:], one)]) for one in range(3)]
        whole = sum(ratio / (1 + ratio) for ratio in others)
        assert float(law(3, 1, p, m, m, CODES, **settings)[token]) == pytest.approx(wanted / (wanted + away) / whole)


DRAFTERS: dict[str, Any] = {
    "model": lambda: ModelDrafter(table_model(Q), 4),
    "trees": lambda: TreeDrafter(table_model(Q), 4, shape_of("rsd-s", 2, 6)),
    "siblings": lambda: SuffixDrafter("group", nodes=5),
}


@pytest.mark.slow(but=["model-Rejection"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model", Rejection()),
        ("trees", Rejection()),
        pytest.param("model", Coupled(), marks=pytest.mark.slow),
        pytest.param("siblings", Rejection(), marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_four_tokens_have_the_joint_law(name: str, rule: Rule) -> None:
    drafter: Drafter = DRAFTERS[name]()
    options: Any = {"guide": table_model(G), "expert": table_model(E)}
    engine = Engine(table_model(P), drafter, Fixed(2), max_batch=120, rule=rule, **options)
    sampling = Sampling(seed=3, **SETTINGS)  # type: ignore[arg-type]
    rows = engine.submit(Request((0, 0), 1200, sampling, Limits(max_new_tokens=4)))
    while engine.step():
        pass
    assert chi_square(joint(rows, 4), law(4, 4, P, G, E, **SETTINGS)) > ALPHA
    assert chi_square(joint(rows, 4), law(4, 4, P, P, P, **SETTINGS)) < ALPHA  # the test sees the classes
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert engine.stats.guide_passes == 2 * engine.stats.rounds


@pytest.mark.slow(but=["model"])
@pytest.mark.parametrize("name", ["model", "trees"])
def test_four_tokens_led_by_two_codes_have_the_joint_law(name: str) -> None:
    options: Any = {"guide": table_model(G), "expert": table_model(G)}
    engine = Engine(table_model(P), DRAFTERS[name](), Fixed(2), max_batch=120, rule=Rejection(), **options)
    sampling = Sampling(seed=3, **SETTINGS, negative_prompt=(1, 2, 0), positive_prompt=(2, 1))  # type: ignore[arg-type]
    rows = engine.submit(Request((0, 0), 1200, sampling, Limits(max_new_tokens=4)))
    while engine.step():
        pass
    assert chi_square(joint(rows, 4), law(4, 4, P, G, G, CODES, **SETTINGS)) > ALPHA
    assert chi_square(joint(rows, 4), law(4, 4, P, G, G, CODES[::-1], **SETTINGS)) < ALPHA
    assert 0 < engine.stats.accepted < engine.stats.drafted


# ── what rows have read ─────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS: list[dict[str, Any]] = [{}, {"prefix_sharing": "shared"}, {"chunk": 3}, {"quantum": 4, "max_batch": 3}]


def led(made: Made, expert: bool = True, **options: Any) -> tuple[Engine, list[Row]]:
    """Requests with and without a posterior, of all of which one has no guidance; see `played`."""
    own: Any = {"expert": scripted(EXPERT, V)} if expert else {}
    return played(made, negative=True, posterior={0: 2.0, 2: 6.0, 3: 1.0}, **own, **options)


@pytest.mark.slow(but=["model-options0"])
@pytest.mark.parametrize(
    ("name", "options"),
    [*(("model", options) for options in OPTIONS), *((name, OPTIONS[-1]) for name in MADE if name != "model")],
)
def test_rows_that_join_move_pause_and_leave(name: str, options: dict[str, Any]) -> None:
    engine, rows = led(MADE[name], **options)
    assert as_decoded(rows, expert=EXPERT)
    assert (engine.stats.pauses > 0) == ("quantum" in options)
    assert name == "plain" or 0 < engine.stats.accepted < engine.stats.drafted
    without = played(MADE[name], negative=True, expert=scripted(EXPERT, V), **options)[1]
    assert [row.tokens for row in rows] != [row.tokens for row in without]


def test_the_target_may_be_the_class() -> None:
    assert as_decoded(led(MADE["model"], expert=False)[1])


def test_a_row_takes_the_odds_with_the_text_of_another() -> None:
    engine = engine_of(MADE["plain"])
    first, second = engine.submit(request(0, 2, guidance=1.0, posterior=2.0))
    while first.tokens == second.tokens:
        engine.step()
    assert 0 != first.class_odds != second.class_odds
    second.become(first, seed=3)
    assert second.class_odds == first.class_odds
    assert engine.submit(request(0, 1, guidance=1.0))[0].class_odds == 0


def test_a_posterior_goes_with_guidance() -> None:
    with pytest.raises(RequestError, match="posterior goes with guidance"):
        engine_of(MADE["plain"]).submit(request(1, posterior=0.5))


LEARN = ClassOdds.learn
SABOTAGES: dict[str, tuple[str, str, Any]] = {
    "odds of the last round alone": ("plain", "learn", lambda *_: None),
    "odds of the root": ("model", "learn", lambda self, row, columns, token: LEARN(self, row, columns[:1], token)),
    "odds of another token": (
        "trees",
        "learn",
        lambda self, row, columns, token: LEARN(self, row, columns, (token + 1) % V),
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_wrong_odds_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, method, wrong = SABOTAGES[name]
    assert as_decoded(led(MADE[drafts])[1], expert=EXPERT)
    monkeypatch.setattr(guidance.ClassOdds, method, wrong)
    assert not as_decoded(led(MADE[drafts])[1], expert=EXPERT)
