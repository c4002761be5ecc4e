"""Prompts of models whose layers keep recurrent states, kept for later rows that begin alike: the same bits, less to compute.

Tests of: models.cache.kept_rows, models.cache.states, models.prompt_passes, engine.prefix_cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from attention_paths import RECURRENT_HERE
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter
from shoal.drafting.protocol import Drafter
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.lookahead.controller import Fixed
from shoal.models.cache import mixing
from shoal.models.cache.kept_rows import KeptStates
from shoal.models.cache.states import StateCache
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.testing import RECURRENT, VOCABULARY, tiny_model
from shoal.types.requests import Request, Row

pytestmark = pytest.mark.skipif(not RECURRENT_HERE, reason="an older Transformers keeps states in caches of many kinds")

BLOCK, STEPWISE_BLOCK, ROOM = 8, 16, 1 << 22
FAMILIES = ("lfm2", "qwen3-next", "olmo-hybrid")
STEPWISE = ("mamba", "falcon-mamba", "jamba", "zamba", "zamba2", "nemotron-h", "recurrent-gemma")
SYSTEM = tuple(1 + i * i % 53 for i in range(45))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "BLOCK", BLOCK)
    monkeypatch.setattr(mixing, "STEPWISE_BLOCK", STEPWISE_BLOCK)


@cache
def target(family: str) -> Runner:
    return wrap(tiny_model(family), family)


def engine(family: str, nbytes: int = ROOM, k: int = 0, **options: Any) -> Engine:
    runner = target(family)
    memory = PrefixMemory(runner, None, nbytes) if nbytes else None
    drafter: Drafter | None = NGramDrafter(3) if k else None
    return Engine(runner, drafter, Fixed(k), rule=Coupled(), prefixes=memory, **{"max_batch": 4, **options})


def ask(of: Engine, prompt: Sequence[int], n: int = 1, owner: str = "") -> list[Row]:
    asked = Request(tuple(prompt), n, Sampling(temperature=0.7, seed=len(prompt)), Limits(max_new_tokens=12), owner=owner)
    rows = of.submit(asked)
    while of.step():
        pass
    return rows


def said(rows: Sequence[Row]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, bit for bit."""
    return [(row.tokens[row.prompt_length :], list(row.logprobs)) for row in rows]


def restored(of: Engine) -> int:
    taken, of.stats.restored_tokens = of.stats.restored_tokens, 0
    return taken


# What is asked one after the other, and the tokens that a later prompt finds, by blocks of 8 and of 16: those of 1, 2, 4 ...
# blocks of an earlier one and of its last whole block.
ASKED = [
    ((*SYSTEM, 7, 3), 0, 0),  # 46 tokens and the last: states after 8, 16, 32 and 40, or after 16 and 32
    ((*SYSTEM, 8, 2, 2, 5, 6, 9, 9, 9), 40, 32),  # shares 45
    ((*SYSTEM[:39], 4, 4, 4), 32, 32),
    ((*SYSTEM[:30], 4, 4, 4), 16, 16),
    ((*SYSTEM[:14], 4, 4, 4), 8, 0),
    (SYSTEM[:7], 0, 0),
    ((*SYSTEM, 8, 2, 2, 5, 6, 9, 9, 9, *range(20, 30)), 48, 48),  # goes on with the second
    ((*range(30, 50), 1), 0, 0),
]


@pytest.mark.slow(but=["lfm2-3", "jamba-3"])
@pytest.mark.parametrize(
    ("family", "k"),
    [("lfm2", 3), *((family, 3 * (i % 2)) for i, family in enumerate((*FAMILIES, *STEPWISE)))]
    + [pytest.param(family, 3, marks=pytest.mark.slow) for family in sorted({*RECURRENT} - {*FAMILIES, *STEPWISE})],
)
def test_later_prompts_have_the_bits_of_those_without_memory(family: str, k: int) -> None:
    plain, keeping = engine(family, 0, k), engine(family, k=k)
    for prompt, *counts in ASKED:
        count = counts[family in STEPWISE]
        for n in (1, 3):
            assert said(ask(keeping, prompt, n)) == said(ask(plain, prompt, n)), (len(prompt), n)
            if n == 1:
                assert restored(keeping) == count, len(prompt)
        restored(keeping)
    assert restored(plain) == 0


