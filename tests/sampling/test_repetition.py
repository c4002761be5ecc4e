"""RPG: repetitions by brute force, the law by enumeration, ids of drafts, and the trap of signs in the authors' code.

Tests of: sampling.processors.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from enumeration import chi_square
from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.sampling.processors import GrammarRepetitionPenalty, Repetition, repeated, types_of
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row


class Tokens:
    """A tokenizer of five tokens: two names, a keyword that opens a statement, a line break with and without an indent."""

    texts = ("a", "b", "if", "\n", "\n ")
    eos_token_id = 5

    def get_vocab(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}


A, B, IF, LINE, INDENTED, END = range(6)
TOKENS, VOCAB, LONGEST = Tokens(), 6, 3
PROMPT = (A, LINE, IF, INDENTED, IF, LINE)
"""Ends with a line of a keyword, repeated once: tokens do not repeat, lines do."""
DECAY, ENDING = 0.4, 0.5
PENALTY = GrammarRepetitionPenalty(TOKENS, decay=DECAY, ending=ENDING)
TARGET, DRAFTER = hashed(VOCAB, 1, spread=0.7), hashed(VOCAB, 2, spread=0.7)


def shortest(items: Any) -> tuple[int, int]:
    """By the definition: each length and number of repetitions is tried."""
    for length in range(1, len(items) + 1):
        times = [n for n in range(1, len(items)) if (n + 1) * length <= len(items)
                 and items[-(n + 1) * length :] == items[-length:] * (n + 1)]  # fmt: skip
        if times:
            return length, max(times)
    return 0, 0


def test_the_shortest_repetition_is_that_of_the_definition() -> None:
    for n in range(9):
        for items in itertools.product("ab", repeat=n):
            assert repeated(items) == shortest(items), items


def effects(tokens: tuple[int, ...]) -> tuple[dict[int, int], int]:
    """By the definition: repetitions per penalised token, and those before which a text may as well end."""
    penalised: dict[int, int] = {}
    length, times = shortest(tokens)
    if times:
        penalised[tokens[-length]] = times
    lines: list[list[int]] = [[]]
    for token in tokens:
        if token in (LINE, INDENTED):
            lines.append([])
        else:
            lines[-1].append(token)
    if lines.pop() or not any(lines):
        return penalised, 0
    whole = [line for line in lines if line]
    kinds = [tuple("if" if text == "if" else "name" for text in words(line)) for line in whole]
    length, times = shortest(kinds)
    if not times:
        return penalised, 0
    first = whole[-length][0]
    penalised[first] = max(times, penalised.get(first, 0))
    return penalised, times if kinds[-length][0] == "if" else 0


def words(line: list[int]) -> list[str]:
    """Letters without a blank between them are one word: "aif" is a name."""
    return ["".join(Tokens.texts[token] for token in line)]


def law(prompt: tuple[int, ...], decay: float = DECAY, ending: float = ENDING) -> dict[tuple[int, ...], float]:
    found, open_ = dict[tuple[int, ...], float](), [((), 1.0)]
    while open_:
        new, mass = open_.pop()
        p = TARGET((*prompt, *new)).double().softmax(-1)
        penalised, ends = effects((*prompt, *new))
        for token, times in penalised.items():
            p[token] *= decay**times
        p[END] *= ending**-ends
        for token, share in enumerate((p / p.sum()).tolist()):
            grown = (*new, token)
            if token == END or len(grown) == LONGEST:
                found[grown] = mass * share
            else:
                open_.append((grown, mass * share))
    return found


def test_penalties_are_those_of_the_definition() -> None:
    """Of all texts of up to five tokens, and of six of three kinds."""
    seen = set()
    for n in range(1, 7):
        for tokens in itertools.product(range(5) if n < 6 else (A, IF, LINE), repeat=n):
            scores = PENALTY(torch.tensor([tokens]), torch.zeros(1, VOCAB))[0]
            penalised, ends = effects(tokens)
            expected = torch.zeros(VOCAB)
            for token, times in penalised.items():
                expected[token] = times * math.log(DECAY)
            expected[END] = -ends * math.log(ENDING)
            assert torch.allclose(scores, expected), tokens
            seen.add((len(penalised), ends))
    assert {(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)} <= seen


def run(rule: Any, k: int, processor: Any, n: int, **options: Any) -> tuple[list[Row], Any]:
    engine = engine_of(
        scripted(TARGET, VOCAB), scripted(DRAFTER, VOCAB) if k else None, Fixed(k), eos=(END,), rule=rule, max_batch=250
    )
    sampling = Sampling(seed=5, processors=[processor], **options)
    rows = engine.submit(Request(PROMPT, n, sampling, Limits(max_new_tokens=LONGEST)))
    while engine.step():
        pass
    return rows, engine.stats


def agreement(rows: list[Row], expected: dict[tuple[int, ...], float]) -> float:
    found = [tuple(row.tokens[len(PROMPT) :]) for row in rows]
    counts = torch.tensor([float(found.count(text)) for text in expected])
    assert counts.sum() == len(rows)
    return chi_square(counts, torch.tensor(list(expected.values())))


@pytest.mark.slow(but=["plain", "rejection", "coupled"])
@pytest.mark.parametrize(
    ("rule", "k"), [(Rejection(), 0), (Rejection(), 2), (Coupled(), 2)], ids=["plain", "rejection", "coupled"]
)
def test_the_law_counted_through_the_engine(rule: Any, k: int) -> None:
    rows, stats = run(rule, k, PENALTY, 1000)
    assert not k or 0 < stats.accepted < stats.drafted
    assert agreement(rows, law(PROMPT)) > 1e-3


def test_repetitions_of_the_token_before_are_noticed() -> None:
    """The control: what would be penalised if the newest token were not looked at."""

    def late(ids: Tensor, scores: Tensor) -> Tensor:
        return PENALTY(ids[:, :-1], scores)

    assert agreement(run(Rejection(), 2, late, 1000)[0], law(PROMPT)) < 1e-6


def test_a_token_of_negative_score_becomes_less_probable_too() -> None:
    """The authors' code multiplies: -2 becomes -1.8, and the probability of the token 0.77 instead of 0.73."""
    ids = torch.tensor([[B, A, A]])
    scores = torch.full((1, VOCAB), -torch.inf)
    scores[0, A], scores[0, B] = -2.0, -3.0
    before, after = scores.softmax(-1)[0, A], GrammarRepetitionPenalty(TOKENS, decay=0.9)(ids, scores).softmax(-1)[0, A]
    multiplied = torch.where(torch.arange(VOCAB) == A, scores * 0.9, scores).softmax(-1)[0, A]
    assert (round(float(before), 2), round(float(multiplied), 2)) == (0.73, 0.77)
    assert float(after / (1 - after)) == pytest.approx(0.9 * float(before / (1 - before)))
    assert not scores[0, A].ne(-2.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_change_ids(temperature: float) -> None:
    """Of a target that goes round in circles when it is free."""
    circle, noise = {A: B, B: LINE, LINE: IF, IF: INDENTED, INDENTED: A}, hashed(VOCAB, 3, spread=0.5)

    def target(history: Any) -> Tensor:
        scores = noise(history).clone()
        scores[circle.get(history[-1], A)] += 2.5
        return scores.index_fill(0, torch.tensor([END]), -5.0)

    tokens = []
    for k, processors in ((0, []), (0, [PENALTY]), (3, [PENALTY])):
        draft = scripted(mixed(target, hashed(VOCAB, 1, spread=3.0), every=4), VOCAB) if k else None
        engine = engine_of(scripted(target, VOCAB), draft, Fixed(k), eos=(END,), rule=Coupled())
        sampling = Sampling(seed=2, temperature=temperature, processors=processors)
        rows = engine.submit(Request((A, B), 3, sampling, Limits(max_new_tokens=40)))
        while engine.step():
            pass
        tokens.append([row.tokens for row in rows])
    assert sum(row.accepted for row in rows) > 0
    assert tokens[1] == tokens[2] != tokens[0]
    if not temperature:
        assert repeated(tokens[0][0])[1] > 5 > repeated(tokens[1][0])[1]


def test_lines_by_the_types_of_their_tokens() -> None:
    line = b"""    total[i] += 0x1F * f"a'{b}" + 'c\\'d' - 1.5e-3  # why"""
    kinds = b"name [ name ] + = number * string + string - number #".split()
    assert types_of(line) == tuple(kinds)
    assert types_of(b"if not a_b1: return None") == (b"if", b"not", b"name", b":", b"return", b"None")
    assert types_of("é = '".encode()) == (b"name", b"=", b"string")
    assert types_of(b" \t") == ()


@pytest.mark.parametrize("name", ["decay", "ending"])
@pytest.mark.parametrize("value", [0.0, 1.1, math.nan])
def test_wrong_factors_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} of a repetition penalty must be in"):
        GrammarRepetitionPenalty(TOKENS, **{name: value})


@pytest.mark.slow
def test_the_bundled_target_stops_going_round_in_circles(bundled: shoal.Shoal) -> None:
    """Greedy, with drafts; lines that differ in their names are one structure."""
    pair = bundled
    own = GrammarRepetitionPenalty(pair.tokenizer)
    text = "def f(x):\n    print(x)\n    print(yy)\n    print(z)\n    "
    (word,) = pair.tokenizer.encode("print")
    assert own.repetitions(pair.tokenizer.encode(text)) == [Repetition(word, 2, True)]
    assert own.repetitions(pair.tokenizer.encode(text + "print")) == []
    free, held = (
        pair.generate("NAMES = (", temperature=0, max_new_tokens=120, processors=processors, lookahead=3)[0].samples[0]
        for processors in ([], [own])
    )
    assert repeated(free.token_ids)[1] > 10 > repeated(held.token_ids)[1]
