"""Masks along the branches of draft trees, several constraints of one row, and a constraint of one's own.

Tests of: constraints.masks, constraints.grammar, constraints.protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grammars import COMPACT, TARGET, TOKENIZER, WORDS, commit, encode, made, possible
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints import grammar, masks
from shoal.constraints.compiler import grammars_of
from shoal.constraints.grammar import GrammarConstraint, TextState, Track
from shoal.constraints.protocol import Allowed, Constraint
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.sampling.distributions import Scores
from shoal.testing import END, VOCABULARY
from shoal.testing.scripted import scripted
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions, Verdict

PROMPT = (1, 2, 3)
DIGITS = encode("0123456789")


class AtMost(Constraint[int]):
    """No more than `most` of these tokens side by side. The state is how many stand at the end of the text."""

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        self.tokens, self.most = list(tokens), most

    def begin(self, row: Row) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1 if token in self.tokens else 0

    def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
        tokens = torch.ones(len(states), vocab_size, dtype=torch.bool, device=device)
        for i, count in enumerate(states):
            if count >= self.most:
                tokens[i, self.tokens] = False
        return Allowed(tokens, torch.ones(len(states), dtype=torch.bool, device=device))


class Listed(AtMost):
    """The same, with a state that could be changed."""

    def begin(self, row: Row) -> Any:
        return [0]

    def advance(self, state: Any, token: int) -> Any:
        return [super().advance(state[0], token)]

    def mask(self, states: Any, vocab_size: int, device: torch.device) -> Allowed:
        return super().mask([count for (count,) in states], vocab_size, device)


def compiled(language: Grammar) -> GrammarConstraint:
    return grammars_of(TOKENIZER, VOCABULARY).constraint(language)


JSON = Grammar("json_schema", {"type": "object", "additionalProperties": {"type": ["number", "boolean"]}, **COMPACT})
LARK = Grammar("lark", 'start: word ("," word)*\nword: /[a-d]{1,3}/ | "(" start ")"')
ROWS: dict[str, Callable[[], list[Constraint[Any]]]] = {
    "regex": lambda: [compiled(WORDS)],
    "json": lambda: [compiled(JSON)],
    "lark": lambda: [compiled(LARK)],
    "two grammars": lambda: [compiled(LARK), compiled(Grammar("regex", "[ab,(]*[abc)]*"))],
    "a grammar and another": lambda: [compiled(WORDS), AtMost(DIGITS, 1)],
    "a state that could be changed": lambda: [Listed(range(0, VOCABULARY, 2), 1)],
    "json, a long number": lambda: [compiled(JSON)],
    "none": list,
}
STARTS = {"json, a long number": '{"a":1234567890123456789'}
"""What a row has committed before its first tree: of this number one digit more is possible."""


def row_of(name: str) -> Row:
    row = Row(Request(PROMPT), 0, 0, 0, list(PROMPT), frozenset([END]), 999)
    masks.begin(row, ROWS[name]())
    return row


@cache
def of_text(name: str, new: tuple[int, ...]) -> Tensor:
    """What may follow new tokens, [vocab], by a row of its own that follows them as a chain."""
    mask = masks.allowed_tokens(Positions([row_of(name)], [new]), torch.empty(1, len(new) + 1, VOCABULARY))
    return torch.ones(VOCABULARY, dtype=torch.bool) if mask is None else mask[0, -1]


def random_tree(name: str, new: tuple[int, ...], nodes: int, random: Random) -> tuple[list[int], list[int]]:
    """Tokens and parents; most tokens are possible where they stand, and some are the EOS."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[tuple[int, ...]] = [()]
    for node in range(nodes):
        parent = random.randrange(-1, node)
        follow = of_text(name, new + paths[parent + 1]).nonzero().flatten().tolist()
        token = random.choice(follow) if follow and random.random() < 0.8 else random.randrange(VOCABULARY)
        tokens.append(token)
        parents.append(parent)
        paths.append((*paths[parent + 1], token))
    return tokens, parents


def differing(rows: dict[str, Row], trees: dict[str, tuple[list[int], list[int]]]) -> int:
    """Columns whose mask is not that of their path alone; padding and what follows an EOS must have no possible token."""
    tree = DraftTree.of([trees[name][0] for name in rows], [trees[name][1] for name in rows])
    positions = Positions.of(list(rows.values()), tree)
    mask = masks.allowed_tokens(positions, torch.empty(len(rows), tree.m + 1, VOCABULARY))
    assert mask is not None
    count = 0
    for b, (name, row) in enumerate(rows.items()):
        new = tuple(row.tokens[len(PROMPT) :])
        for column in range(tree.m + 1):
            expected = torch.zeros(VOCABULARY, dtype=torch.bool)
            if name == "none":
                expected = ~expected
            elif column <= len(tree.drafts[b]) and END not in positions.path(b, column):
                expected = of_text(name, new + tuple(positions.path(b, column)))
            count += not torch.equal(mask[b, column], expected)
    return count


