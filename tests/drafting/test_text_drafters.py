"""Drafters without a model: what they look up, what they keep, and that the tokens are those of plain decoding.

Tests of: drafting.automaton, drafting.recycling, drafting.ngram, drafting.text, drafting.sums.
"""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from by_pairs import by_pairs
from drafts import V, decoded, decoded_plainly, group, heard, leave, passes_of, proposed, row
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting.automaton import ROOT, Place, SuffixAutomaton
from shoal.drafting.draft import read_draft
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter, TrigramDrafter, Trigrams, copied
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.recycling import RecyclingDrafter, Successors
from shoal.drafting.suffix import GrowingTexts, SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.drafting.text import TextDrafter
from shoal.engine.engine import Engine
from shoal.errors import UnsupportedModel
from shoal.lookahead.auto import Auto
from shoal.lookahead.controller import Controller, Fixed
from shoal.lookahead.costs import PairCosts
from shoal.models.loading import wrap
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.sampling.distributions import Scores
from shoal.testing import tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome
from shoal.types.trees import Positions, Verdict

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(scripted(mixed(hashed(V), hashed(V, 1)), V), V),
    "ngram": lambda: NGramDrafter(1, 3),
    "suffix of rows": lambda: SuffixDrafter("row"),
    "suffix": lambda: SuffixDrafter("group"),
    "suffix of engines": lambda: SuffixDrafter("engine"),
    "suffix trees": lambda: SuffixDrafter("engine", nodes=6),
    "full tables": lambda: SuffixDrafter("engine", limit=64),
    "recycling": lambda: RecyclingDrafter("group", k=3, nodes=6),
    "sum": lambda: SumDrafter([SuffixDrafter("engine")], ModelDrafter(scripted(mixed(hashed(V), hashed(V, 1)), V), V)),
    "sum of three": lambda: SumDrafter(
        [NGramDrafter(1, 2), SuffixDrafter("row")], ModelDrafter(scripted(mixed(hashed(V), hashed(V, 1)), V), V)
    ),
    "trigrams": lambda: TrigramDrafter("group", k=3, nodes=6),
    "trigrams by playouts": lambda: TrigramDrafter("engine", k=3, nodes=6, limit=64, playouts=24),
    "recycling of engines": lambda: RecyclingDrafter("engine", k=2, nodes=0),
}
MODELS = ("model", "sum", "sum of three")
"""Of these, what has a q."""


# ── prompt lookup ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_longest_match_counts_and_of_those_the_last() -> None:
    assert proposed(NGramDrafter(2, 3), row(1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3), length=2) == [[9, 9]]
    assert proposed(NGramDrafter(2, 2), row(1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3), length=2) == [[8, 8]]
    assert proposed(NGramDrafter(2, 4), row(1, 2, 3)) == [[]]
    assert proposed(NGramDrafter(1, 4), row(1, 2, 1)) == [
        [2, 1, 2, 1]
    ]  # a text that repeats itself goes on repeating itself
    assert copied([7, 8, 9], 1, 5) == [8, 9, 8, 9, 8]


