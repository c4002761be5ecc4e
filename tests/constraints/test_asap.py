"""Rows draw by estimates of what their beginnings are worth: over-estimates that fall to the truth, and weights that stay right.

Tests of: constraints.estimates, constraints.dressing, engine.commit.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import shoal
from enumeration import chi_square
from particles import EOS, NEW, PROMPT, ROWS, SCRIPT, Asked, Masked, V, by_script, deviation
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints.dressing import add_weights
from shoal.constraints.estimates import DrawnValues, Estimates, PrefixNode, log_weights
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.samples import effective

SHORT = 3
"""New tokens where all texts are to be found."""
LEAST = 0.005
"""Of what p gives to parts of texts that are counted."""
MASKED = Masked()  # one object: constraints without equality are compared by identity


def request(seed: int, exact: str = "asap", rows: int = ROWS, owner: str = "", new: int = NEW) -> Request:
    asked = Request(PROMPT, rows, Sampling(seed=seed), Limits(max_new_tokens=new), constraints=(MASKED,), owner=owner)
    return add_weights(asked, exact)


def engine(k: int = 0, rule: Rule | None = None, max_batch: int = 240) -> Engine:
    draft = scripted(mixed(SCRIPT, hashed(V, 9), every=2), V) if k else None
    return engine_of(scripted(SCRIPT, V), draft, Fixed(k), max_batch=max_batch, rule=rule or Rejection(), eos=[EOS])


def ran(used: Engine, requests: Sequence[Request]) -> list[list[Row]]:
    groups = used.submit_all(requests)
    while used.step():
        pass
    assert all(row.error is None for rows in groups for row in rows)
    return groups


# ── what is learned ─────────────────────────────────────────────────────────────────────────────────────────────────


def root(used: Engine) -> PrefixNode:
    (trie,) = used.estimates.tries.values()
    return trie.root


def possible(state: tuple[int, ...]) -> list[int]:
    allowed = MASKED.mask([state], V, torch.device("cpu"))
    return [token for token in range(V) if bool(allowed.ends if token == EOS else allowed.tokens[0, token])]


def p_after(state: tuple[int, ...]) -> list[float]:
    return SCRIPT((*PROMPT, *state)).double().softmax(-1).tolist()


@cache
def worth(state: tuple[int, ...] = ()) -> float:
    """p's probability that a text that begins so is allowed."""
    if len(state) == SHORT or state[-1:] == (EOS,):
        return 1.0
    return sum(p_after(state)[token] * worth((*state, token)) for token in possible(state))