def rounds(seed: int, count: int = 3) -> int:
    """Columns that differ over some rounds of random trees, a random path of each being committed."""
    random, rows, wrong = Random(seed), {name: row_of(name) for name in ROWS}, 0
    for name, start in STARTS.items():
        commit(rows[name], encode(start))
    for _ in range(count):
        news = {name: tuple(row.tokens[len(PROMPT) :]) for name, row in rows.items()}
        trees = {name: random_tree(name, news[name], random.randrange(9), random) for name in rows}
        wrong += differing(rows, trees)
        for name, row in rows.items():
            _commit_path(name, row, *trees[name], random)
    return wrong


def _commit_path(name: str, row: Row, tokens: list[int], parents: list[int], random: Random) -> None:
    """Commits the drafts up to a random node, as far as they are possible."""
    node, path = random.randrange(-1, len(tokens)), list[int]()
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    for token in reversed(path):
        if token == END or not of_text(name, tuple(row.tokens[len(PROMPT) :]))[token]:
            return
        commit(row, [token])


@given(st.integers(0, 10**6))
@settings(max_examples=12)
def test_a_node_is_masked_by_its_path(seed: int) -> None:
    assert rounds(seed) == 0


def test_a_conjunction_allows_what_all_allow() -> None:
    """And EOS ids only where all let the text end."""
    for text in ("", "a", "ab", "(a", "a,b", "(a)"):
        both = of_text("two grammars", tuple(encode(text)))
        second = possible(Grammar("regex", "[ab,(]*[abc)]*"), encode(text))
        assert torch.equal(both, possible(LARK, encode(text)) & second)
    assert not of_text("two grammars", tuple(encode("(a")))[END]
    assert of_text("two grammars", tuple(encode("(a)")))[END]


def test_without_any_eos_a_conjunction_ends_where_nothing_follows() -> None:
    """ "ab" may be followed by "c" by the one, and by "1" by the other: by both the text is complete."""
    request = Request(
        PROMPT, 1, Sampling(grammar=Grammar("regex", "abc?"), seed=0), Limits(max_new_tokens=9, eos=()),
        constraints=[compiled(Grammar("regex", "ab1?"))],
    )  # fmt: skip
    (row,) = decoded([request], None)[1]
    assert (row.tokens[3:], row.finish_reason) == (encode("ab"), "stop")


