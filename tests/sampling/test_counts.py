"""Penalties count each token of a row once, however often they are asked.

Tests of: types.stats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Limits, Sampling
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.stats import TokenCounts

VOCAB = 12


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8), st.integers(0, 3))
def test_counts_are_those_of_all_tokens_so_far(parts: Sequence[Sequence[int]], start: int) -> None:
    tokens: list[int] = [0] * start
    counts = TokenCounts(start)
    for part in parts:
        tokens += part
        counts.upto(tokens)
        right = Counter(tokens[start:])
        assert dict(zip(counts.ids, counts.counts, strict=True)) == right
        assert [counts.of(token) for token in range(10)] == [right[token] for token in range(10)]


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize(
    ("sampling", "prompts_too"),
    [({"repetition_penalty": 1.3}, True), ({"frequency_penalty": 0.5}, False), ({"presence_penalty": 0.5}, False)],
    ids=str,
)  # fmt: skip
def test_each_token_is_counted_once(
    sampling: dict[str, Any], prompts_too: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once per drafter step, nor per round."""
    counted: list[int] = []
    count = TokenCounts._count
    monkeypatch.setattr(TokenCounts, "_count", lambda self, token: (counted.append(token), count(self, token)))
    script = hashed(VOCAB, 0)
    said = []
    for drafter in (scripted(mixed(script, hashed(VOCAB, 1)), VOCAB), None):
        counted.clear()
        engine = engine_of(scripted(script, VOCAB), drafter, Fixed(k), rule=Coupled())
        rows: list[Row] = []
        for length in (200, 3, 50):
            rows += engine.submit(Request((1,) * length, 2, Sampling(seed=1, **sampling), Limits(20)))
        while engine.step():
            pass
        said.append([row.tokens for row in rows])
        # The last round's tokens are not asked about any more.
        assert 0 < len(counted) <= sum(len(row.tokens) if prompts_too else row.new_tokens for row in rows)
        assert (engine.stats.accepted > 0) == (drafter is not None and k > 0)
    assert said[0] == said[1]
