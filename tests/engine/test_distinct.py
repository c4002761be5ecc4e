"""Texts drawn without replacement by rows that run together: their law, in order, by enumeration, and their weights.

Tests of: engine.joint_rows, constraints.estimates, constraints.dressing, engine.commit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, permutations
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from enumeration import chi_square
from shoal.config import Limits, Sampling
from shoal.constraints.dressing import add_weights
from shoal.constraints.estimates import Trie
from shoal.constraints.protocol import Allowed, Constraint
from shoal.engine import joint_rows
from shoal.engine.engine import Engine
from shoal.engine.joint_rows import Distinct
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed, Uniform
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.uniforms import Purpose
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit

V, EOS, NEW, ROWS, REQUESTS = 3, 2, 4, 3, 1500
PROMPT = (0, 1)
Text = tuple[int, ...]


def script(history: tuple[int, ...]) -> torch.Tensor:
    """Prefers one text, so that most rows write it first."""
    return hashed(V, 0, spread=0.7)(history) + torch.tensor([2.5, 0.0, 0.0])


class NoEarlyEnd(Constraint[int]):
    """Lets no text end with its first token."""

    def begin(self, row: Row) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
        return Allowed(torch.ones(len(states), vocab_size, dtype=torch.bool), torch.tensor([state > 0 for state in states]))


CONSTRAINT = NoEarlyEnd()


@cache
def law(constrained: bool) -> dict[Text, tuple[float, float]]:
    """The probability of every text, as rows draw it and by p."""
    found: dict[Text, tuple[float, float]] = {}

    def go_on(text: Text, drawn: float, by_p: float) -> None:
        if len(text) == NEW or text[-1:] == (EOS,):
            found[text] = drawn, by_p
            return
        p = script((*PROMPT, *text)).double().softmax(-1).tolist()
        allowed = [token for token in range(V) if text or token != EOS or not constrained]
        for token in allowed:
            go_on((*text, token), drawn * p[token] / sum(p[each] for each in allowed), by_p * p[token])

    go_on((), 1.0, 1.0)
    return found


@cache
def ordered(constrained: bool) -> dict[tuple[Text, ...], float]:
    """The probability of every sequence of texts that are drawn one after the other without replacement."""
    p = {text: drawn for text, (drawn, _) in law(constrained).items()}
    return {
        texts: math.prod(p[text] / (1 - sum(p[before] for before in texts[:i])) for i, text in enumerate(texts))
        for texts in permutations(p, ROWS)
    }


class Ahead(Uniform):
    """Drafts for some rows of each request, which end before the others."""

    def __init__(self, *indexes: int) -> None:
        super().__init__(Fixed(NEW - 1))
        self._indexes = indexes

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        longest = super().lengths(rows, waiting)
        return [most if row.index in self._indexes else 0 for row, most in zip(rows, longest, strict=True)]


def engine(lookahead: Any, rule: Rule | None = None, max_batch: int = 700) -> Engine:
    draft = scripted(script if isinstance(lookahead, Ahead) else hashed(V, 9), V)
    return engine_of(scripted(script, V), draft, lookahead, max_batch=max_batch, rule=rule or Rejection(), eos=[EOS])


def request(seed: int, constrained: bool = False, n: int = ROWS, **limits: Any) -> Request:
    constraints = (CONSTRAINT,) if constrained else ()
    asked = Request(PROMPT, n, Sampling(seed=seed), Limits(max_new_tokens=NEW, **limits), constraints=constraints)
    return add_weights(asked, "distinct")


def ran(used: Engine, requests: Sequence[Request]) -> list[list[Row]]:
    groups, ended = used.submit_all(requests), Counter[Row]()
    while commits := used.step():
        ended.update(done.row for done in commits if done.sample is not None)
    assert ended == Counter(row for rows in groups for row in rows)
    return groups


def texts(rows: Sequence[Row]) -> tuple[Text, ...]:
    return tuple(tuple(row.tokens[len(PROMPT) :]) for row in rows)


def fit(groups: Sequence[Sequence[Row]], constrained: bool) -> float:
    """The least p-value of the pairs of texts at two places against their law."""
    drawn, found = [texts(rows) for rows in groups], []
    if any(len(set(each)) < ROWS for each in drawn):
        return 0.0
    for i, j in combinations(range(ROWS), 2):
        expected = Counter[Any]()
        for each, probability in ordered(constrained).items():
            expected[each[i], each[j]] += probability
        counts = Counter((each[i], each[j]) for each in drawn)
        if not set(counts) <= set(expected):
            return 0.0
        found.append(chi_square(torch.tensor([counts[pair] for pair in expected]), torch.tensor(list(expected.values()))))
    return min(found)


@pytest.mark.parametrize(
    ("constrained", "lookahead", "rule", "max_batch"),
    [
        pytest.param(False, Fixed(0), Rejection(), 700, id="plain", marks=pytest.mark.slow),
        pytest.param(False, Fixed(2), Rejection(), 100, id="drafts"),
        pytest.param(False, Ahead(0), Rejection(), 700, id="ahead", marks=pytest.mark.slow),
        pytest.param(True, Fixed(1), Coupled(), 700, id="constrained", marks=pytest.mark.slow),
    ],
)
def test_rows_draw_texts_without_replacement(constrained: bool, lookahead: Any, rule: Rule, max_batch: int) -> None:
    used = engine(lookahead, rule, max_batch)
    groups = ran(used, [request(seed, constrained) for seed in range(REQUESTS)])
    assert fit(groups, constrained) > 1e-4
    assert used.stats.restarted > REQUESTS / 2
    assert 0 < used.stats.accepted < used.stats.drafted or lookahead.limit == 0
    assert deviation(groups, constrained) < 4.2


def deviation(groups: Sequence[Sequence[Row]], constrained: bool) -> float:
    """Of the mean weights of texts from their p, the greatest in standard errors over requests; of texts that come often."""
    weights = {text: [0.0] * len(groups) for text in law(constrained)}
    for number, rows in enumerate(groups):
        for row, text in zip(rows, texts(rows), strict=True):
            weights[text][number] = math.exp(row.log_weight) / ROWS
    errors = {text: stdev(own) / math.sqrt(len(groups)) for text, own in weights.items() if sum(map(bool, own)) > 40}
    assert len(errors) > 8
    return max(abs(mean(weights[text]) - law(constrained)[text][1]) / error for text, error in errors.items())


# ── what it must catch ──────────────────────────────────────────────────────────────────────────────────────────────

FEW = 500  # requests that show what is far off


def only_held(right: Any) -> Any:
    """Rows that run go on whatever texts are drawn."""
    return lambda row, others: [other for other in right(row, others) if other.held_at is not None]


def no_row(right: Any) -> Any:
    """Nothing that is drawn by rows side by side is given up."""
    return lambda row, others: list(right(row, others))[:0]


def from_the_end(right: Any) -> Any:
    """Texts are drawn in the order in which rows end."""

    def wrong(self: Distinct, trie: Trie) -> Iterator[Commit]:
        self._draws[trie].rows.sort(key=lambda row: row.finish_reason is None)
        return right(self, trie)

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "sabotage", "lookahead"),
    [
        (joint_rows, "_rows_to_restart", no_row, Fixed(0)),
        (joint_rows, "_rows_to_restart", only_held, Ahead(0)),
        (Distinct, "_draw_held_rows", from_the_end, Ahead(ROWS - 1)),
    ],
)
def test_other_draws_show(owner: Any, name: str, sabotage: Any, lookahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, sabotage(getattr(owner, name)))
    requests = [request(seed) for seed in range(REQUESTS if sabotage is only_held else FEW)]
    assert fit(ran(engine(lookahead), requests), constrained=False) < 1e-6


@pytest.mark.slow
def test_weights_that_count_each_text_once_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = joint_rows._log_weight
    monkeypatch.setattr(joint_rows, "_log_weight", lambda row, left, behind: right(row, left, 0))
    assert deviation(ran(engine(Fixed(0)), [request(seed) for seed in range(FEW)]), constrained=False) > 8


def test_no_uniform_judges_a_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that goes on after one text is drawn is judged anew after the next: the law hardly shows it."""
    asked, right = Counter[tuple[int, int]](), joint_rows.uniforms

    def noted(seed: int, number: int, purpose: Purpose) -> torch.Tensor:
        asked[seed, number] += purpose is Purpose.DISTINCT
        return right(seed, number, purpose)

    monkeypatch.setattr(joint_rows, "uniforms", noted)
    ran(engine(Ahead(0, 1)), [request(seed) for seed in range(100)])
    assert max(asked.values()) == 1
    assert max(Counter(seed for seed, _ in asked).values()) == ROWS - 1  # the last row, by both before it