def brute(tokens: Sequence[int], least: int, most: int, length: int) -> list[int]:
    for n in range(min(most, len(tokens)), least - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                return copied(tokens, place, length)
    return []


@pytest.mark.parametrize("prompt", [1, 7, 30])
def test_lookups_are_those_of_a_search(prompt: int) -> None:
    """Read token by token, in steps, and all at once."""
    for seed in range(20):
        values = [hash((seed, i)) % 3 for i in range(40)]
        for step in (1, 3, 40):
            grown, drafter = row(*values[:prompt], prompt=prompt), NGramDrafter(2, 4)
            while len(grown.tokens) < len(values):
                assert proposed(drafter, grown, length=5) == [brute(grown.tokens, 2, 4, 5)]
                grown.tokens += values[len(grown.tokens) : len(grown.tokens) + step]


def test_a_prompt_is_looked_up_for_its_own_request() -> None:
    """A drafter of a user may meet another engine, whose first request has the number of one that was given up."""
    drafter = NGramDrafter(2, 3)
    left_behind = row(*range(20), 3, 4, prompt=20)
    assert proposed(drafter, left_behind) == [[5, 6, 7, 8]]
    assert proposed(drafter, row(9, 3, 4)) == [[]]
    assert left_behind.group == 0


# ── suffix automata ─────────────────────────────────────────────────────────────────────────────────────────────────


def occurrences(texts: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    n = len(part)
    return sum(list(text[i : i + n]) == list(part) for text in texts for i in range(len(text) - n + 1))


def state_of(automaton: SuffixAutomaton, part: Sequence[int]) -> int | None:
    state: int | None = ROOT
    for token in part:
        state = None if state is None else automaton.following[state].get(token)
    return state


@pytest.mark.parametrize("seed", range(8))
def test_an_automaton_counts_every_part_of_texts_that_grow_in_turns(seed: int) -> None:
    generator = random.Random(seed)
    texts: list[list[int]] = [[] for _ in range(3)]
    states, automaton = [ROOT] * 3, SuffixAutomaton()
    for _ in range(60):
        which, token = generator.randrange(3), generator.randrange(2 + seed % 2)
        texts[which].append(token)
        states[which] = automaton.append(states[which], token)
    parts = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for part in parts:
        state = state_of(automaton, part)
        assert state is not None
        assert automaton.length[automaton.link[state]] < len(part) <= automaton.length[state]
        assert automaton.count[state] == occurrences(texts, part)
    for part in itertools.product(range(3), repeat=4):
        assert (state_of(automaton, part) is None) == (part not in parts)
    assert len(automaton.length) <= 2 * automaton.tokens + 1
    for text, state in zip(texts, states, strict=True):
        place = Place(automaton, state, len(text)).continued()
        ends = (text[start:] for start in range(len(text) + 1))
        longest = next(end for end in ends if any(occurrences(texts, [*end, token]) for token in range(3)))
        assert (place.state, place.length) == (state_of(automaton, longest), len(longest))


def test_the_memory_of_an_automaton_is_known() -> None:
    generator = random.Random(0)
    for vocabulary, tokens in ((300, 4000), (4, 4000), (1, 4000)):
        values = [generator.randrange(vocabulary) for _ in range(tokens)]
        tracemalloc.start()
        automaton = SuffixAutomaton()
        automaton.read(ROOT, values)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert automaton.bytes == pytest.approx(used, rel=0.05)
        assert used < 800 * tokens


# ── suffix decoding ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_most_frequent_continuation_of_the_longest_match() -> None:
    rows = group(Request((7, 1, 2, 3), 3), [1, 2, 4, 1, 2, 4], [9, 1, 2, 5], [8, 1, 2])
    assert proposed(SuffixDrafter("row"), *rows) == [[1, 2, 4, 1], [], [3, 8, 1, 2]]
    assert proposed(SuffixDrafter("row", least=3), *rows) == [[1, 2, 4, 1], [], []]
    drafter = SuffixDrafter("group")
    assert proposed(drafter, *rows)[2] == [4, 1, 2]  # twice, 3 and 5 once each
    assert drafter.guess(rows[2], 1).confidence == [2 / 3 * 2 / 4.5]
    rows[1].tokens += [5, 1, 2, 5]
    rows[2].tokens += [5]
    assert proposed(drafter, *rows)[2] == [5, 1, 2, 5]


def test_trees_take_the_most_probable_paths() -> None:
    rows = group(Request((7, 1, 2, 3), 3), [1, 2, 4, 1, 2, 4], [9, 1, 2, 5], [8, 1, 2])
    drafter = SuffixDrafter("group", nodes=4)
    drafter.read(rows)
    guess = drafter.guess(rows[2], 3)
    assert list(guess.tokens) == [4, 5, 3, 1]
    assert list(guess.parents or ()) == [-1, -1, -1, 0]
    first, second = 2 / 3 * 4 / 4.5, 2 / 3 * 2 / 4.5 * 3 / 4 / 1.5
    assert guess.confidence == pytest.approx([first, second / first])
    assert guess.up_to(1) == ([4, 5, 3], guess.confidence[:1], [-1, -1, -1])
    assert guess.up_to(2) == guess


@pytest.mark.parametrize("scope", ["row", "group", "engine"])
def test_what_scopes_see_and_forget(scope: str) -> None:
    first, second, drafter = Request((1, 2, 3), 2), Request((1, 2, 3), 2), SuffixDrafter(scope)
    one, sibling = group(first, [4, 5, 6], [4])
    other, late = group(second, [4, 5], [4])
    assert proposed(drafter, one, sibling, other)[1:] == [[] if scope == "row" else [5, 6], []]
    leave(drafter, one)
    assert proposed(drafter, sibling, other) == [[] if scope == "row" else [5, 6], [6] if scope == "engine" else []]
    leave(drafter, sibling)
    assert proposed(drafter, other) == [[6] if scope == "engine" else []]
    other.tokens += [8, 9]
    leave(drafter, other)
    assert proposed(drafter, late)[0][:3] == ([] if scope == "row" else [5, 8, 9])
    leave(drafter, late)
    assert (drafter.table_bytes > 1000) == (scope == "engine")


def test_rows_that_were_cut_leave_nothing() -> None:
    drafter = SuffixDrafter("engine")
    cut, failed, whole = (group(Request((1, 2, 3), 1), [token, token])[0] for token in (4, 5, 6))
    proposed(drafter, cut, failed, whole)
    leave(drafter, cut, reason=None)  # as the engine tells of those cancelled: they have no reason yet
    leave(drafter, failed, reason="error")
    (new,) = group(Request((1, 2, 3), 1), [])
    assert proposed(drafter, new) == [[]]
    leave(drafter, whole)
    assert proposed(drafter, new, length=2) == [[6, 6]]


def test_tables_are_bounded() -> None:
    """Also one text that is longer than they may hold; what remains is the last of it."""
    for scope in ("group", "engine"):
        drafter, most = SuffixDrafter(scope, limit=64), 0
        for number in range(6):
            request = Request(tuple(range(1000 * number, 1000 * number + 90)), 2)
            rows = group(request, [], [])
            for step in range(60):
                for one in rows:
                    one.tokens += [5000 + step % 3, 6000 + step % 3]
                found = proposed(drafter, *rows)
                most = max(most, drafter.table_bytes)
            assert [draft[:3] for draft in found] == [[5000, 6000, 5001]] * 2
            leave(drafter, *rows)
        full = SuffixAutomaton()
        full.read(ROOT, range(64 + 60))
        assert most < 3 * full.bytes


# ── token recycling ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_most_probable_tokens_of_every_column_are_kept_and_the_last_decides() -> None:
    """Both rows end with token 1, and the second drafts 1 again: its last column is the last that says what follows 1."""
    rows = group(Request((5, 1), 2), [], [])
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    drafter = RecyclingDrafter(k=3, nodes=0)
    heard(drafter, rows, [[4], [2, 1]], logits)
    probs, expected = logits.softmax(-1), {1: (1, 2), 4: (0, 1), 2: (1, 1)}
    for token, place in expected.items():
        found = drafter._of(rows[0]).table[token]
        assert [following for following, _ in found] == logits[place].topk(3).indices.tolist()
        assert [sure for _, sure in found] == pytest.approx(probs[place].topk(3).values.tolist())
    drafter.read(rows)
    assert drafter._of(rows[0]).table[5] == [(1, 0.3)]  # read in the prompt, and never heard of


def test_what_is_not_finite_is_passed_over() -> None:
    rows, logits = group(Request((5, 1), 1), []), torch.randn(1, 2, 8)
    logits[0, 1] = torch.nan
    drafter = RecyclingDrafter()
    heard(drafter, rows, [[4]], logits)
    assert 4 not in drafter._of(rows[0]).table
    assert 1 in drafter._of(rows[0]).table


class Every(Controller):
    """Drafts in one round of each `rounds`."""

    limit = 4

    def __init__(self, rounds: int) -> None:
        self.rounds, self.count = rounds, 0

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        self.count += 1
        return [0 if self.count % self.rounds else min(self.limit, row.max_draft_length) for row in rows]

    def learn(self, outcome: Outcome) -> None:
        pass


@pytest.mark.parametrize("kind", [RecyclingDrafter, TrigramDrafter])
def test_plain_rounds_are_learned_from(kind: type[RecyclingDrafter]) -> None:
    """As many of a controller's as there are: the table then has what the target says after every token that was fed."""
    target = scripted(hashed(V, spread=3.0), V)
    drafter = kind("engine", k=V, nodes=0)
    engine = Engine(target, drafter, Every(1000), max_batch=4, rule=Coupled())
    rows = engine.submit(Request((1, 2, 3), 3, Sampling(seed=4), Limits(max_new_tokens=9)))
    while engine.step():
        pass
    assert engine.stats.drafted == 0
    assert engine.stats.rounds == 9
    (table,) = drafter._tables.values()
    fed = [row.tokens[2:-1] for row in rows]
    if isinstance(table, Successors):
        assert set(table.table) == {token for tokens in fed for token in tokens}
        assert all(abs(1 - sum(chance for _, chance in known)) < 1e-6 for known in table.table.values())
    else:
        assert isinstance(table, Trigrams)
        pairs = [tuple(row.tokens[i - 1 : i + 1]) for row in rows for i in range(2, len(row.tokens) - 1)]
        assert {pair: sum(table.table[pair].values()) for pair in pairs} == pytest.approx(Counter(pairs))


def test_rows_that_become_others_are_heard_at_their_new_place() -> None:
    rows, drafter = group(Request((5, 1), 2), [2, 3], [4, 6]), TrigramDrafter("engine", k=2, nodes=0)
    drafter.begin(rows)
    drafter.replace([(rows[0], rows[1])])
    rows[0].become(rows[1], 7)
    logits, nothing = torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.long)
    drafter.observe(rows, Scores(logits, Positions(rows, [[], []])), Verdict(nothing, nothing, torch.ones(2, 1)))
    (table,) = drafter._tables.values()
    assert isinstance(table, Trigrams)
    assert set(table.table) == {(4, 6), (6,)}


@pytest.mark.slow(but=["row-RecyclingDrafter"])
@pytest.mark.parametrize("kind", [RecyclingDrafter, TrigramDrafter])
@pytest.mark.parametrize("scope", ["row", "group", "engine", "model"])
def test_a_table_lives_as_long_as_its_scope(scope: str, kind: type[RecyclingDrafter]) -> None:
    """Of a model: over its engines, for the same options alone, and no longer than the model."""
    target = scripted(hashed(V), V)

    one, later = row(1, 2, 3), row(9, 2)
    drafter = kind.for_target(target, scope=scope, k=3, nodes=0)
    assert proposed(drafter, one, length=1) == [[]]
    leave(drafter, one)
    for k, model, knows in ((3, target, scope == "model"), (2, target, False), (3, scripted(hashed(V), V), False)):
        again = kind.for_target(model, scope=scope, k=k, nodes=0)
        assert proposed(again, later, length=1) == [[3] if knows else []]
    kept = weakref.ref(drafter._tables[0]) if scope == "model" else None
    del drafter, target, model
    gc.collect()
    assert kept is None or kept() is None


@pytest.mark.parametrize("kind", ["recycling", "trigrams"])
def test_a_second_call_drafts_from_the_first_and_a_seed_gives_the_same(kind: str) -> None:
    """In float64. A call of two tokens drafts in its first round alone, where the first call has nothing to draft from."""
    for scope, drafted in (("group", [0, 0]), ("model", [0, 2])):
        model = Shoal(scripted(hashed(V, spread=3.0), V), drafting=read_draft(f"{kind}:scope={scope},nodes=0"))
        calls = [model.generate([[1, 2, 3]], 2, seed=4, max_new_tokens=2, lookahead=3) for _ in range(2)]
        assert [call.stats.drafted for call in calls] == drafted
        plain, *found = (
            [
                sample.token_ids
                for sample in model.generate([[1, 2, 3]], 2, seed=4, max_new_tokens=12, lookahead=k)[0].samples
            ]
            for k in ("off", 3, 3)
        )
        assert found == [plain] * 2


@pytest.mark.parametrize("kind", [RecyclingDrafter, TrigramDrafter])
@pytest.mark.parametrize("scope", ["row", "group", "engine"])
def test_scopes_of_tables(scope: str, kind: Callable[..., Any]) -> None:
    drafter = kind(scope, nodes=0)
    (one, sibling), (other,) = group(Request((1, 2), 2), [3], []), group(Request((1, 2), 1), [])
    assert proposed(drafter, one, sibling, other, length=1) == [
        [], [] if scope == "row" else [3], [3] if scope == "engine" else [],
    ]  # fmt: skip
    leave(drafter, one, sibling, other)
    assert (drafter.table_bytes == 0) == (scope != "engine")


# ── sabotage of what is kept ────────────────────────────────────────────────────────────────────────────────────────


def test_one_table_for_all_users_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrigramDrafter, "_key", lambda self, row: 0)
    with pytest.raises((AssertionError, KeyError)):
        test_scopes_of_tables("group", TrigramDrafter)