def law(node: PrefixNode | None, state: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """The texts that rows draw by these estimates, their probabilities, and those of p given that the text is allowed."""
    if len(state) == SHORT or state[-1:] == (EOS,):
        yield state, 1.0, 1.0
        return
    children = {} if node is None else node.children
    p, tokens = p_after(state), possible(state)
    drawn = [p[token] * (children[token].estimate if token in children else 1.0) for token in tokens]
    for token, share in zip(tokens, drawn, strict=True):
        right = p[token] * worth((*state, token)) / worth(state)
        for text, probability, expected in law(children.get(token), (*state, token)):
            yield text, probability * share / sum(drawn), expected * right


def divergence(node: PrefixNode | None) -> float:
    """KL of the law of rows from p given that the text is allowed."""
    found = list(law(node))
    assert sum(drawn for _, drawn, _ in found) == pytest.approx(1)
    assert sum(expected for *_, expected in found) == pytest.approx(1)
    return sum(expected * math.log(expected / drawn) for _, drawn, expected in found)


def test_the_law_of_rows_becomes_that_of_p_given_the_text() -> None:
    """Row after row, as in the paper's toy."""
    used, found = engine(max_batch=1), [divergence(None)]
    for seed in range(8):
        ran(used, [request(seed, rows=25, new=SHORT)])
        found.append(divergence(root(used)))
    assert found[0] > 0.2  # the local mask's
    assert found[1] < found[0] / 20
    assert found[-1] < 1e-4
    assert root(used).estimate == pytest.approx(worth(), rel=1e-3)


@pytest.mark.parametrize(
    ("k", "rule"), [(0, Rejection()), (2, Rejection()), (2, Coupled())], ids=["plain", "drafts", "coupled"]
)
def test_estimates_fall_to_the_truth_and_never_below(k: int, rule: Rule) -> None:
    used = engine(k, rule, max_batch=8)
    rows = used.submit(request(3, rows=200, new=SHORT))
    before: dict[tuple[int, ...], float] = {}
    while used.step():
        now = {text: node.estimate for text, node in beginnings(root(used))}
        assert all(now[text] <= estimate * (1 + 1e-9) for text, estimate in before.items())
        assert all(estimate >= worth(text) * (1 - 1e-5) for text, estimate in now.items())
        before = now
    assert all(row.beginning is root(used).after(row.tokens[2:]) for row in rows)
    assert len(before) == used.estimates.nodes + 1 > 30
    assert root(used).estimate == pytest.approx(worth(), rel=1e-3)
    assert 0 < used.stats.accepted < used.stats.drafted or not k


def beginnings(node: PrefixNode, text: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], PrefixNode]]:
    yield text, node
    for token, child in node.children.items():
        yield from beginnings(child, (*text, token))


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("exact", "k", "rule"),
    [
        pytest.param("asap+smc", 1, Rejection(), id="resampled"),
        pytest.param("asap", 1, Coupled(), id="coupled", marks=pytest.mark.slow),
    ],
)
def test_weights_of_texts_are_those_of_p_in_the_mean(exact: str, k: int, rule: Rule) -> None:
    used = engine(k, rule)
    assert deviation(second(used, exact), LEAST) < 4.2
    assert 0 < used.stats.accepted < used.stats.drafted or not k
    assert (used.stats.resampled > 0) == (exact == "asap+smc")


def second(used: Engine, exact: str = "asap") -> list[list[Row]]:
    """Requests after one of each owner, whose rows they learn from, and from each other; those of other owners are independent."""
    ran(used, [request(seed, exact, owner=str(seed)) for seed in range(120)])
    return ran(used, [request(200 + seed, exact, owner=str(seed)) for seed in range(120)])


def gaps() -> list[float]:
    """Between p of rows' texts and what their declared probabilities and weights make."""
    groups = ran(engine(1, max_batch=30), [request(seed) for seed in range(20)])
    return [abs(sum(row.processed_logprobs) + row.log_allowed - by_script(row)) for rows in groups for row in rows]


def test_a_weight_makes_of_the_declared_probability_that_of_the_script() -> None:
    assert max(gaps()) < 1e-4


def learned(rows: int) -> PrefixNode:
    used = engine(max_batch=4)
    ran(used, [request(5, rows=rows, new=SHORT)])
    return root(used)


def inside(text: Sequence[int]) -> torch.Tensor:
    """Natural logs of p at each token of a text, -inf where it is not allowed, [tokens, vocab]."""
    found = torch.full((len(text), V), -math.inf, dtype=torch.float64)
    for place in range(len(text)):
        state = tuple(text[:place])
        for token in possible(state):
            found[place, token] = math.log(p_after(state)[token])
    return found


@pytest.mark.parametrize("rows", [1, 12, 200])
def test_probability_and_weight_of_every_text_make_that_of_p(rows: int) -> None:
    """Of all texts, however rare, and whatever has been learned."""
    node = learned(rows)
    texts = list(law(node))
    assert len(texts) > 20
    for text, drawn, expected in texts:
        weight = math.exp(sum(log_weights(node, text, inside(text))))
        assert drawn * weight == pytest.approx(expected * worth(), rel=1e-9)


def fit(k: int, rule: Rule, monkeypatch: pytest.MonkeyPatch, *, told: bool = True) -> float:
    """p-value of how often texts come while the estimates stay as they are; told: against their law, else the local mask's."""
    used = engine(k, rule)
    ran(used, [request(5, rows=12, new=SHORT)])
    expected = {text: drawn for text, drawn, _ in law(root(used) if told else None)}
    monkeypatch.setattr(PrefixNode, "learn", lambda self, block, seen: self.after(block))
    groups = ran(used, [request(100 + seed, rows=100, new=SHORT) for seed in range(10)])
    counts = Counter(tuple(row.tokens[2:]) for rows in groups for row in rows)
    assert set(counts) <= set(expected)
    assert 0 < used.stats.accepted < used.stats.drafted or not k
    return chi_square(torch.tensor([counts[text] for text in expected]), torch.tensor(list(expected.values())))