def test_a_mask_that_takes_too_long_fails_its_branch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only as long as it does."""
    used, slow, at = [0.0], tuple(encode("ab")), Track.at

    def spends(self: Track, state: TextState) -> Any:
        used[0] += 1.01 * grammar.MASK_SECONDS * (state.tokens == slow)
        return at(self, state)

    row, like = row_of("regex"), torch.empty(1, 5, VOCABULARY)
    positions = Positions([row], [encode("abdc")], [[-1, 0, 0, 1]])  # a, ab, ad, abc
    whole = masks.allowed_tokens(positions, like)
    monkeypatch.setattr(grammar, "_processor_time", lambda: used[0])
    with monkeypatch.context() as patch:
        patch.setattr(Track, "at", spends)
        cut = masks.allowed_tokens(positions, like)
        reasons = [masks.why(positions, 0, column, VOCABULARY) for column in range(5)]
    assert whole is not None
    assert cut is not None
    assert [bool(part.any()) for part in cut[0]] == [True, True, False, True, False]
    assert torch.equal(cut[0, [0, 1, 3]], whole[0, [0, 1, 3]])
    assert ["a mask took more than 0.05 s" in reason for reason in reasons] == [False, False, True, False, True]
    again = masks.allowed_tokens(positions, like)
    assert again is not None
    assert torch.equal(again, whole)
    assert not any(masks.why(positions, 0, column, VOCABULARY) for column in range(5))


# ── negative controls ───────────────────────────────────────────────────────────────────────────────────────────────


def caught(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, sabotage: Any) -> int:
    """Columns that differ once something is broken for trees only: what they are compared with is not."""
    whole, real = masks.allowed_tokens, getattr(owner, name)

    def allowed(positions: Positions, like: Tensor) -> Tensor | None:
        with monkeypatch.context() as patch:
            if positions.parents is not None:
                patch.setattr(owner, name, lambda *arguments: sabotage(real, *arguments))
            return whole(positions, like)

    with monkeypatch.context() as patch:
        patch.setattr(masks, "allowed_tokens", allowed)
        return sum(rounds(seed) for seed in range(3))


def _siblings(real: Any, positions: Positions, b: int, constraint: Any, state: Any) -> Any:
    """Each node follows the node before it, whatever its parent is."""
    chain = Positions(positions.rows, positions.drafts)
    return dict.fromkeys(positions.columns(b), state) | real(chain, b, constraint, state)


def _in_place(real: Any, constraint: Listed, state: list[int], token: int) -> list[int]:
    state[:] = real(constraint, state, token)
    return state


def _no_rollback(real: Any, track: Track, state: TextState) -> Any:
    """The matcher stays where the draft before has led it."""
    return real(track, state) if state.length > len(track._consumed) else track._matcher


def _may_always_end(real: Any, *arguments: Any) -> Allowed:
    mask = real(*arguments)
    return Allowed(mask.tokens, torch.ones_like(mask.ends))


def _nothing(real: Any, *arguments: Any) -> Any:
    return real(*arguments)


@pytest.mark.parametrize(
    ("owner", "name", "sabotage"),
    [
        (masks, "_states", _siblings),
        (Listed, "advance", _in_place),
        (Track, "at", _no_rollback),
        (GrammarConstraint, "mask", _may_always_end),
        (GrammarConstraint, "mask", _nothing),
    ],
)
def test_what_is_broken_for_trees_is_caught(owner: Any, name: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (caught(monkeypatch, owner, name, sabotage) > 3) is (sabotage is not _nothing)


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


class RandomTrees(Drafter):
    """Random trees; some nodes are what plain decoding says after their path.

    Attributes:
        branched: accepted paths that are not the first nodes of their trees.
    """

    max_nodes = 12

    def __init__(self, said: dict[tuple[int, ...], list[list[int]]]) -> None:
        self.said, self.random, self.branched = said, Random(0), 0

    def propose(self, inputs: DraftInputs) -> DraftTree:
        made = [self._tree(row, length) for row, length in zip(inputs.rows, inputs.lengths, strict=True)]
        return DraftTree.of([tokens for tokens, _ in made], [parents for _, parents in made])

    def _tree(self, row: Row, length: int) -> tuple[list[int], list[int]]:
        said = self.said[row.request.prompt_ids][row.index]
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [list(row.tokens)]
        while length and len(tokens) < self.max_nodes:
            parent = self.random.choice([i for i, path in enumerate(paths) if len(path) < len(row.tokens) + length]) - 1
            path = paths[parent + 1]
            true = path == said[: len(path)] and len(path) < len(said) and self.random.random() < 0.7
            token = said[len(path)] if true else self.random.choice([*encode("abcd123,;{"), END])
            tokens.append(token)
            parents.append(parent)
            paths.append([*path, token])
        return tokens, parents

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        self.branched += sum(list(path) != list(range(len(path))) for path in verdict.lists[0])


def decoded(requests: Sequence[Request], drafter: Drafter | None) -> tuple[Engine, list[Row]]:
    engine = Engine(
        scripted(TARGET, VOCABULARY), drafter, Fixed(4), max_batch=8, tokenizer=TOKENIZER, eos=(END,), rule=Coupled()
    )
    groups = engine.submit_all(requests)
    while engine.step():
        pass
    return engine, [row for rows in groups for row in rows]


def asked(temperature: float) -> list[Request]:
    ways: list[tuple[Grammar | None, list[Constraint[Any]]]] = [
        (WORDS, []), (JSON, [AtMost(DIGITS, 2)]), (LARK, [compiled(Grammar("regex", "[a-d,()]{0,9}"))]), (None, []),
        (None, [AtMost(DIGITS, 1), AtMost(encode("abcdefgh"), 2)]),
    ]  # fmt: skip
    return [
        Request(
            (*PROMPT, i), 2, Sampling(grammar=language, seed=i, temperature=temperature), Limits(max_new_tokens=24),
            constraints=constraints,
        )
        for i, (language, constraints) in enumerate(ways)
    ]  # fmt: skip


def plain_and_drafted(temperature: float) -> tuple[list[Row], list[Row], Engine, RandomTrees]:
    _, plain = decoded(asked(temperature), None)
    said: dict[tuple[int, ...], list[list[int]]] = {}
    for row in plain:
        said.setdefault(row.request.prompt_ids, []).append(row.tokens)
    drafter = RandomTrees(said)
    engine, rows = decoded(asked(temperature), drafter)
    return plain, rows, engine, drafter


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_tree_drafter_gives_the_ids_of_plain_decoding(temperature: float) -> None:
    plain, rows, engine, drafter = plain_and_drafted(temperature)
    assert [(row.tokens, row.finish_reason) for row in rows] == [(row.tokens, row.finish_reason) for row in plain]
    assert drafter.branched > 10
    assert engine.stats.row_rounds < engine.stats.committed
    assert {row.finish_reason for row in rows} <= {"eos", "length"}


def test_the_mask_of_a_sibling_changes_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(masks, "_states", lambda *arguments, real=masks._states: _siblings(real, *arguments))
    plain, rows, *_ = plain_and_drafted(1.2)
    assert sum(a.tokens != b.tokens for a, b in zip(plain, rows, strict=True)) > 1


def test_rows_without_constraints_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that have some; these are asked once for all their positions."""
    rows, counts = [row_of("none"), row_of("regex"), row_of("none"), row_of("regex")], list[int]()
    real = GrammarConstraint.mask
    monkeypatch.setattr(
        GrammarConstraint, "mask", lambda self, states, *more: counts.append(len(states)) or real(self, states, *more)
    )
    tree = DraftTree.of([encode("ab"), encode("abc"), [], encode("a")], [[-1, -1], [-1, -1, 0], [], [-1]])
    mask = masks.allowed_tokens(Positions.of(rows, tree), torch.empty(4, 4, VOCABULARY))
    assert mask is not None
    assert counts == [6]
    assert mask[::2].all()