def test_a_leak_between_requests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.drafting.suffix.id", lambda _: 0, raising=False)
    with pytest.raises(AssertionError):
        test_what_scopes_see_and_forget("group")


def test_kept_tokens_of_rows_that_were_cut_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.drafting.suffix.ENDS", ("length", "error", None))
    with pytest.raises(AssertionError):
        test_rows_that_were_cut_leave_nothing()


def test_tables_that_outlive_their_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowingTexts, "leave", lambda self, row: None)
    with pytest.raises(AssertionError):
        test_what_scopes_see_and_forget("group")


# ── confidence ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drafts_end_where_their_confidence_ends() -> None:
    rows = group(Request((7, 1, 2, 3), 3), [1, 2, 4, 1, 2, 4], [9, 1, 2, 5], [8, 1, 2])
    asked: list[list[float]] = []

    def stop(position: int, confidence: Sequence[float]) -> list[int]:
        asked.append(list(confidence))
        return [position if sure < 0.4 else 9 for sure in confidence]

    inputs = DraftInputs(rows, [4, 4, 0], torch.zeros(3, 5), lambda q, u: u, stop)
    tree = SuffixDrafter("group").propose(inputs)
    drafter = SuffixDrafter("group")
    drafter.read(rows)
    first, second = (drafter.guess(row, 4) for row in rows[:2])
    assert asked[0] == [first.confidence[0], second.confidence[0] if second.tokens else 0.0, 0.0]
    assert tree.steps == len(asked)
    for draft, guess in zip(tree.drafts, (first, second), strict=False):
        assert len(draft) == next((i for i, sure in enumerate(guess.confidence) if sure < 0.4), len(guess.confidence))
    assert tree.drafts[2] == []