@pytest.mark.parametrize(
    ("k", "rule"),
    [
        pytest.param(2, Rejection(), id="drafts"),
        pytest.param(2, Coupled(), id="coupled", marks=pytest.mark.slow),
    ],
)
def test_rows_draw_by_the_estimates_of_their_round(k: int, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(k, rule, monkeypatch) > 1e-4


@pytest.mark.slow
def test_the_law_of_the_local_mask_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(0, Rejection(), monkeypatch, told=False) < 1e-9


@pytest.mark.slow
def test_weights_become_equal() -> None:
    """Effective number of six rows: of a prompt's first request, and of those after its fortieth."""

    def worth_of(exact: str) -> list[float]:
        used = engine(1, max_batch=ROWS)
        return [effective([row.log_weight for row in ran(used, [request(seed, exact)])[0]]) for seed in range(60)]

    weights, asap = worth_of("weights"), worth_of("asap")
    assert statistics.mean(asap[:10]) > statistics.mean(weights[:10]) - 0.3
    assert statistics.mean(weights[40:]) < 0.9 * ROWS
    assert statistics.mean(asap[40:]) > 0.96 * ROWS


# ── what it must catch ──────────────────────────────────────────────────────────────────────────────────────────────


def undivided(right: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Weights that count what all tokens after a beginning are worth, not what the one that was drawn was preferred by."""

    def wrong(node: PrefixNode, block: Sequence[int], inside: Any) -> list[float]:
        found, here = right(node, block, inside), node.after(())
        for place, token in enumerate(block):
            here = None if here is None else here.children.get(token)
            found[place] += 0.0 if here is None else math.log(here.estimate)
        return found

    return wrong


def late(right: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Weights by what is known after a row's own token, not by what it was drawn by."""

    def wrong(node: PrefixNode, block: Sequence[int], inside: Any) -> list[float]:
        p, drawn = inside.exp(), inside[range(len(block)), list(block)].exp()
        node.learn(block, [DrawnValues(V, float(one), float(own.sum() - one)) for own, one in zip(p, drawn, strict=True)])
        return right(node, block, inside)

    return wrong


@pytest.mark.parametrize("sabotage", [undivided, late])
def test_wrong_weights_show(sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.engine import logprobs

    monkeypatch.setattr(logprobs, "log_weights", sabotage(logprobs.log_weights))
    assert sum(gap > 1e-3 for gap in gaps()) > 20


def test_probabilities_after_masking_show_in_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What p gives to a token given that it is allowed, in the place of what p gives to it."""
    right = PrefixNode.learn
    masked = lambda seen: [each._replace(p=each.p / (each.p + each.rest)) for each in seen]  # noqa: E731
    monkeypatch.setattr(PrefixNode, "learn", lambda self, block, seen: right(self, block, masked(seen)))
    used = engine(max_batch=8)
    ran(used, [request(3, rows=200, new=SHORT)])
    assert abs(root(used).estimate / worth() - 1) > 0.05


def test_beginnings_that_are_not_told_show_in_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the beginnings of a row's round are computed anew, and none before them."""

    def wrong(self: PrefixNode, block: Sequence[int], seen: Sequence[DrawnValues]) -> PrefixNode | None:
        parent, self.parent = self.parent, None
        found = right(self, block, seen)
        self.parent = parent
        return found

    right = PrefixNode.learn
    monkeypatch.setattr(PrefixNode, "learn", wrong)
    used = engine(max_batch=8)
    ran(used, [request(3, rows=200, new=SHORT)])
    assert divergence(root(used)) > 1e-3


def test_copies_that_learn_at_their_own_place_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Row.become

    def wrong(self: Row, other: Row, seed: int) -> None:
        own = self.beginning
        right(self, other, seed)
        self.beginning = own

    monkeypatch.setattr(Row, "become", wrong)
    used = engine(1)
    (rows,) = ran(used, [request(3, "asap+smc", rows=60)])
    assert used.stats.resampled > 5
    assert sum(row.beginning is not root(used).after(row.tokens[2:]) for row in rows) > 5


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_asked_otherwise_is_learned_by_itself() -> None:
    used = engine(max_batch=8)
    one = request(0)
    others = [
        dataclasses.replace(one, owner="another"),
        dataclasses.replace(one, prompt_ids=(1, 0)),
        dataclasses.replace(one, sampling=Sampling(temperature=0.5)),
        dataclasses.replace(one, sampling=Sampling(logit_bias={1: 2.0})),
        dataclasses.replace(one, limits=Limits(max_new_tokens=NEW - 1)),
        dataclasses.replace(one, constraints=(Masked(),)),
    ]
    ran(used, [one, request(7), *others])
    assert len(used.estimates.tries) == 1 + len(others)
    before = used.estimates.nodes
    ran(used, [dataclasses.replace(one, estimated=False)])
    assert used.estimates.nodes == before


def test_memory_is_bounded_and_the_law_holds_without_room() -> None:
    used = engine(1)
    used.estimates = Estimates(most=12)
    groups = ran(used, [request(seed, owner=str(seed // 50)) for seed in range(200)])
    assert used.estimates.nodes <= 12
    assert deviation(groups, LEAST) < 4.2


def test_tries_that_were_used_least_recently_are_given_up() -> None:
    kept = Estimates(most=4)
    rows = {owner: Row(request(0, owner=owner), 0, 0, 0, list(PROMPT), frozenset(), 99) for owner in "abc"}
    for owner in "ab":
        kept.begin([rows[owner]])
        rows[owner].beginning.learn([0], [DrawnValues(2, 0.25, 0.25)])
    kept.begin([rows["a"]])
    kept.begin([rows["c"]])
    assert kept.nodes == 2
    held = rows["a"].beginning.after([0])
    kept.begin([rows["a"]])
    assert rows["a"].beginning.after([0]) is held
    assert rows["a"].beginning.estimate == pytest.approx(0.5)


# ── for users ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["None", "recycling"])
@pytest.mark.parametrize("draft", [None, "suffix:nodes=8", "recycling"])
def test_samples_of_a_grammar_learn_from_each_other(draft: str | None, bundled: shoal.Shoal) -> None:
    pair = bundled if draft is None else shoal.load(draft=draft, compile="off", max_batch=8)
    options: Any = {"max_new_tokens": 16, "grammar": Grammar("regex", "[a-z]{2}[0-9]{3} x*;"), "lookahead": 3}
    result = pair.generate(["value = "] * 3, 8, exact="asap", **options)
    assert 0 < result.stats.accepted < result.stats.drafted
    require_model_s_logprobs(result)


def require_model_s_logprobs(result: Any) -> None:
    """Declared log-probabilities, with what is reported of the constraint, are those of the model: of trees, too."""
    for sample in (sample for output in result for sample in output.samples):
        assert sample.log_allowed is not None
        assert sum(sample.processed_logprobs) + sample.log_allowed == pytest.approx(sum(sample.logprobs), abs=1e-3)


def test_aligned_samples_learn(bundled: shoal.Shoal) -> None:
    result = bundled.generate(["def fibo", "def fibo"], 8, align=True, exact="asap", max_new_tokens=6, lookahead=2)
    require_model_s_logprobs(result)


def test_what_cannot_be_learned_is_refused(bundled: shoal.Shoal) -> None:
    with pytest.raises(RequestError, match="checks of single tokens have none: use 'smc'"):
        bundled.generate("1", 2, exact="asap", constraints=[Asked()], max_new_tokens=4)
    with pytest.raises(RequestError, match=r"exact='asap\+smc' draws among the rows"):
        bundled.generate("1", 1, exact="asap+smc", grammar=Grammar("regex", "[0-9]+"), max_new_tokens=4)