# ── rows that end otherwise ─────────────────────────────────────────────────────────────────────────────────────────


def test_more_rows_than_texts_fail_by_name() -> None:
    (rows,) = ran(engine(Fixed(2)), [request(3, n=len(law(False)) + 2)])
    assert {len(text) for text in texts(rows[:-2])} == {1, 2, 3, 4}
    assert set(texts(rows[:-2])) == set(law(False))
    assert sum(math.exp(row.log_weight) for row in rows[:-2]) / len(rows[:-2]) == pytest.approx(1, abs=0.1)
    for row in rows[-2:]:
        with pytest.raises(RequestError, match="all texts that are possible have been drawn; ask for fewer than 33"):
            raise row.error


def test_rows_that_are_cut_draw_nothing_and_hold_up_no_other() -> None:
    """The first row is cut while the last one, which has ended, waits for it."""
    used = engine(Ahead(ROWS - 1))
    (rows,) = used.submit_all([request(1)])
    assert [done.sample for done in used.step()] == [None] * ROWS
    assert [row.held_at is not None for row in rows] == [False, False, True]
    (cut,) = used.cancel(rows[:1])
    assert cut.sample.finish_reason == "cancelled"
    (other, held) = used.cancel(rows[1:2])
    assert (other.row, held.row, held.sample.finish_reason) == (rows[1], rows[2], "length")
    assert held.sample.log_weight == pytest.approx(0, abs=1e-5)  # nothing was drawn before
    (again,) = used.submit_all([request(1)])
    used.step()
    assert [done.sample.finish_reason for done in used.cancel(again)] == ["cancelled"] * ROWS
    assert used.step() == []