@pytest.mark.parametrize(
    "family",
    ["lfm2", "jamba", *(pytest.param(each, marks=pytest.mark.slow) for each in sorted({*RECURRENT} - {"lfm2", "jamba"}))],
)
def test_a_state_of_other_tokens_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the states after the first block are taken for those after all restored ones."""
    real = KeptStates._restore

    def early(self: KeptStates, cache_: StateCache, slot: int, state: Any, count: int) -> None:
        real(self, cache_, slot, state, count)
        for key, store in cache_._tensors.items():
            store[0, slot] = state.marks[0].states[key]

    monkeypatch.setattr(KeptStates, "_restore", early)
    with pytest.raises(AssertionError):
        test_later_prompts_have_the_bits_of_those_without_memory(family, 0)


def test_every_family_keeps_prompts() -> None:
    assert {family for family in RECURRENT if target(family).mixers.stepwise} == set(STEPWISE)  # type: ignore[union-attr]
    assert all(target(family).can_keep_prefixes for family in RECURRENT)


def test_nothing_is_kept_for_another_owner_or_after_a_change() -> None:
    keeping = engine("lfm2")
    ask(keeping, ASKED[0][0], owner="one")
    ask(keeping, ASKED[1][0], owner="two")
    assert restored(keeping) == 0
    ask(keeping, ASKED[1][0], owner="two")
    assert restored(keeping) == 48


@pytest.mark.slow(but=["lfm2"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "mamba", "jamba"])
def test_memory_is_counted_and_bounded(family: str) -> None:
    """States beside keys: the rows that were not used for the longest time give way; nothing stays with slots."""
    runner = target(family)
    one = engine(family)
    ask(one, ASKED[0][0])
    kept = one.kept_prefixes
    assert kept is not None
    size = kept.allocated_bytes
    states_bytes, cache_ = one.target.cache.bytes_per_slot() // 3, one.target.cache
    tokens, marks = (32, 2) if family in STEPWISE else (40, 4)
    assert size == tokens * runner.memory.token_bytes + marks * states_bytes
    assert isinstance(cache_, StateCache)
    assert not cache_.marks.nbytes
    assert cache_.nbytes() == cache_.slots * (cache_.capacity * runner.memory.token_bytes + 3 * states_bytes)
    many = engine(family, 3 * size)
    for first in range(8):
        ask(many, (first + 1, *ASKED[0][0][1:]))
        assert many.kept_prefixes is not None
        assert 0 < many.kept_prefixes.allocated_bytes <= 3 * size
    ask(many, (8, *ASKED[0][0][1:]))
    assert restored(many) == tokens
    for first, known in ((1, 0), (8, tokens), (2, 0), (8, tokens)):
        ask(many, (first, *ASKED[0][0][1:]))
        assert restored(many) == known


def test_marks_of_slots_are_counted_and_go_with_their_tokens() -> None:
    runner = target("lfm2").fork()
    runner.memory.reserve(2, 64)
    cache_ = runner.cache
    assert isinstance(cache_, StateCache)
    runner.feed([0], torch.tensor([[1]]), [1], want_logits=False)
    cache_.enter(0)
    before = cache_.nbytes()
    KeptStates(1 << 20, BLOCK).serves(cache_)
    for start in (0, 8, 16):
        runner.feed([0], torch.arange(start, start + 8)[None], [8], want_logits=False)
    lengths = lambda slot: [mark.length for mark in cache_.marks.of(slot)]  # noqa: E731
    assert lengths(0) == [8, 16, 24]
    assert cache_.nbytes() == before + cache_.bytes_per_slot()  # three states
    runner.feed([0], torch.arange(24, 32)[None], [8], want_logits=False)
    assert lengths(0) == [8, 16, 32]
    cache_.copy(0, 1, 32)
    assert lengths(1) == [8, 16, 32]
    assert cache_.nbytes() == before + cache_.bytes_per_slot()  # the same ones
    cache_.enter(0)
    assert (lengths(0), lengths(1)) == ([], [8, 16, 32])


def test_a_row_waits_for_what_it_can_use() -> None:
    """Two prompts at once: the second waits a round for the blocks that it shares, and computes the others."""
    long = tuple(1 + i * i % 57 for i in range(90))
    keeping, plain = engine("lfm2"), engine("lfm2", 0)
    rows = []
    for of in (keeping, plain):
        asked = [Request((*long, tail), 1, Sampling(seed=tail), Limits(max_new_tokens=6)) for tail in (3, 4)]
        found = [row for each in asked for row in of.submit(each)]
        while of.step():
            pass
        rows.append([row.tokens for row in found])
    assert rows[0] == rows[1]
    assert restored(keeping) == 88


def test_a_draft_model_with_states_is_not_kept() -> None:
    runner, draft = target("lfm2"), target("lfm2").fork()
    memory = PrefixMemory(runner, draft, ROOM)
    assert memory.draft_model is None
    keeping = Engine(runner, ModelDrafter(draft, VOCABULARY), Fixed(3), max_batch=2, rule=Coupled(), prefixes=memory)
    plain = engine("lfm2", 0)
    for prompt, count, _ in ASKED[:3]:
        tokens = [[row.tokens for row in ask(of, prompt)] for of in (keeping, plain)]
        assert tokens[0] == tokens[1]
        assert restored(keeping) == count