def test_auto_learns_what_a_match_is_worth() -> None:
    """Rows of a request that all say the same: after the first rounds nearly all drafts are accepted, and `auto` knows it."""
    costs = PairCosts(packed=True)
    target = scripted(hashed(50, spread=40.0), 50)
    engine = Engine(target, SuffixDrafter("engine"), Auto(costs), max_batch=4, rule=Coupled(), clock=passes_of(target))
    for number in range(12):
        engine.submit(Request((1, 2, 3), 4, Sampling(temperature=0.0), Limits(max_new_tokens=40)))
        while engine.step():
            pass
        assert engine.scheduler.idle, number
    assert costs.rounds == engine.stats.rounds
    assert engine.stats.accepted > 0.5 * engine.stats.drafted > 0
    assert costs.acceptance.mean > 0.7


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["ngram"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_keeps_to_the_protocol(name: str) -> None:
    assert check_drafter(DRAFTERS[name], V) > 20
    assert check_drafter(DRAFTERS[name], V, lookahead=1) > 5


def test_recycling_learns_as_a_part_of_a_sum() -> None:
    """Of what the target says, whoever drafted: its probabilities add up to 1."""
    recycling = RecyclingDrafter("engine", nodes=0)
    decoded(SumDrafter([recycling], DRAFTERS["model"]()), Coupled(), 3)
    successors = [known for table in recycling._tables.values() for known in table.table.values()]
    assert min(abs(1 - sum(chance for _, chance in known)) for known in successors) < 1e-6


def test_a_row_that_is_resampled_is_read_anew() -> None:
    drafter = RecyclingDrafter("row", nodes=0)
    one, parent = row(1, 2, 3), row(1, 5, 6, 1)
    drafter.begin([one, parent])
    assert proposed(drafter, one, parent) == [[], [5, 6]]
    one.tokens[:] = parent.tokens
    drafter.replace([(one, parent)])
    assert proposed(drafter, one, parent) == [[5, 6]] * 2


def test_trees_need_a_target_that_takes_them() -> None:
    target = wrap(tiny_model("mpt").double(), "tiny", "auto")
    with pytest.raises(UnsupportedModel, match="takes no position for each token"):
        Engine(target, SuffixDrafter(nodes=4), Fixed(2))
    Engine(target, SuffixDrafter(), Fixed(2))


@pytest.mark.slow(but=["1-Rejection-model", "33-Coupled-model"])
@by_pairs({"max_batch": [1, 33], "rule": [Rejection(), Coupled()], "name": DRAFTERS})
def test_tokens_are_those_of_plain_decoding(name: str, rule: Rule, max_batch: int) -> None:
    """At T > 0 as well: without a q both rules draw what plain decoding draws. Nothing is kept of rows that have left."""
    sampled = name not in MODELS or isinstance(rule, Coupled)  # which have a q, so that rejection sampling draws anew
    for temperature in (0.0, 0.7) if sampled else (0.0,):
        plain, expected = decoded_plainly(type(rule), max_batch, temperature)
        engine, found = decoded(drafter := DRAFTERS[name](), rule, max_batch, temperature=temperature)
        assert found == expected
        assert 0 < engine.stats.accepted < engine.stats.drafted
        assert engine.stats.committed == engine.stats.row_rounds + engine.stats.accepted
        assert engine.stats.row_rounds < plain.stats.row_rounds == plain.stats.committed
        assert (engine.stats.draft_passes > 0) == (name in MODELS)
        if isinstance(drafter, TextDrafter) and name in ("ngram", "suffix of rows", "suffix", "recycling"):
            assert drafter.table_bytes < 100 * 3