def test_an_eos_before_the_text_is_complete_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(PROMPT, 8, Sampling(grammar=WORDS, seed=0, temperature=9.0), Limits(max_new_tokens=30))

    def incomplete() -> list[str]:
        texts = [TOKENIZER.decode(row.tokens[3:-1]) for row in decoded([request], None)[1] if row.finish_reason == "eos"]
        assert texts
        return [text for text in texts if not re.fullmatch(WORDS.text, text)]

    assert not incomplete()
    real = GrammarConstraint.mask
    monkeypatch.setattr(GrammarConstraint, "mask", lambda *arguments: _may_always_end(real, *arguments))
    assert incomplete()


# ── a constraint of one's own ───────────────────────────────────────────────────────────────────────────────────────


def longest_run(text: str) -> int:
    return max(map(len, re.findall("[0-9]+", text)), default=0)


@pytest.mark.parametrize("k", [0, 3])
def test_a_constraint_of_ones_own(k: int) -> None:
    """Numbers of one digit or two, in JSON."""
    options: dict[str, Any] = {
        "grammar": Grammar("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3, **COMPACT}),
        "lookahead": k, "seed": 1, "max_new_tokens": 60, "logit_bias": dict.fromkeys(DIGITS, 4.0),
    }  # fmt: skip
    free, bound = (
        made().generate([PROMPT], n=6, **options, constraints=constraints)
        for constraints in ((), [AtMost(DIGITS, 2)])
    )  # fmt: skip
    assert max(longest_run(sample.text) for sample in free[0].samples) > 2
    assert [longest_run(sample.text) for sample in bound[0].samples if longest_run(sample.text) > 2] == []
    complete = [json.loads(sample.text) for sample in bound[0].samples if sample.finish_reason == "eos"]
    assert complete
    assert all(len(numbers) == 3 for numbers in complete)
    assert not k or 0 < bound.stats.accepted < bound.stats.drafted


def test_a_drafter_keeps_a_constraint_without_a_grammar() -> None:
    """Its q at each position has the mask of what it has drafted so far: as much is accepted as without the constraint."""
    options: dict[str, Any] = {"n": 8, "lookahead": 4, "seed": 1, "max_new_tokens": 30, "eos": ()}
    free, bound = (made().generate([PROMPT], constraints=own, **options).stats for own in ((), [AtMost(range(130), 1)]))
    assert bound.accepted / bound.drafted > 0.8 * free.accepted / free.drafted > 0.2


def test_what_a_constraint_must_be() -> None:
    with pytest.raises(RequestError, match=r"constraints must be of .*Constraint, got 'digits'"):
        made().generate([PROMPT], constraints=["digits"])

    class Narrow(AtMost):
        def mask(self, states: Sequence[int], vocab_size: int, device: torch.device) -> Allowed:
            return super().mask(states, vocab_size - 1, device)

    with pytest.raises(RequestError, match=r"constraint Narrow must return tokens of shape \(1, 260\)"):
        made().generate([PROMPT], constraints=[Narrow(DIGITS, 1)])


def test_a_constraint_that_leaves_nothing_is_named() -> None:
    with pytest.raises(RequestError, match=r"no token is left possible by .*constraints=\['AtMost'\]"):
        made().generate([PROMPT], seed=0, constraints=[AtMost(range(VOCABULARY), 0)], eos=())
