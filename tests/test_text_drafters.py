"""Drafters without a model: what they look up, what they keep, and that the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shoal.config import Limits, Sampling
from shoal.drafting.ngram import NGramDrafter, copied
from shoal.drafting.protocol import Drafter
from shoal.drafting.text import TextDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.fixed import Fixed
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Request, Row

V = 5
DRAFTERS: dict[str, Callable[[], TextDrafter]] = {"ngram": lambda: NGramDrafter(1, 3)}


def row(*tokens: int, prompt: int = 1, group: int = 0) -> Row:
    """A row with a prompt of so many tokens, the others committed."""
    return Row(Request(tokens[:prompt], 1), group, 0, 0, list(tokens), frozenset(), 1000)


def proposed(drafter: TextDrafter, *rows: Row, length: int = 4) -> list[list[int]]:
    """What it guesses for rows, through the calls that the engine makes."""
    drafter.read(rows)
    return [list(drafter.guess(one, length).tokens) for one in rows]


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


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_keeps_to_the_protocol(name: str) -> None:
    assert check_drafter(DRAFTERS[name], V) > 20
    assert check_drafter(DRAFTERS[name], V, lookahead=1) > 5


def decoded(
    drafter: Drafter | None, rule: Rule, max_batch: int, *, k: int = 4, temperature: float = 0.7
) -> tuple[Engine, list[list[int]]]:
    """Groups that join one after the other, rows of which are cancelled; the tokens of the others."""
    engine = Engine(scripted(hashed(V, spread=3.0), V), drafter, Fixed(k if drafter else 0), max_batch=max_batch, rule=rule)
    rows: list[Row] = []
    for number in range(4):
        prompt = tuple((i * i) % V for i in range(2 + 3 * number))
        limits = Limits(max_new_tokens=12 + 5 * number)
        rows += engine.submit(Request(prompt, 3, Sampling(temperature=temperature, seed=number), limits))
        engine.step()
    engine.cancel(rows[4:5])
    while engine.step():
        pass
    return engine, [row.tokens for row in rows[:4] + rows[5:]]


@pytest.mark.parametrize("max_batch", [1, 3, 33])
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_are_those_of_plain_decoding(name: str, rule: Rule, max_batch: int) -> None:
    """At T > 0 as well: without a q both rules draw what plain decoding draws. Nothing is kept of rows that have left."""
    for temperature in (0.0, 0.7):
        plain, expected = decoded(None, rule, max_batch, temperature=temperature)
        engine, found = decoded(drafter := DRAFTERS[name](), rule, max_batch, temperature=temperature)
        assert found == expected
        assert 0 < engine.stats.accepted < engine.stats.drafted
        assert engine.stats.committed == engine.stats.row_rounds + engine.stats.accepted == plain.stats.committed
        assert engine.stats.row_rounds < plain.stats.row_rounds == plain.stats.committed
        assert engine.stats.draft_passes == 0
        assert drafter.table_bytes == 0
